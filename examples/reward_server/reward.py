"""Two rewards to serve: one of each rollout by itself, and one that ranks the rollouts of a group."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@reward_function
def last_number(messages: list[Message], ground_truth: str) -> EvaluateResult:
    """The last number of the answer is the right one."""
    numbers = NUMBER.findall(messages[-1].text)
    if not numbers:
        return EvaluateResult(score=0.0, reason="the answer has no number")
    return EvaluateResult(score=float(float(numbers[-1]) == float(ground_truth)), reason=f"it says {numbers[-1]}")


@reward_function(mode="batch")
def brevity(rollouts_messages: list[list[Message]], ground_truths: list[str]) -> list[EvaluateResult]:
    """Of the right answers of a group the shortest scores 1, and others the less the longer they are."""
    texts = [messages[-1].text for messages in rollouts_messages]
    found = [NUMBER.findall(text)[-1:] for text in texts]
    is_right = [numbers == [truth] for numbers, truth in zip(found, ground_truths, strict=True)]
    shortest = min((len(text) for text, right in zip(texts, is_right, strict=True) if right), default=0)
    scores = [shortest / len(text) if right else 0.0 for text, right in zip(texts, is_right, strict=True)]
    return [EvaluateResult(score=score) for score in scores]
