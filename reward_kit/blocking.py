"""A bridge from synchronous code to coroutines, built on anyio's blocking portal."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal

from reward_kit.errors import RewardKitError

_Result = TypeVar("_Result")


def run_blocking(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to completion.

    If the current thread already runs an event loop, as in a notebook, the coroutine runs in a separate thread.
    """
    is_in_loop = False
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        is_in_loop = True
    if not is_in_loop:
        return asyncio.run(coroutine)
    thread = LoopThread("reward-kit blocking call")
    try:
        return thread.run(coroutine)
    finally:
        thread.close()


def allow_threads(max_concurrency: int) -> None:
    """Raise the thread limit of the running event loop to allow this number of concurrent episodes.

    Each episode may block one thread in its environment or a tool, and each reward call may block an additional thread.
    """
    limiter = anyio.to_thread.current_default_thread_limiter()
    limiter.total_tokens = max(limiter.total_tokens, 3 * max_concurrency + 64)


class LoopThread:
    """An event loop in a daemon thread, for synchronous callers and for resources that outlive a call.

    A forked process does not have the thread: there, `run` raises an error and `close` does nothing.

    Args:
        name: the thread's name.
        context: a context manager that is entered when the thread starts and exited on close. Both happen in one task,
            because task groups require it. Every coroutine sees the context variables set by the context manager and
            those of `run`'s caller.
    """

    def __init__(self, name: str, context: AbstractAsyncContextManager[Any] | None = None) -> None:
        self._name, self._pid = name, os.getpid()
        self._lock = threading.Lock()  # guards `_is_closed`: a coroutine is either cancelled by `close` or rejected
        self._is_closed = False
        self._variables: dict[contextvars.ContextVar[Any], Any] = {}
        with ExitStack() as stack:
            # Do not use `start_blocking_portal`: its generator stops the portal when the generator is collected, which
            # would hang in a forked process that lacks the thread.
            ready: Future[BlockingPortal] = Future()
            thread = threading.Thread(target=anyio.run, args=(_serve, ready), name=name, daemon=True)
            thread.start()
            stack.callback(thread.join)
            self._portal = ready.result()
            stack.callback(self._portal.call, self._portal.stop, True)
            if context is not None:
                stack.enter_context(self._portal.wrap_async_context_manager(self._entered(context)))
            self._stack = stack.pop_all()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine and return its result. If the caller is interrupted, the coroutine is cancelled."""
        try:
            if self._pid != os.getpid():  # Check this before taking the lock, which a fork may copy while it is held.
                raise RewardKitError(f"{self._name} is not available in a forked process; create a new instance there")
            with self._lock:
                if self._is_closed:
                    raise RewardKitError(f"{self._name} is closed")
                future: Future[_Result] = self._portal.start_task_soon(self._run, coroutine)
        except BaseException:
            coroutine.close()  # the coroutine will never be awaited
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Exit the context, cancel running coroutines, and end the thread. Only the first call has an effect."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if error is None:
            self._stack.close()
        else:
            self._stack.__exit__(type(error), error, error.__traceback__)

    @contextlib.asynccontextmanager
    async def _entered(self, context: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
        before = contextvars.copy_context()
        async with context:
            after = contextvars.copy_context()
            self._variables = {var: value for var, value in after.items() if before.get(var, after) is not value}
            yield

    async def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        for variable, value in self._variables.items():
            variable.set(value)
        return await coroutine


async def _serve(ready: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        ready.set_result(portal)
        await portal.sleep_until_stopped()
