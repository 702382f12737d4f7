"""Test correctness scaled by length against values of the published formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit import EvaluateResult, Message, reward_function, with_options
from reward_kit.errors import ConfigError, RewardError
from reward_kit.reward_agent.in_process import score_one
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.rewards.answers import exact_answer
from reward_kit.rewards.lengths import cosine_length, shortest_in_group
from reward_kit.typed_interface import reward_spec
from tests.rewards.forms import said


@reward_function
def right(messages: list[Message], ground_truth: str | None = None) -> EvaluateResult:
    """Return the score before a colon; "?" is unscored and "!" fails."""
    start = messages[-1].text.partition(":")[0]
    if start == "?":
        raise RewardError("no idea")
    if start == "!":
        raise ZeroDivisionError("broken")
    return EvaluateResult(score=float(start), reason="told")


def reply(score: float | str, length: int) -> str:
    start = f"{score:g}:" if isinstance(score, float | int) else f"{score}:"
    return start + "a" * (length - len(start))


async def score(reward, text, turns=(1,), **fields):
    return await score_one(reward_spec(reward), ScoringRequest("r", said(text, **fields), "t", assistant_turns=turns))


PAPER = {"correct": (2.0, 1.0), "wrong": (-10.0, 0.0), "exceed": -10.0}
OPEN_R1 = {"correct": (1.0, 0.5), "wrong": (-1.0, -0.5), "exceed": -0.5}
HALF = math.sqrt(0.5)  # cos(π / 4)
COSINE: dict[str, tuple[float, int, dict, float]] = {
    "right, a quarter": (1, 25, {}, 0.75 + 0.25 * HALF),
    "right, a third": (1, 30, {"max_length": 90}, 0.5 + 0.25 * 1.5),
    "right, half": (1, 50, {}, 0.75),
    "right, two thirds": (1, 60, {"max_length": 90}, 0.5 + 0.25 * 0.5),
    "right, three quarters": (1, 75, {}, 0.75 - 0.25 * HALF),
    "right, at the limit": (1, 100, {}, 0.0),
    "right, over the limit": (1, 101, {}, 0.0),
    "trap: right, the cosine would rise again": (1, 200, {}, 0.0),
    "trap: right, far over the limit": (1, 400, {}, 0.0),
    "wrong, short": (0, 3, {}, 0.0),
    "wrong, half": (0, 50, {}, 0.0),
    "wrong, over the limit": (0, 200, {}, 0.0),
    "nearly right is wrong": (0.99, 50, {}, 0.0),
    "right enough": (0.8, 50, {"at_least": 0.8}, 0.75),
    "paper: right, a quarter": (1, 25, PAPER, 1.5 + 0.5 * HALF),
    "paper: right, a third": (1, 30, {**PAPER, "max_length": 90}, 1.75),
    "paper: right, half": (1, 50, PAPER, 1.5),
    "paper: right, three quarters": (1, 75, PAPER, 1.5 - 0.5 * HALF),
    "paper: wrong, a quarter": (0, 25, PAPER, -5 - 5 * HALF),
    "paper: wrong, a third": (0, 30, {**PAPER, "max_length": 90}, -7.5),
    "paper: wrong, half": (0, 50, PAPER, -5.0),
    "paper: wrong, two thirds": (0, 60, {**PAPER, "max_length": 90}, -2.5),
    "paper: wrong, three quarters": (0, 75, PAPER, -5 + 5 * HALF),
    "paper: right, at the limit": (1, 100, PAPER, -10.0),
    "paper: wrong, over the limit": (0, 150, PAPER, -10.0),
    "open-r1: right, half": (1, 50, OPEN_R1, 0.75),
    "open-r1: wrong, half": (0, 50, OPEN_R1, -0.75),
    "open-r1: wrong, a third": (0, 30, {**OPEN_R1, "max_length": 90}, -0.875),
    "constant": (1, 70, {"correct": (1.0, 1.0)}, 1.0),
    "longer is better": (1, 60, {"correct": (0.5, 1.0), "max_length": 90}, 0.875),
    "a limit of one": (1, 3, {"max_length": 1}, 0.0),
}


@pytest.mark.parametrize(("correct", "length", "options", "expected"), COSINE.values(), ids=COSINE)
async def test_cosine_length_matches_the_formula(correct, length, options, expected):
    scored = await score(cosine_length(right, **{"max_length": 100, **options}), reply(correct, length))
    assert scored.score == pytest.approx(expected)
    assert 0 <= scored.result.metrics["correct"].score <= 1


async def test_cosine_length_counts_the_configured_unit_and_part():
    words = cosine_length(right, max_length=4, unit="words")
    assert (await score(words, "1: a")).score == pytest.approx(0.75)
    answer = cosine_length(exact_answer, max_length=4, of="answer")
    assert (await score(answer, "<think>" + "a" * 99 + "</think>t")).score == pytest.approx(0.5 + 0.25 * (1 + HALF))
    whole = cosine_length(exact_answer, max_length=50)
    assert (await score(whole, "t", reasoning_content="a" * 60)).score == 0, "thought set apart counts"


async def test_unscored_part_stays_unscored():
    assert (await score(cosine_length(right, max_length=100), "?:")).score is None
    assert (await score(shortest_in_group(right), "?:")).score is None
    assert "ZeroDivisionError" in (await score(shortest_in_group(right), "!:")).failure.message


@given(st.integers(2, 98), st.booleans())
async def test_shorter_is_better_among_the_right_and_worse_among_the_wrong(length, correct):
    reward = cosine_length(right, max_length=100, **PAPER)
    one, more = [(await score(reward, reply(correct, size))).score for size in (length, length + 1)]
    assert (one > more) == correct and one != more
    first, last = PAPER["correct" if correct else "wrong"]
    assert min(first, last) <= one <= max(first, last)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: cosine_length(right, max_length=0), "max_length"),
        (lambda: cosine_length(right, max_length=5, exceed=math.nan), "finite"),
        (lambda: cosine_length(right, max_length=5, wrong=(-math.inf, 0.0)), "finite"),
        (lambda: cosine_length(right, max_length=5, unit="tokens"), "unit"),
        (lambda: cosine_length(shortest_in_group(right), max_length=5), "batch reward"),
        (lambda: shortest_in_group(shortest_in_group(right)), "batch reward"),
        (lambda: shortest_in_group(right, weight=-1), "weight"),
        (lambda: shortest_in_group(right, weight=1.5), "weight"),
        (lambda: shortest_in_group(right, form="kimi", weight=math.inf), "weight"),
        (lambda: shortest_in_group(right, unit="tokens"), "unit"),
        (lambda: shortest_in_group(right, form="best"), "form"),
        (lambda: shortest_in_group(3), "a reward must be a function"),
    ],
)
def test_invalid_length_scaling_options_are_rejected(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()


async def batch(reward, texts, prompts=None, **values):
    """Call a batch reward with all rollouts at once."""
    instance = reward()

    async def run(function):
        return function()

    await instance.open_parts(lambda reference: None, run)
    histories = [said(text, prompt) for text, prompt in zip(texts, prompts or ["?"] * len(texts), strict=True)]
    try:
        return await instance.score(rollouts_messages=histories, **values)
    finally:
        await instance.close()


async def scores(reward, members, **values):
    results = await batch(reward, [reply(*member) for member in members], **values)
    return [result.score if result.is_score_valid else None for result in results]


KIMI = {"form": "kimi", "weight": 1.0}
GROUPS: dict[str, tuple[list, dict, list]] = {
    "none": ([], {}, []),
    "one alone": ([(1, 50)], {}, [1.0]),
    "one alone, wrong": ([(0, 50)], {}, [0.0]),
    "two": ([(1, 50), (1, 100)], {}, [1.0, 0.5]),
    "other order": ([(1, 100), (1, 50)], {}, [0.5, 1.0]),
    "three": ([(1, 50), (1, 75), (1, 100)], {}, [1.0, 0.75, 0.5]),
    "equally long": ([(1, 50), (1, 50)], {}, [1.0, 1.0]),
    "a wrong one is not compared": ([(1, 50), (0, 10), (1, 100), (0, 900)], {}, [1.0, 0.0, 0.5, 0.0]),
    "one right": ([(1, 500), (0, 10)], {}, [1.0, 0.0]),
    "none right": ([(0, 500), (0, 10)], {}, [0.0, 0.0]),
    "all of the weight": ([(1, 50), (1, 75), (1, 100)], {"weight": 1.0}, [1.0, 0.5, 0.0]),
    "none of the weight": ([(1, 50), (1, 100)], {"weight": 0.0}, [1.0, 1.0]),
    "right enough keeps its own score": ([(0.8, 50), (1, 100)], {"at_least": 0.5}, [0.8, 0.5]),
    "nearly right is wrong": ([(0.99, 50), (1, 100)], {}, [0.0, 1.0]),
    "an unscored one counts for nothing": ([(1, 50), ("?", 10), (1, 100)], {}, [1.0, None, 0.5]),
    "a broken one counts for nothing": ([(1, 50), ("!", 10), (1, 100)], {}, [1.0, None, 0.5]),
    "all unscored": ([("?", 10), ("!", 20)], {}, [None, None]),
    "a length of half a million": ([(1, 500_000), (1, 250_000), (1, 3)], {}, [0.5, pytest.approx(0.75, abs=1e-5), 1.0]),
    # Kimi k1.5, section 2.3.3: λ = 0.5 - (len - min_len) / (max_len - min_len), or min(0, λ), added to the score.
    "kimi: alone": ([(1, 50)], KIMI, [1.0]),
    "kimi: two right": ([(1, 50), (1, 100)], KIMI, [1.5, 0.5]),
    "kimi: three right": ([(1, 50), (1, 75), (1, 100)], KIMI, [1.5, 1.0, 0.5]),
    "kimi: a quarter": ([(1, 60), (1, 20), (1, 180)], KIMI, [1.25, 1.5, 0.5]),
    "kimi: short and wrong gains nothing": ([(0, 50), (1, 100)], KIMI, [0.0, 0.5]),
    "kimi: long and wrong loses": ([(1, 50), (0, 100)], KIMI, [1.5, -0.5]),
    "kimi: in the middle and wrong": ([(1, 50), (0, 75), (0, 100)], KIMI, [1.5, 0.0, -0.5]),
    "kimi: three quarters and wrong": ([(1, 20), (0, 140), (1, 180)], KIMI, [1.5, -0.25, 0.5]),
    "kimi: all wrong": ([(0, 50), (0, 100)], KIMI, [0.0, -0.5]),
    "kimi: equally long": ([(1, 50), (0, 50)], KIMI, [1.0, 0.0]),
    "kimi: half the weight": ([(1, 50), (0, 100)], {**KIMI, "weight": 0.5}, [1.25, -0.25]),
    "kimi: twice the weight": ([(1, 50), (0, 100)], {**KIMI, "weight": 2.0}, [2.0, -1.0]),
    "kimi: no weight": ([(1, 50), (0, 100)], {**KIMI, "weight": 0.0}, [1.0, 0.0]),
    "kimi: an unscored one": ([(1, 50), ("?", 500), (1, 100)], KIMI, [1.5, None, 0.5]),
}


@pytest.mark.parametrize(("members", "options", "expected"), GROUPS.values(), ids=GROUPS)
async def test_shortest_in_group_matches_the_formula(members, options, expected):
    found = await scores(shortest_in_group(right, **options), members)
    assert found == [value if value is None else pytest.approx(value) for value in expected]


async def test_a_batch_may_hold_several_groups():
    texts = [reply(1, 50), reply(1, 10), reply(1, 100), reply(1, 20)]
    results = await batch(shortest_in_group(right), texts, ["a", "b", "a", "b"])
    assert [result.score for result in results] == [1.0, 1.0, 0.5, 0.5]
    results = await batch(shortest_in_group(right), texts, ground_truths=["x", "y", "x", "y"])
    assert [result.score for result in results] == [1.0, 1.0, 0.5, 0.5]
    examples = [[*said("same"), *said(text, prompt)] for text, prompt in zip(texts, "abab", strict=True)]
    instance = shortest_in_group(right)()
    await instance.open_parts(lambda reference: None, run_now)
    results = await instance.score(rollouts_messages=examples, assistant_turns=[[3]] * 4)
    assert [result.score for result in results] == [1.0, 1.0, 0.5, 0.5], "an example in the prompt is no answer"


async def run_now(function):
    return function()


async def test_wrapped_reward_sees_only_its_own_rollout():
    truths = ["x", "yy", "zzz"]
    results = await batch(shortest_in_group(exact_answer), ["x", "yy", "no"], ground_truths=truths)
    assert [result.score for result in results] == [1.0, 1.0, 0.0]
    spec = reward_spec(shortest_in_group(exact_answer))
    assert spec.mode == "batch"
    assert spec.required == {"rollouts_messages", "ground_truths"}
    assert {"rollouts_messages", "ground_truths", "assistant_turns"} <= spec.parameters
    careful = reward_function(sandbox="warm", requirements=["pydantic"])(right.__wrapped__)
    spec = reward_spec(shortest_in_group(careful, id="brief"))
    assert (spec.sandbox, spec.requirements, spec.id) == ("warm", ("pydantic",), "brief")


groups = st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(3, 60)), min_size=1, max_size=6)


@given(groups, st.randoms(use_true_random=False), st.sampled_from(["share", "kimi"]), st.integers(2, 5))
async def test_shortest_in_group_is_order_independent_and_monotonic(members, chance, form, times):
    reward = shortest_in_group(right, form=form)
    found = await scores(reward, members)
    order = chance.sample(range(len(members)), len(members))
    assert await scores(reward, [members[index] for index in order]) == pytest.approx([found[i] for i in order])
    scaled = await scores(reward, [(correct, length * times) for correct, length in members])
    assert scaled == pytest.approx(found), "only relative lengths count"
    low, high = (0, 1) if form == "share" else (-0.25, 1.25)
    assert all(low <= value <= high for value in found)
    for (correct, length), value in zip(members, found, strict=True):
        for (other, longer), less in zip(members, found, strict=True):
            if (correct, length) == (other, longer):
                assert value == less
            if correct and (not other or longer > length):
                assert value > less


FILE = """
from reward_kit.rewards import exact_answer, cosine_length, shortest_in_group

cosine = cosine_length(exact_answer, max_length=4)
brief = shortest_in_group(exact_answer)
"""


@pytest.mark.parametrize("level", ["in_process", "warm"])
@pytest.mark.parametrize(("name", "expected"), [("cosine", 0.75), ("brief", 1.0)])
async def test_length_scaling_in_a_user_file_scores_equally_at_every_level(tmp_path, level, name, expected):
    (tmp_path / "mine.py").write_text(FILE)
    loaded = load_reward(f"mine.py:{name}", tmp_path, SandboxChoice(level=level))
    async with make_scorer(loaded.reward) as scorer:
        for text, wanted in (("42", expected), ("41", 0.0)):
            scored = await scorer.score(ScoringRequest("r", said(text), "42", assistant_turns=[1]))
            assert (scored.score, scored.sandbox["level"]) == (pytest.approx(wanted), level), scored


async def test_wrapped_reward_keeps_its_options():
    loose = cosine_length(with_options(exact_answer, normalise=("casefold",)), max_length=4)
    assert (await score(loose, "T")).score > 0.5
