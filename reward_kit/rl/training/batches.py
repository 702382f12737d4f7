"""A batch on its way: its groups are rolled out, scored as soon as each is over, and handed on once they are scored."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import anyio.abc

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.rl.trainer import Trainer
from reward_kit.rl.training.collecting import Asked
from reward_kit.rl.training.meter import SCORING, WAIT


class Group(NamedTuple):
    """The episodes of one sample, with their scores.

    Attributes:
        place: in the order in which its batch was asked for.
        episodes: (G,) its episodes.
        scored: (G,) their scores, or why there are none.
    """

    place: int
    episodes: list[SingleAgentEpisode]
    scored: list[Scored]


class BatchOnItsWay:
    """Groups between their rollout and their scores.

    Args:
        trainer: collects and scores.
        tasks: live as long as scores may be waited for.

    Attributes:
        episodes: of the groups whose rollout is over and that were not handed on, by their place.
    """

    def __init__(self, trainer: Trainer, tasks: anyio.abc.TaskGroup) -> None:
        self.episodes: dict[int, list[SingleAgentEpisode]] = {}
        self._trainer, self._tasks = trainer, tasks
        self._ready: asyncio.Queue[Group] = asyncio.Queue()
        self._asked = self._handed_on = 0
        self._first_call = math.inf

    @property
    def outstanding(self) -> int:
        """How many groups were asked for and not handed on."""
        return self._asked - self._handed_on

    async def roll_out(self, asked: Sequence[Asked]) -> None:
        """Collect these groups too; the scores of each are asked for as soon as it is over."""
        first, self._asked = self._asked, self._asked + len(asked)

        async def finished(place: int, episodes: list[SingleAgentEpisode]) -> None:
            self._trainer.meter.add_collected(episodes)
            self.take_over(first + place, episodes)

        with self._trainer.meter.time("collect"):
            await self._trainer.collector.collect(self._trainer.worker, asked, finished)

    def restore(self, groups: Sequence[list[SingleAgentEpisode]]) -> None:
        """Go on with groups that were rolled out before a resume."""
        first, self._asked = self._asked, self._asked + len(groups)
        for place, episodes in enumerate(groups):
            self.take_over(first + place, episodes)

    def take_over(self, place: int, episodes: list[SingleAgentEpisode]) -> None:
        """The rollout of a group is over: have it scored."""
        self.episodes[place] = episodes
        self._tasks.start_soon(self._score, place)

    async def _score(self, place: int) -> None:
        episodes, trainer = self.episodes[place], self._trainer
        requests = [ScoringRequest.of(episode, trainer.worker.task_definition) for episode in episodes]
        self._first_call = min(self._first_call, time.perf_counter())
        scored = await trainer.reward_agent.score_all(requests, len(requests))
        self._ready.put_nowait(Group(place, episodes, scored))

    async def next_group(self) -> Group:
        """The next group that has its scores, whichever it is."""
        meter = self._trainer.meter
        with meter.time(WAIT):
            group = await self._ready.get()
        self._handed_on += 1
        del self.episodes[group.place]
        if not self.outstanding:
            meter.add_seconds(SCORING, time.perf_counter() - self._first_call)
            self._first_call = math.inf
        return group
