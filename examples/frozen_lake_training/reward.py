"""Did the agent reach the goal?"""

from __future__ import annotations

from reward_kit import EvaluateResult, reward_function


@reward_function
def reached_goal(messages: list, environment_return: float | None) -> EvaluateResult:
    """1 at the goal, 0 otherwise."""
    return EvaluateResult(score=float(environment_return or 0.0))
