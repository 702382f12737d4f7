"""Refuses what no step of several agents can hold, before anything of it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_kit.episodes.multi_agent_given import Flags
from reward_kit.episodes.multi_agent_reading import ALL, MultiAgentRecord
from reward_kit.episodes.reward_values import check_reward
from reward_kit.errors import EpisodeError, did_you_mean


def check_step(
    record: MultiAgentRecord,
    observations: Mapping[Any, Any],
    actions: Mapping[Any, Any],
    rewards: Mapping[Any, Any],
    flags: Flags,
) -> None:
    """Check what a step of the environment says of several agents; each agent's own part is its track's to check.

    Raises:
        EpisodeError: the episode has not begun or is over, an agent acts that has seen nothing, a reward is no number,
            or a flag is nobody's.
    """
    if record.is_terminated or record.is_truncated:
        raise EpisodeError(f"episode {record.id_} is over and takes no further step; it has {record._size()}")
    tracks = record._tracks
    if not tracks and not record.env_t and record._start_time is None:
        raise EpisodeError(f"episode {record.id_}: call add_env_reset before add_env_step")
    if not actions.keys() <= tracks.keys():
        _refuse_strangers(record, actions)
    for agent, reward in rewards.items():
        if type(reward) is not float and reward is not None:
            check_reward(reward, record.id_, len(record), agent)
    if flags.terminated or flags.truncated:
        _check_flags(record, flags, {*observations, *rewards})


def _refuse_strangers(record: MultiAgentRecord, actions: Mapping[Any, Any]) -> None:
    for agent, action in actions.items():
        if agent not in record.agent_ids and action is not None:
            near = did_you_mean(str(agent), map(str, record.agent_ids))
            raise EpisodeError(
                f"agent {agent!r} acts and has seen nothing yet; its first observation comes before{near}"
            )


def _check_flags(record: MultiAgentRecord, flags: Flags, entering: set[Any]) -> None:
    """An environment may name agents that never entered, as going on or at the end of all; nobody else ends."""
    if any(each.get(ALL) for each in flags):
        return
    for name, given in (("terminateds", flags.terminated), ("truncateds", flags.truncated)):
        for agent, flag in given.items():
            if flag and agent not in entering and not record.knows(agent):
                near = did_you_mean(str(agent), [ALL, *map(str, record.agent_ids)])
                raise EpisodeError(
                    f"episode {record.id_}, step {len(record)}: {name} ends {agent!r}, which is no agent here{near}"
                )
