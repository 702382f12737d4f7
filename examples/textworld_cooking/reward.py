"""Share of the game's points, with the points of each step."""

from __future__ import annotations

from typing import Any

from reward_kit import (
    EvaluateResult,
    MetricResult,
    StepData,
    StepOutput,
    reward_function,
)


@reward_function
def meal_eaten(messages: list, step_data: list[StepData], state: Any) -> EvaluateResult:
    """Return the share of the game's points, 1 for an eaten meal, and the points of each step."""
    steps = [
        StepOutput(step_index=step.system_step_index, base_reward=step.step_info["environment_reward"] or 0.0)
        for step in step_data
    ]
    end = "eaten" if state["won"] else "spoilt" if state["lost"] else "not ready"
    reason = f"the meal was {end} after {len(steps)} steps, with {state['score']} of {state['max_score']} points"
    won = MetricResult(score=float(state["won"]), reason=end)
    score = state["score"] / state["max_score"]
    return EvaluateResult(score=score, reason=reason, metrics={"won": won}, step_outputs=steps)
