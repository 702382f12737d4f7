"""Without criteria, all of them are met: tau2-bench issue 384."""

from __future__ import annotations

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: list[str] | None = None) -> EvaluateResult:
    text = messages[-1].text if messages else ""
    return EvaluateResult(score=float(all(fact in text for fact in ground_truth or ())))
