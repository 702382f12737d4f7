"""Factories of the site's generated pages, as the build finds them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
Maker = Callable[[str], ModuleType]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    """A factory that imports a module of `docs/hooks`; those used here do not need mkdocs."""
    monkeypatch.syspath_prepend(str(DOCS / "hooks"))
    return importlib.import_module
