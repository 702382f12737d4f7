"""Test the docs site on loopback: page widths, links and search."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from tests.browser.conftest import Opened
from tests.browser.window import DESK, PHONE, Window

pytestmark = pytest.mark.campaign
ROOT = Path(__file__).parents[2]
SIZES = pytest.mark.parametrize("size", [(1280, 800), PHONE], ids=["desk", "phone"])
_FETCHED = """() => Promise.all([...document.images].map((one) => {
  one.loading = "eager";
  return one.decode().catch(() => null);
}))"""
_FACTS = """() => ({
  ids: [...document.querySelectorAll("[id], a[name]")].map((one) => one.id || one.name),
  links: [...document.querySelectorAll("a[href]")].map((one) => one.getAttribute("href")),
  sources: [...document.querySelectorAll("img[src], script[src], link[href]:not([rel=canonical])")]
    .map((one) => one.getAttribute("src") || one.getAttribute("href")),
  blank: [...document.images].filter((one) => one.complete && one.src && !one.naturalWidth).map((one) => one.src),
  widest: document.documentElement.scrollWidth,
  split: [...document.querySelectorAll("article td, article th")].flatMap((cell) => {
    const words = [];
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      for (const match of walker.currentNode.textContent.matchAll(/[\\p{L}\\p{N}]+/gu)) {
        const range = document.createRange();
        range.setStart(walker.currentNode, match.index);
        range.setEnd(walker.currentNode, match.index + match[0].length);
        const lines = new Set([...range.getClientRects()].map((line) => Math.round(line.top)));
        if (lines.size > 1) words.push(match[0]);
      }
    }
    return words;
  }),
})"""


class Site(NamedTuple):
    """The built site.

    Attributes:
        folder: where it lies.
        address: where it is served, with a slash at the end.
    """

    folder: Path
    address: str

    def pages(self) -> list[str]:
        """Return the page addresses relative to the site."""
        found = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.html"))
        return [name.removesuffix("index.html") for name in found]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing; the tests check what the browser reports."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("mkdocs is not installed; `make docs` does")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()


@SIZES
def test_every_page_fits_the_window_and_has_no_broken_link(window: Opened, site: Site, size: tuple[int, int]) -> None:
    """No page is wider than the window, loads from another host, or has a broken link or picture."""
    opened = window(size)
    facts = {page: inspect_page(opened, site, page) for page in site.pages()}
    assert len(facts) > 50
    wrong = [f"{page}: {size[0]} pixels show {one['widest']}" for page, one in facts.items() if one["widest"] > size[0]]
    wrong += [f"{page}: a table splits {word}" for page, one in facts.items() for word in one["split"]]
    wrong += [f"{page}: no picture at {source}" for page, one in facts.items() for source in one["blank"]]
    wrong += [f"asked elsewhere: {url}" for url in opened.requests if not url.startswith(site.address)]
    assert wrong == []
    assert [said for page in facts for said in broken(site, facts, page)] == []


def inspect_page(opened: Window, site: Site, page: str) -> dict[str, Any]:
    """Return the contents of a page after everything has loaded, including pictures below the window."""
    opened.open(site.address + page)
    opened.page.evaluate(_FETCHED)
    found: dict[str, Any] = opened.page.evaluate(_FACTS)
    return found


def broken(site: Site, facts: dict[str, dict[str, Any]], page: str) -> Iterator[str]:
    """Return the page's links to missing pages, anchors and files."""
    for link in [*facts[page]["links"], *facts[page]["sources"]]:
        address, anchor = urldefrag(urljoin(site.address + page, link))
        if not address.startswith(site.address):
            assert link.startswith(("https://", "http://", "mailto:", "javascript:", "data:")), f"{page}: {link}"
            continue
        target = unquote(address.removeprefix(site.address))
        if target in facts:
            if anchor and unquote(anchor) not in facts[target]["ids"]:
                yield f"{page}: {link} leads to no such place"
        elif not (site.folder / target).is_file():
            yield f"{page}: {link} leads nowhere"


@SIZES
@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("resume", "guides/runs/"),
        ("temperature", "guides/models/"),
        ("timeout", "guides/models/"),
        ("anthropic", "guides/models/"),
        ("cost", "guides/models/"),
        ("GiGPO", "tutorials/gigpo_by_hand/"),
        ("action_mask", "concepts/tokens/"),
    ],
)
def test_search_lists_the_right_page_first(
    window: Opened, site: Site, size: tuple[int, int], word: str, page: str
) -> None:
    opened = window(size).open(site.address)
    if size == PHONE:
        opened.page.locator("label.md-header__button[for=__search]").click()
    opened.page.locator("input.md-search__input").click()
    opened.page.locator("input.md-search__input").press_sequentially(word)
    first = opened.page.locator(".md-search-result__item a").first
    first.wait_for()
    first.click()
    opened.page.wait_for_url(f"{site.address}{page}**")
    assert word.lower() in opened.page.locator("article").inner_text().lower()


def test_copying_a_console_block_copies_only_the_commands(window: Opened, site: Site) -> None:
    opened = window(permissions=["clipboard-read", "clipboard-write"]).open(f"{site.address}guides/training/")
    block = opened.page.locator(".highlight", has=opened.page.locator(".gp")).first
    assert "$ " in block.inner_text() and "held-out" in block.inner_text()
    block.hover()
    block.locator("[data-clipboard-target], .md-clipboard, .md-code__button").first.click()
    copied = opened.page.evaluate("() => navigator.clipboard.readText()")
    lines = [line for line in copied.splitlines() if line]
    assert lines and all(line.startswith("reward-kit ") for line in lines), copied


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_color_scheme_follows_the_system_until_changed(window: Opened, site: Site, size: tuple[int, int]) -> None:
    opened = window(size, color_scheme="dark").open(site.address)

    def scheme() -> str | None:
        return opened.page.locator("body").get_attribute("data-md-color-scheme")

    assert scheme() == "slate"
    opened.page.locator("form[data-md-component=palette] label:visible").click()
    assert scheme() == "default"
    opened.open(f"{site.address}reference/metrics/")
    assert scheme() == "default", "what was chosen is kept"


def test_phone_menu_reaches_every_page(window: Opened, site: Site) -> None:
    opened = window(PHONE).open(site.address)
    opened.page.locator("label.md-header__button[for=__drawer]").click()
    menu = opened.page.locator(".md-sidebar--primary")
    menu.get_by_text("Reference", exact=True).first.click()
    menu.get_by_role("link", name="Command line").click()
    opened.page.get_by_role("heading", name="Command line", exact=False).first.wait_for()
    assert opened.page.url == f"{site.address}reference/command_line/"
