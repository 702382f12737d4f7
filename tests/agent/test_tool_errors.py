"""Test the counts and reports of calls to unknown tools."""

from __future__ import annotations

from reward_kit.agent.tool_execution import ToolErrors


def test_unknown_tools_are_listed_with_the_available_ones() -> None:
    tool_errors = ToolErrors()
    assert not tool_errors.lines()
    for name in ["act", "go", "act"]:
        tool_errors.add_unknown(name, ["move", "look"])
    message = "3 calls to unknown tools: 'act', 'go' (known: move, look)"
    assert tool_errors.lines() == [message]


def test_invented_tool_names_are_bounded() -> None:
    tool_errors = ToolErrors()
    for number in range(1_000):
        tool_errors.add_unknown(f"tool_{number}" + "x" * 500, [f"real_{n}" for n in range(50)])
    (line,) = tool_errors.lines()
    assert line.startswith("1,000 calls to unknown tools: 'tool_0") and len(line) < 500
