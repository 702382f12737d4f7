"""`pairwise_judge` compares two answers in both orders."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError, ProviderError, RewardError
from reward_kit.models import Message
from reward_kit.rewards import pairwise_judge
from tests.chat_server import answer, status
from tests.rewards.judges import data_block, fair, judged, talk

OURS, OTHER = "Paris, on the Seine.", "Lyon."


def decides(as_first, as_second=None):
    """Return a judge whose verdict depends on whether the rollout's answer comes first or second."""

    def decide(data, _):
        return {"winner": as_first if data["first"] == OURS else as_second or as_first}

    return fair(decide)


def prefers(text):
    """Return a judge that prefers one answer in either position."""

    def decide(data, _):
        found = [place for place in ("first", "second") if text in data[place]]
        return {"winner": found[0] if len(found) == 1 else "tie"}

    return fair(decide)


CASES = {
    "better in both places": (decides("first", "second"), 1.0, 1.0),
    "worse in both places": (decides("second", "first"), 0.0, 1.0),
    "equal in both places": (decides("tie"), 0.5, 1.0),
    "the first answer wins": (decides("first"), 0.5, 0.0),
    "the second answer wins": (decides("second"), 0.5, 0.0),
    "better, then equal": (decides("first", "tie"), 0.5, 0.0),
    "equal, then better": (decides("tie", "second"), 0.5, 0.0),
    "worse, then equal": (decides("second", "tie"), 0.5, 0.0),
    "equal, then worse": (decides("tie", "first"), 0.5, 0.0),
    "by its content, better": (prefers("Paris"), 1.0, 1.0),
    "by its content, worse": (prefers("Lyon"), 0.0, 1.0),
    "by its content, equal": (prefers("."), 0.5, 1.0),
}


@pytest.mark.parametrize(("script", "score", "consistent"), CASES.values(), ids=CASES)
async def test_only_consistent_verdicts_in_both_orders_count(script, score, consistent):
    result, server = await judged(pairwise_judge, script, talk(OURS), ground_truth=OTHER)
    assert (result.score, result.metrics["consistent"].score) == (score, consistent)
    shown = sorted((data["first"], data["second"]) for _, data, _ in map(data_block, server.bodies))
    assert shown == [(OTHER, OURS), (OURS, OTHER)]
    assert result.metrics["judge_usage"].reason.startswith("calls=2 cached=0 prompt_tokens=22")


@pytest.mark.parametrize(("as_first", "as_second"), [("first", "first"), ("second", "second"), ("first", "second")])
async def test_metrics_report_the_verdict_for_each_order(as_first, as_second):
    result, _ = await judged(pairwise_judge, decides(as_first, as_second), talk(OURS), ground_truth=OTHER)
    assert result.metrics["won_as_first"].score == float(as_first == "first")
    assert result.metrics["won_as_second"].score == float(as_second == "second")


OTHERS = {
    "ground truth": {"ground_truth": OTHER},
    "baseline": {"baseline": OTHER, "ground_truth": "not this one"},
    "field of the sample": {"baseline_key": "old", "sample": {"old": OTHER}, "ground_truth": "not this one"},
    "with blanks around": {"ground_truth": OTHER},
    "a number": {"ground_truth": 42},
    "a mapping": {"ground_truth": {"city": "Lyon"}},
    "empty": {"ground_truth": ""},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
async def test_baseline_is_read_from_the_configured_source(options):
    result, server = await judged(pairwise_judge, prefers("Seine"), talk(OURS), **options)
    assert result.score == 1.0
    assert not any("not this one" in str(body) for body in server.bodies)


UNASKED = {
    "empty": (talk(""), 0.0),
    "None": (talk(None), 0.0),
    "a thought alone": (talk("<think>Paris"), 0.0),
    "no assistant": ([Message(role="user", content="x")], 0.0),
    "nothing": ([], 0.0),
    "the same answer": (talk(OTHER), 0.5),
    "the same but for blanks": (talk(f"  {OTHER}\n"), 0.5),
    "the same behind a thought": (talk(f"<think>hm</think>{OTHER}"), 0.5),
}


@pytest.mark.parametrize(("messages", "score"), UNASKED.values(), ids=UNASKED)
async def test_some_pairs_need_no_judge(messages, score):
    result, server = await judged(pairwise_judge, [], messages, ground_truth=OTHER)
    assert (result.score, len(server.requests)) == (score, 0)


async def test_votes_are_counted_separately_for_each_order():
    by_seed = {0: "first", 1: "first", 2: "tie"}

    def script(body):
        return decides(by_seed[body["seed"]], "second")(body)

    result, server = await judged(pairwise_judge, script, talk(OURS), ground_truth=OTHER, votes=3)
    assert (result.score, len(server.requests)) == (1.0, 6)


async def test_evenly_split_votes_are_a_tie():
    script = lambda body: decides(["first", "second"][body["seed"]])(body)  # noqa: E731
    result, _ = await judged(pairwise_judge, script, talk(OURS), ground_truth=OTHER, votes=2)
    assert (result.score, result.metrics["consistent"].score) == (0.5, 1.0)


@pytest.mark.parametrize("winner", ["First", "answer", "both", "", "1", 1, None, ["first"]])
async def test_unknown_winner_is_an_unreadable_verdict(winner):
    with pytest.raises(ProviderError, match="no verdict that can be parsed"):
        await judged(pairwise_judge, fair(lambda data, _: {"winner": winner}), talk(OURS), ground_truth=OTHER)


@pytest.mark.parametrize("failure", [status(500), status(400), answer("First is better.")])
async def test_missing_verdict_for_an_order_leaves_the_rollout_unscored(failure):
    script = lambda body: failure if data_block(body)[1]["first"] == OURS else decides("first")(body)  # noqa: E731
    with pytest.raises(ProviderError):
        await judged(pairwise_judge, script, talk(OURS), ground_truth=OTHER)


async def test_criteria_are_included_in_the_prompt():
    _, server = await judged(
        pairwise_judge, decides("tie"), talk(OURS), ground_truth=OTHER, criteria="which {is} shorter"
    )
    assert "Decide by this: which {is} shorter." in server.bodies[0]["messages"][0]["content"]


async def test_missing_baseline_leaves_the_rollout_unscored():
    with pytest.raises(RewardError, match="ground_truth"):
        await judged(pairwise_judge, [], talk(OURS))
    with pytest.raises(RewardError, match="no answer in its field 'old'"):
        await judged(pairwise_judge, [], talk(OURS), baseline_key="old", sample={})
    with pytest.raises(ConfigError, match="set either baseline or baseline_key, not both"):
        await judged(pairwise_judge, [], talk(OURS), baseline="x", baseline_key="old")
    with pytest.raises(ConfigError, match="votes"):
        with_options(pairwise_judge, votes=0)


@settings(max_examples=20, deadline=None)
@given(
    st.text(st.characters(codec=None), max_size=30), st.text(max_size=30), st.sampled_from(["first", "second", "tie"])
)
def test_position_bias_of_the_judge_gives_a_tie(ours, other, place):
    result, server = asyncio.run(
        judged(pairwise_judge, fair(lambda data, _: {"winner": place}), talk(ours), ground_truth=other)
    )
    assert result.score == (0.5 if server.requests or ours.strip() else 0.0)
