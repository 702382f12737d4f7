"""Success at the goal."""

from __future__ import annotations

from reward_kit import EvaluateResult, reward_function


@reward_function
def reached_goal(messages: list, environment_return: float | None) -> EvaluateResult:
    """Return 1 if the goal is reached, else 0."""
    return EvaluateResult(score=float(environment_return or 0.0))
