"""Conversion between Braintrust scorers and reward functions, compatible with reward-kit 0.4.

A scorer is a function `(input, output, expected) -> float`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reward_kit.models import EvaluateResult, Message
from reward_kit.typed_interface import reward_function

Scorer = Callable[[Any, Any, Any], float]
Messages = list[Message]


def scorer_to_reward_fn(
    scorer: Scorer,
    *,
    messages_to_input: Callable[[Messages], Any] | None = None,
    ground_truth_to_expected: Callable[[Messages], Any] | None = None,
) -> Callable[..., Any]:
    """Convert a scorer to a reward function.

    The scorer receives the content of the first message as `input`, the content of the last message as `output`, and
    the content of the last message of the ground truth as `expected`.

    Args:
        scorer: the scorer.
        messages_to_input: a function that computes `input` from the messages instead.
        ground_truth_to_expected: a function that computes `expected` from the ground truth instead.
    """

    @reward_function
    def scored(messages: Messages, ground_truth: Messages | None = None, **kwargs: Any) -> EvaluateResult:
        given = messages_to_input(messages) if messages_to_input else messages[0].content
        expected = None
        if ground_truth:
            expected = ground_truth_to_expected(ground_truth) if ground_truth_to_expected else ground_truth[-1].content
        return EvaluateResult(score=scorer(given, messages[-1].content, expected))

    return scored


def reward_fn_to_scorer(reward_fn: Callable[..., Any]) -> Scorer:
    """Convert a reward function to a scorer.

    The reward function receives `input` and `output` as two messages, and `expected` as an assistant message.
    """

    def scorer(input: Any, output: Any, expected: Any = None) -> float:
        messages = [Message(role="user", content=str(input)), Message(role="assistant", content=str(output))]
        truth = None if expected is None else [Message(role="assistant", content=str(expected))]
        return float(reward_fn(messages=messages, ground_truth=truth).score)

    return scorer
