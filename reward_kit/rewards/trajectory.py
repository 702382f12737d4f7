"""Rewards for the course of an episode: environment rewards, number of steps, failed tool calls and milestones.

Tool calls and milestones are read from the recorded steps instead of the messages. A call has failed if its tool
reported an error. A milestone is reached in the step whose call or result matches it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pydantic

from reward_kit.agent.models import StepData
from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult, StepOutput
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.option_types import Finite
from reward_kit.typed_interface import reward_function


def _check_range(options: Mapping[str, Any]) -> None:
    low, high = options["low"], options["high"]
    if not low < high:
        raise ConfigError(f"option 'low' must be less than 'high', got {low:g} and {high:g}")


@reward_function
@checks_options(_check_range)
def environment_score(
    messages: list[Message], environment_return: float | None = None, *, low: Finite = 0.0, high: Finite = 1.0
) -> EvaluateResult:
    """Score the sum of the environment rewards, which is scaled linearly from 0 at `low` to 1 at `high` and clipped.

    If the environment returned no reward, the episode is unscored.

    Options:
        low: the sum that scores 0.
        high: the sum that scores 1.
    """
    _check_range({"low": low, "high": high})
    if environment_return is None:
        raise RewardError("environment_score: the environment returned no reward")
    score = min(max((environment_return - low) / (high - low), 0.0), 1.0)
    return EvaluateResult(score=score, reason=f"the environment returned {environment_return:g}")


def _check_steps(options: Mapping[str, Any]) -> None:
    best, worst = options["best"], options["worst"]
    if not 1 <= best < worst:
        raise ConfigError(f"option 'best' must be at least 1 and less than 'worst', got {best} and {worst}")


@reward_function
@checks_options(_check_steps)
def few_steps(messages: list[Message], assistant_turns: list[int], *, best: int = 1, worst: int = 50) -> EvaluateResult:
    """Score 1 for at most `best` actions and 0 for at least `worst` actions. In between, the score decreases linearly.

    An agent that has not acted scores 0. This reward does not measure success, so combine it with a `gate`.
    """
    _check_steps({"best": best, "worst": worst})
    count = len(assistant_turns)
    score = min(max((worst - count) / (worst - best), 0.0), 1.0) if count else 0.0
    return EvaluateResult(score=score, reason=f"{count} actions (best {best}, worst {worst})")


@reward_function
def no_tool_errors(messages: list[Message], step_data: list[StepData], *, each: bool = True) -> EvaluateResult:
    """Score the share of tool calls that did not fail. The share within each step is that step's reward.

    A call fails if the tool is unknown, if the arguments are invalid, or if the tool raises an error. Calls that were
    not executed because the episode had ended are ignored. If there are no calls, the score is 1.

    Options:
        each: True to score the share, or False to score 0 if any call failed.
    """
    failed = {
        step.system_step_index: ["error" in tool for tool in _outcomes(step) if not tool.get("skipped")]
        for step in step_data
    }
    wrong, total = sum(map(sum, failed.values())), sum(map(len, failed.values()))
    share = 1.0 - wrong / total if total else 1.0
    outputs = [
        StepOutput(step_index=index, base_reward=1.0 - sum(calls) / len(calls))
        for index, calls in failed.items()
        if calls
    ]
    score = share if each else float(wrong == 0)
    return EvaluateResult(score=score, reason=f"{wrong} of {total} tool calls failed", step_outputs=outputs or None)


class Milestone(pydantic.BaseModel):
    """A milestone of an episode.

    A milestone is reached either by a tool call or by an observation.

    Attributes:
        name: the milestone's name in metrics and reasons.
        tool: the name of the tool whose successful call reaches the milestone. If None, `observed` is required.
        arguments: the arguments and values that the call must contain. The call may contain other arguments as well.
        observed: a string. The milestone is reached if a tool result or a message from the environment contains it. If
            None, `tool` is required.
        weight: the weight of the milestone relative to the others.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(min_length=1)
    tool: str | None = None
    arguments: dict[str, Any] = pydantic.Field(default_factory=dict)
    observed: str | None = pydantic.Field(default=None, min_length=1)
    weight: float = pydantic.Field(default=1.0, gt=0, allow_inf_nan=False)

    @pydantic.model_validator(mode="after")
    def _says_how(self) -> Milestone:
        if (self.tool is None) == (self.observed is None):
            raise ValueError("a milestone must have either tool or observed")
        if self.arguments and self.tool is None:
            raise ValueError("arguments requires tool")
        return self


