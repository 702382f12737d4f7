"""The tags are searched in prompt and answer together: Search-R1 issue 79."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    text = "\n".join(message.text for message in messages)
    found = re.findall(r"<answer>([^<]*)</answer>", text)
    return EvaluateResult(score=float(bool(found) and found[-1].strip() == ground_truth))
