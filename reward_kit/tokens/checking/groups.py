"""The episodes of a batch beside one another: ids are unique, and a group begins from one state."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.tokens.checking.findings import EpisodeFinding, Found


class _Member(NamedTuple):
    """What is kept of the first episode of a group, to compare the others with."""

    rollout_id: str
    sample_id: Any
    policy: Any
    environment_seed: int | None
    start_key: str | None


class BatchChecks:
    """Sees episodes one after another and keeps a line of each group, so that a run of any length can be checked."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._groups: dict[str, _Member] = {}

    def add(self, episode: SingleAgentEpisode) -> list[EpisodeFinding]:
        """What is wrong with an episode beside those that were added before."""
        found, facts = Found.about_episode(episode.id_), facts_of(episode)
        if (name := (episode.id_, facts.get("attempt") or 0)) in self._seen:
            found.error(
                "duplicate-rollout",
                "another episode of the batch has this id; scores and credit are joined by it: a row was repeated to "
                "fill a batch, or two runs share a seed",
            )
            return found.findings
        self._seen.add(name)
        _check_own_start(found, episode)
        group_id, member = facts.get("group_id"), _member(episode)
        if group_id is not None and (first := self._groups.setdefault(group_id, member)) is not member:
            is_verified = (facts.get("start") or {}).get("verified") is not False
            _check_group(found, group_id, first, member, is_verified)
        return found.findings


def _member(episode: SingleAgentEpisode) -> _Member:
    facts = facts_of(episode)
    seeds, start = facts.get("seeds") or {}, facts.get("start") or {}
    known = (facts.get("sample_id"), facts.get("policy"), seeds.get("environment"), start.get("state_key"))
    return _Member(episode.id_, *known)


def _check_own_start(found: Found, episode: SingleAgentEpisode) -> None:
    """The state in which the first action was taken is the one that the group's start was verified by."""
    key = (facts_of(episode).get("start") or {}).get("state_key")
    first = episode.get_infos(0).get("state_key") if len(episode) else None
    if key is not None and first is not None and key != first:
        found.error(
            "start-moved",
            f"it starts from the state {key} and acts first in {first}; something acted between the fork and the first "
            "action, or the key covers what should not count (time, session ids, noise)",
            step=0,
        )


def _check_group(found: Found, group_id: str, first: _Member, member: _Member, is_verified: bool) -> None:
    """A group is one policy on one sample from one start; the first thing that differs explains the rest."""
    if member.sample_id != first.sample_id:
        found.error(
            "mixed-groups",
            f"it is of sample {member.sample_id!r} and {first.rollout_id} of {first.sample_id!r}, both in group "
            f"{group_id!r}; their scores are compared although the tasks differ",
        )
    elif member.policy != first.policy:
        found.error(
            "mixed-groups",
            f"it is by {member.policy!r} and {first.rollout_id} by {first.policy!r}, both in group {group_id!r}; the "
            "baseline of one policy is another's",
        )
    elif None not in (member.start_key, first.start_key) and member.start_key != first.start_key:
        report = found.error if is_verified else found.warn
        report(
            "mixed-starts",
            f"it starts from the state {member.start_key} and {first.rollout_id} from {first.start_key}, both in group "
            f"{group_id!r}; the world was reset with another seed, or a fork does not copy its state",
        )
    elif None not in (member.environment_seed, first.environment_seed) and (
        member.environment_seed != first.environment_seed
    ):
        found.error(
            "mixed-seeds",
            f"its environment seed is {member.environment_seed} and that of {first.rollout_id} {first.environment_seed}"
            f", both in group {group_id!r}; the seed of the environment belongs to the group",
        )
