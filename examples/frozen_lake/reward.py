"""Success at the goal, with the environment's reward for each step."""

from __future__ import annotations

from reward_kit import EvaluateResult, StepData, StepOutput, reward_function


@reward_function
def reached_goal(messages: list, environment_return: float | None, step_data: list[StepData]) -> EvaluateResult:
    """Return 1 if the goal is reached, else 0, and the environment's reward of each step."""
    steps = [
        StepOutput(step_index=step.system_step_index, base_reward=step.step_info["environment_reward"] or 0.0)
        for step in step_data
    ]
    reached = environment_return is not None and environment_return >= 1.0  # None without any action
    reason = "reached the goal" if reached else "did not reach the goal"
    return EvaluateResult(score=float(reached), reason=f"{reason} in {len(steps)} steps", step_outputs=steps)
