"""`AsyncRewardAgent`: scores arrive while the machine works.

A batch is submitted, its calls run concurrently, and results come back as whole groups complete. A pointwise reward is
called once for each rollout, a batch reward once for each group. This is the seam between collecting and learning;
where the calls run (in this process, in the sandbox, on another machine) is behind it.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import anyio
import anyio.abc

from reward_kit.errors import ConfigError, RewardError
from reward_kit.reward_agent.in_process import InProcessScorer, warn_unconfined
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest
from reward_kit.typed_interface import RewardSpec

_Result = TypeVar("_Result")


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
        scorer: where rewards are called; a reward alone is called in this process, also one that asks for walls: a
            warning says so.
        max_concurrency: calls in flight at a time; that of a group is one.
        deadline_s: for one call of a reward in this process; what exceeds it is unscored with the class `timeout`. A
            scorer has limits of its own.

    Raises:
        ConfigError: a deadline is given beside a scorer, or no call may be in flight.
    """

    def __init__(
        self, scorer: RewardSpec | Scorer, *, max_concurrency: int = 16, deadline_s: float | None = None
    ) -> None:
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency is at least 1, not {max_concurrency}")
        if isinstance(scorer, RewardSpec):
            warn_unconfined(scorer)
            scorer = InProcessScorer(scorer, deadline_s, max_threads=max_concurrency)
        elif deadline_s is not None:
            raise ConfigError("deadline_s is for a reward in this process; give the scorer its own limit")
        self.scorer: Scorer = scorer
        self._max_concurrency = max_concurrency
        self._tasks: anyio.abc.TaskGroup | None = None
        self._waiting: deque[tuple[Ticket, int, contextvars.Context]] = deque()
        self._workers = 0
        self._complete: deque[list[tuple[int, Scored]]] = deque()
        self._ready: deque[list[tuple[int, Scored]]] = deque()
        self._getting = anyio.Lock()
        self._submitted = self._delivered = 0

    async def __aenter__(self) -> Self:
        self._arrival = anyio.Event()
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
            self._waiting.clear()
            self._arrival.set()
            await self.scorer.__aexit__(kind, error, trace)

    async def submit(self, batch: Sequence[ScoringRequest], group_size: int = 1) -> Ticket:
        """Begin scoring a batch whose consecutive `group_size` requests form groups, which a batch reward sees as one.

        Raises:
            ConfigError: the batch is no whole number of groups.
            RewardError: the agent is not open.
        """
        tasks = self._open_tasks()
        if group_size < 1 or len(batch) % group_size:
            raise ConfigError(f"a batch of {len(batch)} cannot be cut into groups of {group_size}")
        ticket = Ticket(batch, group_size, self._submitted, [None] * len(batch))
        self._submitted += len(batch)
        context = contextvars.copy_context()
        starts = range(0, len(batch), group_size if self.scorer.mode == "batch" else 1)
        self._waiting.extend((ticket, start, context) for start in starts)
        for _ in range(min(len(starts), self._max_concurrency - self._workers)):
            self._workers += 1
            tasks.start_soon(self._work)
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
            there = sum(map(len, self._ready))
            while there < chunk_size:
                self._ready.append(await self._next_group())
                there += len(self._ready[-1])
            if there > chunk_size:
                raise ConfigError(f"get({chunk_size}) would cut a group; {there} results make whole groups")
            return self._hand_out(len(self._ready))

    async def get_group(self) -> ScoredChunk:
        """The next group that completes, whatever its size.

        Raises:
            ConfigError: all that was submitted has been handed out.
            RewardError: the agent is not open.
        """
        self._open_tasks()
        async with self._getting:
            if self._submitted == self._delivered:
                raise ConfigError("get_group() can never be met: 0 results are outstanding")
            if not self._ready:
                self._ready.append(await self._next_group())
            return self._hand_out(1)

    def _hand_out(self, groups: int) -> ScoredChunk:
        taken = [scored for _ in range(groups) for scored in self._ready.popleft()]
        self._delivered += len(taken)
        results = [result for _, result in taken]
        return ScoredChunk([index for index, _ in taken], [result.score for result in results], results)

    def _open_tasks(self) -> anyio.abc.TaskGroup:
        if self._tasks is None:
            raise RewardError("the reward agent is not open; use `async with AsyncRewardAgent(…)`")
        return self._tasks

    async def _next_group(self) -> list[tuple[int, Scored]]:
        while not self._complete:
            self._open_tasks()
            self._arrival = anyio.Event()
            await self._arrival.wait()
        return self._complete.popleft()

    async def _work(self) -> None:
        """Make one call after the other. A task for each of them would cost as much as a short reward."""
        in_groups = self.scorer.mode == "batch"
        try:
            while self._waiting:
                ticket, index, context = self._waiting.popleft()
                if in_groups:
                    group = ticket.requests[index : index + ticket.group_size]
                    scored = await _Turn(self.scorer.score_group(group), context)
                    for place, result in enumerate(scored, index):
                        ticket.results[place] = result
                else:
                    ticket.results[index] = await _Turn(self.scorer.score(ticket.requests[index]), context)
                if (complete := ticket.complete_group(index)) is not None:
                    self._complete.append(complete)
                    self._arrival.set()
        finally:
            self._workers -= 1


class _Turn(Generic[_Result]):
    """Awaits a coroutine as if it were a task: in a copy of a context, and others have their turn at least once."""

    def __init__(self, coroutine: Coroutine[Any, Any, _Result], context: contextvars.Context) -> None:
        self._coroutine, self._context = coroutine, context.copy()

    def __await__(self) -> Generator[Any, Any, _Result]:
        step, given, has_waited = self._coroutine.send, None, False
        while True:
            try:
                awaited = self._context.run(step, given)
            except StopIteration as end:
                if not has_waited:
                    yield None
                result: _Result = end.value
                return result
            has_waited = True
            try:
                step, given = self._coroutine.send, (yield awaited)
            except BaseException as error:  # noqa: BLE001 - thrown in from outside, and handed on
                step, given = self._coroutine.throw, error
