"""The credit of an episode's steps against the contract: each step has some, or none has where it is unscored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reward_kit.agent.models import StepData
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.tokens.checking.findings import Found

Credited = StepData | Mapping[str, Any]
"""A step with its credit: `StepData`, or a line of `credit.jsonl`."""

_SAME = 1e-9


class _Credit(NamedTuple):
    """What is said of one step; None where nothing is."""

    step: Any
    advantage: float | None
    return_to_go: float | None
    episode_advantage: float | None
    group_id: str | None
    reward: float | None = None
    environment_reward: float | None = None
    is_view: bool = False


def _credit(step: Credited) -> _Credit:
    if not isinstance(step, StepData):
        step_index, advantage, return_to_go = step.get("step"), step.get("A"), step.get("return_to_go")
        return _Credit(step_index, advantage, return_to_go, step.get("A_E"), step.get("group_id"))
    info = step.step_info
    return _Credit(
        step=step.system_step_index,
        advantage=step.advantage,
        return_to_go=step.return_to_go,
        episode_advantage=info.get("A_E"),
        group_id=info.get("group_id"),
        reward=step.base_reward,
        environment_reward=info.get("environment_reward"),
        is_view="environment_reward" in info,
    )


def check_credit(found: Found, episode: SingleAgentEpisode, steps: Sequence[Credited], scored: bool | None) -> None:
    """Check what an estimator said of one episode.

    Args:
        found: gets the findings.
        episode: the record.
        steps: its steps with credit.
        scored: whether the episode has a score; None where that is not known.
    """
    per_step = [_credit(step) for step in steps]
    if [credit.step for credit in per_step] != list(range(len(episode))):
        named = [credit.step for credit in per_step[:8]]
        found.error(
            "credit-steps",
            f"{len(episode)} steps and credit for {len(per_step)} of them, in the order {named}; the credit belongs to "
            "another episode, or to an earlier attempt",
        )
        return
    _check_joined(found, episode, per_step)
    if facts_of(episode).get("failure"):
        scored = False
    if scored is False:
        _check_unscored(found, per_step)
    elif any(_is_credited(credit) for credit in per_step) or scored:
        _check_scored(found, per_step)


def _is_credited(credit: _Credit) -> bool:
    return credit.advantage is not None or credit.return_to_go is not None


def _check_joined(found: Found, episode: SingleAgentEpisode, per_step: Sequence[_Credit]) -> None:
    """The credit is this episode's."""
    group, rewards = facts_of(episode).get("group_id"), episode.environment_rewards()
    for t, credit in enumerate(per_step):
        if group is not None and credit.group_id is not None and credit.group_id != group:
            found.error(
                "group-id",
                f"credited in group {credit.group_id!r}, and the episode is of {group!r}; its baseline is another's",
                step=t,
            )
            return
        if credit.is_view and credit.environment_reward != rewards[t] and not _are_nan(credit, rewards[t]):
            found.error(
                "environment-reward",
                f"the step has the environment's reward {credit.environment_reward} and the record {rewards[t]}; "
                "rewards moved by one step, or were changed after the episode (a view is never written back)",
                step=t,
            )
            return


def _are_nan(credit: _Credit, reward: float | None) -> bool:
    return credit.environment_reward != credit.environment_reward and reward != reward


def _check_unscored(found: Found, per_step: Sequence[_Credit]) -> None:
    for t, credit in enumerate(per_step):
        if credit.advantage is not None:
            found.error(
                "advantage-unscored",
                f"the episode is unscored and the step has the advantage {credit.advantage:.4g}; a missing score "
                "counted as 0: unscored is None and takes no part",
                step=t,
            )
            return


def _check_scored(found: Found, per_step: Sequence[_Credit]) -> None:
    without = [t for t, credit in enumerate(per_step) if credit.advantage is None]
    if without and len(without) < len(per_step):
        found.error(
            "credit-missing",
            f"the step has no advantage and {len(per_step) - len(without)} others have; all steps of a scored episode "
            "are credited, those of an unscored one are not",
            step=without[0],
        )
        return
    for t, credit in enumerate(per_step):
        numbers = {"advantage": credit.advantage, "return": credit.return_to_go, "base reward": credit.reward}
        for name, value in numbers.items():
            if value is not None and not math.isfinite(value):
                found.error(
                    "credit-not-finite",
                    f"its {name} is {value}; a score was NaN, or a spread of 0 was divided by",
                    step=t,
                )
                return
    known = [(t, credit.episode_advantage) for t, credit in enumerate(per_step) if credit.episode_advantage is not None]
    for t, value in known:
        if abs(value - known[0][1]) > _SAME * max(1.0, abs(value)):
            found.error(
                "episode-advantage-varies",
                f"A_E is {value:.6g} here and {known[0][1]:.6g} in step {known[0][0]}; it is one number for the whole "
                "trajectory: the baseline was taken over steps",
                step=t,
            )
            return
