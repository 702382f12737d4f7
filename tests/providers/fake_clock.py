"""A clock that advances only on request, so that tests of pacing are exact and instant."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from reward_kit.providers.request_queue import Clock


class FakeTimer:
    """A callback that can be cancelled."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock(Clock):
    """A replacement for the event loop's time."""

    def __init__(self) -> None:
        self.time = 1_000.0
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self.time + delay_s, next(self._order), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        """Sleep in fake time, like `asyncio.sleep`."""
        over = asyncio.get_running_loop().create_future()
        self.call_later(seconds, lambda: over.done() or over.set_result(None))
        await over

    async def advance(self, seconds: float) -> None:
        """Let time pass, and run everything that becomes due."""
        end = self.time + seconds
        await settle()
        while self._timers and self._timers[0][0] <= end:
            self.time, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
                await settle()
        self.time = end


async def settle() -> None:
    """Let every task continue as far as possible without time passing."""
    for _ in range(8):
        await asyncio.sleep(0)
