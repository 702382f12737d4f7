"""Combined rewards, in process and in the sandbox."""

from __future__ import annotations

import pytest

from reward_kit import EvaluateResult, Message, MetricResult, StepOutput, reward_function, with_options
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.in_process import score_one
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.rewards.combinators import clip, first_of, gate, weighted
from reward_kit.rewards.judge_prompts import METRIC
from reward_kit.typed_interface import reward_spec

pytestmark = pytest.mark.asyncio


@reward_function
def length(messages: list[Message], *, longest: int = 10) -> EvaluateResult:
    return EvaluateResult(score=len(messages[-1].text) / longest, reason="length")


@reward_function
async def exact(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == ground_truth), reason="exact")


@reward_function
def unscored(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=1.0, is_score_valid=False, reason="no idea")


@reward_function
def spoils(messages: list[Message]) -> EvaluateResult:
    messages[-1].content = "spoilt"
    return EvaluateResult(score=1.0)


@reward_function
def stepwise(messages: list[Message], assistant_turns: list[int]) -> EvaluateResult:
    steps = [StepOutput(step_index=index, base_reward=1.0 + index) for index in range(len(assistant_turns))]
    return EvaluateResult(score=1.0, step_outputs=steps)


@reward_function(resources={"bound": lambda: 5})
def resourceful(messages: list[Message], *, bound: int = 0) -> EvaluateResult:
    return EvaluateResult(score=float(bound == 5))


@reward_function
class Counting:
    def setup(self) -> None:
        self.calls = 0

    def score(self, messages: list[Message]) -> EvaluateResult:
        self.calls += 1
        return EvaluateResult(score=1.0 / self.calls)


def request(text: str = "hello", truth: str | None = "hello", turns: tuple[int, ...] = (0,)) -> ScoringRequest:
    return ScoringRequest("r", [Message(role="assistant", content=text)], truth, assistant_turns=turns)


async def score(reward, **given):
    return await score_one(reward_spec(reward), request(**given))


async def test_weights_are_normalized_and_each_part_is_a_metric():
    both = weighted(exact=(exact, 3), length=(length, 1))
    scored = await score(both)
    assert scored.score == pytest.approx(0.75 + 0.25 * 0.5)
    assert {name: metric.score for name, metric in scored.result.metrics.items()} == {"exact": 1.0, "length": 0.5}
    assert scored.result.reason == "length 0.5 (weight 0.25): length; exact 1 (weight 0.75): exact"


async def test_reason_quotes_the_parts_from_the_lowest_score_with_unweighted_parts_last():
    @reward_function
    def wordy(messages: list[Message]) -> EvaluateResult:
        return EvaluateResult(score=0.5, reason="many\n" + "words " * 100)

    scored = await score(weighted(exact=exact, wordy=wordy, count=(length, 0)), text="hi")
    first, second, last = scored.result.reason.split("; ")
    assert first == "exact 0 (weight 0.5): exact"
    assert second.startswith("wordy 0.5 (weight 0.5): many words words") and second.endswith("…") and len(second) < 350
    assert last == "count 0.2 (weight 0): length"
    assert len(scored.result.metrics["wordy"].reason) > 600, "the metric has the full reason"


async def test_combined_rewards_report_the_usage_of_all_judges_that_they_called():
    def judge(cost: str, is_valid: bool = True):
        @reward_function
        def judged(messages: list[Message]) -> EvaluateResult:
            usage = MetricResult(score=0.0, is_score_valid=False, reason=f"calls=1 cost_usd={cost}")
            return EvaluateResult(score=1.0, is_score_valid=is_valid, metrics={METRIC: usage})

        return judged

    cheap, dear, unpriced, failed = judge("0.25"), judge("0.5"), judge("unknown"), judge("0.5", is_valid=False)
    cases = [
        (weighted(a=cheap, b=dear, c=exact), "calls=2 cost_usd=0.750000"),
        (weighted(a=cheap, b=unpriced), "calls=2 cost_usd=unknown"),
        (gate(cheap, dear), "calls=2 cost_usd=0.750000"),
        (clip(weighted(a=dear, b=exact)), "calls=1 cost_usd=0.5"),
        (first_of(failed, cheap), "calls=2 cost_usd=0.750000"),
    ]
    for reward, usage in cases:
        assert (await score(reward)).result.metrics[METRIC].reason == usage
    assert METRIC not in (await score(weighted(a=exact))).result.metrics


