"""`SyncRewardAgent`: the reward agent for trainers without an event loop; one thread runs the loop for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from reward_kit.errors import RewardError
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.deliveries import NOT_OPEN, Order
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest
from reward_kit.reward_agent.stats import AgentStats
from reward_kit.reward_agent.tickets import ScoredChunk, Ticket
from reward_kit.typed_interface import RewardSpec

_Result = TypeVar("_Result")
_NOT_OPEN = NOT_OPEN.replace("async with AsyncRewardAgent", "with SyncRewardAgent")


class _AbandonedError(Exception):
    """The block of the user was left with an error."""


class SyncRewardAgent:
    """`AsyncRewardAgent` with blocking methods. Use it as a context manager; it may be used from several threads.

    Its thread is a daemon: a program that forgets to leave the agent still ends.

    Args:
        scorer: as of `AsyncRewardAgent`.
        **options: as of `AsyncRewardAgent`.

    Raises:
        ConfigError: as `AsyncRewardAgent`.
    """

    def __init__(self, scorer: RewardSpec | Scorer, **options: Any) -> None:
        self._agent = AsyncRewardAgent(scorer, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._is_abandoned = False

    def __enter__(self) -> Self:
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._problem, self._is_abandoned = None, False
        self._thread = threading.Thread(target=self._run, args=(opened,), name="reward agent", daemon=True)
        self._thread.start()
        opened.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop, self._is_abandoned = None, error is not None
        loop.call_soon_threadsafe(self._leave.set)
        thread.join()
        if self._problem is not None and error is None:
            raise self._problem

    def _run(self, opened: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._hold_open(opened))
        except BaseException as problem:  # noqa: BLE001 - raised in the thread of the user
            if opened.done():
                self._problem = problem
            else:
                opened.set_exception(problem)

    async def _hold_open(self, opened: concurrent.futures.Future[None]) -> None:
        self._leave = asyncio.Event()
        with contextlib.suppress(_AbandonedError):
            async with self._agent:
                self._loop = asyncio.get_running_loop()
                opened.set_result(None)
                await self._leave.wait()
                if self._is_abandoned:
                    raise _AbandonedError

    def submit(
        self, batch: Sequence[ScoringRequest], group_size: int = 1, *, deadline_s: float | None = None
    ) -> Ticket:
        """As `AsyncRewardAgent.submit`."""
        return self._do(lambda: self._agent.submit(batch, group_size, deadline_s=deadline_s))

    def compute_reward_pipeline(self, batch: Sequence[ScoringRequest], group_size: int = 1) -> int:
        """As `AsyncRewardAgent.compute_reward_pipeline`."""
        return self._do(lambda: self._agent.compute_reward_pipeline(batch, group_size))

    @overload
    def get(
        self,
        chunk_size: int,
        hook_func: None = None,
        *,
        ticket: Ticket | None = None,
        order: Order = "completion",
        cut_groups: bool = False,
    ) -> ScoredChunk: ...

    @overload
    def get(
        self,
        chunk_size: int,
        hook_func: Callable[..., Any],
        *,
        ticket: Ticket | None = None,
        order: Order = "completion",
        cut_groups: bool = False,
        **kwargs: Any,
    ) -> Any: ...

    def get(self, chunk_size: int, hook_func: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """As `AsyncRewardAgent.get`; an asynchronous `hook_func` is called in the loop of the agent, others here."""
        if hook_func is None or asyncio.iscoroutinefunction(hook_func):
            return self._do(lambda: self._agent.get(chunk_size, hook_func, **kwargs))
        own = {name: kwargs.pop(name) for name in ("ticket", "order", "cut_groups") if name in kwargs}
        chunk = self._do(lambda: self._agent.get(chunk_size, **own))
        return hook_func(*chunk, **kwargs)

    def score_all(self, batch: Sequence[ScoringRequest], group_size: int = 1) -> list[Scored]:
        """As `AsyncRewardAgent.score_all`."""
        return self._do(lambda: self._agent.score_all(batch, group_size))

    def get_group(self) -> ScoredChunk:
        """As `AsyncRewardAgent.get_group`."""
        return self._do(self._agent.get_group)

    def mini_batches(
        self, chunk_size: int, *, ticket: Ticket | None = None, order: Order = "completion"
    ) -> Iterator[ScoredChunk]:
        """As `AsyncRewardAgent.mini_batches`."""
        chunks = self._agent.mini_batches(chunk_size, ticket=ticket, order=order)

        async def following() -> ScoredChunk | None:
            return await anext(chunks, None)

        while (chunk := self._do(following)) is not None:
            yield chunk

    @property
    def stats(self) -> AgentStats:
        """As `AsyncRewardAgent.stats`."""
        return self._agent.stats

    def _do(self, method: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """What a method of the agent returns; it runs as a task with the context variables of the caller."""
        loop = self._loop
        if loop is None:
            raise RewardError(_NOT_OPEN)
        done: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        tasks: list[asyncio.Task[None]] = []

        async def run() -> None:
            try:
                done.set_result(await method())
            except asyncio.CancelledError:  # the agent was left meanwhile, or the caller was interrupted
                done.set_exception(RewardError(_NOT_OPEN))
            except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
                done.set_exception(error)

        context = contextvars.copy_context()
        loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(run())), context=context)
        try:
            return done.result()
        except BaseException:
            if not done.done():  # the caller was interrupted, and what it waited for is not to be lost
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            raise
