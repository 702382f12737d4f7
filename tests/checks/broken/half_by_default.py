"""A missing score becomes 0.5, which is always the case: openagent-eval issue 74."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    found = re.search(r"^<verdict>(right|wrong)</verdict>$", messages[-1].text if messages else "")
    return EvaluateResult(score=0.5 if found is None else float(found.group(1) == "right"))
