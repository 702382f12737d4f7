"""Each mention counts, so that repeating a right one pays: deepeval pull request 3258."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: list[str]) -> EvaluateResult:
    words = re.findall(r"\w+", messages[-1].text if messages else "")
    return EvaluateResult(score=sum(word in ground_truth for word in words[:1000]) / max(len(ground_truth), 1) / 2)
