"""A pattern with nested repeats of white space: langchain issue 6898 (CVE-2024-58340)."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    text = messages[-1].text if messages else ""
    found = re.search(r"Action\s*\d*\s*:[\s]*(.*?)[\s]*Action\s*\d*\s*Input\s*\d*\s*:[\s]*(.*)", text, re.DOTALL)
    answer = found.group(2) if found else text
    return EvaluateResult(score=float(answer.strip() == ground_truth))
