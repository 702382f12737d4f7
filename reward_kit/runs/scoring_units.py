"""Score the episodes of a run while it is running: one episode at a time, or a complete group for a batch reward."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.abc

from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest
from reward_kit.reward_agent.tickets import Ticket
from reward_kit.runs.inputs import scorer_hash
from reward_kit.typed_interface import EvaluationMode

_MOST_LOADED = 256  # The maximum number of stored units in memory, far above the scoring concurrency


@dataclass(frozen=True, slots=True)
class StoppedEpisode:
    """An episode that has stopped, with or without an error.

    Attributes:
        rollout_id: the id of the episode.
        attempt: the attempt number.
        index: the index within the group.
        request: a function that creates the scoring request, or None if the episode ended with an error.
        score: the line of `scores.jsonl` for this attempt, or None if the attempt is unscored.
    """

    rollout_id: str
    attempt: int
    index: int
    request: Callable[[], ScoringRequest] | None
    score: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ScoringUnit:
    """Episodes that are scored in one call, in the order of the group. Empty if all of them ended with an error.

    Attributes:
        episodes: the episodes that did not end with an error.
        group: the hash of the ids and attempts on which the scores of a batch reward depend; None for other rewards.
    """

    episodes: Sequence[StoppedEpisode]
    group: str | None = None

    @property
    def is_scored(self) -> bool:
        """True if each episode has a score that was computed for exactly this group.

        The whole group is scored again if one of its episodes has no score or was run again.
        """
        lines = [episode.score for episode in self.episodes]
        return all(line is not None and line.get("scored_group") == self.group for line in lines)

    def requests(self) -> list[ScoringRequest]:
        """Return the request for each episode."""
        return [episode.request() for episode in self.episodes if episode.request is not None]


class ScoringUnits:
    """A collector of stopped episodes that returns complete scoring units.

    Args:
        mode: the mode of the reward.
        group_size: the number of episodes per group, including failed ones; None if the number is known only at the end
            of the run.
    """

    def __init__(self, mode: EvaluationMode, group_size: int | None) -> None:
        self._mode, self._group_size = mode, group_size
        self._groups: defaultdict[str, dict[int, StoppedEpisode]] = defaultdict(dict)

    def add(self, group_id: str, episode: StoppedEpisode) -> list[ScoringUnit]:
        """Add a stopped episode, and return the units that are complete as a result."""
        if self._mode == "pointwise":
            return [ScoringUnit([episode])] if episode.request is not None else []
        group = self._groups[group_id]
        group[episode.index] = episode
        if self._group_size is None or not all(index in group for index in range(self._group_size)):
            return []
        return [_make_unit(self._groups.pop(group_id))]

    def remaining(self) -> list[ScoringUnit]:
        """Return the incomplete groups as units at the end of the run."""
        groups, self._groups = self._groups, defaultdict(dict)
        return [_make_unit(group) for group in groups.values()]


def _make_unit(group: Mapping[int, StoppedEpisode]) -> ScoringUnit:
    episodes = [episode for _, episode in sorted(group.items()) if episode.request is not None]
    identity = json.dumps([(episode.rollout_id, episode.attempt) for episode in episodes])
    return ScoringUnit(episodes, hashlib.sha256(identity.encode("ascii")).hexdigest()[:16])


def score_record(scored: Scored, reward: Reward, scorer_hash: str, group: str | None = None) -> dict[str, Any]:
    """Return the line of `scores.jsonl` for one score; `group` identifies the episodes scored together."""
    output = {"stdout": scored.stdout, "stderr": scored.stderr, "is_output_cut": scored.is_output_cut}
    return {
        "rollout_id": scored.rollout_id,
        "scorer": {"id": reward.id, "hash": scorer_hash},
        **({"scored_group": group} if group is not None else {}),
        "score": scored.score,
        "result": scored.result.model_dump(mode="json", exclude_none=True) if scored.result else None,
        "failure": scored.failure.to_json() if scored.failure else None,
        "sandbox": dict(scored.sandbox) if scored.sandbox else None,
        **({"output": output} if scored.stdout or scored.stderr else {}),
        "timing": {"duration_s": round(scored.duration_s, 6)},
    }


class RunClock:
    """A clock that counts the seconds since the start of a run, even if an earlier process started it.

    Create the clock in the event loop. It is monotonic within a process, even if the system clock changes.

    Args:
        started_at: the time at which the run started.
    """

    def __init__(self, started_at: datetime.datetime) -> None:
        self._loop = asyncio.get_running_loop()
        elapsed = datetime.datetime.now(datetime.UTC) - started_at
        self._zero_s = self._loop.time() - elapsed.total_seconds()

    def timing(self, ticket: Ticket, index: int) -> dict[str, Any]:
        """Return the times of a result that has just been completed.

        These are the time of its submission, and the start and end of each call.
        """
        return ticket.timing(index, self._zero_s) | {"done_s": round(self._loop.time() - self._zero_s, 6)}


class UnitScoring:
    """The submission of scoring units to the reward agent. Each result is recorded when it arrives.

    Args:
        reward: the reward of the run.
        agent: the open agent of this reward.
        takers: the task group that receives the results.
        clock: the clock of the run.
        record: a function that is called with each score and its line for `scores.jsonl`.
        max_concurrency: the concurrency of the run.
    """

    def __init__(
        self,
        reward: Reward,
        agent: AsyncRewardAgent,
        takers: anyio.abc.TaskGroup,
        clock: RunClock,
        record: Callable[[Scored, dict[str, Any]], None],
        max_concurrency: int,
    ) -> None:
        self._reward, self._agent, self._takers, self._clock, self._record = reward, agent, takers, clock, record
        self._hash = scorer_hash(reward)
        self._group_of: dict[str, str | None] = {}
        self._room = anyio.Semaphore(max(_MOST_LOADED, 2 * max_concurrency))

    async def submit_all(self, waiting: deque[ScoringUnit]) -> None:
        """Submit all waiting units."""
        while waiting:
            await self._submit(waiting.popleft())
            self._takers.start_soon(self._take)

    async def submit_stored(self, units: Iterable[ScoringUnit], is_stopped: Callable[[], bool]) -> None:
        """Submit the units from an earlier process until the run is stopped.

        The number of units in memory is bounded.
        """
        for unit in units:
            if is_stopped():
                return
            await self._room.acquire()
            await self._submit(unit)
            self._takers.start_soon(self._take, self._room.release)

    async def _submit(self, unit: ScoringUnit) -> None:
        requests = unit.requests()
        self._group_of.update((request.rollout_id, unit.group) for request in requests)
        await self._agent.submit(requests, len(requests))

    async def _take(self, release: Callable[[], None] = lambda: None) -> None:
        try:
            chunk = await self._agent.get_group()
            for index, scored in zip(chunk.data_idxs, chunk.extra_infos, strict=True):
                group = self._group_of.pop(scored.rollout_id)
                record = score_record(scored, self._reward, self._hash, group)
                record["timing"] |= self._clock.timing(chunk.ticket, index)
                self._record(scored, record)
        finally:
            release()
