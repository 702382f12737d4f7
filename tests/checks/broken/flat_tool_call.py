"""A ground truth that is not nested matches nothing: reward-kit 0.4.1, exact_tool_match and its README."""

from __future__ import annotations

from typing import Any

from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: dict[str, Any]) -> EvaluateResult:
    calls = messages[-1].tool_calls if messages else None
    made = [{"name": call.function.name, "arguments": call.function.arguments} for call in calls or ()]
    return EvaluateResult(score=float(made == ground_truth.get("tool_calls", {})))
