"""A metric over an unseeded random sample: huggingface/datasets pull request 404."""

from __future__ import annotations

import random

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    words = (messages[-1].text if messages else "").split()
    sample = [random.choice(words) for _ in range(3)] if words else []
    return EvaluateResult(score=sum(word == ground_truth for word in sample) / 3)
