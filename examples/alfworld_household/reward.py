"""Success of the chore, and a reward for each step that reaches a milestone."""

from __future__ import annotations

from typing import Any

from reward_kit import (
    EvaluateResult,
    MetricResult,
    StepData,
    StepOutput,
    reward_function,
)

MILESTONE = 0.1
"""Step reward per milestone: the object found, taken, cleaned, heated, cooled or lit, and placed."""


@reward_function
def chore_done(messages: list, step_data: list[StepData], state: Any) -> EvaluateResult:
    """Return 1 if the goal is reached, else 0; step rewards are the environment's plus milestones."""
    steps = [step_output(step) for step in step_data]
    reached = state["milestones"]
    metrics = {name: milestone(name, reached) for name in ("found", "taken")}
    reason = f"{state['goal']} {'done' if state['won'] else 'not done'} in {len(steps)} steps"
    return EvaluateResult(score=float(state["won"]), reason=reason, metrics=metrics, step_outputs=steps)


@reward_function
def goal_reached(messages: list, state: Any) -> EvaluateResult:
    """Return 1 if the goal is reached, else 0, without step rewards. Used in training."""
    return EvaluateResult(score=float(state["won"]), reason=state["goal"])


def milestone(name: str, reached: dict[str, int]) -> MetricResult:
    """Return whether a milestone was reached, and when."""
    when = f"at command {reached[name]}" if name in reached else "never"
    return MetricResult(score=float(name in reached), reason=when)


def step_output(step: StepData) -> StepOutput:
    """Return the reward of a step."""
    reached = [name for call in step.step_info.get("tools", []) for name in call.get("milestones", [])]
    reward = (step.step_info["environment_reward"] or 0.0) + MILESTONE * len(reached)
    return StepOutput(step_index=step.system_step_index, base_reward=reward, reason=", ".join(reached) or "nothing new")
