"""Actors on a cluster: their processes, the messages that they exchange with the driver, and a pool of actors."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import pickle
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
import anyio.abc

from reward_kit.agent.limits import ActionUsage, RunBudget
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.errors import ConfigError, RewardKitError, boundary
from reward_kit.integrations.ray.cluster import ClusterError, describe_resources, ray_module
from reward_kit.lazy import package_version
from reward_kit.providers.session import ProviderSession
from reward_kit.task_parts import RunLimitsModel

Build = Callable[[ProviderSession, RunBudget], Mapping[str, RLRolloutWorker]]
"""A factory that creates the workers of a process, keyed by label.

The factory is pickled and is called in the process with the provider session and the budget of the process. It raises
ConfigError if the process does not meet a requirement.
"""
Start = Callable[[], Awaitable[Any]]
"""A function that starts an actor and returns its handle. It raises ConfigError, or RayError if a retry may succeed."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SETTLE_S = 10.0  # The time for the other actors to start after the first one.
_CLOSE_SECONDS = 15.0
_MOST_LOG_LINES = 1_000
logger = logging.getLogger("reward_kit.integrations.ray")


class EpisodesUsage(NamedTuple):
    """The tokens, steps and cost (in US dollars) of all episodes so far."""

    tokens: int = 0
    cost: float = 0.0
    steps: int = 0

    def plus(self, other: EpisodesUsage) -> EpisodesUsage:
        return EpisodesUsage(self.tokens + other.tokens, self.cost + other.cost, self.steps + other.steps)

    def since(self, before: EpisodesUsage) -> EpisodesUsage:
        return EpisodesUsage(self.tokens - before.tokens, self.cost - before.cost, self.steps - before.steps)


class RunUsage(NamedTuple):
    """The total usage of a run's other processes, and the time that the run has taken."""

    spent: EpisodesUsage
    seconds: float


class ActorBudget(RunBudget):
    """A run's budget in one of its processes.

    The usage of this process (`own`) counts immediately. The usage of the other processes counts when the driver
    reports it.
    """

    def __init__(self, limits: RunLimitsModel | None = None) -> None:
        super().__init__(limits)
        self.own = self._others = EpisodesUsage()

    def spend(self, used: ActionUsage, steps: int = 0) -> None:
        super().spend(used, steps)
        self.own = self.own.plus(EpisodesUsage(used.tokens, used.cost or 0.0, steps))

    def hear(self, rest: RunUsage) -> None:
        """Update the usage of the other processes and the duration of the run."""
        news, self._others = rest.spent.since(self._others), rest.spent
        super().spend(ActionUsage(news.tokens, news.cost), news.steps)
        self._began = time.monotonic() - rest.seconds


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a process: its workers, the limits of the run, and environment variables with secrets.

    The settings are sent directly to the process and are never written to a file.
    """

    build: Build
    limits: RunLimitsModel = field(default_factory=RunLimitsModel)
    max_concurrency: int = 16
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


class Assignment(NamedTuple):
    """A request to collect an episode with the worker `label`.

    If `keeps_start` is true, the process keeps the initial state of the group until `close_group` is called.
    """

    label: str
    sample: Sample
    run_seed: int
    group_id: str
    rollout_index: int
    keeps_start: bool


class Reply(NamedTuple):
    """An episode as a line of `episodes.jsonl`, and the usage and the logs of the process since its last reply."""

    record: dict[str, Any]
    spent: EpisodesUsage
    logs: list[tuple[int, str, str]]
    notices: list[str]
    gave_up: str | None


class Process:
    """The state of an actor's process.

    Each call runs in a separate task. One additional task opens and closes the objects that all calls share.

    Attributes:
        context: the context variables of every call.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self._leave = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    async def open(self, shared: AbstractAsyncContextManager[Any]) -> None:
        """Enter a context manager, which `close` exits. The context variables that it sets apply to every call."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with shared:
                self.context = contextvars.copy_context()
                opened.set_result(None)
                await self._leave.wait()

        self._holder = self.context.run(asyncio.create_task, hold())
        await asyncio.wait([opened, self._holder], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            await self._holder  # This raises the error that prevented the opening.

    async def hold(self) -> None:
        """Wait until this process ends, so that the caller notices the end immediately."""
        await self._leave.wait()

    async def close(self) -> None:
        """Close the shared objects."""
        self._leave.set()
        if self._holder is not None:
            await self._holder


class CollectedLogs(logging.Handler):
    """A logging handler that stores the package's records. The records do not reach Ray's log files."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[int, str, str]] = deque(maxlen=_MOST_LOG_LINES)

    def begin(self) -> None:
        package = logging.getLogger("reward_kit")
        package.addHandler(self)
        package.propagate = False
        package.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, record.name, self.format(record)))

    def take(self) -> list[tuple[int, str, str]]:
        """Return and remove the stored records."""
        taken = list(self._lines)
        self._lines.clear()
        return taken


def unpickle_setup(driver: str, packed: bytes) -> Any:
    """Unpickle an object that the driver sent.

    Raises:
        ConfigError: If this process uses a different version of the package, or if the object cannot be unpickled.
    """
    where, here = os.uname().nodename, package_version()
    if driver != here:
        raise ConfigError(
            f"reward-kit has version {here} on {where}, but version {driver} in the driver; install the same version"
        )
    with boundary(ConfigError, f"on {where}: the driver's message cannot be read"):
        return pickle.loads(packed)


