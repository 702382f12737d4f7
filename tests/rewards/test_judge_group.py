"""Test `group_judge`, which compares answers in two orders and scores equal answers once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError, ProviderError
from reward_kit.models import Message
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.rewards import group_judge
from reward_kit.typed_interface import reward_spec
from tests.chat_server import ChatServer, answer, status
from tests.rewards.judges import data_block, fair, judged, talk


def worth(**grades):
    """Return a judge that grades by content: the grade of the first key that the answer begins with."""

    def decide(data, _):
        found = {}
        for name, text in data["answers"].items():
            found[name] = next(grade for start, grade in grades.items() if text.lower().startswith(start))
        return {"grades": found}

    return fair(decide)


def by_place(*values):
    """Return a judge that grades by position only."""
    return fair(lambda data, _: {"grades": dict(zip(data["answers"], values, strict=True))})


def group(*texts, prompt="Which city?"):
    return [talk(text, prompt) for text in texts]


SCORED = {
    "two": (["Paris", "Lyon"], {}, {"paris": 10, "lyon": 0}, [1.0, 0.0]),
    "both bad": (["Paris", "Lyon"], {}, {"paris": 3, "lyon": 0}, [0.3, 0.0]),
    "equal grades": (["Paris", "Lyon"], {}, {"paris": 5, "lyon": 5}, [0.5, 0.5]),
    "in the batch's order": (["Lyon", "Paris", "Metz"], {}, {"paris": 10, "lyon": 0, "metz": 4}, [0.0, 1.0, 0.4]),
    "equal answers are one": (["Paris", "Lyon", "Paris"], {}, {"paris": 8, "lyon": 2}, [0.8, 0.2, 0.8]),
    "equal but for blanks": (["Paris", " Paris\n"], {}, {"paris": 8}, [0.8, 0.8]),
    "equal behind thoughts": (["<think>a</think>Paris", "<think>b</think>Paris"], {}, {"paris": 8}, [0.8, 0.8]),
    "all equal": (["Paris"] * 4, {}, {"paris": 6}, [0.6] * 4),
    "one alone has a grade": (["Paris"], {}, {"paris": 7}, [0.7]),
    "empty gets 0": (["Paris", "", None], {}, {"paris": 7}, [0.7, 0.0, 0.0]),
    "another scale": (["Paris", "Lyon"], {"scale": (1, 5)}, {"paris": 5, "lyon": 2}, [1.0, 0.25]),
    "scale of a hundred": (["Paris", "Lyon"], {"scale": (0, 100)}, {"paris": 99, "lyon": 1}, [0.99, 0.01]),
    "eight": (
        [f"{name}x" for name in "abcdefgh"],
        {},
        {name: at for at, name in enumerate("abcdefgh")},
        [at / 10 for at in range(8)],
    ),
    "ranks of two": (["Lyon", "Paris"], {"method": "rank"}, {"paris": 1, "lyon": 2}, [0.0, 1.0]),
    "ranks of three": (["a", "b", "c"], {"method": "rank"}, {"a": 3, "b": 1, "c": 2}, [0.0, 1.0, 0.5]),
    "shared first rank": (["a", "b", "c"], {"method": "rank"}, {"a": 1, "b": 1, "c": 3}, [1.0, 1.0, 0.0]),
    "shared last rank": (["a", "b", "c"], {"method": "rank"}, {"a": 1, "b": 3, "c": 3}, [1.0, 0.0, 0.0]),
    "ranks with equal answers": (["a", "b", "a"], {"method": "rank"}, {"a": 1, "b": 2}, [1.0, 0.0, 1.0]),
    "ranks with an empty one": (["a", "", "b"], {"method": "rank"}, {"a": 1, "b": 2}, [1.0, 0.0, 0.0]),
    "surrogates": (["a\ud800", "b\x00"], {}, {"a": 10, "b": 0}, [1.0, 0.0]),
    "long": (["a" * 300_000, "b" * 300_000], {}, {"a": 10, "b": 0}, [1.0, 0.0]),
}


@pytest.mark.parametrize(("texts", "options", "grades", "scores"), SCORED.values(), ids=SCORED)
async def test_group_is_scored_by_grades_or_ranks(texts, options, grades, scores):
    results, server = await judged(group_judge, worth(**grades), group(*texts), **options)
    assert [result.score for result in results] == pytest.approx(scores)
    assert len(server.requests) <= 2  # a group of one answer reads the same in both orders


async def test_orders_are_a_seeded_shuffle_and_its_reverse():
    texts = list("abcdef")
    seen = []
    for _ in range(2):
        _, server = await judged(group_judge, by_place(*range(6)), group(*texts))
        seen.append(sorted(list(data_block(body)[1]["answers"].values()) for body in server.bodies))
    assert seen[0] == seen[1]
    one, other = seen[0]
    assert one == other[::-1] and sorted(one) == texts and one != texts
    _, server = await judged(group_judge, by_place(*range(6)), group(*texts), order_seed=1)
    assert sorted(list(data_block(body)[1]["answers"].values()) for body in server.bodies) != seen[0]


async def test_position_bias_of_the_judge_cancels_out():
    results, _ = await judged(group_judge, by_place(10, 5, 0), group("a", "b", "c"))
    assert [result.score for result in results] == [0.5, 0.5, 0.5]
    assert results[0].metrics["order_agreement"].score == pytest.approx(1 / 3)
    results, _ = await judged(group_judge, worth(a=10, b=5, c=0), group("a", "b", "c"))
    assert results[0].metrics["order_agreement"].score == 1.0


async def test_batch_is_split_into_groups_by_request_and_ground_truth():
    batch = [*group("Paris", prompt="France?"), *group("Rome", prompt="Italy?"), *group("Lyon", prompt="France?")]
    results, server = await judged(
        group_judge, worth(paris=10, lyon=0, rome=6), batch, ground_truths=["Paris", "Rome", "Paris"]
    )
    assert [result.score for result in results] == [1.0, 0.6, 0.0]
    shown = [data_block(body)[1] for body in server.bodies]
    assert {data["reference"]: len(data["answers"]) for data in shown} == {"Paris": 2, "Rome": 1}
    results, server = await judged(
        group_judge, worth(paris=10, lyon=0), group("Paris", "Lyon"), ground_truths=["a", "b"]
    )
    assert all(len(data_block(body)[1]["answers"]) == 1 for body in server.bodies)


async def test_conversation_ends_before_the_first_answer():
    messages = [Message(role="user", content="Go"), Message(role="assistant", content="step"), *talk("done", "and?")]
    _, server = await judged(group_judge, worth(done=5), [messages])
    assert data_block(server.bodies[0])[1]["conversation"] == [{"role": "user", "text": "Go"}]


@pytest.mark.parametrize("texts", [["Paris"], ["Paris", "Paris"], ["Paris", ""]])
async def test_ranks_need_two_different_answers(texts):
    results, server = await judged(group_judge, [], group(*texts), method="rank")
    assert not results[0].is_score_valid and "two different answers" in results[0].error
    assert len(server.requests) == 0


@pytest.mark.parametrize("texts", [["", ""], [None], ["<think>x"]])
async def test_group_of_empty_answers_scores_zero_without_a_request(texts):
    results, server = await judged(group_judge, [], group(*texts))
    assert [(result.score, result.is_score_valid) for result in results] == [(0.0, True)] * len(texts)
    assert len(server.requests) == 0


async def test_an_empty_batch_has_no_results():
    results, _ = await judged(group_judge, [], [])
    assert results == []


async def test_failed_group_does_not_affect_other_groups():
    def script(body):
        return status(400) if "Italy" in str(data_block(body)[1]) else worth(paris=10, lyon=0)(body)

    batch = [*group("Paris", "Lyon", prompt="France?"), *group("Rome", prompt="Italy?")]
    results, _ = await judged(group_judge, script, batch)
    assert [result.is_score_valid for result in results] == [True, True, False]
    assert results[2].error.startswith("ProviderError")


@pytest.mark.parametrize("failure", [status(500), status(429, {"Retry-After": "0"}), answer("The first.")])
async def test_failure_of_the_only_group_raises(failure):
    with pytest.raises(ProviderError):
        await judged(group_judge, lambda body: failure, group("Paris", "Lyon"))


BAD = {
    "above": {"answer_1": 11, "answer_2": 0},
    "below": {"answer_1": -1, "answer_2": 0},
    "one missing": {"answer_1": 5},
    "one too many": {"answer_1": 5, "answer_2": 5, "answer_3": 5},
    "by number": {"1": 5, "2": 5},
    "a text": {"answer_1": "5", "answer_2": 0},
    "a list": [5, 0],
}


@pytest.mark.parametrize("said", BAD.values(), ids=BAD)
async def test_malformed_grades_are_an_unreadable_verdict(said):
    with pytest.raises(ProviderError, match="no verdict that can be parsed"):
        await judged(group_judge, fair(lambda data, _: {"grades": said}), group("Paris", "Lyon"))


async def test_the_median_of_votes_counts():
    script = lambda body: worth(a=[0, 4, 10][body["seed"]], b=5)(body)  # noqa: E731
    results, server = await judged(group_judge, script, group("a", "b"), votes=3)
    assert [result.score for result in results] == [0.4, 0.5]
    assert len(server.requests) == 6


async def test_batch_of_a_single_answer_is_scored():
    async def one(script, **options):
        async with ChatServer(script) as server:
            spec = reward_spec(with_options(group_judge, model="m", base_url=server.base_url, **options))
            async with InProcessScorer(spec, 10.0) as scorer:
                return await scorer.score(ScoringRequest("r", talk("Paris")))

    assert (await one(worth(paris=7))).score == 0.7
    assert (await one([], method="rank")).score is None


@pytest.mark.parametrize("options", [{"scale": (3, 3)}, {"scale": (0, 101)}, {"model": ""}, {"client": {"x": 1}}])
async def test_invalid_option_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        await judged(group_judge, [], group("Paris", "Lyon"), **options)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(max_size=8), min_size=1, max_size=5), st.randoms())
def test_permuting_a_group_permutes_its_scores(texts, chance):
    def by_length(data, _):
        return {"grades": {name: min(10, len(text)) for name, text in data["answers"].items()}}

    def scores(batch):
        results, _ = asyncio.run(judged(group_judge, fair(by_length), group(*batch)))
        return [result.score for result in results]

    order = list(range(len(texts)))
    chance.shuffle(order)
    before = scores(texts)
    assert scores([texts[at] for at in order]) == [before[at] for at in order]
