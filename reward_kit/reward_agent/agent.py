"""`AsyncRewardAgent`, which accepts batches of rollouts and returns their scores group by group.

Scoring runs concurrently with other work. A pointwise reward is called once for each rollout, and a batch reward is
called once for each group. There is no polling: when a result arrives, it wakes the callers that wait for it.
`call_scheduler.py` makes the calls. `tickets.py` stores the results of a batch and delivers them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import operator
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast, overload

import anyio
import anyio.abc

from reward_kit.blocking import LoopThread
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardError, type_name
from reward_kit.providers.request_queue import Rates
from reward_kit.reward_agent.call_scheduler import CallScheduler, Retries
from reward_kit.reward_agent.custom_scorer import in_process_scorer
from reward_kit.reward_agent.in_process import warn_unconfined
from reward_kit.reward_agent.score_cache import ScoreCache, check_cacheable
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest
from reward_kit.reward_agent.stats import AgentStats, Tally
from reward_kit.reward_agent.tickets import NOT_OPEN, BatchFormat, Order, ScoredChunk, Ticket
from reward_kit.typed_interface import RewardSpec, reward_spec
from reward_kit.validation import check_positive

_NOT_OPEN = NOT_OPEN.replace("async with AsyncRewardAgent", "with SyncRewardAgent")


class AsyncRewardAgent:
    """An agent that scores rollouts concurrently. Use it as an async context manager.

    Args:
        scorer: a reward function or class, or an object that calls a reward elsewhere, such as `RemoteReward`. A
            function or class is called in this process, with a warning if it requests a sandbox.
        max_concurrency: the maximum number of concurrent calls. A call for a group counts as one call.
        deadline_s: the time limit of a call in seconds. A call that exceeds it is cancelled, and its rollouts are
            unscored with the class `timeout`. The time includes the wait for a worker, except for a synchronous
            reward in this process.
        max_pending: the maximum number of requests without a score. If a new batch would exceed this number, `submit`
            waits.
        rates: the limits on calls per minute and on concurrent calls. If None, the attribute `rates` of the scorer is
            used.
        retries: the policy for retrying failed calls. If None, the attribute `retries` of the scorer is used. If the
            scorer has no such attribute, calls are not retried.
        cache: a cache that gives identical requests the same score and makes only one call for identical requests in
            flight. If None, every request is scored, because two responses from a judge to the same question are two
            samples.
        batch_format: the format of a trainer's batches, such as `DataProtoFormat` from `integrations.verl`. Such
            batches are then accepted and returned in addition to lists of requests.

    Attributes:
        scorer: the scorer that was passed, or the scorer that was created for the reward.

    Raises:
        ConfigError: If a number is out of range, if the rates limit tokens, or if the reward cannot be cached.
    """

    def __init__(
        self,
        scorer: Callable[..., Any] | RewardSpec | Scorer,
        *,
        max_concurrency: int = 16,
        deadline_s: float | None = None,
        max_pending: int | None = None,
        rates: Rates | None = None,
        retries: Retries | None = None,
        cache: ScoreCache | None = None,
        batch_format: BatchFormat | None = None,
    ) -> None:
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, got {max_concurrency}")
        if deadline_s is not None:
            check_positive("deadline_s", deadline_s)
        if max_pending is not None:
            check_positive("max_pending", max_pending, is_integer=True)
        if isinstance(scorer, type) or (callable(scorer) and not hasattr(scorer, "score")):
            scorer = reward_spec(scorer)
        if isinstance(scorer, RewardSpec):
            warn_unconfined(scorer)
            if cache is not None:
                check_cacheable(scorer)
            scorer = in_process_scorer(scorer, deadline_s, max_threads=max_concurrency)
            deadline_s = None
        rates = rates or getattr(scorer, "rates", None) or Rates()
        if rates.tokens_per_minute is not None:
            raise ConfigError(
                "rates.tokens_per_minute applies only to model endpoints, because the token usage of a reward is "
                "unknown"
            )
        self.scorer = cast(Scorer, scorer)
        retries = retries or getattr(scorer, "retries", None)
        width = min(max_concurrency, rates.max_connections or max_concurrency)
        self._tally = Tally()
        self._caller = CallScheduler(
            self.scorer,
            self._tally,
            max_concurrency=width,
            deadline_s=deadline_s,
            rates=rates,
            retries=retries,
            cache=cache,
        )
        self._max_pending = max_pending
        self._batch_format = batch_format
        self._tasks: anyio.abc.TaskGroup | None = None
        self._tickets: dict[Ticket, None] = {}  # tickets with undelivered results
        self._completed: dict[tuple[Ticket, int], None] = {}  # undelivered groups
        self._group_takers: deque[asyncio.Event] = deque()
        self._submitters: deque[asyncio.Event] = deque()
        self._quiet = anyio.Event()
        self._pending = self._submitted = 0

    async def __aenter__(self) -> Self:
        await self.scorer.__aenter__()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._caller.open(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = self._open_tasks()
        try:
            # A call that waits for its retry has no task, so the task group would not wait for it.
            while self._pending and error is None:
                self._quiet = anyio.Event()
                await self._quiet.wait()
        finally:
            self._caller.close()
            if error is not None or self._pending:
                tasks.cancel_scope.cancel()
            try:
                # Keep the error of the block from the task group, which would wrap the error in an ExceptionGroup.
                await tasks.__aexit__(None, None, None)
            finally:
                self._tasks = None
                for ticket in self._tickets:
                    ticket.close()
                for waiting in (*self._group_takers, *self._submitters):
                    waiting.set()
                self._tickets.clear()
                self._completed.clear()
                self._pending = self._tally.groups_outstanding = 0
                await self.scorer.__aexit__(kind, error, trace)

    def _open_tasks(self) -> anyio.abc.TaskGroup:
        if self._tasks is None:
            raise RewardError(NOT_OPEN)
        return self._tasks

    async def submit(self, batch: Any, group_size: int = 1, *, deadline_s: float | None = None) -> Ticket:
        """Start scoring a batch.

        If the batch would exceed `max_pending`, this method waits, unless no other requests are pending.

        Args:
            batch: a list of requests or episodes, or a batch in the `batch_format` of the agent.
            group_size: the number of consecutive requests that form a group. A batch reward scores a group in one call.
            deadline_s: the time limit in seconds from now. Requests without a score by then are unscored with the class
                `timeout`.

        Raises:
            ConfigError: If the size of the batch is not a multiple of the group size, or if the deadline is not
                positive.
            RewardError: If the agent is not open.
        """
        self._open_tasks()
        group_size = _whole("group_size", group_size)
        arrangement = self._batch_format.arrange(batch, group_size) if self._batch_format is not None else None
        requests = _as_requests(batch) if arrangement is None else arrangement.requests
        if group_size < 1 or len(requests) % group_size:
            raise ConfigError(f"a batch of {len(requests)} requests cannot be divided into groups of {group_size}")
        if deadline_s is not None:
            check_positive("deadline_s", deadline_s)
        if self._max_pending is not None:  # first come, first served
            turn = asyncio.Event()
            self._submitters.append(turn)
            try:
                while self._submitters[0] is not turn or (
                    self._pending and self._pending + len(requests) > self._max_pending
                ):
                    await turn.wait()
                    turn.clear()
                    self._open_tasks()
            finally:
                self._submitters.remove(turn)
                if self._submitters:  # The batch of the next submitter may also fit.
                    self._submitters[0].set()
        self._submitted += 1
        finishes_groups = self._caller.finishes_groups
        ticket = Ticket(requests, group_size, self, number=self._submitted, finishes_groups=finishes_groups)
        ticket.arrangement = arrangement
        if not ticket.requests:
            return ticket
        self._tickets[ticket] = None
        self._pending += len(requests)
        self._tally.submitted += len(requests)
        self._tally.groups_outstanding += len(requests) // group_size
        if deadline_s is not None:
            ticket.expire_in(deadline_s)
        self._caller.add(ticket)
        return ticket

    async def compute_reward_pipeline(self, batch: Any, group_size: int = 1) -> int:
        """Submit a batch, and return the number of its requests.

        If `get` is called without a ticket, it returns the results of the oldest batch first.
        """
        return len((await self.submit(batch, group_size)).requests)

    @overload
    async def get(self, chunk_size: int, hook_func: None = None, **options: Any) -> ScoredChunk: ...

    @overload
    async def get(self, chunk_size: int, hook_func: Callable[..., Any], **options: Any) -> Any: ...

    async def get(
        self,
        chunk_size: int,
        hook_func: Callable[..., Any] | None = None,
        *,
        ticket: Ticket | None = None,
        order: Order = "completion",
        cut_groups: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Wait for `chunk_size` results of one batch, and return them sorted by their index in the batch.

        The results consist of whole groups. They are returned as a `ScoredChunk` or, if the batch is in the agent's
        `batch_format`, in that format.

        Args:
            chunk_size: the number of results. It must be a multiple of the group size unless `cut_groups` is true.
            hook_func: a function that is called with the three columns of the chunk. Its result, which is awaited if
                necessary, is returned instead of the chunk. If the function raises an error, the results remain
                available.
            ticket: the ticket of the batch. If None, the oldest batch that has results left is used.
            order: "completion" returns the groups that completed first, which favors fast rewards. "submission" returns
                the groups that were submitted first, even if other groups complete earlier.
            cut_groups: whether a group may be split. The rest of a split group comes first in the next chunk.
            **kwargs: keyword arguments for `hook_func`.

        Raises:
            ConfigError: If fewer results are left, or if a group would be split. The error is raised immediately, and
                no results are lost.
            RewardError: If the agent is not open, or if it is closed while this method waits.
        """
        if kwargs and hook_func is None:
            raise ConfigError(f"get: {', '.join(sorted(kwargs))} can be passed only with hook_func")
        taken = await self.take(chunk_size, ticket=ticket, order=order, cut_groups=cut_groups)
        try:
            if hook_func is None:
                return taken.result()
            answer = hook_func(*taken.result(), **kwargs)
            return await answer if inspect.isawaitable(answer) else answer
        except BaseException:
            self.put_back(taken)
            raise

    async def take(
        self,
        chunk_size: int,
        *,
        ticket: Ticket | None = None,
        order: Order = "completion",
        cut_groups: bool = False,
    ) -> Taken:
        """Wait for results as `get` does, but return them in a form that `put_back` accepts."""
        self._open_tasks()
        chunk_size = _whole("chunk_size", chunk_size)
        if ticket is None:
            ticket = self._oldest(chunk_size)
        elif not isinstance(ticket, Ticket):
            raise ConfigError(f"ticket must be the result of submit, got {type_name(ticket)}")
        elif not ticket.belongs_to(self) and ticket.requests:
            raise ConfigError("the ticket belongs to a different agent or to a closed agent")
        return self._handed_out(ticket, await ticket.deliveries.take(chunk_size, order, cut_groups=cut_groups))

    def put_back(self, taken: Taken) -> None:
        """Make results available again. They come before results that arrive later.

        This has no effect on a closed agent.
        """
        ticket = taken.ticket
        if not ticket.belongs_to(self):
            return
        groups = ticket.deliveries.put_back(taken.indexes)
        self._tickets = {ticket: None, **self._tickets}
        self._completed = {**{(ticket, group): None for group in groups}, **self._completed}
        self._wake_group_taker()

    async def score_all(self, batch: Sequence[Any], group_size: int = 1) -> list[Scored]:
        """Submit requests or episodes, and return their scores in order.

        If the caller is cancelled, the calls are cancelled too.

        Raises:
            ConfigError: As for `submit`.
            RewardError: If the agent is not open, or if it is closed while this method waits.
        """
        ticket = await self.submit(batch, group_size)
        try:
            return (await self.take(len(batch), ticket=ticket)).chunk.extra_infos
        except anyio.get_cancelled_exc_class():
            ticket.cancel()
            if ticket.belongs_to(self):  # Take the results, because the agent would keep them otherwise.
                await self.take(len(batch), ticket=ticket)
            raise

    async def get_group(self) -> ScoredChunk:
        """Wait for the next complete group of any batch, except for groups that a `get` is waiting for.

        Raises:
            ConfigError: If no results are left.
            RewardError: If the agent is not open, or if it is closed while this method waits.
        """
        wake_up = asyncio.Event()
        self._group_takers.append(wake_up)
        try:
            while True:
                self._open_tasks()
                if not self._tickets:
                    raise ConfigError("get_group() cannot return, because no results are outstanding")
                if self._group_takers[0] is wake_up and (ticket := self._with_ready_group()) is not None:
                    taken: ScoredChunk = self._handed_out(ticket, ticket.deliveries.take_group()).result()
                    return taken
                await wake_up.wait()
                wake_up.clear()
        finally:
            self._group_takers.remove(wake_up)
            self._wake_group_taker()

    async def mini_batches(
        self, chunk_size: int, *, ticket: Ticket | None = None, order: Order = "completion"
    ) -> AsyncIterator[Any]:
        """Yield the remaining results of one batch in chunks, in the form that `get` returns.

        The last chunk may be smaller.

        Raises:
            ConfigError, RewardError: As for `get`.
        """
        self._open_tasks()
        ticket = self._oldest(1) if ticket is None else ticket
        while left := ticket.deliveries.outstanding:
            yield await self.get(min(chunk_size, left), ticket=ticket, order=order)

    @property
    def stats(self) -> AgentStats:
        """The statistics of the agent. Use `stats.metrics()` to log them."""
        return self._tally.stats(self._pending)

    def _oldest(self, chunk_size: int) -> Ticket:
        for ticket in self._tickets:
            if ticket.deliveries.outstanding:
                return ticket
        if chunk_size == 0:  # an empty batch
            return Ticket((), 1, self)
        raise ConfigError(f"get({chunk_size}) cannot return, because no results are outstanding")

    def _with_ready_group(self) -> Ticket | None:
        """Return the batch of the first complete group that no `get` is waiting for."""
        return next((ticket for ticket, _ in self._completed if ticket.deliveries.has_ready_group()), None)

    def _handed_out(self, ticket: Ticket, indexes: list[int]) -> Taken:
        for group in {index // ticket.group_size for index in indexes}:
            self._completed.pop((ticket, group), None)
        if not ticket.deliveries.undelivered:
            self._tickets.pop(ticket, None)
        if not self._tickets:
            for wake_up in self._group_takers:
                wake_up.set()
        return Taken(ticket, indexes)

    def _wake_group_taker(self) -> None:
        if self._group_takers and self._with_ready_group() is not None:
            self._group_takers[0].set()

    def settled(self, count: int) -> None:
        self._pending -= count
        if not self._pending:
            self._quiet.set()
        if self._submitters:
            self._submitters[0].set()

    def completed(self, ticket: Ticket, group: int) -> None:
        self._tally.complete_group(ticket.results[ticket.group_slice(group)])
        self._completed[ticket, group] = None
        ticket.deliveries.complete(group)
        if self._group_takers:
            self._wake_group_taker()

    def gave_up(self, ticket: Ticket) -> None:
        self._caller.cancel_unwanted()


class Taken(NamedTuple):
    """Results that were taken from an agent."""

    ticket: Ticket
    indexes: list[int]

    @property
    def chunk(self) -> ScoredChunk:
        """The results, with one item per request."""
        return ScoredChunk.of(self.ticket, self.indexes)

    def result(self) -> Any:
        """Return the results in the format of the batch."""
        arrangement = self.ticket.arrangement
        return self.chunk if arrangement is None else arrangement.result(self.chunk)


def _as_requests(batch: Any) -> list[ScoringRequest]:
    if not isinstance(batch, Sequence):
        raise ConfigError(
            f"a batch must be a list of requests or episodes, got {type_name(batch)}; for a DataProto, create the "
            "agent with batch_format=DataProtoFormat(tokenizer) from reward_kit.integrations.verl"
        )
    requests = [ScoringRequest.from_episode(item) if isinstance(item, SingleAgentEpisode) else item for item in batch]
    for index, request in enumerate(requests):
        if not isinstance(request, ScoringRequest):
            raise ConfigError(f"submit: item {index} is {type_name(request)}; pass a ScoringRequest or an episode")
    return requests


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r}") from None


