"""Test that a dry run shows the tools and the first request that an agent gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import Project

TOOLS = '''
from reward_kit import ToolRegistry
from reward_kit.environments import SqliteResource

registry = ToolRegistry("desk")

@registry.tool
async def lookup_order(number: str, db: SqliteResource) -> str:
    """Look up an order."""
    return str((await db.step("execute_sql", {"query": "SELECT * FROM orders"})).observation)

@registry.tool
def refund_order(number: str, reason: str = "") -> str:
    """Refund an order."""
    return "refunded"

@registry.tool
def close_ticket() -> str:
    """Close the ticket."""
    return "closed"
'''
AGENT = """
import json
from pathlib import Path
from reward_kit import AgentPolicy, PolicyOutput

class Notes(AgentPolicy):
    async def get_action(self, observation, available_tools_specs=None):
        messages = [message.to_chat() for message in observation]
        Path("seen.json").write_text(json.dumps({"messages": messages, "tools": available_tools_specs}))
        return PolicyOutput({"type": "text", "content": "done"})
"""
OWN = ["lookup_order", "refund_order", "close_ticket"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Create a task with a SQLite resource and three tools of its own."""
    project = Project(tmp_path, rows=1)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "agent.py").write_text(AGENT)
    write(project)
    return project


def write(project: Project, **task: Any) -> None:
    seed = "CREATE TABLE orders (number TEXT, item TEXT)"
    config = {"resource_type": "sqlite", "base_resource_config": {"seed_sql": seed}}
    project.write_task(**{**config, "policy": "agent.py:Notes", "num_rollouts_per_sample": 1, **task})


def both(project: Project) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first request that a dry run shows, and that of a run."""
    dry = project.call("run", "task.yaml", "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    real = project.call("run", "task.yaml")
    assert real.returncode == 0, real.stderr
    seen = json.loads((project.folder / "seen.json").read_text())
    shown = json.loads(dry.stdout)
    assert shown["tools"] == [spec["function"]["name"] for spec in seen["tools"] or []]
    assert shown["first_request"]["sample"] == "q0"
    return {key: shown["first_request"][key] for key in ("messages", "tools")}, {**seen, "tools": seen["tools"] or []}


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ({}, OWN),
        ({"tools": ["lookup_order", "execute_sql"]}, ["execute_sql", "lookup_order"]),
        ({"tools_module_path": None, "tools": ["list_tables"]}, ["list_tables"]),
        ({"tools": [], "observation": False}, []),
        ({"terminate_tool": "bye", "observation": False}, [*OWN, "bye"]),
    ],
)
def test_dry_run_shows_the_request_that_the_agent_gets(
    project: Project, task: dict[str, Any], names: list[str]
) -> None:
    write(project, **task)
    shown, seen = both(project)
    assert shown == seen
    assert [spec["function"]["name"] for spec in seen["tools"]] == names
    has_schema = any("CREATE TABLE orders" in message["content"] for message in seen["messages"])
    assert has_schema == task.get("observation", True)


def test_request_is_printed_shortened_and_escaped(project: Project) -> None:
    write(project, initial_user_prompt="First\nsecond \x1b[31m" + "x" * 1_000, observation=False, messages=None)
    done = project.call("run", "task.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "tools:    lookup_order, refund_order, close_ticket\n" in done.stdout
    start = done.stdout.index("First request, for sample 'q0':\n")
    lines = done.stdout[start:].splitlines()
    assert lines[1] == "  [user] First" and lines[2].startswith("    second \\x1b[31mxxx")
    assert len(lines[2]) < 500 and lines[2].endswith("characters)")
    assert lines[3:] == [
        "  lookup_order(number): Look up an order.",
        "  refund_order(number, reason): Refund an order.",
        "  close_ticket(): Close the ticket.",
        "Nothing was written.",
    ]


def test_user_who_speaks_first_is_named_and_not_asked(project: Project) -> None:
    user = {"type": "scripted", "replies": ["Hello"]}
    write(project, messages=[{"role": "system", "content": "Help."}], user=user, on_text=None)
    done = project.call("run", "task.yaml", "--dry-run")
    assert "  [system] Help.\n" in done.stdout and "CREATE TABLE orders" in done.stdout
    assert "  [user] (the simulated user's first message)\n" in done.stdout


@pytest.mark.parametrize("command", [("run", "task.yaml"), ("run", "task.yaml", "--dry-run"), ("check", "task.yaml")])
def test_unknown_name_is_an_error_with_its_line(project: Project, command: tuple[str, ...]) -> None:
    write(project, tools=["lookup_order", "refund_ordr"])
    text = (project.folder / "task.yaml").read_text()
    line = text[: text.index("- refund_ordr")].count("\n") + 1
    done = project.call(*command)
    assert done.returncode == 2
    assert f"error: task.yaml:{line}: tools: unknown tool 'refund_ordr'; did you mean 'refund_order'?\n" in done.stderr
    assert not project.runs()


def test_unknown_name_of_an_option_is_an_error(project: Project) -> None:
    done = project.call("run", "task.yaml", "-T", "tools=[exec_sql]")
    assert done.returncode == 2
    assert "error: -T: tools: unknown tool 'exec_sql'; did you mean 'execute_sql'?" in done.stderr
    write(project, resource_type=None, base_resource_config=None, tools=["lookup"], tools_module_path="other.py")
    (project.folder / "other.py").write_text(
        "from reward_kit import ToolRegistry\nr = ToolRegistry('r')\n@r.tool\ndef look_up(): 'Look.'\n"
    )
    done = project.call("run", "task.yaml")
    assert "tools: unknown tool 'lookup'; did you mean 'look_up'?" in done.stderr


def test_resume_rejects_another_selection(project: Project) -> None:
    assert project.call("run", "task.yaml", "-T", "tools=[lookup_order]").returncode == 0
    write(project, tools=["lookup_order", "close_ticket"])
    done = project.call("run", "--resume")
    assert done.returncode == 2 and "its inputs changed" in done.stderr and "task.yaml" in done.stderr
    write(project)
    done = project.call("run", "--resume")
    assert done.returncode == 0, done.stderr


def test_check_reports_an_expert_that_calls_a_hidden_tool(project: Project) -> None:
    query = {"resource_config": {"expert_queries": ["SELECT 1"]}}
    project.write_rows([{"id": "q0", "number": 0, "ground_truth": "done", **query}])
    done = project.call("check", "task.yaml")
    assert "the expert of SqliteResource calls 'execute_sql', which the task does not offer" in done.stdout
