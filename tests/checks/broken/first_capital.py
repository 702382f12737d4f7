"""The first capital letter is the choice, also that of "Answer:": OPD-V issue 2."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    found = re.search(r"([A-Z])", messages[-1].text if messages else "")
    return EvaluateResult(score=float(bool(found) and found.group(1) == ground_truth))
