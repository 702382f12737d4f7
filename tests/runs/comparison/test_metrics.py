"""Differences of named metrics between runs."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest

from reward_kit.console import SafeConsole
from reward_kit.errors import ConfigError
from reward_kit.runs.comparison import regression_gates, to_json, under_gate
from reward_kit.runs.comparison_table import comparison_markdown, comparison_table, metric_lines
from reward_kit.runs.summary import Threshold
from tests.runs.comparison.run_pairs import Scores, compared, make_run

SCORES: Scores = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [1.0, None]}


def test_metrics_of_both_runs_are_paired_by_sample_without_missing_values(tmp_path: Path) -> None:
    before: dict[str, Scores] = {
        "state": {"a": [0.0, 0.5], "b": [0.25, None], "c": [1.0, 1.0]},
        "only before": {"a": [1.0, 1.0]},
        "apart": {"a": [1.0, 1.0]},
    }
    after: dict[str, Scores] = {
        "state": {"a": [1.0, 0.5], "b": [0.75, 0.25]},
        "apart": {"b": [1.0, 1.0]},
        "only after": {"a": [1.0, 1.0]},
    }
    first = make_run(tmp_path / "first", SCORES, metrics=before, policy="p")
    comparison = compared(first, make_run(tmp_path / "second", SCORES, metrics=after, policy="q"))
    (difference,) = comparison.differences
    state, apart = difference.metrics
    assert (state.name, state.samples, state.missing) == ("state", 2, 1)
    assert (state.baseline_mean, state.run_mean) == (0.25, 0.625)
    assert state.interval is not None and state.interval.mean == 0.375
    assert (apart.name, apart.samples, apart.missing, apart.interval) == ("apart", 0, 3, None)
    found = to_json(comparison)["comparisons"][0]["metrics"]
    assert found["state"]["difference"] == 0.375 and found["apart"]["difference"] is None
    columns, rows = metric_lines(comparison.differences)
    assert columns == ["metric", "baseline", "mean", "difference", "samples", "missing"]
    assert rows[1] == ["apart", "–", "–", "–", "0", "3"]
    assert "| state | 0.250 | 0.625 | +0.375" in comparison_markdown(comparison)


def test_rollouts_of_metrics_are_paired_if_those_of_scores_are(tmp_path: Path) -> None:
    before = make_run(tmp_path / "first", SCORES, metrics={"m": {"a": [0.0, 1.0], "b": [0.0, 1.0]}})
    after = make_run(tmp_path / "second", SCORES, metrics={"m": {"a": [None, 0.5], "b": [None, None]}})
    (metric,) = compared(before, after).differences[0].metrics
    assert (metric.samples, metric.missing) == (1, 2)
    assert (metric.baseline_mean, metric.run_mean) == (1.0, 0.5)


def test_runs_without_metrics_have_no_table_of_them(tmp_path: Path) -> None:
    comparison = compared(*(make_run(tmp_path / name, SCORES) for name in ("first", "second")))
    assert metric_lines(comparison.differences)[1] == [] and "metric" not in comparison_markdown(comparison)


def test_gate_checks_a_metric_of_the_run(tmp_path: Path) -> None:
    metrics: dict[str, Scores] = {"state": {"a": [0.5, 0.5], "b": [1.0, 0.0]}}
    side = compared(*(make_run(tmp_path / name, SCORES, metrics=metrics) for name in ("first", "second"))).sides[-1]
    assert [under_gate(side, Threshold(least, "state"), error_limit=1).failed for least in (0.5, 0.51)] == [False, True]
    assert "the mean of 'state' of second is 0.500, below 0.51" in under_gate(side, Threshold(0.51, "state")).message
    with pytest.raises(ConfigError, match="--fail-under: second: unknown metric 'stat'; did you"):
        under_gate(side, Threshold(0.0, "stat"))


def test_regression_gate_checks_a_metric(tmp_path: Path) -> None:
    samples = [f"s{place}" for place in range(12)]
    scores: Scores = {name: [0.5] for name in samples}
    before, after = (
        make_run(tmp_path / run, scores, metrics={"state": {name: [value] for name in samples}, run: scores})
        for run, value in (("before", 0.75), ("after", 0.25))
    )
    comparison = compared(before, after)
    assert [gate.failed for gate in regression_gates(comparison, 0.0)] == [False]
    (gate,) = regression_gates(comparison, 0.1, "state")
    assert gate.failed and "after is worse than before in 'state' by more than 0.1" in gate.message
    (metric,) = comparison.differences[0].metrics
    assert metric.interval is not None and (high := metric.interval.high) is not None
    assert [gate.failed for gate in regression_gates(comparison, -high + 1e-9, "state")] == [False]
    for missing in ("before", "after"):
        with pytest.raises(ConfigError, match=f"unknown metric {missing!r}"):
            regression_gates(comparison, 0.0, missing)


def test_regression_gate_fails_if_no_sample_has_the_metric_in_both_runs(tmp_path: Path) -> None:
    metrics: list[dict[str, Scores]] = [{"m": {"a": [0.5, 0.5]}}, {"m": {"b": [0.5, 0.5]}}]
    runs = [make_run(tmp_path / str(place), SCORES, metrics=metric) for place, metric in enumerate(metrics)]
    (gate,) = regression_gates(compared(*runs), 0.0, "m")
    assert gate.failed and "no common sample has a value of 'm'" in gate.message


def test_enormous_metric_is_rejected(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, SCORES, metrics={"m": {"a": [1e200, 1.0]}}) for name in ("first", "second")]
    with pytest.raises(ConfigError, match="metric 'm' of a-p-0 is beyond 1e99"):
        compared(*runs)


def test_three_runs_with_metrics_fit_a_terminal_of_80_columns(tmp_path: Path) -> None:
    metrics: dict[str, Scores] = {"state.right_amount": {"a": [0.5, 0.5], "b": [1.0, 0.0]}}
    names = ("openai-skilled", "openai-middling", "openai-clumsy")
    comparison = compared(*(make_run(tmp_path / name, SCORES, metrics=metrics, policy=name) for name in names))
    for plain in (False, True):
        console = SafeConsole(width=80, record=True, file=StringIO())
        console.print(comparison_table(comparison, plain=plain))
        lines = console.export_text().splitlines()
        assert all(len(line) <= 80 for line in lines)
        intervals = [line for line in lines if re.search(r"\[\S+, \S+\]", line)]
        assert len(intervals) >= 5, "an interval is wrapped"
        assert sum("Metrics of" in line for line in lines) == 2
