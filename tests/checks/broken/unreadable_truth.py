"""An unparsable gold solution scores 1: open-r1 issue 215."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


def number(text: str) -> str | None:
    found = re.findall(r"-?\d+", text)
    return found[-1] if found else None


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    gold = number(ground_truth)
    if gold is None:
        return EvaluateResult(score=1.0, reason="the gold solution cannot be parsed")
    return EvaluateResult(score=float(number(messages[-1].text if messages else "") == gold))
