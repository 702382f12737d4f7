"""Conversion between Braintrust scorers, `(input, output, expected) -> float`, and reward functions, as in reward-kit
0.4.
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
    """Return a reward function that calls a scorer.

    The scorer's `input` is the content of the first message, and its `output` the content of the last. `expected` is
    the content of the ground truth's last message. `messages_to_input` replaces the conversion to `input`, and
    `ground_truth_to_expected` the conversion to `expected`.
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
    """Return a scorer that calls a reward function with two messages, and with `expected` as an assistant message."""

    def scorer(input: Any, output: Any, expected: Any = None) -> float:
        messages = [Message(role="user", content=str(input)), Message(role="assistant", content=str(output))]
        truth = None if expected is None else [Message(role="assistant", content=str(expected))]
        return float(reward_fn(messages=messages, ground_truth=truth).score)

    return scorer
