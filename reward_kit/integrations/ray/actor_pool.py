"""A fixed number of actors, each replaced when it is lost; calls that are awaited, cancelled and classified."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import anyio
import anyio.abc

from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.integrations.ray.cluster import ClusterError, ray_module, told_resources

Start = Callable[[], Awaitable[Any]]
"""Makes an actor ready to work; its handle. Raises ConfigError where it never can, RayError where it may later."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SETTLE_S = 10.0  # for so long after the first the others are waited for
_CLOSE_SECONDS = 15.0
logger = logging.getLogger("reward_kit.integrations.ray")


@dataclass(eq=False, slots=True)
class Member:
    """One actor that works.

    Attributes:
        handle: Ray's.
        number: of its slot, from 0.
        load: calls in flight.
        is_lost: it is of no use any more.
    """

    handle: Any
    number: int
    load: int = 0
    is_lost: bool = False
    _lost: anyio.Event = field(default_factory=anyio.Event)

    def lose(self) -> None:
        """It is gone, or unreachable and so not to be relied on. What it still does is in vain."""
        if not self.is_lost:
            self.is_lost = True
            self._lost.set()
            ray_module().kill(self.handle)

    async def until_lost(self) -> None:
        """Until somebody says so."""
        await self._lost.wait()


class ActorPool:
    """Keeps `size` actors alive. Use `open`.

    Args:
        what: what one is called, for messages.
        start: makes one.
        size: how many.
        wait_s: how long to wait for one where there is none.
        tell: takes a line when one is lost or cannot be made.
    """

    def __init__(
        self, what: str, start: Start, size: int, wait_s: float, tell: Callable[[str], None] = logger.warning
    ) -> None:
        self._what, self._start, self.size, self._wait_s, self._tell_user = what, start, size, wait_s, tell
        self.members: list[Member] = []
        self._refusal: ConfigError | None = None
        self._trouble = ""
        self._news = anyio.Event()
        self._settled_at = math.inf
        self._is_closing = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ActorPool]:
        """Start them, and end them with the block. They are waited for when they are needed."""
        async with anyio.create_task_group() as slots:
            for number in range(self.size):
                slots.start_soon(self._keep, number)
            try:
                yield self
            finally:
                self._is_closing = True
                with anyio.CancelScope(shield=True):
                    await self._end_all()
                slots.cancel_scope.cancel()

    async def place(self) -> Member:
        """The actor with the least to do; where there is none, the next one that comes.

        Raises:
            ConfigError: none can be made.
            ClusterError: none came in time.
        """
        with anyio.move_on_after(self._wait_s):
            while True:
                while not self._alive():
                    if self._refusal is not None:
                        raise self._refusal
                    await self._news.wait()
                await self._settled()
                if self._alive():  # the first may be lost while the others are awaited
                    break
        if not (alive := self._alive()):
            raise ClusterError(
                f"no {self._what} for {self._wait_s:g} s ({self.size} asked for; the cluster has {told_resources()})"
                f"{self._trouble}; the run can be resumed"
            )
        return min(alive, key=lambda member: member.load)

    async def _settled(self) -> None:
        """Until all are there, or have had their time."""
        with anyio.move_on_after(self._settled_at - anyio.current_time()):
            while len(self.members) < self.size and self._refusal is None:
                await self._news.wait()

    def _alive(self) -> list[Member]:
        return [member for member in self.members if not member.is_lost]

    async def _keep(self, number: int) -> None:
        """Have an actor in one slot for as long as the pool is open."""
        pause_s = _FIRST_PAUSE_S
        while not self._is_closing:
            try:
                handle = await self._start()
            except ConfigError as refusal:
                self._tell_user(f"{self._what} {number}: {refusal}")
                self._refusal = refusal
                self._tell()
                return
            except ray_module().exceptions.RayError as error:
                self._trouble = f"; the last one failed of: {error}"
                self._tell_user(f"{self._what} {number} did not start: {error}")
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            await self._serve(Member(handle, number))

    async def _serve(self, member: Member) -> None:
        if self._settled_at == math.inf:  # the first one does not take all there is to do
            self._settled_at = anyio.current_time() + _SETTLE_S
        self.members.append(member)
        self._tell()
        async with anyio.create_task_group() as watching:
            watching.start_soon(_watch, member)
            await member.until_lost()
            watching.cancel_scope.cancel()
        self.members.remove(member)
        if not self._is_closing:
            self._tell_user(f"{self._what} {member.number} was lost; another takes its place")

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def _end_all(self) -> None:
        """Let each close what it holds, and end it in any case."""
        async with anyio.create_task_group() as ending:
            for member in self.members:
                ending.start_soon(_end, member)


async def _watch(member: Member) -> None:
    """Learn of its death: the call ends only with the actor."""
    try:
        await member.handle.hold.remote()
    except ray_module().exceptions.RayError as error:
        if not member.is_lost:
            logger.info("actor %d: %s", member.number, error)
    member.lose()


async def _end(member: Member) -> None:
    with anyio.move_on_after(_CLOSE_SECONDS):
        try:
            await member.handle.close.remote()
        except ray_module().exceptions.RayError as error:
            logger.info("actor %d: %s", member.number, error)
    member.lose()


async def actor_started(kind: type, setup: Any, resources: Mapping[str, Any]) -> Any:
    """A new actor that is ready to work; its handle.

    Args:
        kind: its class, with `prepare(version, packed)`.
        setup: what it is told, secrets among it. As an argument of a call it goes straight to the process; what goes
            into an actor's constructor is kept by the cluster.
        resources: what it reserves, as Ray's `options` takes it.

    Raises:
        ConfigError: it cannot work there.
        RayError: its process was lost before it was ready.
    """
    ray = ray_module()
    handle = ray.remote(kind).options(max_restarts=0, max_task_retries=0, **resources).remote()
    try:
        await handle.prepare.remote(version("reward-kit"), ray.cloudpickle.dumps(setup))
    except BaseException as error:
        ray.kill(handle)
        if isinstance(error, ray.exceptions.RayTaskError):
            raise refusal_of(error) from error
        raise
    return handle


def refusal_of(error: Any) -> ConfigError:
    """Why an actor cannot work, as it said itself."""
    cause = error.cause
    told = str(cause) if isinstance(cause, RewardKitError) else f"{type(cause).__name__}: {cause}"
    return ConfigError(f"a worker cannot be made: {told}")


async def answer_of(member: Member, reference: Any) -> Any:
    """What a call returns. Where the caller is cancelled, so is the call.

    Raises:
        RayError: the call failed; see `is_loss`.
    """
    try:
        return await reference
    except anyio.get_cancelled_exc_class():
        if not member.is_lost:
            ray_module().cancel(reference)
        raise


def is_loss(error: Exception) -> bool:
    """Whether a call failed because its process or the machine under it is gone, or its answer was lost on the way."""
    return not isinstance(error, ray_module().exceptions.RayTaskError)
