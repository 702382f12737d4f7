"""`Sandbox`: calls of confined code, as many at once as there are slots, each in a fresh child or in a warm worker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from reward_kit.errors import ConfigError, Failure
from reward_kit.sandbox.linux import SetupError
from reward_kit.sandbox.outcome import Level, Outcome, Strength
from reward_kit.sandbox.program import Limits, Program, World, needs_of, world_of
from reward_kit.sandbox.worker import Session, ask_all, request_of, run_isolated
from reward_kit.sandbox.zygote_process import ZygoteProcess

_WarmKey = tuple[Program, Limits]


class Sandbox:
    """Run programs confined, for the length of an `async with`.

    Zygotes are started as they are needed, at most `slots` at work; idle ones are kept, the longest unused given up
    first.

    Args:
        strength: "auto" takes the strongest that this machine has, "namespaces" or "landlock", and refuses where it has
            neither. Naming one takes that one or refuses. "process" only limits, and confines nothing: it is never
            taken by itself.
        slots: calls at once; by default the number of CPUs.

    Raises:
        ConfigError: on entering, where the strength cannot be had; it names what is missing.
    """

    def __init__(self, *, strength: Strength | Literal["auto"] = "auto", slots: int | None = None) -> None:
        if slots is not None and slots < 1:
            raise ConfigError(f"slots must be at least 1, not {slots}")
        self._wanted: Strength | Literal["auto"] = strength
        self._slots = slots or len(os.sched_getaffinity(0))
        self._free = asyncio.Semaphore(self._slots)
        self._idle: OrderedDict[ZygoteProcess, World] = OrderedDict()
        self._warm: OrderedDict[Session, tuple[_WarmKey, World, ZygoteProcess]] = OrderedDict()
        self._worlds: dict[tuple[object, ...], World] = {}
        self._strength: Strength | None = None
        self._is_open = False

    @property
    def strength(self) -> Strength:
        """The strength in use."""
        if self._strength is None:
            raise ConfigError("the sandbox is used before `async with` has opened it")
        return self._strength

    @property
    def waiting_children(self) -> set[int]:
        """The ids of confined children that have been sent no call yet."""
        return {zygote.prepared_pid for zygote in self._idle} - {0}

    @property
    def is_settled(self) -> bool:
        """No child is being made ready."""
        return all(zygote.is_settled for zygote in self._idle)

    async def __aenter__(self) -> Sandbox:
        self._strength = await best_strength(self._wanted)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        sessions, self._warm = self._warm, OrderedDict()
        idle, self._idle = self._idle, OrderedDict()
        for session in sessions:
            await session.close()
        zygotes = [*idle, *(zygote for _, _, zygote in sessions.values())]
        await asyncio.gather(*(zygote.close() for zygote in zygotes))

    async def call(
        self, program: Program, request: Any, *, limits: Limits | None = None, level: Level = "isolated"
    ) -> Outcome:
        """Call the program's function once.

        Args:
            program: what to call.
            request: for the form "reward" the arguments by name, for "plain" the one argument; anything with a JSON
                form. The code gets a copy.
            limits: by default `Limits()`.
            level: "isolated" is a fresh child; "warm" a child that has answered calls of this program before.

        Raises:
            ConfigError: the request has no JSON form, or the program's paths are gone. What the code does never raises.
        """
        limits = limits or Limits()
        payload = request_of(program, request)
        async with self._free:
            try:
                if level == "warm":
                    return await self._call_warm(program, payload, limits)
                async with self._zygote(program, limits) as zygote:
                    outcome = await run_isolated(zygote, program, payload, limits, self.strength)
                    # A program that fails is not loaded before its next call, which is to meet the failure.
                    again = program if outcome.failure is None else None
                    zygote.prepare(limits, is_single=True, cpu_s=limits.cpu_s, program=again)
                    return outcome
            except SetupError as error:
                return self._refusal(error, level)

    async def ask(self, program: Program, inputs: Sequence[Any], *, limits: Limits | None = None) -> list[Outcome]:
        """Put each input to the program in one fresh child, one at a time; the caller compares what comes back.

        The child never holds more than one input, and no expected answer. The limits hold for all inputs together;
        where the child ends, the rest is not asked and fails alike.

        Raises:
            ConfigError: as for `call`.
        """
        limits = limits or Limits()
        calls = [request_of(program, value) for value in inputs]
        async with self._free:
            try:
                async with self._zygote(program, limits) as zygote:
                    outcomes = await ask_all(zygote, program, calls, limits, self.strength)
                    zygote.prepare(limits, is_single=False, cpu_s=limits.cpu_s)
                    return outcomes
            except SetupError as error:
                return [self._refusal(error, "isolated")] * len(calls)

    def _refusal(self, error: SetupError, level: Level) -> Outcome:
        failure = Failure("refused", "Sandbox", f"nothing was run: {error}")
        return Outcome(None, failure, "setup", level=level, strength=self.strength)

    def _world(self, program: Program, limits: Limits) -> World:
        may_start = limits.processes > 0
        if may_start and self.strength == "landlock":
            raise ConfigError(
                "limits.processes needs namespaces, without which what is started could outlive the call; "
                "this sandbox runs with Landlock alone"
            )
        key = (may_start, *needs_of(program))
        if key not in self._worlds:
            self._worlds[key] = world_of(program, may_start_processes=may_start)
        return self._worlds[key]

    @asynccontextmanager
    async def _zygote(self, program: Program, limits: Limits) -> AsyncIterator[ZygoteProcess]:
        """A zygote of the program's world for one call; it goes back to the others if it lives."""
        world = self._world(program, limits)
        zygote = await self._take(world, limits, program)
        try:
            yield zygote
        finally:
            await self._give_back(zygote, world)

    async def _take(self, world: World, limits: Limits, program: Program) -> ZygoteProcess:
        """A zygote of this world, before others one that has a child ready."""
        if not self._is_open:
            raise ConfigError("the sandbox is used outside of its `async with`")
        while dead := next((zygote for zygote in self._idle if not zygote.is_alive), None):
            del self._idle[dead]
            await dead.close()
        if fitting := [zygote for zygote, other in self._idle.items() if other == world]:
            zygote = next((zygote for zygote in fitting if zygote.is_prepared(limits, program)), fitting[0])
            del self._idle[zygote]
            return zygote
        while len(self._idle) + len(self._warm) >= 2 * self._slots + 2 and (self._idle or self._warm):
            await self._give_up_one()
        return await ZygoteProcess.start(world, self.strength)

    async def _give_up_one(self) -> None:
        """End the zygote that has been idle longest."""
        if self._idle:
            zygote, _ = self._idle.popitem(last=False)
        else:
            session, (_, _, zygote) = self._warm.popitem(last=False)
            await session.close()
        await zygote.close()

    async def _give_back(self, zygote: ZygoteProcess, world: World) -> None:
        if zygote.is_alive and self._is_open:
            self._idle[zygote] = world
        else:
            await zygote.close()

    async def _call_warm(self, program: Program, payload: bytes, limits: Limits) -> Outcome:
        session, world, zygote = await self._take_warm(program, limits)
        try:
            return await session.call(payload, limits.wall_s)
        finally:
            if session.is_usable and self._is_open:
                self._warm[session] = ((program, limits), world, zygote)
            else:
                await session.close()
                await self._give_back(zygote, world)

    async def _take_warm(self, program: Program, limits: Limits) -> tuple[Session, World, ZygoteProcess]:
        key = (program, limits)
        for session in [session for session, (other, _, _) in self._warm.items() if other == key]:
            _, world, zygote = self._warm.pop(session)
            if session.is_clean():
                return session, world, zygote
            await session.close()
            await self._give_back(zygote, world)
        world = self._world(program, limits)
        zygote = await self._take(world, limits, program)
        session = await Session.start(zygote, program, limits, self.strength, "warm")
        return session, world, zygote


