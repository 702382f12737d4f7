"""A marker left by the first call makes the second call do nothing: inspect_ai pull request 841."""

from __future__ import annotations

from reward_kit import EvaluateResult, Message, reward_function

DONE: set[str] = set()


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    answer = messages[-1].text if messages else ""
    was_done = answer in DONE
    DONE.add(answer)
    return EvaluateResult(score=0.0 if was_done else float(answer == ground_truth))
