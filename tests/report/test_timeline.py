"""The timeline of a run: spans, lanes, gaps and curves."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.report.timeline import (
    MOST_BARS,
    Bar,
    RewardCall,
    Span,
    _assign_lanes,
    build_timeline,
    covered_seconds,
    groups_complete,
    intersect_spans,
    merge_spans,
    most_at_once,
    occupancy,
)
from tests.report.run_factory import episode, facts, score

_EIGHTHS = st.integers(0, 160).map(lambda eighths: eighths / 8)
SPANS = st.lists(st.tuples(_EIGHTHS, _EIGHTHS).map(lambda pair: Span(min(pair), max(pair))), max_size=12)


def covers(spans: list[Span], moment: float) -> int:
    return sum(span.begin_s <= moment < span.end_s for span in spans)


MOMENTS = [place / 8 + 1 / 16 for place in range(160)]


@given(SPANS)
def test_merged_spans_cover_the_same_moments_without_overlap(spans: list[Span]) -> None:
    found = merge_spans(spans)
    assert [covers(found, moment) for moment in MOMENTS] == [int(covers(spans, moment) > 0) for moment in MOMENTS]
    assert all(one.end_s < other.begin_s for one, other in pairwise(found))


@given(SPANS, SPANS)
def test_intersected_spans_cover_moments_that_both_cover(one: list[Span], other: list[Span]) -> None:
    found = intersect_spans(merge_spans(one), merge_spans(other))
    both = [int(covers(one, moment) > 0 and covers(other, moment) > 0) for moment in MOMENTS]
    assert [covers(found, moment) for moment in MOMENTS] == both
    assert covered_seconds(found) == pytest.approx(sum(both) / 8)


@given(SPANS)
def test_peak_and_occupancy_agree_with_counting(spans: list[Span]) -> None:
    counts = [covers(spans, moment) for moment in MOMENTS]
    long = [span for span in spans if span.end_s > span.begin_s]
    assert most_at_once(long) == max(counts)
    np.testing.assert_allclose(occupancy(spans, np.arange(161) / 8), counts, atol=1e-9)


@given(SPANS)
def test_lanes_are_minimal_and_bars_in_a_lane_do_not_overlap(spans: list[Span]) -> None:
    long = [span for span in spans if span.end_s > span.begin_s]
    lanes, bars = _assign_lanes([(span, [Bar(0, "call", *span, "r")]) for span in long])
    assert lanes == most_at_once(long) and sorted(bar[2:4] for bar in bars) == sorted(map(tuple, long))
    for lane in range(lanes):
        assert most_at_once([Span(*bar[2:4]) for bar in bars if bar.lane == lane]) == 1


def test_reward_call_waits_before_and_between_attempts() -> None:
    call = RewardCall(["r"], 1.0, 9.0, [Span(2.0, 3.0), Span(5.0, 9.0)], is_unscored=False)
    assert call.waits == [Span(1.0, 2.0), Span(3.0, 5.0)]


def test_reward_call_without_attempts_only_waits() -> None:
    assert RewardCall(["r"], 1.0, 4.0, [], is_unscored=False).waits == [Span(1.0, 4.0)]


def test_bars_show_kind_times_and_episode(tmp_path: Path) -> None:
    broke = {"class": "crash", "where": "ToolError", "message": "no"}
    episodes = [episode("r", 0.0, 2.0), episode("s", 0.5, 1.0), episode("t", 1.0, 1.0, failure=broke)]
    scores = [score("r", 1.0, (2.5, 3.0), (4.0, 5.0), asked_s=2.0), score("s", None, (1.5, 2.0), asked_s=1.5)]
    drawn = build_timeline(facts(tmp_path, episodes, scores))
    assert drawn is not None and drawn.length_s == 5.0
    collecting, scoring = drawn.bands
    assert [(bar.episode, bar.kind, bar.begin_s, bar.end_s) for bar in collecting.bars] == [
        ("r", "episode", 0.0, 2.0),
        ("s", "episode", 0.5, 1.5),
        ("t", "broken", 1.0, 2.0),
    ]
    assert sorted((bar.episode, bar.kind, bar.begin_s, bar.end_s) for bar in scoring.bars) == [
        ("r", "call", 4.0, 5.0),
        ("r", "retried", 2.5, 3.0),
        ("r", "waiting", 2.0, 2.5),
        ("r", "waiting", 3.0, 4.0),
        ("s", "unscored", 1.5, 2.0),
    ]
    assert {strip.title: strip.peak for strip in drawn.strips} == {
        "Episodes in progress": 3,
        "Scores waiting": 1,
        "Calls in flight": 1,
    }
    assert drawn.overlap_s == 0.5 and drawn.alone_s == 3.0


def test_group_scores_share_a_single_call(tmp_path: Path) -> None:
    episodes = [episode(name) for name in "rst"]
    scores = [score(name, 1.0, (2.0, 3.0), asked_s=1.0, scored_group="g") for name in "rst"]
    drawn = build_timeline(facts(tmp_path, episodes, scores))
    assert drawn is not None
    assert [call.episodes for call in drawn.calls] == [["r", "s", "t"]]
    assert {strip.title: strip.peak for strip in drawn.strips}["Calls in flight"] == 1


def test_long_idle_period_is_left_out_and_marked(tmp_path: Path) -> None:
    episodes = [episode("r", 0.0, 10.0), episode("s", 40_000.0, 10.0)]
    drawn = build_timeline(facts(tmp_path, episodes, [score("s", 1.0, (40_011.0, 40_012.0), asked_s=40_010.0)]))
    assert drawn is not None
    assert drawn.length_s == pytest.approx(22.0)
    assert [(gap.at_s, gap.seconds) for gap in drawn.gaps] == [(10.0, 39_990.0)]
    assert [(bar.begin_s, bar.end_s) for bar in drawn.bands[0].bars] == [(0.0, 10.0), (10.0, 20.0)]


def test_short_idle_period_is_kept(tmp_path: Path) -> None:
    drawn = build_timeline(facts(tmp_path, [episode("r", 0.0, 1.0), episode("s", 21.0, 1.0)], []))
    assert drawn is not None and drawn.gaps == [] and drawn.length_s == 22.0


@pytest.mark.parametrize(("size", "is_drawn"), [(MOST_BARS, True), (MOST_BARS + 1, False)])
def test_timeline_with_too_many_bars_shows_totals_only(tmp_path: Path, size: int, is_drawn: bool) -> None:
    drawn = build_timeline(facts(tmp_path, [episode(f"r{n}", float(n), 1.0) for n in range(size)], []))
    assert drawn is not None and bool(drawn.bands) == is_drawn
    assert drawn.strips[0].peak == 1 and drawn.strips[0].mean_N.mean() == pytest.approx(1.0)


def test_waiting_requests_are_left_out_if_they_need_too_many_lanes(tmp_path: Path) -> None:
    episodes = [episode(f"r{n}", 0.0 if n < 2 else n * 1.0, 1.0) for n in range(100)]
    scores = [score(f"r{n}", 1.0, (200.0 + n, 201.0 + n), asked_s=100.0) for n in range(100)]
    drawn = build_timeline(facts(tmp_path, episodes, scores))
    assert drawn is not None
    assert [(band.title, band.lanes) for band in drawn.bands] == [
        ("Collecting", 2),
        ("Scoring, without waiting requests", 1),
    ]


def test_scored_transcripts_have_no_collecting_band(tmp_path: Path) -> None:
    run = facts(tmp_path, [episode("r", -500.0, 5.0)], [score("r", 1.0, (1.0, 2.0))], data="transcripts.jsonl")
    drawn = build_timeline(run)
    assert drawn is not None and [band.title for band in drawn.bands] == ["Scoring"]
    assert drawn.alone_s is None


def test_group_is_complete_with_its_last_score_and_never_with_a_missing_score(tmp_path: Path) -> None:
    broke = {"class": "crash", "where": "ToolError", "message": "no"}
    episodes = [
        *(episode("a", sample="1"), episode("b", sample="1", failure=broke, begin_s=6.0)),
        *(episode("c", sample="2"), episode("d", sample="2"), episode("e", sample="3")),
    ]
    scores = [score("a", 1.0, (1.0, 4.0)), score("c", 1.0, (1.0, 2.0)), score("e", None, (3.0, 5.0))]
    moments, groups = groups_complete(facts(tmp_path, episodes, scores).episodes)
    assert (sorted(moments), groups) == ([5.0, 7.0], 3)


def test_curves_show_completed_share_over_time(tmp_path: Path) -> None:
    episodes = [episode(f"r{n}", 0.0, float(n + 1)) for n in range(4)]
    drawn = build_timeline(facts(tmp_path, episodes, [score("r0", 1.0, (1.0, 2.0))]))
    assert drawn is not None
    stopped, scored = drawn.curves
    assert list(stopped.steps) == [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]
    assert (scored.done, scored.total, list(scored.steps)) == (1, 4, [(2.0, 0.25)])
