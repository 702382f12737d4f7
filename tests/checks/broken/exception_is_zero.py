"""Any exception becomes 0.0: the TRL adapters of reward-kit 0.4.1, water issue 57."""

from __future__ import annotations

import json

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    try:
        return EvaluateResult(score=float(json.loads(messages[-1].content)["answer"] == ground_truth))
    except Exception as error:  # noqa: BLE001
        return EvaluateResult(score=0.0, reason=f"error: {error}")
