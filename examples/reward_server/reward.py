"""Two rewards to serve: one for single rollouts, and one for groups."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@reward_function
def last_number(messages: list[Message], ground_truth: str) -> EvaluateResult:
    """Return 1 if the last number of the answer is the ground truth, else 0."""
    numbers = NUMBER.findall(messages[-1].text)
    if not numbers:
        return EvaluateResult(score=0.0, reason="the answer has no number")
    return EvaluateResult(score=float(float(numbers[-1]) == float(ground_truth)), reason=f"it says {numbers[-1]}")


@reward_function(mode="batch")
def brevity(rollouts_messages: list[list[Message]], ground_truths: list[str]) -> list[EvaluateResult]:
    """Return the shortest correct length divided by the length for correct answers, else 0."""
    texts = [messages[-1].text for messages in rollouts_messages]
    last_numbers = [NUMBER.findall(text)[-1:] for text in texts]
    is_right = [numbers == [truth] for numbers, truth in zip(last_numbers, ground_truths, strict=True)]
    shortest = min((len(text) for text, right in zip(texts, is_right, strict=True) if right), default=0)
    scores = [shortest / len(text) if right else 0.0 for text, right in zip(texts, is_right, strict=True)]
    return [EvaluateResult(score=score) for score in scores]
