"""Every page of the docs runs as written: files, Python blocks, commands and their output."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.sandbox.host import best_strength
from tests.pages.parts import Page, read_page
from tests.pages.running import ROOT, run_page

DOCS = ROOT / "docs"
PAGES = [read_page(path) for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]]
NAMES = [str(page.path.relative_to(ROOT)) for page in PAGES]
RUN_BY_OTHERS = re.compile(r"\{ \.python \.\w+ \}")
LANGUAGES = {
    "python",
    "console",
    "yaml",
    "json",
    "jsonl",
    "text",
    "dockerfile",
    "toml",
    "ini",
    "csv",
    "html",
    "sql",
    "make",
    "jinja",
    "markdown",
}


def parameter(page: Page, name: str) -> object:
    is_long = page.is_("long") or page.environment
    return pytest.param(page, id=name, marks=[pytest.mark.campaign] if is_long else [])


def confines() -> bool:
    try:
        asyncio.run(best_strength("auto"))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("page", [parameter(page, name) for page, name in zip(PAGES, NAMES, strict=True)])
def test_page_runs_as_written(page: Page, tmp_path: Path) -> None:
    programs = None
    if page.environment:
        programs = ROOT / ".integrations" / page.environment / "bin"
        if not programs.is_dir():
            pytest.skip(f"runs in .integrations/{page.environment}, which is not here: make test-docs")
    if missing := sorted(name for name in page.programs if shutil.which(name) is None):
        pytest.skip(f"needs {', '.join(missing)}, which is not on this machine")
    if page.is_("needs a sandbox") and not confines():
        pytest.skip("this machine cannot confine code: reward-kit doctor")
    run_page(page, tmp_path, programs)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_page_declares_how_each_block_is_run(page: Page) -> None:
    is_tutorial = page.path.parent.name == "tutorials"
    assert not (is_tutorial and page.before), f"{page.path}: a tutorial begins with nothing"
    for block in page.blocks:
        known = block.language in LANGUAGES or RUN_BY_OTHERS.fullmatch(block.language)
        assert known, f"{page.path}:{block.line}: {block.language!r} is not run by anything"
        why = block.note("not run")
        assert why != "", f"{page.path}:{block.line}: not run, without a reason"
        if is_tutorial:
            assert why in (None, "installs"), f"{page.path}:{block.line}: a tutorial runs whole"
