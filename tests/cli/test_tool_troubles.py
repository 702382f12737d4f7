"""Test that bugs in tools and calls of unknown tools are reported at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.project import Project

TOOLS = """
from reward_kit import ToolRegistry
from reward_kit.errors import ToolError

registry = ToolRegistry("shop")

@registry.tool
def cancel_order(order: int = 0) -> str:
    "Cancel an order."
    return f"cancelled {ordr}"

@registry.tool
def refund(order: int = 0) -> str:
    "Refund an order."
    raise ToolError("nothing was paid")
"""


def call_of(name: str) -> dict[str, Any]:
    return {"type": "tool_call", "name": name, "arguments": {}}


def project_calling(folder: Path, *names: str) -> Project:
    actions = [*map(call_of, names), {"type": "text", "content": "done"}]
    project = Project(folder, rows=1, policy={"type": "scripted", "actions": actions})
    (folder / "tools.py").write_text(TOOLS)
    return project


def test_tool_errors_are_reported_at_the_end(tmp_path: Path) -> None:
    done = project_calling(tmp_path, "cancel_order").call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    told = "tool cancel_order raised NameError: name 'ordr' is not defined (tools.py:10), 2 calls"
    assert f"{told}; more in runs/{run.name}/run.log\n" in done.stderr
    assert "tools.py" in (run / "run.log").read_text()


def test_calls_of_unknown_tools_are_reported(tmp_path: Path) -> None:
    done = project_calling(tmp_path, "act", "act").call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    assert "4 calls named an unknown tool: 'act' (known: cancel_order, refund)\n" in done.stderr


def test_deliberate_tool_errors_are_not_reported(tmp_path: Path) -> None:
    done = project_calling(tmp_path, "refund").call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    assert "refund" not in done.stderr and "an unknown tool" not in done.stderr


def test_hints_begin_with_reading_the_episodes(tmp_path: Path) -> None:
    done = project_calling(tmp_path).call("run", "task.yaml")
    (run,) = (tmp_path / "runs").iterdir()
    lines = done.stderr.splitlines()
    first = lines.index(f"Read the episodes:  reward-kit view runs/{run.name} --open")
    assert lines[first + 1].endswith(f"reward-kit score runs/{run.name} --reward FILE.py:FUNCTION")