def _check_reach(options: Mapping[str, Any]) -> None:
    reach = options["reach"]
    if not reach:
        raise ConfigError("option 'reach' must have at least one milestone")
    if len({milestone.name for milestone in reach}) < len(reach):
        raise ConfigError("option 'reach': two entries have the same name; rename one of them")


@reward_function
@checks_options(_check_reach)
def milestones(
    messages: list[Message], step_data: list[StepData], *, reach: tuple[Milestone, ...] = (), ordered: bool = False
) -> EvaluateResult:
    """Score the weighted share of milestones that were reached.

    The step in which a milestone is first reached earns the milestone's weight as a step reward, so the action gets the
    credit. Only successful calls by the agent and their results count; the instructions do not.

    Options:
        reach: the milestones, each of the form `{name, tool, arguments}` or `{name, observed}`, with an optional
            `weight`.
        ordered: True to count a milestone only if all earlier milestones have been reached. Milestones that are
            reached in the same step count as reached in order.

    Example, in a task file:
        reward_function_path: reward_kit.rewards:milestones
        reward_options:
          reach:
            - {name: found the mug, observed: you see a mug}
            - {name: took it, tool: take, arguments: {thing: mug}, weight: 2}
    """
    _check_reach({"reach": reach})
    total = sum(milestone.weight for milestone in reach)
    reached = _reached(step_data, reach, ordered)
    metrics = {
        one.name: MetricResult(
            score=float(one.name in reached),
            reason=f"reached in step {reached[one.name]}" if one.name in reached else "not reached",
        )
        for one in reach
    }
    gained: dict[int, float] = {}
    for one in reach:
        if one.name in reached:
            gained[reached[one.name]] = gained.get(reached[one.name], 0.0) + one.weight / total
    steps = [StepOutput(step_index=index, base_reward=reward) for index, reward in sorted(gained.items())]
    reason = f"{len(reached)} of {len(reach)} milestones were reached"
    score = min(1.0, sum(one.weight for one in reach if one.name in reached) / total)
    return EvaluateResult(score=score, reason=reason, metrics=metrics, step_outputs=steps or None)


def _reached(steps: Sequence[StepData], reach: Sequence[Milestone], ordered: bool) -> dict[str, int]:
    """Return a mapping from each reached milestone to the step in which it was first reached."""
    reached: dict[str, int] = {}
    for step in steps:
        action, after = _after_action(step)
        # the successful calls, with their results
        calls: list[tuple[str, Mapping[str, Any], str]] = []
        made = (action.tool_calls if action is not None else None) or []
        results = [message.text for message in after if message.role == "tool"]
        for call, outcome, answer in zip(made, _outcomes(step), results, strict=False):
            if "error" not in outcome and not outcome.get("skipped"):
                arguments: Any = {}
                with suppress(ValueError, RecursionError):
                    arguments = json.loads(call.function.arguments)
                calls.append((call.function.name, arguments if isinstance(arguments, dict) else {}, answer))
        answers = [message.text for message in after if message.role == "user"] + [answer for _, _, answer in calls]
        for one in reach:
            if one.name in reached:
                continue
            if one.observed is not None:
                is_reached = any(one.observed in answer for answer in answers)
            else:
                is_reached = any(
                    name == one.tool and all(k in given and given[k] == v for k, v in one.arguments.items())
                    for name, given, _ in calls
                )
            if is_reached:
                reached[one.name] = step.system_step_index
            elif ordered:
                break
    return reached


def _after_action(step: StepData) -> tuple[Message | None, list[Message]]:
    """Return the message of the action and the messages after it."""
    answers: list[Message] = []
    for message in reversed(step.resulting_messages_history):
        if message.role == "assistant":
            return message, answers[::-1]
        answers.append(message)
    return None, []


def _outcomes(step: StepData) -> list[dict[str, Any]]:
    outcomes = step.step_info.get("tools")
    return [tool for tool in outcomes if isinstance(tool, dict)] if isinstance(outcomes, list) else []
