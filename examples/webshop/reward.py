"""WebShop's reward of the purchase, computed from the final state."""

from __future__ import annotations

from typing import Any

from reward_kit import (
    EvaluateResult,
    MetricResult,
    StepData,
    StepOutput,
    reward_function,
)
from reward_kit.environments import Purchase, ShoppingGoal, match_purchase


@reward_function
def right_purchase(messages: list, step_data: list[StepData], state: Any) -> EvaluateResult:
    """Return WebShop's reward of the purchase, 0 without one; the metric `success` is 1 for the full reward."""
    steps = [
        StepOutput(step_index=step.system_step_index, base_reward=step.step_info["environment_reward"] or 0.0)
        for step in step_data
    ]
    if state["purchase"] is None:
        return EvaluateResult(score=0.0, reason="nothing was bought", metrics=success_metric(0.0), step_outputs=steps)
    goal, purchase = ShoppingGoal(**state["goal"]), Purchase(**state["purchase"])
    match = match_purchase(goal, purchase)
    reason = (
        f"{purchase.title}: {match.attributes} of {len(goal.attributes)} attributes, {match.options} of "
        f"{len(goal.options)} options, price {'met' if match.price else 'missed'}, type factor {match.r_type}"
    )
    return EvaluateResult(score=match.reward, reason=reason, metrics=success_metric(match.reward), step_outputs=steps)


def success_metric(reward: float) -> dict[str, MetricResult]:
    """Return the success metric, whose mean WebShop reports in addition to the mean reward."""
    success = reward == 1.0
    return {"success": MetricResult(score=float(success), reason="all is met" if success else "not all is met")}
