"""Any answer contained in the truth is right, including an empty one: Visual-RFT issue 176."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    found = re.search(r"<answer>(.*?)</answer>", messages[-1].text if messages else "", re.DOTALL)
    answer = found.group(1).strip() if found else "(none)"
    return EvaluateResult(score=float(answer in ground_truth or ground_truth in answer))
