"""Is the board solved? And which pushes brought it nearer?"""

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
"""What a step earns for a box that it pushes onto a goal, and loses for one that it pushes off."""


@reward_function
def solved(messages: list, step_data: list[StepData], state: Any) -> EvaluateResult:
    """1 where every box is on a goal at the end, 0 otherwise; each step has its boxes and the environment's reward."""
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
    """How many boxes are on goals after a step; as many as before where it made no move."""
    counts = [call["boxes_on_goals"] for call in step.step_info.get("tools", []) if "boxes_on_goals" in call]
    return counts[-1] if counts else before
