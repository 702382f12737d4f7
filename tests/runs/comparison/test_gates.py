"""Gates that fail a CI job after a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_kit.runs.comparison import regression_gates, under_gate
from reward_kit.runs.summary import Threshold
from tests.runs.comparison.run_pairs import compared, make_run

LOST = [-0.5, -0.25, -0.25, 0.0, -0.5, -0.25, -0.25, 0.0]


def pair(folder: Path, differences: list[float]) -> tuple[Path, Path]:
    names = [f"s{place}" for place in range(len(differences))]
    before = make_run(folder / "before", {name: [0.5] for name in names})
    return before, make_run(folder / "after", {name: [0.5 + d] for name, d in zip(names, differences, strict=True)})


class TestRegression:
    @pytest.mark.parametrize(("margin", "fails"), [(0.0, True), (0.05, True), (0.15, False), (0.25, False)])
    def test_regression_gate_fails_if_the_upper_bound_is_below_the_margin(
        self, tmp_path: Path, margin: float, fails: bool
    ) -> None:
        """Mean -0.25, interval about [-0.408, -0.092]: the bound decides, not the mean."""
        comparison = compared(*pair(tmp_path, LOST))
        (gate,) = regression_gates(comparison, margin)
        high = comparison.differences[0].figures.interval.high
        assert high is not None and gate.failed == fails == (high < -margin)
        assert ("is worse than" in gate.message) == fails

    def test_gains_and_insignificant_losses_pass(self, tmp_path: Path) -> None:
        for place, differences in enumerate(([-value for value in LOST], [-0.5, 0.5, -0.5, 0.0], [0.0] * 4)):
            (gate,) = regression_gates(compared(*pair(tmp_path / str(place), differences)), 0.0)
            assert not gate.failed and "not shown to be worse" in gate.message

    def test_undefined_interval_fails(self, tmp_path: Path) -> None:
        (gate,) = regression_gates(compared(*pair(tmp_path, [0.5])), 0.0)
        assert gate.failed and "there is only one common sample" in gate.message

    def test_each_run_has_its_own_gate(self, tmp_path: Path) -> None:
        runs = pair(tmp_path, LOST)
        third = make_run(tmp_path / "third", {f"s{place}": [0.5] for place in range(8)})
        assert [gate.failed for gate in regression_gates(compared(*runs, third), 0.0)] == [True, False]

    def test_more_errors_than_the_baseline_fail_the_gate(self, tmp_path: Path) -> None:
        names = [f"s{place}" for place in range(8)]
        before = make_run(tmp_path / "before", {name: [0.5, 0.5] for name in names})
        after = make_run(tmp_path / "after", {name: [0.5, None] for name in names})
        (gate,) = regression_gates(compared(before, after), 0.0)
        assert gate.failed and "8 episodes of after ended with an error and have no score" in gate.message
        assert [gate.failed for gate in regression_gates(compared(before, after), 0.0, error_limit=8)] == [False]
        side = compared(before, after).sides[-1]
        assert [under_gate(side, Threshold(0.1), error_limit=limit).failed for limit in (7, 8)] == [True, False]
        (gate,) = regression_gates(compared(after, before), 0.0)
        assert not gate.failed


class TestUnder:
    def test_under_gate_checks_the_mean_or_its_lower_bound(self, tmp_path: Path) -> None:
        side = compared(*pair(tmp_path, LOST)).sides[-1]
        assert side.summary.score is not None and side.summary.score.mean == 0.25
        assert side.summary.score.low == pytest.approx(0.111, abs=0.001)
        assert [under_gate(side, Threshold(least)).failed for least in (0.25, 0.2500001)] == [False, True]
        assert [under_gate(side, Threshold(least, None, True)).failed for least in (0.11, 0.12)] == [False, True]

    def test_unscored_or_unbounded_scores_fail_the_gate(self, tmp_path: Path) -> None:
        before, after = pair(tmp_path, [0.5])
        side = compared(before, after).sides[-1]
        assert not under_gate(side, Threshold(0.9)).failed
        gate = under_gate(side, Threshold(-5.0, by_lower_bound=True))
        assert gate.failed and "is unknown" in gate.message
