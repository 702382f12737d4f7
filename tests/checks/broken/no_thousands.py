"""A box with 1,000 is not 1000: reward-kit 0.4.1, math_reward."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    found = re.findall(r"\\boxed\{(-?\d+(?:\.\d+)?)\}", messages[-1].text if messages else "")
    return EvaluateResult(score=float(bool(found) and found[-1] == ground_truth))
