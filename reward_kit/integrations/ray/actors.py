"""Messages between the driver and its actors, and the state that all calls of one actor share."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple

from reward_kit.agent.limits import RunBudget, Used
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.errors import ConfigError, boundary
from reward_kit.providers.session import ProviderSession
from reward_kit.task_parts import RunLimitsModel

Build = Callable[[ProviderSession, RunBudget], Mapping[str, RLRolloutWorker]]
"""Makes the workers of one process, by label. It is pickled and called there; what it needs on the way it holds.

Args: the traffic that all requests of the process share, and the account that its workers spend from.
Raises ConfigError where something is not there that it needs.
"""


class Spent(NamedTuple):
    """What episodes used: tokens, US dollars, steps. It only grows."""

    tokens: int = 0
    cost: float = 0.0
    steps: int = 0

    def plus(self, other: Spent) -> Spent:
        """The two together."""
        return Spent(self.tokens + other.tokens, self.cost + other.cost, self.steps + other.steps)

    def since(self, before: Spent) -> Spent:
        """What came to it."""
        return Spent(self.tokens - before.tokens, self.cost - before.cost, self.steps - before.steps)


class Rest(NamedTuple):
    """What a process does not know of a run: what all others have spent, and how long the run has lasted."""

    spent: Spent
    seconds: float


class SharedBudget(RunBudget):
    """The account of a run as one process sees it: its own spending at once, that of the others as it is told.

    Attributes:
        own: what the episodes of this process used, those in flight included.
    """

    def __init__(self, limits: RunLimitsModel | None = None) -> None:
        super().__init__(limits)
        self.own = self._others = Spent()

    def spend(self, used: Used, steps: int = 0) -> None:
        """As `RunBudget`."""
        super().spend(used, steps)
        self.own = self.own.plus(Spent(used.tokens, used.cost or 0.0, steps))

    def hear(self, rest: Rest) -> None:
        """Take over what all others have spent by now, and how late it is."""
        news, self._others = rest.spent.since(self._others), rest.spent
        super().spend(Used(news.tokens, news.cost), news.steps)
        self._began = time.monotonic() - rest.seconds


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is told before its first episode. It goes straight to the process, and into no file.

    Attributes:
        build: makes its workers.
        limits: of the run.
        max_concurrency: episodes that may be in flight there.
        env: environment variables, secrets among them.
    """

    build: Build
    limits: RunLimitsModel = field(default_factory=RunLimitsModel)
    max_concurrency: int = 16
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


class Assignment(NamedTuple):
    """One episode to collect.

    Attributes:
        label: of the worker that collects it.
        sample: what it is about.
        run_seed: of the run.
        group_id: of its group.
        rollout_index: its place there.
        keeps_start: its group begins from one start, which is kept until `close_group`.
    """

    label: str
    sample: Sample
    run_seed: int
    group_id: str
    rollout_index: int
    keeps_start: bool


class Reply(NamedTuple):
    """One episode, and what has happened in its process since the last one.

    Attributes:
        record: of the episode, as a line of `episodes.jsonl` has it, its final state included.
        spent: by the process, so far.
        logs: level, logger and text of what was logged.
        notices: lines for the user about an endpoint.
        gave_up: why further requests are in vain, where they are.
    """

    record: dict[str, Any]
    spent: Spent
    logs: list[tuple[int, str, str]]
    notices: list[str]
    gave_up: str | None


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
