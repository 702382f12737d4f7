"""The `Sandbox`, which runs calls concurrently in confined processes. A call uses a new child or a warm worker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from reward_kit.errors import ConfigError, Failure
from reward_kit.sandbox.frames import encode_request
from reward_kit.sandbox.linux import SetupError
from reward_kit.sandbox.outcome import Evidence, Level, Outcome, Strength, judge
from reward_kit.sandbox.program import Limits, Program, ZygoteSpec, zygote_spec_for
from reward_kit.sandbox.zygote import Ended
from reward_kit.sandbox.zygote_process import Child, ZygoteProcess

_WARM_CPU_S = 86_400.0
_CALLS_PER_MEMORY_CHECK = 64
_SPOILING = ("memory", "open_files", "disk", "processes")
_LAST_CALL_S = 2.0
_WarmKey = tuple[Program, Limits]
STRENGTHS: tuple[Strength, ...] = ("namespaces", "landlock", "process")
_CONFINING: tuple[Strength, ...] = ("namespaces", "landlock")


class Sandbox:
    """A context manager that runs programs in confined processes.

    Zygotes are started on demand, and at most `slots` of them are busy at the same time. An idle zygote is reused. If a
    different zygote is needed, the least recently used idle zygote is stopped.

    Args:
        strength: "auto" uses the stronger of "namespaces" and "landlock" that is available on this machine, and raises
            an error if neither is available. Any other value requires that strength. "process" only sets resource
            limits and does not confine the code, so "auto" never selects it.
        slots: the maximum number of concurrent calls. The default is the number of CPUs.

    Raises:
        ConfigError: On entering, if the strength is not available. The message contains the reason.
    """

    def __init__(self, *, strength: Strength | Literal["auto"] = "auto", slots: int | None = None) -> None:
        if slots is not None and slots < 1:
            raise ConfigError(f"slots must be at least 1, got {slots}")
        self._wanted: Strength | Literal["auto"] = strength
        self._slots = slots or len(os.sched_getaffinity(0))
        self._free = asyncio.Semaphore(self._slots)
        self._idle: OrderedDict[ZygoteProcess, ZygoteSpec] = OrderedDict()
        self._warm: OrderedDict[ChildSession, tuple[_WarmKey, ZygoteSpec, ZygoteProcess]] = OrderedDict()
        self._specs: dict[tuple[object, ...], ZygoteSpec] = {}
        self._strength: Strength | None = None
        self._is_open = False

    @property
    def strength(self) -> Strength:
        """The strength in use."""
        if self._strength is None:
            raise ConfigError("the sandbox is not open; use it inside its `async with`")
        return self._strength

    @property
    def waiting_children(self) -> set[int]:
        """The process ids of prepared children that have not received a call."""
        return {zygote.prepared_pid for zygote in self._idle} - {0}

    @property
    def is_settled(self) -> bool:
        """True if no child is being prepared."""
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
        """Call the function of the program once.

        Args:
            program: the program to call.
            request: any JSON value. A program of the form "reward" requires a dictionary of keyword arguments. A
                program of the form "plain" receives the value as its only argument. The code receives a copy.
            limits: the limits of the call. The default is `Limits()`.
            level: "isolated" starts a new child for the call. "warm" may use a child that has answered earlier calls of
                the same program.

        Raises:
            ConfigError: If the request cannot be converted to JSON, or if a path does not exist. If the code fails, the
                failure is part of the returned outcome.
        """
        limits = limits or Limits()
        payload = encode_call(program, request)
        async with self._free:
            try:
                if level == "warm":
                    return await self._call_warm(program, payload, limits)
                async with self._zygote(program, limits) as zygote:
                    outcome = await run_isolated(zygote, program, payload, limits, self.strength)
                    # A failing program is not preloaded, so its next call reports the failure.
                    preloaded = program if outcome.failure is None else None
                    zygote.prepare(limits, is_single=True, cpu_s=limits.cpu_s, program=preloaded)
                    return outcome
            except SetupError as error:
                return self._refusal(error, level)

    async def ask(self, program: Program, inputs: Sequence[Any], *, limits: Limits | None = None) -> list[Outcome]:
        """Call the program with each input in turn, in one new child, and return the outcomes.

        The child receives one input at a time, and never the expected answers. The limits apply to all inputs together.
        If the child ends, the remaining inputs get the same outcome.

        Raises:
            ConfigError: As for `call`.
        """
        limits = limits or Limits()
        calls = [encode_call(program, value) for value in inputs]
        outcomes: list[Outcome] = []
        async with self._free:
            try:
                async with self._zygote(program, limits) as zygote:
                    session = await ChildSession.start(zygote, program, limits, self.strength, "isolated")
                    deadline = time.monotonic() + limits.wall_s
                    try:
                        for call in calls:
                            if not session.is_usable and outcomes and outcomes[-1].failure is not None:
                                outcomes.append(outcomes[-1])
                            else:
                                outcomes.append(await session.call(call, max(0.0, deadline - time.monotonic())))
                    finally:
                        await session.close()
                    zygote.prepare(limits, is_single=False, cpu_s=limits.cpu_s)
                    return outcomes
            except SetupError as error:
                return [self._refusal(error, "isolated")] * len(calls)

    def _refusal(self, error: SetupError, level: Level) -> Outcome:
        failure = Failure("refused", "Sandbox", f"the code was not run: {error}")
        return Outcome(None, failure, "setup", level=level, strength=self.strength)

    def _spec(self, program: Program, limits: Limits) -> ZygoteSpec:
        may_start = limits.processes > 0
        if may_start and self.strength == "landlock":
            raise ConfigError(
                "limits.processes needs namespaces, because processes could otherwise outlive the call; this "
                "sandbox uses only Landlock"
            )
        key = (may_start, program.imports, program.read_paths, program.search_paths)
        if key not in self._specs:
            self._specs[key] = zygote_spec_for(program, may_start_processes=may_start)
        return self._specs[key]

    @asynccontextmanager
    async def _zygote(self, program: Program, limits: Limits) -> AsyncIterator[ZygoteProcess]:
        """Yield a zygote for one call of the program."""
        spec = self._spec(program, limits)
        zygote = await self._take(spec, limits, program)
        try:
            yield zygote
        finally:
            await self._give_back(zygote, spec)

    async def _take(self, spec: ZygoteSpec, limits: Limits, program: Program) -> ZygoteProcess:
        """Return a zygote with this configuration. If possible, it is a zygote that has already prepared a child."""
        if not self._is_open:
            raise ConfigError("the sandbox is not open; use it inside its `async with`")
        while dead := next((zygote for zygote in self._idle if not zygote.is_alive), None):
            del self._idle[dead]
            await dead.close()
        if fitting := [zygote for zygote, other in self._idle.items() if other == spec]:
            zygote = next((zygote for zygote in fitting if zygote.is_prepared(limits, program)), fitting[0])
            del self._idle[zygote]
            return zygote
        while len(self._idle) + len(self._warm) >= 2 * self._slots + 2 and (self._idle or self._warm):
            if self._idle:  # evict the zygote that has been idle for the longest time
                zygote, _ = self._idle.popitem(last=False)
            else:
                session, (_, _, zygote) = self._warm.popitem(last=False)
                await session.close()
            await zygote.close()
        return await ZygoteProcess.start(spec, self.strength)

    async def _give_back(self, zygote: ZygoteProcess, spec: ZygoteSpec) -> None:
        if zygote.is_alive and self._is_open:
            self._idle[zygote] = spec
        else:
            await zygote.close()

    async def _call_warm(self, program: Program, payload: bytes, limits: Limits) -> Outcome:
        key = (program, limits)
        for session in [session for session, (other, _, _) in self._warm.items() if other == key]:
            _, spec, zygote = self._warm.pop(session)
            if session.is_clean():
                break
            await session.close()
            await self._give_back(zygote, spec)
        else:
            spec = self._spec(program, limits)
            zygote = await self._take(spec, limits, program)
            session = await ChildSession.start(zygote, program, limits, self.strength, "warm")
        try:
            return await session.call(payload, limits.wall_s)
        finally:
            if session.is_usable and self._is_open:
                self._warm[session] = (key, spec, zygote)
            else:
                await session.close()
                await self._give_back(zygote, spec)


def encode_call(program: Program, request: Any) -> bytes:
    """Encode the payload of the frame for a call.

    Raises:
        ConfigError: If the request cannot be converted to JSON, or if the request of a reward is not a dictionary.
    """
    if program.form == "reward":
        if not isinstance(request, dict):
            raise ConfigError(
                f"a reward function is called with a mapping of argument names, got {type(request).__name__}"
            )
        call: dict[str, Any] = {"args": [], "kwargs": request}
    else:
        call = {"args": [request], "kwargs": {}}
    try:
        return encode_request(call)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the arguments of {program.function} are not JSON: {error}") from error


async def run_isolated(
    zygote: ZygoteProcess, program: Program, call: bytes, limits: Limits, strength: Strength
) -> Outcome:
    """Run one call in a new child. The child has ended when this function returns."""
    child = await zygote.spawn(limits, is_single=True, cpu_s=limits.cpu_s, program=program)
    started = time.monotonic()
    try:
        child.answered = asyncio.get_running_loop().create_future()
        child.answered.add_done_callback(lambda _: zygote.kill_child(child) if child.has_fault else None)
        child.send(program, call)
        is_late = False
        try:
            async with asyncio.timeout(limits.wall_s):
                await asyncio.shield(child.ended)
        except TimeoutError:
            await zygote.end_child(child)
            is_late = True
        except asyncio.CancelledError:
            await zygote.end_child(child)
            raise
        evidence = Evidence()
        child.take_end(evidence, child.ended.result())
        if is_late and evidence.how == "killed":
            evidence.how = "late"
        evidence.wall_s = time.monotonic() - started
        return judge(evidence, limits, "isolated", strength)
    finally:
        child.close()


class ChildSession:
    """A child that answers multiple calls of the same function, one after the other."""

    def __init__(self, zygote: ZygoteProcess, child: Child, program: Program, strength: Strength, level: Level) -> None:
        self._zygote, self._child, self._program, self._strength = zygote, child, program, strength
        self._limits = child.limits
        self._level = level
        self._loop = asyncio.get_running_loop()
        self._child.ended.add_done_callback(self._on_end)
        self._calls = 0
        self._first_resident_mb = 0.0
        self._cpu_before = 0.0
        self._cpu_of_earlier_calls = 0.0
        self._ended_for: Literal["late", "cpu"] | None = None
        self.is_usable = True  # True if the last call left nothing behind

    @classmethod
    async def start(
        cls, zygote: ZygoteProcess, program: Program, limits: Limits, strength: Strength, level: Level
    ) -> ChildSession:
        """Start a child for the session."""
        cpu_s = _WARM_CPU_S if level == "warm" else limits.cpu_s
        child = await zygote.spawn(limits, is_single=False, cpu_s=cpu_s)
        return cls(zygote, child, program, strength, level)

    def _on_end(self, _: asyncio.Future[Ended | None]) -> None:
        self.is_usable = False
        if self._child.answered is not None and not self._child.answered.done():
            self._child.answered.set_result(None)

    async def call(self, payload: bytes, wall_s: float) -> Outcome:
        """Send a payload from `encode_call`, and return the outcome. The child is killed after `wall_s` seconds."""
        started = self._loop.time()
        child = self._child
        answered = child.answered = self._loop.create_future()
        self._cpu_before = child.cpu_s()
        # A warm call is not charged for earlier calls. All calls of one `ask` share the limits.
        self._cpu_of_earlier_calls = self._cpu_before if self._level == "warm" else 0.0
        self._arm(answered, started + wall_s, max(0.0, min(wall_s, self._cpu_left_s())))
        child.send(self._program, payload)
        self._calls += 1
        if child.ended.done():
            self._on_end(child.ended)
        try:
            await answered
        except asyncio.CancelledError:
            self.is_usable = False
            await self._zygote.end_child(child)
            raise
        finally:
            self._timer.cancel()
        evidence = Evidence()
        if child.has_fault or not self.is_usable:
            self.is_usable = False
            child.take_end(evidence, await self._zygote.end_child(child))
            evidence.cpu_s = max(0.0, evidence.cpu_s - self._cpu_before)
            if self._ended_for is not None and evidence.how != "lost":
                evidence.how = self._ended_for
        else:
            child.take_answer(evidence)
            evidence.cpu_s = child.cpu_s() - self._cpu_before
            self.is_usable = self._is_sound(evidence)
        evidence.wall_s = self._loop.time() - started
        return judge(evidence, self._limits, self._level, self._strength)

    def _arm(self, answered: asyncio.Future[None], deadline: float, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._check_limits, answered, deadline)

    def _check_limits(self, answered: asyncio.Future[None], deadline: float) -> None:
        """End the call if it has reached its wall time limit or its CPU time limit.

        Otherwise, set a timer for the limit that will be reached first.
        """
        left_s = deadline - self._loop.time()
        cpu_left_s = self._cpu_left_s()
        if left_s > 0.001 and cpu_left_s > 0.001:
            self._arm(answered, deadline, min(left_s, cpu_left_s))
            return
        self._ended_for = "late" if left_s <= 0.001 else "cpu"
        self.is_usable = False
        if not answered.done():
            answered.set_result(None)

    def _cpu_left_s(self) -> float:
        return self._limits.cpu_s - (self._child.cpu_s() - self._cpu_of_earlier_calls)

    def _is_sound(self, evidence: Evidence) -> bool:
        """Return True if the call left nothing running or open and the memory grew by less than half of its limit."""
        answer = evidence.answer
        if evidence.fault is not None or not isinstance(answer, dict) or (answer.get("left") and self._level == "warm"):
            return False
        error = answer.get("error")
        if isinstance(error, dict) and error.get("kind") in _SPOILING:
            return False
        if self._level != "warm" or (self._calls > 1 and self._calls % _CALLS_PER_MEMORY_CHECK):
            return True
        resident = self._child.resident_mb()
        if self._calls == 1:
            self._first_resident_mb = resident
        return resident - self._first_resident_mb <= self._limits.memory_mb / 2

    def is_clean(self) -> bool:
        """Return True if the child is alive and has sent nothing since its last answer."""
        return self.is_usable and not self._child.ended.done() and not self._child.has_extra

    async def close(self) -> None:
        """End the child. The zygote can still be used."""
        try:
            if self._program.last_call and self._calls and self.is_clean():
                await self.call(encode_call(self._program, json.loads(self._program.last_call)), _LAST_CALL_S)
            self.is_usable = False
            if not self._child.ended.done():
                await self._zygote.end_child(self._child)
        finally:
            self._child.close()


# In a working sandbox, neither a socket nor the list of accounts can be opened.
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
        reached.append("a file on the host")
    except OSError:
        pass
    return reached
"""
_known: dict[Strength, Availability] = {}


