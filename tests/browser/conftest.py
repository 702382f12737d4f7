"""One headless Chromium for the tests of this folder, which are skipped if it or playwright is missing.

Debian and Ubuntu have it as `apt install chromium`; playwright's own browsers are not needed. `make test` opens one
page, to see that it works; the rest takes half a minute of a core and has a target of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.window import DESK, Window

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
Opened = Callable[..., Window]


def _chromium() -> str | None:
    named = os.environ.get("REWARD_KIT_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


# Of the package and not of the session: while it is open, playwright's event loop runs in this thread.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed; it is among the development tools (make test)")
    if (path := _chromium()) is None:
        pytest.skip("no Chromium was found; `apt install chromium`, or name one in REWARD_KIT_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--force-color-profile=srgb"])
        yield browser
        browser.close()


@pytest.fixture
def window(browser: Browser) -> Iterator[Opened]:
    """A factory of windows; at the end of the test, none may have recorded an error."""
    contexts, windows = [], []

    def opened(size: tuple[int, int] = DESK, **options: Any) -> Window:
        viewport = {"width": size[0], "height": size[1]}
        contexts.append(browser.new_context(viewport=viewport, **options))
        windows.append(Window(contexts[-1]))
        return windows[-1]

    yield opened
    wrong = [one for made in windows for one in made.wrong]
    for context in contexts:
        context.close()
    assert wrong == []
