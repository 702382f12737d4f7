"""Test that a bug in a tool is an error of the episode, and that calls of unknown tools are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.project import Project, lines

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


def test_bug_in_a_tool_is_an_error_and_not_a_score(tmp_path: Path) -> None:
    project = project_calling(tmp_path, "cancel_order")
    done = project.call("run", "task.yaml")
    assert done.returncode == 3, done.stderr
    message = "tool 'cancel_order': NameError: name 'ordr' is not defined"
    assert message in done.stdout and "crash 2" in done.stdout
    run = project.run_path()
    assert f"2 episodes ended with an error; tracebacks are in runs/{run.name}/run.log\n" in done.stderr
    (figures,) = json.loads((run / "summary.json").read_text())["policies"]
    assert (figures["episodes"], figures["scored"], figures["score"], figures["errors"]) == (2, 0, None, {"crash": 2})
    assert figures["stop_reasons"] == {"error": 2}
    assert not [score for score in lines(run / "scores.jsonl") if score["score"] is not None]
    for episode in lines(run / "episodes.jsonl"):
        failure = episode["failure"]
        assert (episode["stop_reason"], failure["class"], failure["message"]) == ("error", "crash", message)
        assert f"{tmp_path}/tools.py:10 in cancel_order" in failure["traceback"]
    assert f"{tmp_path}/tools.py" in (run / "run.log").read_text()
    assert "tools.py:10 in cancel_order" in (run / "report.html").read_text()


def test_fixed_tool_runs_again_with_only_failed(tmp_path: Path) -> None:
    project = project_calling(tmp_path, "cancel_order")
    assert project.call("run", "task.yaml").returncode == 3
    (tmp_path / "tools.py").write_text(TOOLS.replace("ordr", "order"))
    run = project.run_path()
    done = project.call("run", "--resume", str(run), "--only-failed", "--force")
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads((run / "summary.json").read_text())["policies"]
    assert (figures["scored"], figures["errors"]) == (2, {})


def test_calls_of_unknown_tools_are_reported(tmp_path: Path) -> None:
    done = project_calling(tmp_path, "act", "act").call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    assert "4 calls to unknown tools: 'act' (known: cancel_order, refund)\n" in done.stderr


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


def test_agent_that_ignores_the_base_url_is_reported(tmp_path: Path) -> None:
    policy = {"type": "own_agent", "agent": "agent.py:agent", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    project = Project(tmp_path, rows=2, policy=policy)
    (tmp_path / "agent.py").write_text("async def agent(task, base_url):\n    return 'elsewhere'\n")
    done = project.call("run", "task.yaml")
    assert done.stderr.count("warning: the agent agent sent no model request to base_url in an episode") == 1
    (tmp_path / "prices.yaml").write_text("m: {input: 1.0, output: 1.0}\n")
    done = project.call("run", "task.yaml", "-T", "policy.price_file=prices.yaml", "--max-cost", "1")
    assert done.returncode == 3, done.stderr
    assert "did not report the cost of this action, so the cost limit cannot be enforced" in done.stdout + done.stderr
