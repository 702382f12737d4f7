"""An event loop in virtual time: the clock jumps to the next timer when nothing is left to do."""

from __future__ import annotations

import asyncio
import selectors


class StuckError(Exception):
    """All tasks wait, and no timer will wake them."""


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
    """An event loop for code that waits only for timers and itself, not for threads or sockets."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._jumping.now


def runner() -> asyncio.Runner:
    """A runner of coroutines in such a loop."""
    return asyncio.Runner(loop_factory=VirtualLoop)


def run(coroutine):
    """Run a coroutine in its own loop."""
    with runner() as running:
        return running.run(coroutine)


async def settled() -> None:
    """Wait until everything possible without time passing has happened."""
    await asyncio.sleep(1e-6)
