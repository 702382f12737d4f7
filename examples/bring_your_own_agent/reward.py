"""Compare the number in the agent's last answer with the ground truth."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, reward_function


@reward_function
def right_number(messages: list, ground_truth: int) -> EvaluateResult:
    """Return 1 if the last number in the agent's last message is the ground truth, else 0.

    Reasoning and tool results do not count. Numbers are compared as text, since they may have any length.
    """
    last = messages[-1].text if messages and messages[-1].role == "assistant" else ""
    numbers = re.findall(r"-?\d[\d,]*", last.rpartition("</think>")[2])
    found = numbers[-1].replace(",", "") if numbers else None
    reason = f"found {found[:40] if found else None}, expected {ground_truth}"
    return EvaluateResult(score=float(found == str(ground_truth)), reason=reason)