@dataclass(eq=False, slots=True)
class Member:
    """An actor in a pool, with its Ray handle, slot number and pending calls."""

    handle: Any
    number: int
    load: int = 0
    lost: anyio.Event = field(default_factory=anyio.Event)

    @property
    def is_lost(self) -> bool:
        return self.lost.is_set()

    def lose(self) -> None:
        """Mark the actor as lost, even if it may only be unreachable. Results that it returns later are ignored."""
        if not self.is_lost:
            self.lost.set()
            ray_module().kill(self.handle)


class ActorPool:
    """A pool of actors. It replaces lost actors and reports each loss to `tell`.

    If no actor exists for `wait_s` seconds, `place` fails.
    """

    def __init__(
        self, what: str, start: Start, size: int, wait_s: float, tell: Callable[[str], None] = logger.warning
    ) -> None:
        self._what, self._start, self.size, self._wait_s, self._tell = what, start, size, wait_s, tell
        self.members: list[Member] = []
        self._refusal: ConfigError | None = None
        self._trouble = ""
        self._changed = anyio.Event()
        self._settled_at = math.inf
        self._is_closing = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ActorPool]:
        """Start the actors without waiting for them, and stop them at the end of the block."""
        async with anyio.create_task_group() as slots:
            for number in range(self.size):
                slots.start_soon(self._keep, number)
            try:
                yield self
            finally:
                self._is_closing = True
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as ending:
                        for member in self.members:
                            ending.start_soon(_end, member)
                slots.cancel_scope.cancel()

    async def place(self) -> Member:
        """Return the actor with the fewest pending calls. If no actor exists, wait for one.

        Raises:
            ConfigError: If actors cannot be started.
            ClusterError: If no actor started in time.
        """
        with anyio.move_on_after(self._wait_s):
            while True:
                while not self._alive():
                    if self._refusal is not None:
                        raise self._refusal
                    await self._changed.wait()
                # Wait until all actors have started, or the time for starting is over.
                with anyio.move_on_after(self._settled_at - anyio.current_time()):
                    while len(self.members) < self.size and self._refusal is None:
                        await self._changed.wait()
                if self._alive():  # The first actor may be lost while this method waits for the others.
                    break
        if not (alive := self._alive()):
            raise ClusterError(
                f"no {self._what} for {self._wait_s:g} s ({self.size} requested; the cluster has "
                f"{describe_resources()}){self._trouble}; the run can be resumed"
            )
        return min(alive, key=lambda member: member.load)

    def _alive(self) -> list[Member]:
        return [member for member in self.members if not member.is_lost]

    async def _keep(self, number: int) -> None:
        """Keep one slot of the pool occupied by replacing its actor whenever the actor is lost."""
        pause_s = _FIRST_PAUSE_S
        while not self._is_closing:
            try:
                handle = await self._start()
            except ConfigError as refusal:
                self._tell(f"{self._what} {number}: {refusal}")
                self._refusal = refusal
                self._notify()
                return
            except ray_module().exceptions.RayError as error:
                self._trouble = f"; the last start failed: {error}"
                self._tell(f"{self._what} {number} did not start: {error}")
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            if self._settled_at == math.inf:  # The first actor must not get all the work.
                self._settled_at = anyio.current_time() + _SETTLE_S
            member = Member(handle, number)
            self.members.append(member)
            self._notify()
            async with anyio.create_task_group() as watching:
                watching.start_soon(_watch, member)
                await member.lost.wait()
                watching.cancel_scope.cancel()
            self.members.remove(member)
            if not self._is_closing:
                self._tell(f"{self._what} {number} was lost; starting a replacement")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


async def _watch(member: Member) -> None:
    """Mark an actor as lost when its `hold` call ends. The call ends only if the actor ends."""
    try:
        await member.handle.hold.remote()
    except ray_module().exceptions.RayError as error:
        if not member.is_lost:
            logger.info("actor %d: %s", member.number, error)
    member.lose()


async def _end(member: Member) -> None:
    """Ask an actor to close its objects, and then kill the actor in any case."""
    with anyio.move_on_after(_CLOSE_SECONDS):
        try:
            await member.handle.close.remote()
        except ray_module().exceptions.RayError as error:
            logger.info("actor %d: %s", member.number, error)
    member.lose()


async def start_actor(kind: type, setup: Any, resources: Mapping[str, Any]) -> Any:
    """Start an actor, call its `prepare(version, packed)`, and return its handle when it is ready.

    The settings may contain secrets. They are therefore passed in a call, which goes directly to the process, because
    Ray would store the arguments of a constructor.

    Raises:
        ConfigError: If the actor cannot work in its process.
        RayError: If the process was lost before it was ready.
    """
    ray = ray_module()
    handle = ray.remote(kind).options(max_restarts=0, max_task_retries=0, **resources).remote()
    try:
        await handle.prepare.remote(package_version(), ray.cloudpickle.dumps(setup))
    except BaseException as error:
        ray.kill(handle)
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            reason = str(cause) if isinstance(cause, RewardKitError) else f"{type(cause).__name__}: {cause}"
            raise ConfigError(f"cannot create a worker: {reason}") from error
        raise
    return handle


async def await_result(member: Member, reference: Any) -> Any:
    """Wait for the result of a call, or raise a RayError. If the caller is cancelled, the call is cancelled too."""
    try:
        return await reference
    except anyio.get_cancelled_exc_class():
        if not member.is_lost:
            ray_module().cancel(reference)
        raise


def is_actor_lost(error: Exception) -> bool:
    """Return True if a call failed because its process, its machine or its result was lost."""
    return not isinstance(error, ray_module().exceptions.RayTaskError)
