"""What is scored together, and when: an episode once it stopped, or a group once the last of its episodes has."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.typed_interface import Mode


@dataclass(frozen=True, slots=True)
class Stopped:
    """An episode that is over.

    Attributes:
        rollout_id: names it.
        attempt: which one of it this is.
        index: its place in its group.
        request: makes what a reward is given; None where the episode broke, and is left out.
        score: its line of `scores.jsonl`, where it has one that counts.
    """

    rollout_id: str
    attempt: int
    index: int
    request: Callable[[], ScoringRequest] | None
    score: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ScoringUnit:
    """Episodes that one call scores, in the order of their group; there are none where all of them broke.

    Attributes:
        episodes: those that did not break.
        group: names these attempts of these episodes, since a batch reward judges each of them beside the others; None
            for a pointwise reward.
    """

    episodes: Sequence[Stopped]
    group: str | None = None

    @property
    def is_scored(self) -> bool:
        """Each of them has a score, given beside the very others that are here now.

        So a group is scored again, as a whole, where one of its episodes has no score or has run again since.
        """
        lines = [episode.score for episode in self.episodes]
        return all(line is not None and line.get("scored_group") == self.group for line in lines)

    def requests(self) -> list[ScoringRequest]:
        """What a reward is given of each."""
        return [episode.request() for episode in self.episodes if episode.request is not None]


class ScoringUnits:
    """Puts episodes together as they stop.

    Args:
        mode: of the reward.
        group_size: how many episodes a group has, broken ones included; None where only the end of all tells.
    """

    def __init__(self, mode: Mode, group_size: int | None) -> None:
        self._mode, self._group_size = mode, group_size
        self._groups: defaultdict[str, dict[int, Stopped]] = defaultdict(dict)

    def add(self, group_id: str, episode: Stopped) -> list[ScoringUnit]:
        """What can be scored now that this episode is over; nothing while others of its group are still to come."""
        if self._mode == "pointwise":
            return [ScoringUnit([episode])] if episode.request is not None else []
        group = self._groups[group_id]
        group[episode.index] = episode
        if self._group_size is None or not all(index in group for index in range(self._group_size)):
            return []
        return [_together(self._groups.pop(group_id))]

    def rest(self) -> list[ScoringUnit]:
        """The groups that are there, as they are, where nothing more is to come."""
        groups, self._groups = self._groups, defaultdict(dict)
        return [_together(group) for group in groups.values()]


def _together(group: Mapping[int, Stopped]) -> ScoringUnit:
    whole = [episode for _, episode in sorted(group.items()) if episode.request is not None]
    named = json.dumps([(episode.rollout_id, episode.attempt) for episode in whole])
    return ScoringUnit(whole, hashlib.sha256(named.encode("ascii")).hexdigest()[:16])
