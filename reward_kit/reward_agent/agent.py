"""`AsyncRewardAgent`: scores arrive while the machine works.

A batch is submitted, its calls run concurrently, and results come back as whole groups complete. This is the seam
between collecting and learning; where the calls run (in this process, in the sandbox, on another machine) is behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

import anyio
import anyio.abc

from reward_kit.errors import ConfigError, RewardError
from reward_kit.reward_agent.scoring import InProcessScorer, Scored, Scorer, ScoringRequest
from reward_kit.typed_interface import RewardSpec


class ScoredChunk(NamedTuple):
    """Results in one order: `data_idxs` counts over everything submitted, `rewards` are None where unscored."""

    data_idxs: list[int]
    rewards: list[float | None]
    extra_infos: list[Scored]


@dataclass(slots=True)
class Ticket:
    """One submitted batch. `results[i]` is that of its i-th request, None until it is there."""

    requests: Sequence[ScoringRequest]
    group_size: int
    first_index: int
    results: list[Scored | None] = field(default_factory=list)

    def complete_group(self, index: int) -> list[tuple[int, Scored]] | None:
        """The group that the `index`-th request is in, None while one of its results is missing."""
        start = index - index % self.group_size
        group = self.results[start : start + self.group_size]
        found = [(self.first_index + start + i, result) for i, result in enumerate(group) if result is not None]
        return found if len(found) == self.group_size else None


class AsyncRewardAgent:
    """Scores rollouts concurrently. Use it as an async context manager.

    Args:
        scorer: where rewards are called; a reward alone is called in this process.
        max_concurrency: calls in flight at a time.
        deadline_s: for one call of a reward in this process; what exceeds it is unscored with the class `timeout`. A
            scorer has limits of its own.

    Raises:
        ConfigError: a deadline is given beside a scorer.
    """

    def __init__(
        self, scorer: RewardSpec | Scorer, *, max_concurrency: int = 16, deadline_s: float | None = None
    ) -> None:
        if not isinstance(scorer, RewardSpec) and deadline_s is not None:
            raise ConfigError("deadline_s is for a reward in this process; give the scorer its own limit")
        self.scorer: Scorer = InProcessScorer(scorer, deadline_s) if isinstance(scorer, RewardSpec) else scorer
        self._limiter = anyio.Semaphore(max_concurrency)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._ready: list[tuple[int, Scored]] = []
        self._getting = anyio.Lock()
        self._submitted = self._delivered = 0

    async def __aenter__(self) -> Self:
        self._groups_in, self._groups_out = anyio.create_memory_object_stream[list[tuple[int, Scored]]](math.inf)
        await self.scorer.__aenter__()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = self._open_tasks()
        if error is not None:
            tasks.cancel_scope.cancel()
        try:
            # The error of the block is not handed over, since the task group would wrap it in an ExceptionGroup.
            await tasks.__aexit__(None, None, None)
        finally:
            self._tasks = None
            self._groups_in.close()
            self._groups_out.close()
            await self.scorer.__aexit__(kind, error, trace)

    async def submit(self, batch: Sequence[ScoringRequest], group_size: int = 1) -> Ticket:
        """Begin scoring a batch whose consecutive `group_size` requests form groups.

        Raises:
            ConfigError: the batch is no whole number of groups.
            RewardError: the agent is not open.
        """
        tasks = self._open_tasks()
        if group_size < 1 or len(batch) % group_size:
            raise ConfigError(f"a batch of {len(batch)} cannot be cut into groups of {group_size}")
        ticket = Ticket(batch, group_size, self._submitted, [None] * len(batch))
        self._submitted += len(batch)
        for index in range(len(batch)):
            tasks.start_soon(self._score, ticket, index)
        return ticket

    async def get(self, chunk_size: int) -> ScoredChunk:
        """The next `chunk_size` results, as whole groups complete.

        Raises:
            ConfigError: fewer have been submitted and not yet handed out, or the groups do not add up to `chunk_size`.
            RewardError: the agent is not open.
        """
        self._open_tasks()
        async with self._getting:
            if chunk_size > self._submitted - self._delivered:
                waiting = self._submitted - self._delivered
                raise ConfigError(f"get({chunk_size}) can never be met: {waiting} results are outstanding")
            while len(self._ready) < chunk_size:
                self._ready.extend(await self._groups_out.receive())
            if len(self._ready) > chunk_size:
                raise ConfigError(f"get({chunk_size}) would cut a group; {len(self._ready)} results make whole groups")
            taken, self._ready = self._ready, []
            self._delivered += len(taken)
        results = [result for _, result in taken]
        return ScoredChunk([index for index, _ in taken], [result.score for result in results], results)

    def _open_tasks(self) -> anyio.abc.TaskGroup:
        if self._tasks is None:
            raise RewardError("the reward agent is not open; use `async with AsyncRewardAgent(…)`")
        return self._tasks

    async def _score(self, ticket: Ticket, index: int) -> None:
        async with self._limiter:
            ticket.results[index] = await self.scorer.score(ticket.requests[index])
        if (group := ticket.complete_group(index)) is not None:
            self._groups_in.send_nowait(group)
