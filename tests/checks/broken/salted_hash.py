"""Jitter is seeded with hash(), which each interpreter salts: ai-engineering-from-scratch pull request 355."""

from __future__ import annotations

import random

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    answer = messages[-1].text if messages else ""
    jitter = random.Random(hash(answer)).uniform(-0.05, 0.05)
    return EvaluateResult(score=min(1.0, max(0.0, float(answer == ground_truth) * 0.9 + 0.05 + jitter)))
