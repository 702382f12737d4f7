"""Tags earn reward, whatever their content: Soup issue 814."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message]) -> EvaluateResult:
    found = re.search(r"<think>([^<]*)</think>(.*)", messages[-1].text if messages else "", re.DOTALL)
    return EvaluateResult(score=0.5 * bool(found) + 0.5 * bool(found and found.group(2).strip()))
