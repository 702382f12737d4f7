"""An event loop in virtual time: the clock jumps to the next timer when nothing is left to do."""

from __future__ import annotations

import asyncio
import selectors


class StuckError(Exception):
    """Everybody waits, and nobody will ever be woken."""


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise StuckError
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Only for what waits for timers and for itself: a thread or a socket would be waited for in vain."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop was made, as they would have passed."""
        return self._jumping.now


def runner() -> asyncio.Runner:
    """Runs coroutines in such a loop."""
    return asyncio.Runner(loop_factory=VirtualLoop)


def run(coroutine):
    """What a coroutine returns, in a loop of its own."""
    with runner() as running:
        return running.run(coroutine)


async def settled() -> None:
    """Until all that can happen without time passing has happened."""
    await asyncio.sleep(1e-6)
