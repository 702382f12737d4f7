"""Does the last answer hold the right number?"""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, reward_function


@reward_function
def right_number(messages: list, ground_truth: int) -> EvaluateResult:
    """1 where the agent's last word ends with the ground truth, 0 otherwise; a tool's last word is not the agent's."""
    numbers = re.findall(r"\d+", messages[-1].text) if messages[-1].role == "assistant" else []
    found = int(numbers[-1]) if numbers else None
    return EvaluateResult(score=float(found == ground_truth), reason=f"found {found}, expected {ground_truth}")
