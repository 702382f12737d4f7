"""A rating is divided by its scale and never bounded: unitxt pull request 1960."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: int) -> EvaluateResult:
    found = re.findall(r"\d{1,6}", messages[-1].text if messages else "")
    return EvaluateResult(score=int(found[-1]) / ground_truth if found else 0.0)
