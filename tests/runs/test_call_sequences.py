"""The call sequences on the architecture page match the code."""

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
from tests.rl.training.frozen_lake import lake_folder

PACKAGE = Path(reward_kit.__file__).parent
PAGE = PACKAGE.parent / "docs" / "development" / "architecture.md"
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def way(title: str) -> list[tuple[str, str]]:
    """Return the steps of a section of the page: the file and the qualified name of each function."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}")[2].partition("\n## ")[0]
    return ROW.findall(section)


RUN, UPDATE = way("Call sequence of a run"), way("Call sequence of an update")


def test_page_lists_the_steps() -> None:
    assert len(RUN) >= 15 and len(UPDATE) >= 15


@pytest.mark.parametrize(("file", "name"), RUN + UPDATE, ids=".".join)
def test_listed_functions_exist(file: str, name: str) -> None:
    body: Any = ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} has no {name}"
        body = getattr(found[0], "body", [])


def record_calls(arguments: list[str], steps: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the `steps` that a command calls, in the order of their first calls."""
    called: list[tuple[str, str]] = []

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
        done = CliRunner().invoke(program, [*arguments, "--display", "none"])
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert done.exit_code == 0, done.output
    return called


def test_run_calls_the_listed_functions_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path, rows=1, num_rollouts_per_sample=1)
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("REWARD_KIT_TRUST", "1")
    assert record_calls(["run", "task.yaml", "--sandbox", "in_process"], RUN) == RUN


def test_update_calls_the_listed_functions_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("REWARD_KIT_TRUST", "1")
    assert record_calls(["train", "train.yaml"], UPDATE) == UPDATE
