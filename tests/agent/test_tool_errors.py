"""Test the counts and reports of tool errors."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from reward_kit.agent.tool_execution import ToolErrors
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import RewardKitError, ToolError

LOG = Path("runs/one/run.log")
registry = ToolRegistry("shop")
ORDERS: dict[str, str] = {}


@registry.tool
def misspelt() -> str:
    """Use a name that is not there."""
    return str(ordr)  # type: ignore[name-defined]  # noqa: F821


@registry.tool
def refuses(how: str) -> str:
    """Refuse on purpose, in one way or another."""
    if how == "value":
        raise ValueError("no such order")
    if how == "wrapped":
        try:
            return ORDERS[how]
        except KeyError as error:
            raise ToolError("no such order") from error
    raise NoSuchOrder(how)


class NoSuchOrder(KeyError):
    """An exception of the tool's own."""


def failure(name: str, **arguments: str) -> RewardKitError:
    async def call() -> None:
        await registry.get_tool(name).call(arguments)

    with pytest.raises(ToolError) as raised:
        anyio.run(call)
    return raised.value


def test_tool_bug_is_reported_with_location_and_count() -> None:
    tool_errors = ToolErrors()
    for _ in range(2):
        tool_errors.add("misspelt", failure("misspelt"))
    line = misspelt.__code__.co_firstlineno + 3
    place = f"test_tool_errors.py:{line}"
    assert tool_errors.lines(LOG) == [
        f"tool misspelt raised NameError: name 'ordr' is not defined ({place}), 2 calls; more in {LOG}"
    ]


@pytest.mark.parametrize("how", ["value", "wrapped", "own exception"])
def test_deliberate_tool_error_is_not_a_bug(how: str) -> None:
    tool_errors = ToolErrors()
    tool_errors.add("refuses", failure("refuses", how=how))
    assert tool_errors.lines(LOG) == []


def test_most_frequent_tool_bugs_are_listed_first() -> None:
    tool_errors = ToolErrors()
    for number, tool in enumerate(["a", "b", "c", "d"], start=1):
        for _ in range(number):
            tool_errors.add(tool, failure("misspelt"))
    assert [line.split()[1] for line in tool_errors.lines(LOG)] == ["d", "c", "b"]


def test_unknown_tools_are_listed_with_the_available_ones() -> None:
    tool_errors = ToolErrors()
    assert not tool_errors.lines(LOG)
    for name in ["act", "go", "act"]:
        tool_errors.add_unknown(name, ["move", "look"])
    told = "3 calls named an unknown tool: 'act', 'go' (known: move, look)"
    assert tool_errors.lines(LOG) == [told]


def test_invented_tool_names_are_bounded() -> None:
    tool_errors = ToolErrors()
    for number in range(1_000):
        tool_errors.add_unknown(f"tool_{number}" + "x" * 500, [f"real_{n}" for n in range(50)])
    (line,) = tool_errors.lines(LOG)
    assert line.startswith("1,000 calls named an unknown tool: 'tool_0") and len(line) < 500
