"""What every actor has: something that its calls share, held open by one task, and an end that others learn of."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import pickle
from collections import deque
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any

from reward_kit.errors import ConfigError, boundary

_MOST_LOG_LINES = 1_000


class Process:
    """An actor's process. Each call is a task of its own; what they share is opened and closed by one that waits.

    Attributes:
        context: the context variables that hold for every call.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self._leave = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    async def open(self, shared: AbstractAsyncContextManager[Any]) -> None:
        """Hold something open until `close`; what it sets of context variables holds for every call."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = self.context.run(asyncio.create_task, self._hold(shared, opened))
        await asyncio.wait([opened, self._holder], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            await self._holder  # it raises what kept it from opening

    async def _hold(self, shared: AbstractAsyncContextManager[Any], opened: asyncio.Future[None]) -> None:
        async with shared:
            self.context = contextvars.copy_context()
            opened.set_result(None)
            await self._leave.wait()

    async def hold(self) -> None:
        """Until this process ends: whoever waits for it learns of its death at once."""
        await self._leave.wait()

    async def close(self) -> None:
        """Close what is shared."""
        self._leave.set()
        if self._holder is not None:
            await self._holder


class CollectedLogs(logging.Handler):
    """Keeps what the package logs until it is taken along; nothing of it goes into the files of the cluster."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[int, str, str]] = deque(maxlen=_MOST_LOG_LINES)

    def begin(self) -> None:
        """Listen."""
        package = logging.getLogger("reward_kit")
        package.addHandler(self)
        package.propagate = False
        package.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self._lines.append((record.levelno, record.name, self.format(record)))

    def take(self) -> list[tuple[int, str, str]]:
        """What has come since the last time."""
        taken = list(self._lines)
        self._lines.clear()
        return taken


def unpacked(driver: str, packed: bytes) -> Any:
    """What a driver sends to a process.

    Args:
        driver: the version of this package there.
        packed: pickled.

    Raises:
        ConfigError: this package is another version here, or does not know what was sent.
    """
    where, here = os.uname().nodename, version("reward-kit")
    if driver != here:
        raise ConfigError(f"reward-kit is {here} on {where} and {driver} in the driver")
    with boundary(ConfigError, f"on {where}: what the driver sent cannot be read"):
        return pickle.loads(packed)
