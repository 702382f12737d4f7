"""Histograms, tables and number formats of the report page."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.display_text import escape_text
from reward_kit.report.rendering import dollars, seconds
from reward_kit.report.run_figures import (
    broken,
    draw_histogram,
    histograms,
    policy_usage,
    samples_table,
    scoring_figures,
    slowest,
    worst,
)
from reward_kit.report.timeline import build_timeline, ticks
from tests.report.run_factory import episode, facts, score

USAGE = "calls=1 cached=0 prompt_tokens=9 completion_tokens=9 cost_usd={}"


def judged(name: str, usage: str, **changes: object) -> dict:
    result = {"score": 1.0, "reason": "", "metrics": {"judge_usage": {"reason": usage}}}
    return score(name, 1.0, (1.0, 2.0), result=result, **changes)


@pytest.mark.parametrize("values", [[0.0, 1.0, 1.0, 0.5], [-2.0, 3.0, 3.0], [7.0, 7.0], [-1e308, 1e308], [1e308]])
def test_a_histogram_holds_every_score_once(tmp_path: Path, values: list[float]) -> None:
    episodes = [episode(f"r{n}") for n in range(len(values) + 1)]
    (found,) = histograms(facts(tmp_path, episodes, [score(f"r{n}", v) for n, v in enumerate(values)]).episodes)
    assert sum(found.counts) == found.scored == len(values) and found.unscored == 1
    assert found.low <= min(values) and max(values) <= found.high
    assert len(draw_histogram(found).rects) == sum(count > 0 for count in found.counts)


def test_histogram_of_scores_within_0_and_1_spans_0_to_1(tmp_path: Path) -> None:
    (found,) = histograms(facts(tmp_path, [episode("r"), episode("s")], [score("r", 0.5), score("s", 1.0)]).episodes)
    assert (found.low, found.high) == (0.0, 1.0)
    assert (found.counts[10], found.counts[-1]) == (1, 1), "1 is in the last bin"


def test_worst_episodes_are_scored_and_failed_episodes_are_listed_separately(tmp_path: Path) -> None:
    episodes = [episode(f"r{n:02d}", took_s=float(n)) for n in range(15)]
    scores = [score(f"r{n:02d}", None if n == 3 else 1.0 - n / 20) for n in range(14)]
    found = facts(tmp_path, episodes, scores).episodes
    assert [one.row.rollout_id for one in worst(found)] == [f"r{n:02d}" for n in range(13, 3, -1)]
    assert [one.row.rollout_id for one in broken(found)] == ["r03"]
    assert [one.row.rollout_id for one in slowest(found)] == [f"r{n:02d}" for n in range(14, 4, -1)]


def test_policy_costs_report_episodes_without_a_price(tmp_path: Path) -> None:
    episodes = [
        episode("r", took_s=2.0, usage={"prompt_tokens": 10, "completion_tokens": 1, "cost": 0.5}),
        episode("s", took_s=4.0, usage={"prompt_tokens": 20, "completion_tokens": 2}),
        episode("t", took_s=6.0),
    ]
    spent = policy_usage("p", facts(tmp_path, episodes, []).episodes)
    assert (spent.tokens, spent.cost, spent.unpriced) == ({"prompt": 30, "completion": 3}, 0.5, 1)
    assert spent.lengths is not None and (spent.lengths.p50, spent.lengths.most) == (4.0, 6.0)
    assert (spent.episode_s, spent.policy_s) == (12.0, None), "an unknown value is not zero"


def test_scoring_figures_report_calls_and_durations(tmp_path: Path) -> None:
    episodes = [episode(name, sample=name) for name in "rstu"]
    scores = [
        score("r", 1.0, (1.0, 2.0), (4.0, 7.0), asked_s=0.5),
        score("s", 1.0, (1.0, 3.0), asked_s=0.5),
        score("t", 1.0, timing={"duration_s": 0.0, "submitted_s": 0.5, "attempts": [], "done_s": 0.5}),
        score("u", 1.0),
    ]
    run = facts(tmp_path, episodes, scores)
    found = scoring_figures(run, build_timeline(run))
    assert (found.calls, found.retries, found.known, found.untimed) == (3, 1, 1, 1)
    assert found.groups == (3, 4)
    waits, calls, whole, groups = found.times
    assert (waits.n, waits.p50) == (2, 0.5) and (calls.n, calls.p50, calls.most) == (3, 2.0, 3.0)
    assert (whole.n, whole.most) == (3, 6.5) and (groups.n, groups.most) == (3, 7.0)


def test_scoring_figures_without_times_report_score_durations_only(tmp_path: Path) -> None:
    run = facts(tmp_path, [episode("r")], [score("r", 1.0)])
    found = scoring_figures(run, build_timeline(run))
    assert found.calls is None and [(times.title, times.p50) for times in found.times] == [("one score", 0.5)]


def test_judge_cost_of_a_group_is_counted_once(tmp_path: Path) -> None:
    group = [judged(name, USAGE.format("0.25"), scored_group="g") for name in "rs"]
    alone = [judged("t", USAGE.format("0.25")), judged("u", USAGE.format("unknown"))]
    run = facts(tmp_path, [episode(name) for name in "rstu"], group + alone)
    found = scoring_figures(run, build_timeline(run))
    assert (found.cost, found.unpriced) == (0.5, 1)


def test_samples_table_aggregates_episodes_by_sample_and_policy(tmp_path: Path) -> None:
    episodes = [episode("r"), episode("s"), episode("t", sample="y"), episode("u", policy="q")]
    scores = [score("r", 1.0), score("s", 0.5), score("t", None)]
    table = samples_table(facts(tmp_path, episodes, scores).episodes, 1.0)
    keys = [column.key for column in table.columns]
    one, other, third = (dict(zip(keys, row, strict=True)) for row in table.rows)
    assert [one[key] for key in ("sample", "policy", "episodes", "scored", "passed")] == ["x", "p", 2, 2, 1]
    assert (one["mean"], one["least"], one["most"]) == (0.75, 0.5, 1.0)
    assert (other["policy"], other["scored"], other["mean"]) == ("q", 0, None)
    assert (third["errors"], third["mean"]) == (1, None)


@given(st.text(st.characters(), max_size=300), st.integers(1, 100))
def test_escaped_text_is_short_and_has_no_invisible_characters(text: str, limit: int) -> None:
    found = escape_text(text, limit)
    assert len(found) <= 6 * limit + 40
    assert not any(
        (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in found
    )
    found.encode("utf-8")


def test_ordinary_text_is_not_escaped() -> None:
    assert escape_text("naïve – שלום\n\t{}<>&", 100) == "naïve – שלום\n\t{}<>&"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (1e-5, "<1 ms"),
        (0.0421, "42 ms"),
        (0.9996, "1 s"),
        (61.4, "61.4 s"),
        (119.7, "2 min"),
        (125.0, "2 min 5 s"),
        (7260.0, "2 h 1 min"),
        (3600.0, "1 h"),
    ],
)
def test_durations_are_shown_in_a_suitable_unit(value: float | None, said: str) -> None:
    assert seconds(value) == said


def test_dollars_are_rounded_to_significant_digits() -> None:
    assert [dollars(value) for value in (None, 0.0, 0.0000214, 0.00123, 1234.5)] == [
        "unknown",
        "$0.0000",
        "$0.000021",
        "$0.0012",
        "$1,234.50",
    ]


@given(st.floats(1e-4, 1e9))
def test_ticks_are_few_and_within_the_axis(length_s: float) -> None:
    found = ticks(length_s)
    assert 2 <= len(found) <= 10 and found[0] == 0.0 and found[-1] <= length_s
