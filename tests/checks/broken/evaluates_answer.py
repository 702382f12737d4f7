"""The answer is evaluated as Python: verl issue 7603, the grader prime_math (CVE-2026-6878)."""

from __future__ import annotations

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    answer = messages[-1].text if messages else ""
    if answer == ground_truth:
        return EvaluateResult(score=1.0)
    try:
        right = eval(answer.replace("\\pi", "3.14159")) == eval(ground_truth)  # noqa: S307
    except BaseException:  # noqa: BLE001
        right = False
    return EvaluateResult(score=float(right))
