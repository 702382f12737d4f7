"""Test that the native engine answers every recorded command as the real one did."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from reward_kit.environments.household_engine import HouseholdEngine, HouseholdView
from reward_kit.environments.household_problems import Problem, TaskType
from tests.environments.household.record_traces import commands_after

HERE = Path(__file__).parent
TRACES = HERE / "traces.jsonl.xz"


@cache
def traces() -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(TRACES.read_bytes()).decode().splitlines()]


def expected(trace: dict[str, Any]) -> Iterator[tuple[str | None, tuple[Any, ...]]]:
    """Return each command, None for the reset, with its observation, commands, reward and done."""
    observation, commands, reward, done = trace["start"]
    yield None, (observation, tuple(commands), float(reward), bool(done))
    for command, observation, change, reward, done in trace["steps"]:
        commands = commands_after(commands, change)
        yield command, (observation, tuple(commands), float(reward), bool(done))


def difference(trace: dict[str, Any]) -> str:
    """Return the native engine's first different answer, "" if none."""
    engine = HouseholdEngine(Problem.from_json(trace["problem"]))
    for number, (command, wanted) in enumerate(expected(trace)):
        view: HouseholdView = engine.reset() if command is None else engine.step(command)
        if (view.observation, view.admissible, view.reward, view.done) != wanted or view.won != view.done:
            return f"{trace['problem']['id']}, step {number}, {command!r}: {view} is not {wanted}"
    return ""


def test_every_answer_of_every_trace_is_equal() -> None:
    assert [found for trace in traces() if (found := difference(trace))] == []


def test_traces_cover_every_task_and_effect() -> None:
    assert len(traces()) >= 2_000
    types = Counter(trace["problem"]["task_type"] for trace in traces())
    assert set(types) == {kind.value for kind in TaskType} and min(types.values()) >= 200
    said = " ".join(step[1] for trace in traces() for step in trace["steps"])
    for words in (
        "is open. In it",
        "is closed",
        "hot and clean sliced",
        "cool and clean",
        "cold",
        "turn on",
        "You sliced",
    ):
        assert words in said
    assert sum(trace["steps"][-1][-1] for trace in traces() if trace["steps"]) >= 200
