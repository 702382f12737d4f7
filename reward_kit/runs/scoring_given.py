"""A reward made ready for episodes that are there already: `score`, `rescore`, and the same from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pydantic

from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.scoring import Reward, check_parameters, check_truth
from reward_kit.runs.overrides import overlaid
from reward_kit.validation import describe_validation_error

_OF_REWARD = ("sandbox", "reward_options")


def definition_for_scores(
    known: Mapping[str, Any], reward: str, changes: Mapping[str, Any], pass_threshold: float | None
) -> TaskDefinitionModel:
    """What scores are given by. Walls and options of a run were chosen for its own reward, and not for this one.

    Args:
        known: keys of the task that the episodes were collected for.
        reward: FILE.py:FUNCTION.
        changes: dotted keys of a task file, with their values.
        pass_threshold: a score of this or more passes; None leaves the task's.

    Raises:
        ConfigError: a key has nothing to do with scores, or a value is wrong.
    """
    known = {name: value for name, value in known.items() if name not in _OF_REWARD}
    for key in changes:
        if key != "limits.reward_time_s" and key.partition(".")[0] not in _OF_REWARD:
            raise ConfigError(f"-T {key}: a score has limits.reward_time_s, sandbox and reward_options, and no other")
    named: dict[str, Any] = {"reward_function_path": reward}
    if pass_threshold is not None:
        named["pass_threshold"] = pass_threshold
    try:
        return TaskDefinitionModel.model_validate({**overlaid(known, changes), **named})
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, TaskDefinitionModel)
        raise ConfigError("\n".join(f"-T {line}" for line in problems)) from None


def check_reward(reward: Reward, facts: Iterable[Mapping[str, Any]]) -> None:
    """As `run` does of its samples: a reward that would break on every row, or could be right on none, is refused.

    Args:
        reward: the reward.
        facts: of each episode, at least its `ground_truth` and its `sample`.

    Raises:
        ConfigError: it asks for what nobody gives.
    """
    check_parameters(reward)
    truths, fields = [], {"messages"}
    for fact in facts:
        truths.append(fact.get("ground_truth"))
        fields |= (fact.get("sample") or {}).keys()
    check_truth(reward, truths, sorted(fields), "row")
