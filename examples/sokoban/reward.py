"""Success on the board, with a reward for pushing boxes onto goals."""

from __future__ import annotations

from typing import Any

from reward_kit import (
    EvaluateResult,
    MetricResult,
    StepData,
    StepOutput,
    reward_function,
)

BOX = 0.1
"""Step reward for a box pushed onto a goal, subtracted for a box pushed off."""


@reward_function
def solved(messages: list, step_data: list[StepData], state: Any) -> EvaluateResult:
    """Return 1 if all boxes are on goals, else 0; step rewards are the environment's plus those of boxes."""
    steps, before = [], state["level"].count("*")
    for step in step_data:
        after = boxes_on_goals(step, before)
        reward = (step.step_info["environment_reward"] or 0.0) + BOX * (after - before)
        steps.append(StepOutput(step_index=step.system_step_index, base_reward=reward))
        before = after
    done, placed, boxes, shortest = (state[key] for key in ("solved", "boxes_on_goals", "boxes", "shortest_solution"))
    efficiency = shortest / state["moves"] if done else 0.0
    metrics = {
        "boxes_on_goals": MetricResult(score=placed / boxes, reason=f"{placed} of {boxes}"),
        "efficiency": MetricResult(score=efficiency, reason=f"the shortest solution has {shortest} moves"),
    }
    reason = f"{'solved' if done else 'not solved'} in {state['moves']} moves"
    return EvaluateResult(score=float(done), reason=reason, metrics=metrics, step_outputs=steps)


def boxes_on_goals(step: StepData, before: int) -> int:
    """Return the number of boxes on goals after a step, or `before` if it made no move."""
    counts = [call["boxes_on_goals"] for call in step.step_info.get("tools", []) if "boxes_on_goals" in call]
    return counts[-1] if counts else before
