"""The evidence is truncated to the length that is scored: fever-scorer issue 1."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: list[str]) -> EvaluateResult:
    while len(messages) > 1:
        messages.pop(0)
    found = re.findall(r"\w+", messages[0].text) if messages else []
    return EvaluateResult(score=float(found == ground_truth))
