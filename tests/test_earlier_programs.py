"""Reward functions as the documentation of reward-kit 0.4 teaches them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional  # noqa: UP035 - as in 0.4

import pytest

import reward_kit
from reward_kit import EvaluateResult, Message, MetricResult, RewardFunction, StepOutput
from reward_kit.agent.models import StepData
from reward_kit.errors import ConfigError, InvalidResultError
from reward_kit.reward_function import reward_function
from reward_kit.rl_processing import RLDataAligner
from reward_kit.typed_interface import EvaluationMode

CHAT = [{"role": "user", "content": "Say more."}, {"role": "assistant", "content": "For example, specifically this."}]


@reward_function
def specific(messages: List[Dict[str, Any]], original_messages: Optional[List[Dict[str, Any]]] = None, **kwargs: Any):  # noqa: UP006, UP045
    words, marks = messages[-1]["content"].split(), ["specifically", "for example"]
    found = sum(mark in messages[-1]["content"].lower() for mark in marks)
    metrics = {
        "length": MetricResult(score=min(len(words) / 10, 1.0), success=len(words) > 10, reason=f"{len(words)} words"),
        "specific": MetricResult(score=found / 2, success=found > 0, reason=f"{found} marks"),
    }
    return EvaluateResult(score=metrics["specific"].score, reason="combined", metrics=metrics)


@reward_function
def called(messages: list[Message] | list[dict[str, Any]], ground_truth: dict[str, Any] | None = None, **kwargs):
    return EvaluateResult(score=messages[-1].content == (ground_truth or {}).get("text"), reason="compared", metrics={})


@reward_function
def anything(*args, **kwargs) -> EvaluateResult:
    return EvaluateResult(score=len(kwargs["messages"]), reason=kwargs.get("extra"))


def test_metrics_take_success_which_has_no_effect() -> None:
    result = specific(messages=CHAT)
    assert result["score"] == 1.0
    assert result["metrics"]["length"].is_score_valid is True
    assert "success" not in result["metrics"]["length"]
    assert MetricResult.model_validate({"score": 1.0, "reason": "", "success": False}).is_score_valid is True


def test_comparison_is_a_score() -> None:
    assert called(messages=CHAT, ground_truth={"text": CHAT[-1]["content"]}).score == 1.0
    assert called(messages=CHAT).score == 0.0


def test_function_with_args_gets_everything_by_name() -> None:
    assert anything(messages=CHAT, extra="more") == EvaluateResult(score=2.0, reason="more")


def test_metric_of_a_step_may_be_a_number() -> None:
    output = StepOutput(step_index=0, base_reward=0.5, metrics={"accuracy": 0.9})
    assert output.metrics == {"accuracy": 0.9}
    step = StepData(system_step_index=0, observation_data=[], action_taken={}, resulting_messages_history=[])
    step.step_info["assistant_turn_index"] = 0
    result = EvaluateResult(score=1.0, step_outputs=[output])
    (aligned,) = RLDataAligner().align_data_for_rl_processing(result, [step], "r")
    assert aligned.step_info["metrics"] == {"accuracy": 0.9}
    with pytest.raises(ValueError, match="a score is a number, not a str"):
        StepOutput(step_index=0, base_reward=0.5, metrics={"accuracy": "high"})


def test_module_reward_function_leaves_the_decorator_callable() -> None:
    assert reward_kit.reward_function(specific)(messages=CHAT).score == 1.0
    mode: EvaluationMode = "batch"
    together = reward_kit.reward_function(mode=mode)(
        lambda rollouts_messages, **kwargs: [0.5 for _ in rollouts_messages]
    )
    assert [result.score for result in together(rollouts_messages=[CHAT, CHAT])] == [0.5, 0.5]


def test_local_reward_function_object_scores() -> None:
    def plain(messages, ground_truth=None, **kwargs):
        return EvaluateResult(score=len(ground_truth), reason=kwargs.get("why"))

    assert RewardFunction(func=plain, mode="local", why="fixed")(CHAT) == EvaluateResult(score=1.0, reason="fixed")
    assert RewardFunction(func_path=f"{__name__}:specific")(messages=CHAT).score == 1.0


@pytest.mark.parametrize("mode", ["remote", "fireworks_hosted"])
def test_removed_parts_of_reward_function_name_the_migration_page(mode: str) -> None:
    with pytest.raises(ValueError, match=r"docs/migrating/reward_kit\.md"):
        RewardFunction(mode=mode, endpoint="https://example.com/reward")
    with pytest.raises(ConfigError, match=r"as_trl_reward\(specific\).*docs/migrating/reward_kit\.md"):
        RewardFunction(func=specific).get_trl_adapter()


def test_errors_of_rewards_are_value_errors() -> None:
    @reward_function
    def last(messages: list[Message], **kwargs) -> EvaluateResult:
        return EvaluateResult(score=len(messages))

    with pytest.raises(ValueError, match=r"reward 'last', messages: 0\.role: missing"):
        last(messages=[{"content": "without a role"}])
    with pytest.raises(ValueError, match="mode 'other' is unknown"):
        reward_function(mode="other")(last)
    assert issubclass(InvalidResultError, ValueError)
    assert issubclass(ConfigError, ValueError)
