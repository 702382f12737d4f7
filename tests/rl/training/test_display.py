"""Progress display of a training run."""

from __future__ import annotations

import io

import pytest

from reward_kit.console import SafeConsole
from reward_kit.rl.training.config import TrainModel
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.pipelines import Progress


def left_after(seconds: list[float], updates: int, begun_at: int = 0, every: int | None = None) -> list[str]:
    """Return the displayed time left after each update of these durations, with evaluations of 40 s."""
    evaluation = {} if every is None else {"evaluation": {"dataset_path": "held_out.jsonl", "every": every}}
    return _left(seconds, TrainModel.model_validate({"task": "t.yaml", "updates": updates} | evaluation), begun_at)


def _left(seconds: list[float], config: TrainModel, begun_at: int = 0, steps: int = 100) -> list[str]:
    console = SafeConsole(file=io.StringIO(), width=200)
    display = TrainingDisplay("plain", config, console)
    display.begin_at(Progress(begun_at))
    if config.evaluation is not None:
        display.updated({"time/evaluate_s": 40.0}, Progress())
    for number, took in enumerate(seconds, begun_at + 1):
        display.updated({"time/total_s": took}, Progress(number, totals={"env_steps": number * steps}))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [line.partition(" left")[0].split()[-1] if " left" in line else "" for line in lines]


def test_first_update_is_not_used_for_the_time_estimate() -> None:
    assert left_after([60.0, 2.0, 4.0], 10) == ["", "16s", "21s"]
    assert left_after([60.0, 2.0], 100, begun_at=90) == ["", "16s"]
    assert left_after([1.0, 1.0, 1.0], 3) == ["", "1s", ""]


def test_only_recent_updates_count() -> None:
    assert left_after([50.0] * 30 + [1.0] * 20, 60)[-1] == "10s"


@pytest.mark.parametrize(("every", "left"), [(None, "18s"), (10, "1m38s"), (5, "2m18s"), (4, "2m18s"), (20, "58s")])
def test_remaining_evaluations_are_included_in_the_estimate(every: int | None, left: str) -> None:
    """11 updates, of which 9 remain."""
    shown = left_after([2.0, 2.0], 11, every=every)
    assert shown[-1] == left


def test_time_left_follows_the_environment_steps() -> None:
    """Updates of 100 steps: after the second of 10, eight remain. Evaluations of 40 s follow every 500 steps."""
    plain = TrainModel.model_validate({"task": "t.yaml", "max_env_steps": 1000})
    assert _left([60.0, 2.0], plain) == ["", "16s"]
    evaluated = TrainModel.model_validate(
        {"task": "t.yaml", "max_env_steps": 1000, "evaluation": {"dataset_path": "h.jsonl", "every_env_steps": 500}}
    )
    assert _left([60.0, 2.0], evaluated)[-1] == "1m36s"
    both = TrainModel.model_validate({"task": "t.yaml", "max_env_steps": 1000, "updates": 5})
    assert _left([60.0, 2.0], both) == ["", "6s"]
