"""Without a box the whole text is searched for the answer: verifiers pull request 1028."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    text = messages[-1].text if messages else ""
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    scope = found[-1] if found else text
    return EvaluateResult(score=float(ground_truth in re.findall(r"\w+", scope)))
