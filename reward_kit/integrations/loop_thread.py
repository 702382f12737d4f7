"""An event loop in a thread of its own, for callers that have none: worlds and engines live longer than a call."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines for threads that have no loop. The thread is a daemon: a program that forgets it still ends.

    Args:
        name: of the thread.
        held: open as long as the thread lives, by one task, as task groups want it; what it sets of context variables
            every coroutine sees.
    """

    def __init__(self, name: str, held: AbstractAsyncContextManager[Any] | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._context = contextvars.copy_context()
        self._leave = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        try:
            self._result_of(self._open(held or nullcontext()))
        except BaseException:
            self._end()
            raise

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """What the coroutine returns; where the caller is interrupted, it is cancelled."""
        return self._result_of(self._within(coroutine))

    def close(self) -> None:
        """Close what is held, and end the loop and its thread; what still runs in it is cancelled."""
        if not self._loop.is_closed():
            try:
                self._result_of(self._close())
            finally:
                self._end()

    def _result_of(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
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
