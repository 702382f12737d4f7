"""A mean over no words is NaN, which propagates: ms-swift issue 8123."""

from __future__ import annotations

import math

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    words = (messages[-1].text if messages else "").split()
    hits = [float(word == ground_truth) for word in words]
    return EvaluateResult(score=math.fsum(hits) / len(hits) if hits else math.nan)
