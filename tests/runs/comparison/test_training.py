"""Test the comparison of training runs by their last held-out evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.training_comparison import (
    are_training_runs,
    read_training_sides,
    training_difference,
    training_json,
    training_lines,
    training_notes,
)
from tests import command_line
from tests.report.training.training_run_factory import make_training, update
from tests.runs.comparison.run_pairs import make_run

DIGESTS = {"evaluation's dataset": "d", "evaluation's reward": "r", "evaluation's task file": "t", "train file": "f"}


def training_run(folder: Path, name: str, score: float | None, error: float | None = 0.03, **header: Any) -> Path:
    held_out = {"held_out/score": score, "held_out/standard_error": error, "held_out/count": 64.0}
    lines = [(0, {"held_out/score": 0.1}), (2, {**update(2), **held_out}), (3, update(3))]
    header = {"digests": DIGESTS, "config": {"evaluation": {"hold_out": None, "limit": None}}} | header
    return make_training(folder, lines if score is not None else lines[2:], **header).rename(folder / name)


def test_last_held_out_scores_are_compared_with_both_standard_errors(tmp_path: Path) -> None:
    runs = [training_run(tmp_path, "one", 0.5, 0.03), training_run(tmp_path, "two", 0.7, 0.04)]
    assert are_training_runs(runs)
    base, side = read_training_sides(runs)
    difference = training_difference(base, side)
    assert difference.mean == pytest.approx(0.2) and difference.standard_error == pytest.approx(math.hypot(0.03, 0.04))
    assert (difference.low, difference.high) == pytest.approx((0.102, 0.298))
    lines = dict(training_lines([base, side]))
    assert lines["held-out score"] == ["0.500", "0.700"] and lines["after update"] == ["2", "2"]
    assert lines["held-out episodes"] == ["64", "64"] and lines["environment steps"] == ["64", "64"]
    assert any("`reward-kit sweep`" in note for note in training_notes([base, side]))
    assert training_json([base, side])["differences"][0]["mean"] == pytest.approx(0.2)


def test_score_without_an_error_has_no_interval(tmp_path: Path) -> None:
    sides = read_training_sides([training_run(tmp_path, "one", 0.5, None), training_run(tmp_path, "two", 0.7)])
    assert training_difference(*sides).low is None
    assert dict(training_lines(sides))["standard error"] == ["–", "0.030"]


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"digests": {**DIGESTS, "evaluation's dataset": "other"}}, "evaluation's dataset"),
        ({"digests": {**DIGESTS, "evaluation's reward": "other"}}, "evaluation's reward"),
        ({"config": {"evaluation": {"limit": 4}}}, "evaluation.limit"),
    ],
)
def test_other_held_out_samples_are_rejected(tmp_path: Path, header: dict[str, Any], named: str) -> None:
    runs = [training_run(tmp_path, "one", 0.5), training_run(tmp_path, "two", 0.7, **header)]
    with pytest.raises(ConfigError, match=rf"two and one have different held-out samples or rewards \({named}\)"):
        read_training_sides(runs)


def test_samples_drawn_with_another_seed_are_rejected(tmp_path: Path) -> None:
    drawn = {"config": {"evaluation": {"hold_out": 8}}}
    one = training_run(tmp_path, "one", 0.5, seed=0, **drawn)
    two = training_run(tmp_path, "two", 0.7, seed=1, **drawn)
    with pytest.raises(ConfigError, match=r"\(seed\)"):
        read_training_sides([one, two])
    assert read_training_sides([training_run(tmp_path, "three", 0.5), training_run(tmp_path, "four", 0.7, seed=1)])


def test_differences_in_how_scores_were_measured_are_noted(tmp_path: Path) -> None:
    header = {
        "digests": {**DIGESTS, "evaluation's task file": "other"},
        "config": {"evaluation": {"hold_out": None, "limit": None, "temperature": 0.0}},
    }
    sides = read_training_sides([training_run(tmp_path, "one", 0.5), training_run(tmp_path, "two", 0.7, **header)])
    notes = list(training_notes(sides))
    assert "two: evaluation.temperature is 0.0, but None in the baseline" in notes
    assert "two: the task file of the evaluation differs from the baseline's" in notes


def test_run_without_an_evaluation_is_rejected(tmp_path: Path) -> None:
    runs = [training_run(tmp_path, "one", 0.5), training_run(tmp_path, "two", None)]
    with pytest.raises(ConfigError, match="two has no held-out evaluation to compare"):
        read_training_sides(runs)


def test_damaged_metrics_are_rejected_with_their_file(tmp_path: Path) -> None:
    runs = [training_run(tmp_path, "one", 0.5), training_run(tmp_path, "two", 0.5)]
    (runs[1] / "metrics.jsonl").write_text('{"update": 1, "held_out/score": "high"}\n')
    with pytest.raises(StoreError, match=r"two/metrics\.jsonl cannot be read"):
        read_training_sides(runs)


def test_command_compares_training_runs_and_rejects_mixed_kinds(tmp_path: Path) -> None:
    training_run(tmp_path, "one", 0.5)
    training_run(tmp_path, "two", 0.7)
    make_run(tmp_path / "evaluated", {"a": [0.5]})
    done = command_line.call("compare", "one", "two", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["differences"][0]["run"] == "two"
    assert "note: one run per setting does not show the results of other seeds" in done.stderr
    done = command_line.call("compare", "one", "two", cwd=tmp_path)
    assert "held-out score" in done.stdout and "+0.200  [" in done.stdout
    done = command_line.call("compare", "one", "two", "--markdown", cwd=tmp_path)
    assert done.stdout.startswith("|  | one | two |\n|---|---:|---:|\n| held-out score | 0.500 | 0.700 |")
    mixed = command_line.call("compare", "evaluated", "two", cwd=tmp_path)
    assert mixed.returncode == 2 and "two is a training run" in mixed.stderr
    gate = command_line.call("compare", "one", "two", "--fail-on-regression=0", cwd=tmp_path)
    assert gate.returncode == 2 and "of training runs, only the table" in gate.stderr
