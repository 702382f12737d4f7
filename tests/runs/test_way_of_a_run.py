"""The way of a run, as the architecture page tells it, is the way that a run takes."""

from __future__ import annotations

import ast
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner

import reward_kit
from reward_kit.cli.main import program
from tests.cli.project import Project

PACKAGE = Path(reward_kit.__file__).parent
PAGE = PACKAGE.parent / "docs" / "development" / "architecture.md"
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def way() -> list[tuple[str, str]]:
    """The steps of the page: the file and the qualified name of each function."""
    section = PAGE.read_text(encoding="utf-8").partition("## The way of a run")[2].partition("\n## ")[0]
    return ROW.findall(section)


def test_the_page_has_the_steps() -> None:
    assert len(way()) >= 15


@pytest.mark.parametrize(("file", "name"), way(), ids=".".join)
def test_each_function_is_where_the_page_says(file: str, name: str) -> None:
    body: Any = ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} has no {name}"
        body = getattr(found[0], "body", [])


def test_one_run_calls_them_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path, rows=1, num_rollouts_per_sample=1)
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("REWARD_KIT_TRUST", "1")
    steps, called = way(), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            step = (path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname)
            if step in steps and step not in called:
                called.append(step)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        done = CliRunner().invoke(program, ["run", "task.yaml", "--sandbox", "in_process", "--display", "none"])
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert done.exit_code == 0, done.output
    assert called == steps
