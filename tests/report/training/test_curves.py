"""Curves of a training run, from the lines of `metrics.jsonl` to charts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.errors import ConfigError, StoreError
from reward_kit.report.training_data import MOST_POINTS, STRETCHES, Series, build_curve, read_training, thinned
from reward_kit.report.training_page import (
    PARTS,
    SCORE,
    SMALL,
    Axes,
    ChartLine,
    ChartSpec,
    draw,
    short,
    whole_ticks,
    y_ticks,
)
from tests.report.training.training_run_factory import make_training, update

DOCS = Path(__file__).parents[3] / "docs"
KL = ChartSpec("KL", (ChartLine("learner/approx_kl", "kl"),), "told", has_zero=False)


def series(*values: float) -> Series:
    return Series(np.arange(len(values)), np.array(values, np.float64))


class TestReading:
    """`metrics.jsonl`, line by line."""

    def test_each_metric_becomes_a_series(self, tmp_path: Path) -> None:
        lines = [(0, {"held_out/score": 0.25}), (1, update(1)), (2, update(2, held_out__score=0.75))]
        run = read_training(make_training(tmp_path, lines))
        assert run.series["held_out/score"].updates_N.tolist() == [0, 2]
        assert run.series["held_out/score"].values_N.tolist() == [0.25, 0.75]
        assert (
            run.series["learner/entropy"].at(2) == pytest.approx(1 / 3) and run.series["learner/entropy"].at(0) is None
        )
        assert (run.updates, run.resumed_at, run.best) == (2, [], (2, 0.75))

    @pytest.mark.parametrize(
        ("scores", "best"), [([0, 1, 1, 0], (1, 1.0)), ([1, 0, 1, 1], (2, 1.0)), ([1, 0, 0, 0], (0, 1.0))]
    )
    def test_best_update_is_the_first_of_equal_scores_after_training_began(
        self, tmp_path: Path, scores: list[int], best: tuple[int, float]
    ) -> None:
        run = read_training(make_training(tmp_path, [(n, update(n, score__mean=s)) for n, s in enumerate(scores)]))
        assert run.metric == "score/mean" and run.best == best

    def test_restarted_counter_marks_a_resumed_process(self, tmp_path: Path) -> None:
        done = [8.0, 16.0, 8.0, 16.0, 8.0]
        lines = [(n, update(n, reward_agent__done=count)) for n, count in enumerate(done, 1)]
        assert read_training(make_training(tmp_path, lines)).resumed_at == [3, 5]

    def test_non_finite_value_is_a_gap(self, tmp_path: Path) -> None:
        run = read_training(make_training(tmp_path, [(n, update(n, learner__approx_kl=None)) for n in (1, 2)]))
        assert np.isnan(run.series["learner/approx_kl"].values_N).all() and draw("kl", KL, run) is None

    @pytest.mark.parametrize("value", [1e308, -1e308, 10**400])
    def test_value_beyond_any_scale_is_a_gap(self, tmp_path: Path, value: float) -> None:
        lines = [(n, update(n, learner__approx_kl=one)) for n, one in enumerate([0.1, value, 0.2])]
        chart = draw("kl", KL, read_training(make_training(tmp_path, lines)))
        assert chart is not None and chart.data["lines"][0]["v"] == [0.1, None, 0.2]

    def test_incomplete_last_line_is_skipped_and_damaged_line_is_named(self, tmp_path: Path) -> None:
        run = make_training(tmp_path, [(1, update(1))])
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"update": 2, "sco')
        assert read_training(run).updates == 1
        with (run / "metrics.jsonl").open("a") as file:
            file.write("\n")
        with pytest.raises(StoreError, match=r"metrics\.jsonl:2: not JSON"):
            read_training(run)
        (run / "metrics.jsonl").write_text('{"at": "x"}\n')
        with pytest.raises(StoreError, match=r"metrics\.jsonl:1: expected an object with an integer"):
            read_training(run)

    def test_evaluation_run_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text(
            '{"schema_version": 1, "task_name": "t", "timing": {"started_at": "2026-01-01T00:00:00Z"}}'
        )
        with pytest.raises(ConfigError, match="is not a run of `reward-kit train`"):
            read_training(tmp_path)


class TestThinning:
    """Long curves reduced to few points."""

    def test_short_curve_is_not_thinned(self) -> None:
        curve = build_curve(series(1.0, math.nan, 3.0))
        assert curve.low_M is None and np.array_equal(curve.values_M, [1.0, math.nan, 3.0], equal_nan=True)

    @given(st.integers(MOST_POINTS + 1, 3_000), st.integers(0, 2**32 - 1))
    def test_thinned_curve_keeps_extremes_and_means_lie_between_them(self, count: int, seed: int) -> None:
        values = np.random.default_rng(seed).standard_normal(count)
        curve = build_curve(series(*values))
        assert curve.low_M is not None and curve.high_M is not None and len(curve.values_M) == STRETCHES
        assert (curve.low_M.min(), curve.high_M.max()) == (values.min(), values.max())
        assert (curve.low_M <= curve.values_M + 1e-12).all() and (curve.values_M <= curve.high_M + 1e-12).all()
        assert curve.updates_M[-1] == count - 1 and (np.diff(curve.updates_M) > 0).all()

    def test_gap_is_kept_in_a_thinned_curve(self) -> None:
        values = np.ones(2_000)
        values[1_000] = math.nan
        curve = build_curve(series(*values))
        assert np.isnan(curve.values_M).sum() == 1 and len(curve.values_M) == STRETCHES + 1

    @given(st.integers(1, 2_000))
    def test_thinned_keeps_both_ends(self, count: int) -> None:
        kept = thinned(series(*range(count)))
        assert len(kept.values_N) <= MOST_POINTS and (kept.values_N[0], kept.values_N[-1]) == (0, count - 1)


class TestDrawing:
    """Positions of values in a chart."""

    def test_points_are_drawn_at_their_values(self, tmp_path: Path) -> None:
        run = read_training(make_training(tmp_path, [(n, update(n, learner__approx_kl=float(n))) for n in range(3)]))
        chart = draw("kl", KL, run)
        assert chart is not None
        (line,) = chart.lines
        left, _, right, bottom = chart.box[:4]
        assert [x for x, _ in line.dots] == [left, (left + right) / 2, right]
        heights = [y for _, y in line.dots]
        assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11) and heights[0] == bottom
        assert line.d.startswith("M") and line.d.count("L") == 2 and line.latest == "2"
        assert chart.aloud == "KL. kl: from 0 to 2, at least 0, at most 2"

    def test_gap_splits_the_line(self, tmp_path: Path) -> None:
        values = [1.0, None, 2.0, 3.0]
        run = read_training(
            make_training(tmp_path, [(n, update(n, learner__approx_kl=v)) for n, v in enumerate(values)])
        )
        chart = draw("kl", KL, run)
        assert chart is not None and chart.lines[0].d.count("M") == 2
        assert chart.data["lines"][0]["v"] == values

    def test_held_out_score_has_a_confidence_band(self, tmp_path: Path) -> None:
        held_out = {"held_out__min": 0.0, "held_out__max": 1.0, "held_out__standard_error": 0.1}
        lines = [(n, update(n, held_out__score=score, **held_out)) for n, score in enumerate([0.5, 0.9])]
        chart = draw("score", SCORE, read_training(make_training(tmp_path, lines)))
        assert chart is not None
        assert chart.data["band"] == [[0, pytest.approx(0.304), pytest.approx(0.696)], [1, pytest.approx(0.704), 1.0]]
        assert chart.band.endswith("Z") and [tick.text for tick in chart.y_ticks] == ["0", "0.25", "0.5", "0.75", "1"]

    def test_logarithmic_chart_spaces_values_by_magnitude(self, tmp_path: Path) -> None:
        values = [0.01, 1.0, 100.0]
        picture = KL._replace(is_log=True)
        run = read_training(
            make_training(tmp_path, [(n, update(n, learner__approx_kl=v)) for n, v in enumerate(values)])
        )
        chart = draw("kl", picture, run)
        assert chart is not None
        heights = [y for _, y in chart.lines[0].dots]
        assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)

    def test_all_zero_chart_is_hidden_with_hides_zeros(self, tmp_path: Path) -> None:
        run = read_training(make_training(tmp_path, [(1, update(1, score__unscored=0.0))]))
        picture = ChartSpec(
            "Unscored", (ChartLine("score/unscored", "batch"),), "told", has_zero=False, hides_zeros=True
        )
        assert draw("u", picture, run) is None and draw("u", picture._replace(hides_zeros=False), run) is not None

    @given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
    def test_y_ticks_are_few_and_within_the_scale(self, low: float, span: float) -> None:
        scale = Axes(box=SMALL, low=low, high=low + span, is_log=False, first=0, last=10)
        found = y_ticks(scale)
        assert 1 <= len(found) <= 6 and all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)

    def test_update_axis_has_whole_number_ticks(self) -> None:
        assert whole_ticks(0, 3, 6) == [0, 1, 2, 3] and whole_ticks(5, 5, 6) == [5]
        assert whole_ticks(0, 10_000, 6) == [0, 2_000, 4_000, 6_000, 8_000, 10_000]

    @pytest.mark.parametrize(
        ("value", "told"),
        [(0.0, "0"), (12.0, "12"), (0.00035, "0.00035"), (1234.5, "1,234.5"), (123456.7, "123,457"), (-0.5, "-0.5")],
    )
    def test_numbers_are_shown_in_short_form(self, value: float, told: str) -> None:
        assert short(value) == told


def test_every_drawn_metric_is_documented() -> None:
    docs = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    drawn = [line.name for part in PARTS for picture in part.pictures for line in picture.lines]
    for name in [*drawn, *(line.name for line in SCORE.lines)]:
        assert f"`{name}`" in docs
