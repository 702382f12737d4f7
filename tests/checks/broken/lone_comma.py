"""A lone comma matches [0-9,]+ but is not a float: omlx pull request 3484."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: float) -> EvaluateResult:
    found = re.findall(r"-?[0-9,]+(?:\.[0-9]+)?", messages[-1].text if messages else "")
    return EvaluateResult(score=float(bool(found) and float(found[-1].replace(",", "")) == ground_truth))