@dataclass(frozen=True, slots=True)
class Availability:
    """The result of testing whether a strength works on this machine."""

    strength: Strength
    is_available: bool  # True if a test child was confined
    reason: str = ""  # the reason if the strength is not available
    landlock: int = 0  # the active Landlock version, or 0 if Landlock is inactive


async def probe() -> tuple[Availability, ...]:
    """Test every strength, starting with the strongest. The results are cached until the process ends."""
    return tuple([await _availability(strength) for strength in STRENGTHS])


async def best_strength(wanted: Strength | Literal["auto"]) -> Strength:
    """Return the strength to use.

    Raises:
        ConfigError: If the requested strength does not work on this machine or, for "auto", if no strength that
            confines the code works.
    """
    missing = []
    for strength in _CONFINING if wanted == "auto" else (wanted,):
        result = await _availability(strength)
        if result.is_available:
            return strength
        missing.append(f"{strength}: {result.reason}")
    raise ConfigError(f"this machine cannot confine code ({'; '.join(missing)})")


async def _availability(strength: Strength) -> Availability:
    if strength not in _known:
        _known[strength] = await _try(strength)
    return _known[strength]


async def _try(strength: Strength) -> Availability:
    if sys.platform != "linux":
        return Availability(strength, False, f"needs Linux; this is {sys.platform}")
    program = Program(_TRIAL, "trial", form="plain")
    try:
        zygote = await ZygoteProcess.start(zygote_spec_for(program, may_start_processes=False), strength)
    except SetupError as error:
        return Availability(strength, False, str(error))
    try:
        outcome = await run_isolated(zygote, program, encode_call(program, None), Limits(), strength)
    finally:
        await zygote.close()
    if outcome.failure is not None:
        return Availability(strength, False, outcome.failure.message)
    if outcome.value and strength != "process":
        return Availability(strength, False, f"sandboxed code could still access {' and '.join(outcome.value)}")
    return Availability(strength, True, landlock=int(zygote.facts["landlock"]))
