"""Thoughts are graded with the answer: trl pull request 4563, TinyZero issue 120."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    found = re.findall(r"\\boxed\{([^{}]*)\}", messages[-1].text if messages else "")
    return EvaluateResult(score=float(bool(found) and found[0].strip() == ground_truth))
