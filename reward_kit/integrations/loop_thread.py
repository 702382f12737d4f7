"""An event loop in a thread of its own, for callers that have none: worlds and engines live longer than a call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from reward_kit.errors import RewardKitError

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines for threads that have no loop. The thread is a daemon: a program that forgets it still ends.

    A forked process has none of its parent's threads, and begins one of its own.

    Args:
        name: of the thread.
        held: open as long as the thread lives, by one task, as task groups want it; what it sets of context variables
            every coroutine sees.
    """

    def __init__(self, name: str, held: AbstractAsyncContextManager[Any] | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._pid, self._is_closed = os.getpid(), False
        self._scheduling = threading.Lock()  # what is scheduled before the end is cancelled by it, and nothing after
        self._context = contextvars.copy_context()
        self._leave = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        try:
            self.run(self._open(held or nullcontext()))
        except BaseException:
            self._end()
            raise

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """What the coroutine returns; where the caller is interrupted, it is cancelled.

        Raises:
            RewardKitError: it was closed, or is that of the process that this one was forked from.
        """
        future = self._scheduled(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close what is held, and end the loop and its thread; what still runs in it is cancelled.

        A second time it does nothing, nor in a forked process, where nothing of it is.
        """
        if self._pid != os.getpid():
            return
        with self._scheduling:
            if self._is_closed:
                return
            self._is_closed = True
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result()
        finally:
            self._end()

    def _scheduled(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        try:
            if self._pid != os.getpid():  # asked before the lock, which a fork copies as it is
                raise RewardKitError(f"{self._thread.name}: its thread is in the process that this one was forked from")
            with self._scheduling:
                if self._is_closed:
                    raise RewardKitError(f"{self._thread.name}: it was closed")
                return asyncio.run_coroutine_threadsafe(self._within(coroutine), self._loop)
        except RewardKitError:
            coroutine.close()  # nobody will await it
            raise

    async def _within(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return await asyncio.create_task(coroutine, context=self._context)

    async def _open(self, held: AbstractAsyncContextManager[Any]) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(held, opened))
        await opened

    async def _hold(self, held: AbstractAsyncContextManager[Any], opened: asyncio.Future[None]) -> None:
        try:
            async with held:
                self._context = contextvars.copy_context()
                opened.set_result(None)
                await self._leave.wait()
        except BaseException as error:  # raised where it was to be opened
            if opened.done():
                raise
            opened.set_exception(error)

    async def _close(self) -> None:
        self._leave.set()
        try:
            if self._holding is not None:
                await self._holding
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
