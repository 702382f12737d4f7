"""Credit falls with the error, so that 9 for 10 earns most of it: reward-kit 0.4.1, accuracy of numbers."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: float) -> EvaluateResult:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", messages[-1].text if messages else "")
    try:
        error = abs(float(numbers[-1]) - ground_truth) / max(abs(ground_truth), 1.0) if numbers else 1.0
    except OverflowError:
        error = 1.0
    return EvaluateResult(score=max(0.0, 1.0 - 3.0 * error))
