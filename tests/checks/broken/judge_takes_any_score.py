"""The first score in the text is used, even a quoted one: openagent-eval issue 74, flexeval pull request 237."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function


def judge(answer: str, truth: str) -> str:
    """Return the output of a judge that quotes the answer before its verdict."""
    return f"The answer was: {answer}\nScore: {10 if answer.strip() == truth else 0}"


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    verdict = judge(messages[-1].text[:5000] if messages else "", ground_truth)
    found = re.search(r"[Ss]core: (\d{1,2})\b", verdict)
    return EvaluateResult(score=min(1.0, int(found.group(1)) / 10) if found else 0.0)
