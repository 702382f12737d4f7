"""The bridge from synchronous code to coroutines, on anyio's blocking portal."""

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
from anyio.from_thread import BlockingPortal

from reward_kit.errors import RewardKitError

_Result = TypeVar("_Result")


def run_blocking(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end; in a thread of its own if this thread runs an event loop, as in a notebook."""
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


class LoopThread:
    """An event loop in a daemon thread, for callers that have none and resources that outlive a call.

    A process forked from this one has no such thread: there, `run` raises and `close` does nothing.

    Args:
        name: of the thread.
        held: entered when the thread starts and left when it is closed, both in one task, as task groups require. Every
            coroutine sees the context variables that entering it sets, and those of the caller of `run`.
    """

    def __init__(self, name: str, held: AbstractAsyncContextManager[Any] | None = None) -> None:
        self._name, self._pid = name, os.getpid()
        self._lock = threading.Lock()  # of `_is_closed`: a coroutine is either cancelled by `close` or refused
        self._is_closed = False
        self._variables: dict[contextvars.ContextVar[Any], Any] = {}
        with ExitStack() as stack:
            # Not `start_blocking_portal`: its generator stops the portal when it is collected, and in a forked process,
            # which has no such thread, that would never end.
            ready: Future[BlockingPortal] = Future()
            thread = threading.Thread(target=anyio.run, args=(_serve, ready), name=name, daemon=True)
            thread.start()
            stack.callback(thread.join)
            self._portal = ready.result()
            stack.callback(self._portal.call, self._portal.stop, True)
            if held is not None:
                stack.enter_context(self._portal.wrap_async_context_manager(self._entered(held)))
            self._stack = stack.pop_all()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of a coroutine; if the caller is interrupted, it is cancelled."""
        try:
            if self._pid != os.getpid():  # checked before the lock, which a fork may copy in any state
                raise RewardKitError(f"{self._name}: its thread is in the process that this one was forked from")
            with self._lock:
                if self._is_closed:
                    raise RewardKitError(f"{self._name}: it was closed")
                future: Future[_Result] = self._portal.start_task_soon(self._run, coroutine)
        except BaseException:
            coroutine.close()  # it will not be awaited
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Leave what is held, cancel what still runs, and end the thread. Only the first call has an effect."""
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
    async def _entered(self, held: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
        before = contextvars.copy_context()
        async with held:
            after = contextvars.copy_context()
            self._variables = {each: value for each, value in after.items() if before.get(each, after) is not value}
            yield

    async def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        for variable, value in self._variables.items():
            variable.set(value)
        return await coroutine


async def _serve(ready: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        ready.set_result(portal)
        await portal.sleep_until_stopped()
