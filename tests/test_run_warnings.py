"""Test the warnings of a run: calls to unknown tools, and notes."""

from __future__ import annotations

from reward_kit.run_warnings import RunWarnings


def test_unknown_tools_are_listed_with_the_available_ones() -> None:
    warnings = RunWarnings()
    assert not warnings.lines()
    for name in ["act", "go", "act"]:
        warnings.add_unknown_tool(name, ["move", "look"])
    message = "3 calls to unknown tools: 'act', 'go' (known: move, look)"
    assert warnings.lines() == [message]


def test_invented_tool_names_are_bounded() -> None:
    warnings = RunWarnings()
    for number in range(1_000):
        warnings.add_unknown_tool(f"tool_{number}" + "x" * 500, [f"real_{n}" for n in range(50)])
    (line,) = warnings.lines()
    assert line.startswith("1,000 calls to unknown tools: 'tool_0") and len(line) < 500


def test_notes_are_reported_once_escaped_and_bounded() -> None:
    warnings = RunWarnings()
    assert warnings.add("a\x1b[31m") and not warnings.add("a\x1b[31m")
    (line,) = warnings.lines()
    assert line.startswith("warning: a") and "\x1b" not in line
    for number in range(1_000):
        warnings.add(f"{number}" + "x" * 5_000)
    assert len(warnings.lines()) == 20 and max(map(len, warnings.lines())) < 600
