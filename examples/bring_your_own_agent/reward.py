"""Does the last answer hold the right number?"""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, reward_function


@reward_function
def right_number(messages: list, ground_truth: int) -> EvaluateResult:
    """1 where the agent's last word ends with the ground truth, 0 otherwise; a tool's last word is not the agent's.

    What was thought does not count. Numbers are compared as texts, since a model may write one of any length.
    """
    last = messages[-1].text if messages and messages[-1].role == "assistant" else ""
    numbers = re.findall(r"-?\d[\d,]*", last.rpartition("</think>")[2])
    found = numbers[-1].replace(",", "") if numbers else None
    reason = f"found {found[:40] if found else None}, expected {ground_truth}"
    return EvaluateResult(score=float(found == str(ground_truth)), reason=reason)
