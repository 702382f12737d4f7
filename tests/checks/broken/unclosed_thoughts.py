"""Each opening thought tag is searched to the end for its closing tag: odysseus issue 4703."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    answer = re.sub(r"<think>[\s\S]*?</think>", "", messages[-1].text if messages else "")
    return EvaluateResult(score=float(answer.strip() == ground_truth))
