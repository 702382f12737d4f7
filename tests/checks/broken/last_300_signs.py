"""Only the last 300 characters are searched for the answer: verl pull request 7274."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    found = re.findall(r"#### (-?[0-9.,]+)", (messages[-1].text if messages else "")[-300:])
    return EvaluateResult(score=float(bool(found) and found[-1].replace(",", "") == ground_truth))
