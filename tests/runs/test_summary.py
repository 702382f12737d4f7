"""Test the summary of a run against tables computed by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.runs.summary import (
    EpisodeRow,
    PolicySummary,
    summarize,
    summary_from_json,
    summary_to_json,
)


def row(sample: str, index: int, score: float | None = None, **facts: Any) -> EpisodeRow:
    values: dict[str, Any] = {
        "policy": "p",
        "stop_reason": "answered",
        "num_steps": 2,
        "environment_return": None,
        "error_class": None,
        "error_message": None,
        "error_traceback": None,
        "usage": {},
    }
    return EpisodeRow(f"{sample}-{index}", sample, score=score, **{**values, **facts})


def broken(sample: str, index: int, kind: str = "crash", message: str = "it broke", **facts: Any) -> EpisodeRow:
    stop = {"stop_reason": "error", "num_steps": 0}
    return row(sample, index, error_class=kind, error_message=message, **{**stop, **facts})


def unscored(sample: str, index: int, kind: str = "timeout") -> EpisodeRow:
    return row(sample, index, score_error=kind, error_message="no score")


def summary_of(*rows: EpisodeRow, threshold: float = 1.0) -> PolicySummary:
    (summary,) = summarize(rows, threshold)
    return summary


TABLE = [
    row("a", 0, 1.0, environment_return=2.0),
    row("a", 1, 1.0, environment_return=4.0, stop_reason="max_steps", num_steps=9),
    row("a", 2, 0.0),
    row("b", 0, 0.5, stop_reason="token_limit"),
    row("b", 1, 1.0),
    broken("b", 2, "provider_error", "429", environment_return=100.0),
    row("c", 0, 0.0),
    unscored("c", 1),
    broken("c", 2),
]


def test_summary_matches_values_by_hand() -> None:
    found = summary_of(*TABLE)
    assert (found.episodes, found.scored) == (9, 6)
    assert found.score is not None and found.score.mean == pytest.approx(3.5 / 6)
    assert (found.score.n, found.score.n_clusters) == (6, 3)
    # Only sample a has all three attempts: 2 of 3 pass, so at least one does, and not all of them do.
    assert found.pass_at_1 == pytest.approx(2 / 3)
    assert (found.k, found.pass_at_k, found.pass_hat_k, found.pass_excluded) == (3, 1.0, 0.0, 2)
    assert found.errors == {"crash": 1, "provider_error": 1, "timeout": 1}
    assert found.failures == 3
    assert found.limits == 2
    assert found.stop_reasons == {"answered": 5, "error": 2, "max_steps": 1, "token_limit": 1}
    assert found.mean_steps == pytest.approx((6 * 2 + 9) / 9)
    assert found.mean_return == pytest.approx(3.0), "a broken episode's return is not one"
    assert found.first_error == "429"


def test_errors_failures_and_limits_are_counted_separately() -> None:
    found = summary_of(row("a", 0, 1.0, stop_reason="wall_time_limit"), row("b", 0, 0.0), broken("c", 0))
    assert (found.errors, found.failures, found.limits) == ({"crash": 1}, 1, 1)
    assert found.episodes == 3 and found.scored == 2


def test_unscored_is_not_zero() -> None:
    found = summary_of(row("a", 0, 0.8), row("b", 0, 0.6), unscored("c", 0), broken("d", 0))
    assert found.score is not None and found.score.mean == pytest.approx(0.7)
    assert found.pass_at_1 == 0.0 and found.failures == 2
    nothing = summary_of(unscored("a", 0), broken("b", 0))
    assert (nothing.score, nothing.pass_at_1, nothing.pass_at_k, nothing.pass_hat_k) == (None, None, None, None)
    assert (nothing.scored, nothing.k, nothing.failures) == (0, 0, 0)


@pytest.mark.parametrize(("threshold", "passes"), [(0.5, 2), (0.51, 1), (1.0, 1), (1.01, 0), (0.0, 3)])
def test_score_equal_to_the_threshold_passes(threshold: float, passes: int) -> None:
    found = summary_of(row("a", 0, 0.0), row("b", 0, 0.5), row("c", 0, 1.0), threshold=threshold)
    assert found.pass_at_1 == pytest.approx(passes / 3)
    assert found.failures == 3 - passes


class TestK:
    def test_k_is_the_attempt_count_of_complete_samples(self) -> None:
        attempts = [row("a", index, 1.0) for index in range(4)] + [row("b", index, 0.0) for index in range(3)]
        found = summary_of(*attempts, broken("b", 3))
        assert (found.k, found.pass_at_k, found.pass_hat_k) == (4, 1.0, 1.0)

    def test_failed_attempt_of_the_only_sample_reduces_k(self) -> None:
        found = summary_of(*(row("a", index, float(index > 0)) for index in range(3)), broken("a", 3))
        assert (found.k, found.pass_at_k, found.pass_hat_k) == (3, 1.0, 0.0)

    def test_single_attempt_has_only_pass_at_1(self) -> None:
        found = summary_of(row("a", 0, 1.0), row("b", 0, 0.0))
        assert (found.k, found.pass_at_1, found.pass_at_k, found.pass_hat_k) == (1, 0.5, None, None)


class TestTokensAndCost:
    def test_tokens_and_cost_include_failed_episodes(self) -> None:
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.25, "cached_tokens": 9, "reasoning_tokens": 0}
        found = summary_of(row("a", 0, 1.0, usage=usage), broken("b", 0, usage=usage), row("c", 0, 1.0))
        assert (found.tokens, found.cost) == (30, 0.5)
        assert found.token_details == {"cached_tokens": 18}

    def test_unknown_cost_is_not_free(self) -> None:
        usage = {"prompt_tokens": 10, "completion_tokens": 5}
        assert summary_of(row("a", 0, 1.0, usage=usage)).cost is None
        assert summary_of(row("a", 0, 1.0)).cost is None
        free = summary_of(row("a", 0, 1.0, usage={**usage, "cost": 0.0})).cost
        assert free == 0.0 and isinstance(free, float)


def test_each_policy_has_its_own_summary_in_any_order() -> None:
    rows = [row("a", 0, 1.0, policy="z"), row("a", 1, 0.0, policy="a"), row("b", 0, 0.0, policy="z")]
    found = summarize(rows, 1.0)
    assert [(summary.policy, summary.episodes, summary.failures) for summary in found] == [("a", 1, 1), ("z", 2, 1)]
    assert summarize(reversed(rows), 1.0) == found
    assert summarize([], 1.0) == []


def test_first_error_is_of_the_first_rollout_and_has_a_traceback() -> None:
    rows = [broken("b", 0, message="second"), broken("a", 0, message="first", error_traceback="tb"), row("a", 1, 1.0)]
    found = summary_of(*rows)
    assert (found.first_error, found.first_traceback) == ("first", "tb")
    assert summary_of(row("a", 0, 0.0)).first_error is None, "a failure is no error"


RECORD = {
    "rollout_id": "a-0",
    "sample_id": "a",
    "policy": "p",
    "stop_reason": "answered",
    "num_steps": 2,
    "environment_return": 1.5,
    "failure": None,
    "usage": None,
    "steps": [{}, {"info": {"tools": [{"name": "x", "error": "bad"}, {"name": "y"}]}}],
    "final": {"info": {"tools": [{"name": "x", "error": "unknown tool"}]}},
}


class TestRows:
    def test_row_is_read_from_an_episode_record(self) -> None:
        found = EpisodeRow.from_record(RECORD)
        assert (found.rollout_id, found.sample_id, found.policy) == ("a-0", "a", "p")
        assert (found.stop_reason, found.num_steps, found.environment_return) == ("answered", 2, 1.5)
        assert (found.tool_errors, dict(found.usage), found.is_error) == (2, {}, False)

    def test_row_of_an_episode_that_never_started(self) -> None:
        failure = {"class": "refused", "message": "no world", "traceback": "tb", "where": "ConfigError"}
        record = {key: value for key, value in RECORD.items() if key != "final"}
        found = EpisodeRow.from_record({**record, "steps": [], "failure": failure})
        assert (found.error_class, found.error_message, found.error_traceback) == ("refused", "no world", "tb")
        assert found.is_error and found.tool_errors == 0

    def test_score_is_added_to_a_row(self) -> None:
        found = EpisodeRow.from_record(RECORD)
        found.add_score({"score": 0.5, "failure": None})
        assert (found.score, found.is_error) == (0.5, False)

    def test_failed_score_is_an_error_but_keeps_the_error_of_the_episode(self) -> None:
        found = EpisodeRow.from_record(RECORD)
        found.add_score({"score": None, "failure": {"class": "timeout", "message": "slow", "traceback": ""}})
        assert (found.score, found.score_error, found.error_message, found.is_error) == (None, "timeout", "slow", True)
        broke = broken("a", 0, message="the episode's own")
        broke.add_score({"score": None, "failure": {"class": "timeout", "message": "the score's"}})
        assert broke.error_message == "the episode's own"
        assert summary_of(broke).errors == {"crash": 1}


def test_tool_errors_are_counted_over_all_episodes() -> None:
    found = summary_of(row("a", 0, 1.0, tool_errors=2), row("b", 0, 1.0, tool_errors=3))
    assert (found.tool_errors, found.errors) == (5, {})


figures = st.builds(
    lambda sample, score, kind: (sample, score if kind == "scored" else None, kind),
    st.sampled_from("abcd"),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from(["scored", "broken", "unscored"]),
)


@given(st.lists(figures, min_size=1, max_size=30))
def test_every_episode_is_counted_once_and_summary_json_round_trips(drawn: list[tuple[str, Any, str]]) -> None:
    makers = {"broken": broken, "unscored": unscored}
    rows = [
        row(sample, index, score) if kind == "scored" else makers[kind](sample, index)
        for index, (sample, score, kind) in enumerate(drawn)
    ]
    found = summarize(rows, 1.0)
    (only,) = found
    assert only.scored + sum(only.errors.values()) == only.episodes == len(rows)
    assert sum(only.stop_reasons.values()) == len(rows)
    assert only.failures <= only.scored
    if only.pass_hat_k is not None and only.pass_at_k is not None:
        assert 0.0 <= only.pass_hat_k <= only.pass_at_k <= 1.0
    assert summary_from_json(json.loads(json.dumps(summary_to_json(found), allow_nan=False))) == found


def test_a_missing_metric_is_not_zero_and_unscored_episodes_have_none() -> None:
    def measured(row: EpisodeRow, score: float | None, **metrics: Any) -> EpisodeRow:
        named = {name: {"score": value, "reason": ""} for name, value in metrics.items()}
        row.add_score({"rollout_id": row.rollout_id, "score": score, "result": {"metrics": named}})
        return row

    found = summary_of(
        measured(row("a", 0), 1.0, state=1.0, judge_usage=0.0),
        measured(row("a", 1), 1.0, state=True),
        measured(row("b", 0), 1.0, other="high", state=float("inf")),
        measured(row("b", 1), None, state=0.0),
        measured(row("c", 0), 1.0, state=0.5),
    )
    state = found.metrics["state"]
    assert list(found.metrics) == ["state", "other"] and found.metrics["other"] is None
    assert state is not None and (state.mean, state.n, state.n_clusters, state.n_unscored) == (0.75, 2, 2, 3)
    assert summary_from_json(json.loads(json.dumps(summary_to_json([found]), allow_nan=False))) == [found]


def test_summary_of_an_earlier_release_has_no_metrics() -> None:
    document = summary_to_json([summary_of(row("a", 0, 1.0))])
    del document["policies"][0]["metrics"]
    assert summary_from_json(document)[0].metrics == {}


def judged(row: EpisodeRow, group: str | None, cost: str) -> EpisodeRow:
    metric = {"judge_usage": {"score": 0.0, "reason": f"calls=1 cost_usd={cost}"}}
    result = {"score": 1.0, "metrics": metric}
    row.add_score({"rollout_id": row.rollout_id, "score": 1.0, "result": result, "scored_group": group})
    return row


def test_the_cost_of_a_judge_counts_once_for_episodes_judged_together() -> None:
    alone = [judged(row("a", index, 1.0), None, "0.250000") for index in range(2)]
    together = [judged(row("b", index, 1.0), "group", "0.100000") for index in range(2)]
    assert summary_of(*alone, *together).judge_cost == pytest.approx(0.6)
    unpriced = judged(row("a", 0, 1.0, usage={"cost": 0.1}), None, "unknown")
    assert summary_of(unpriced, row("b", 0, 1.0)).judge_cost is None


def test_the_total_cost_includes_the_judge_and_is_unknown_if_a_part_is() -> None:
    paid = row("a", 0, 1.0, usage={"cost": 0.1})
    assert summary_of(paid).total_cost == pytest.approx(0.1)
    assert summary_of(judged(paid, None, "0.250000")).total_cost == pytest.approx(0.35)
    assert summary_of(judged(row("b", 0, 1.0, usage={"cost": 0.1}), None, "unknown")).total_cost is None
    assert summary_of(judged(row("c", 0, 1.0), None, "0.250000")).total_cost is None


def test_tags_have_figures_of_their_own_and_unscored_is_not_zero() -> None:
    rows = [
        row("a", 0, 1.0, tags=("easy", "sql")),
        row("b", 0, 0.0, tags=("easy",)),
        broken("b", 1, tags=("easy",)),
        unscored("c", 0),
        row("d", 0, score_error="timeout", tags=("hard",)),
    ]
    found = summarize(rows, 1.0)
    tags = found[0].tags
    assert list(tags) == ["easy", "hard", "sql"]
    easy = tags["easy"]
    assert (easy.samples, easy.episodes, easy.scored, easy.passed) == (2, 3, 2, 1)
    assert easy.score is not None and easy.score.mean == 0.5
    assert tags["hard"].score is None and tags["sql"].passed == 1
    assert summary_from_json(json.loads(json.dumps(summary_to_json(found), allow_nan=False))) == found
    record = {"rollout_id": "r", "sample_id": "a", "policy": "p", "stop_reason": "x", "num_steps": 0, "steps": []}
    record |= {"environment_return": None, "sample": {"tags": "easy, sql,,easy"}}
    assert EpisodeRow.from_record(record).tags == ("easy", "sql")