_Result = TypeVar("_Result")


class SyncRewardAgent:
    """An `AsyncRewardAgent` with blocking methods. Use it as a context manager in any thread.

    It takes the same arguments. It runs in a daemon thread, so a program can exit without closing it.
    """

    def __init__(self, scorer: Callable[..., Any] | RewardSpec | Scorer, **options: Any) -> None:
        self._agent = AsyncRewardAgent(scorer, **options)
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread("reward agent", self._agent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(error)

    def submit(self, batch: Any, group_size: int = 1, *, deadline_s: float | None = None) -> Ticket:
        return self._do(lambda: self._agent.submit(batch, group_size, deadline_s=deadline_s))

    def compute_reward_pipeline(self, batch: Any, group_size: int = 1) -> int:
        return self._do(lambda: self._agent.compute_reward_pipeline(batch, group_size))

    @overload
    def get(self, chunk_size: int, hook_func: None = None, **options: Any) -> ScoredChunk: ...

    @overload
    def get(self, chunk_size: int, hook_func: Callable[..., Any], **options: Any) -> Any: ...

    def get(self, chunk_size: int, hook_func: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        if hook_func is None or inspect.iscoroutinefunction(hook_func):
            return self._do(lambda: self._agent.get(chunk_size, hook_func, **kwargs))
        own = {name: kwargs.pop(name) for name in ("ticket", "order", "cut_groups") if name in kwargs}
        taken = self._do(lambda: self._agent.take(chunk_size, **own))
        try:
            return hook_func(*taken.result(), **kwargs)
        except BaseException:
            self._do(lambda: self._put_back(taken))
            raise

    async def _put_back(self, taken: Taken) -> None:
        self._agent.put_back(taken)

    def score_all(self, batch: Sequence[Any], group_size: int = 1) -> list[Scored]:
        return self._do(lambda: self._agent.score_all(batch, group_size))

    def get_group(self) -> ScoredChunk:
        return self._do(self._agent.get_group)

    def mini_batches(
        self, chunk_size: int, *, ticket: Ticket | None = None, order: Order = "completion"
    ) -> Iterator[Any]:
        chunks = self._agent.mini_batches(chunk_size, ticket=ticket, order=order)

        async def following() -> Any:
            return await anext(chunks, None)

        while (chunk := self._do(following)) is not None:
            yield chunk

    @property
    def stats(self) -> AgentStats:
        return self._agent.stats

    def _do(self, method: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run one of the agent's coroutines as a task with the caller's context variables."""
        if (thread := self._thread) is None:
            raise RewardError(_NOT_OPEN)
        try:
            return thread.run(method())
        except concurrent.futures.CancelledError:  # the agent was closed
            raise RewardError(_NOT_OPEN) from None


@dataclass(slots=True, eq=False)
class _Held:
    """The agent of an event loop, and the task that opens and closes it."""

    ready: asyncio.Future[AsyncRewardAgent]
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class PersistentAgent:
    """A reward agent that stays open between calls, for trainers that score in their own loops and tasks.

    Each event loop has a separate agent. The first call opens the agent. It is closed when the loop ends, because
    trainers have no shutdown hook. Opening a sandboxed reward for each rollout would take a third of a second.
    """

    def __init__(self, make: Callable[[], AsyncRewardAgent]) -> None:
        self._make = make
        # Loops run in multiple threads, but each loop uses only its own entry.
        self._held: dict[asyncio.AbstractEventLoop, _Held] = {}

    async def score(self, request: ScoringRequest) -> Scored:
        """Score one rollout. If the caller is cancelled, the call is cancelled too."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            # Forget loops that were closed without ending their tasks.
            for ended in [each for each in list(self._held) if each.is_closed()]:
                self._held.pop(ended, None)
            held = self._held[loop] = _Held(loop.create_future())
            held.task = loop.create_task(self._hold(loop, held))
        agent = await asyncio.shield(held.ready)
        return (await agent.score_all([request]))[0]

    async def close(self) -> None:
        """Close the agent of the running event loop. A later call opens a new agent."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None and held.task is not None:
            held.leave.set()
            await held.task

    async def _hold(self, loop: asyncio.AbstractEventLoop, held: _Held) -> None:
        """Keep the agent open until `close` is called or the loop cancels its tasks."""
        try:
            async with self._make() as agent:
                held.ready.set_result(agent)
                await held.leave.wait()
        except Exception as error:
            if held.ready.done():
                raise
            held.ready.set_exception(error)  # `score` raises this error. The next call tries again.
        finally:
            held.ready.cancel()  # no effect if the future is done
            if self._held.get(loop) is held:
                del self._held[loop]


def score_all(
    reward: Callable[..., Any] | RewardSpec | Scorer,
    requests: Sequence[ScoringRequest],
    group_size: int = 1,
    **options: Any,
) -> list[Scored]:
    """Score requests concurrently, and return the scores in order.

    This function blocks. Use `AsyncRewardAgent` in asynchronous code.

    Args:
        reward: the reward or the scorer, as in `AsyncRewardAgent`.
        requests: the requests, for example `ScoringRequest.from_episode(episode, task)` for each episode.
        group_size: the number of consecutive requests that form a group.
        **options: options of `AsyncRewardAgent`, such as `max_concurrency` or `deadline_s`.

    Raises:
        ConfigError: If an option is invalid, or if the number of requests is not a multiple of `group_size`.
    """
    with SyncRewardAgent(reward, **options) as agent:
        return agent.score_all(requests, group_size)
