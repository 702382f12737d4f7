"""Success on the board."""

from __future__ import annotations

from typing import Any

from reward_kit import EvaluateResult, reward_function


@reward_function
def solved(messages: list, state: Any) -> EvaluateResult:
    """Return 1 if the box is on its goal, else 0."""
    return EvaluateResult(score=float(state["solved"]))