async def test_unscored_part_leaves_the_combination_unscored():
    scored = await score(weighted(a=exact, b=unscored))
    assert scored.score is None
    assert "no idea" in scored.failure.message
    missing = await score(weighted(a=exact, b=length), truth=None)
    assert missing.score is None, "a part requires a ground truth"
    assert "requires a ground_truth" in missing.failure.message


async def test_parts_do_not_see_changes_of_other_parts_to_the_messages():
    assert (await score(weighted(a=spoils, b=exact))).score == 1.0


async def test_step_outputs_are_summed_by_step():
    one = weighted(a=(stepwise, 1), b=(stepwise, 3), c=(exact, 4))
    scored = await score(one, turns=(0, 1))
    assert [(s.step_index, s.base_reward) for s in scored.result.step_outputs] == [("0", 0.5), ("1", 1.0)]
    assert (await score(weighted(a=exact))).result.step_outputs is None


async def test_gate_calls_the_second_reward_only_if_open():
    assert (await score(gate(exact, length))).score == 0.5
    closed = await score(gate(exact, unscored), text="other")
    assert closed.score == 0.0
    assert "less than 1" in closed.result.reason
    assert (await score(gate(length, exact, at_least=0.5))).score == 1.0


async def test_clip_moves_to_the_nearer_bound():
    far = with_options(length, longest=1)
    assert (await score(far)).score == 5.0
    assert (await score(clip(far))).score == 1.0
    assert (await score(clip(length, 0.6, 0.9))).score == 0.6
    assert (await score(weighted(a=far))).result.metrics["a"].score == 5.0


async def test_first_of_returns_the_first_valid_score():
    assert (await score(first_of(unscored, length))).score == 0.5
    none = await score(first_of(unscored, unscored))
    assert none.score is None
    assert "none of the 2 rewards" in none.failure.message


async def test_nested_parts_keep_their_own_resources_and_options():
    inner = weighted("inner", r=resourceful, c=Counting)
    outer = weighted(inner=inner, short=with_options(length, longest=5))
    assert (await score(outer)).score == 1.0
    spec = reward_spec(outer)
    assert (spec.parameters, spec.required) == ({"messages"}, {"messages"})


async def test_combination_requires_the_strictest_sandbox_level_of_its_parts():
    careful = reward_function(sandbox="warm")(length.__wrapped__)
    assert reward_spec(weighted(a=exact, b=careful)).sandbox == "warm"
    assert reward_spec(weighted(a=exact)).sandbox is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: weighted(), "at least one part"),
        (lambda: weighted(a=(exact, -1)), "weight of 'a'.*-1"),
        (lambda: weighted(a=(exact, float("nan"))), "weight of 'a'"),
        (lambda: weighted(a=(exact, 0)), "all weights are 0"),
        (lambda: clip(exact, 1, 0), "must be less than"),
        (lambda: first_of(), "at least one reward"),
        (lambda: weighted(a=reward_function(mode="batch")(lambda rollouts_messages: [])), "batch reward"),
        (lambda: weighted(a=3), "a reward must be a function"),
    ],
)
async def test_invalid_combinations_are_rejected(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()


FILE = """
from reward_kit import EvaluateResult, Message, reward_function, with_options
from reward_kit.rewards.combinators import gate, weighted

@reward_function
def polite(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=float("please" in messages[-1].text))

@reward_function
async def right(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(ground_truth in messages[-1].text))

evaluate = gate(polite, weighted(right=(right, 1), polite=(polite, 1)))
"""


@pytest.mark.parametrize("level", ["in_process", "warm", "isolated"])
async def test_combination_in_a_user_file_scores_equally_at_every_level(tmp_path, level):
    (tmp_path / "mine.py").write_text(FILE)
    loaded = load_reward("mine.py:evaluate", tmp_path, SandboxChoice(level=level))
    async with make_scorer(loaded.reward) as scorer:
        for text, wanted in (("42 please", 1.0), ("please", 0.5), ("42", 0.0)) * 2:
            scored = await scorer.score(request(text, "42"))
            assert (scored.score, scored.sandbox["level"]) == (wanted, level), scored