STRENGTHS: tuple[Strength, ...] = ("namespaces", "landlock", "process")
_CONFINING: tuple[Strength, ...] = ("namespaces", "landlock")

# Both must fail in whatever deserves the name of a sandbox: a socket, and the list of the machine's accounts.
_TRIAL = """
def trial(_):
    reached = []
    try:
        import _socket
        _socket.socket(2, 1)
        reached.append("a socket")
    except OSError:
        pass
    try:
        open("/etc/passwd").close()
        reached.append("a file of the host")
    except OSError:
        pass
    return reached
"""

_known: dict[Strength, Availability] = {}


@dataclass(frozen=True, slots=True)
class Availability:
    """The result of trying one strength on this machine.

    Attributes:
        strength: which.
        is_available: a child was confined with it, and could not get out.
        reason: why not; "" where it works.
        landlock: the version of Landlock that is in force; 0 for none.
    """

    strength: Strength
    is_available: bool
    reason: str = ""
    landlock: int = 0


async def probe() -> tuple[Availability, ...]:
    """Try every strength, strongest first; what was found holds for this process's life."""
    return tuple([await _availability(strength) for strength in STRENGTHS])


async def best_strength(wanted: Strength | Literal["auto"]) -> Strength:
    """The strength to use.

    Raises:
        ConfigError: it, or for "auto" any that confines, is not to be had here.
    """
    candidates = _CONFINING if wanted == "auto" else (wanted,)
    missing = []
    for strength in candidates:
        found = await _availability(strength)
        if found.is_available:
            return strength
        missing.append(f"{strength}: {found.reason}")
    raise ConfigError(f"this machine cannot confine code ({'; '.join(missing)})")


async def _availability(strength: Strength) -> Availability:
    if strength not in _known:
        _known[strength] = await _try(strength)
    return _known[strength]


async def _try(strength: Strength) -> Availability:
    if sys.platform != "linux":
        return Availability(strength, False, f"it needs Linux, and this is {sys.platform}")
    program = Program(_TRIAL, "trial", form="plain")
    try:
        zygote = await ZygoteProcess.start(world_of(program, may_start_processes=False), strength)
    except SetupError as error:
        return Availability(strength, False, str(error))
    try:
        outcome = await run_isolated(zygote, program, request_of(program, None), Limits(), strength)
    finally:
        await zygote.close()
    if outcome.failure is not None:
        return Availability(strength, False, outcome.failure.message)
    if outcome.value and strength != "process":
        return Availability(strength, False, f"confined code still reached {' and '.join(outcome.value)}")
    return Availability(strength, True, landlock=int(zygote.facts["landlock"]))
