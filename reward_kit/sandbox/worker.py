"""Calls: one in a fresh child, or several of the same function in a child that is reused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Literal

from reward_kit.errors import ConfigError
from reward_kit.sandbox.frames import encode_request
from reward_kit.sandbox.outcome import Evidence, Level, Outcome, Strength, judge
from reward_kit.sandbox.program import Limits, Program
from reward_kit.sandbox.zygote import Ended
from reward_kit.sandbox.zygote_process import Child, ZygoteProcess

_WARM_CPU_S = 86_400.0
_CALLS_A_LOOK = 64
_SPOILING = ("memory", "open_files", "disk", "processes")
_LAST_CALL_S = 2.0


def request_of(program: Program, request: Any) -> bytes:
    """The frame payload of a call.

    Raises:
        ConfigError: the request has no JSON form, or a reward is not given its arguments by name.
    """
    if program.form == "reward":
        if not isinstance(request, dict):
            raise ConfigError(f"a reward function is called with arguments by name, not with {type(request).__name__}")
        call: dict[str, Any] = {"args": [], "kwargs": request}
    else:
        call = {"args": [request], "kwargs": {}}
    try:
        return encode_request(call)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"what {program.function} is called with has no JSON form: {error}") from error


async def run_isolated(
    zygote: ZygoteProcess, program: Program, call: bytes, limits: Limits, strength: Strength
) -> Outcome:
    """Make one call in a fresh child, of which nothing is left when this returns."""
    child = await zygote.spawn(limits, is_single=True, cpu_s=limits.cpu_s, program=program)
    started = time.monotonic()
    try:
        child.answered = asyncio.get_running_loop().create_future()
        child.answered.add_done_callback(lambda _: zygote.kill_child(child) if child.has_fault else None)
        child.send(program, call)
        evidence = Evidence()
        is_late = await _is_late(zygote, child, limits.wall_s)
        child.take_end(evidence, child.ended.result())
        if is_late and evidence.how == "killed":
            evidence.how = "late"
        evidence.wall_s = time.monotonic() - started
        return judge(evidence, limits, "isolated", strength)
    finally:
        child.close()


async def _is_late(zygote: ZygoteProcess, child: Child, wall_s: float) -> bool:
    """Wait for the child's end, and bring it about where its time is up or we are cancelled."""
    try:
        async with asyncio.timeout(wall_s):
            await asyncio.shield(child.ended)
    except TimeoutError:
        await zygote.end_child(child)
        return True
    except asyncio.CancelledError:
        await zygote.end_child(child)
        raise
    return False


class Session:
    """A child that answers several calls of one function, one after the other.

    Attributes:
        is_usable: the last call left it clean.
    """

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
        self.is_usable = True

    @classmethod
    async def start(
        cls, zygote: ZygoteProcess, program: Program, limits: Limits, strength: Strength, level: Level
    ) -> Session:
        """A session with a child of its own."""
        cpu_s = _WARM_CPU_S if level == "warm" else limits.cpu_s
        child = await zygote.spawn(limits, is_single=False, cpu_s=cpu_s)
        return cls(zygote, child, program, strength, level)

    def _on_end(self, _: asyncio.Future[Ended | None]) -> None:
        self.is_usable = False
        if self._child.answered is not None and not self._child.answered.done():
            self._child.answered.set_result(None)

    async def call(self, payload: bytes, wall_s: float) -> Outcome:
        """Make one call.

        Args:
            payload: as `request_of` gives it.
            wall_s: seconds until the child is killed.
        """
        started = self._loop.time()
        child = self._child
        answered = child.answered = self._loop.create_future()
        self._cpu_before = child.cpu_s()
        # A warm call is not charged for earlier ones; the calls of one `ask` share their limits.
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
            await self._post_mortem(evidence)
        else:
            child.take_answer(evidence)
            evidence.cpu_s = child.cpu_s() - self._cpu_before
            self.is_usable = self._is_sound(evidence)
        evidence.wall_s = self._loop.time() - started
        return judge(evidence, self._limits, self._level, self._strength)

    def _arm(self, answered: asyncio.Future[None], deadline: float, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._look_at_clocks, answered, deadline)

    def _look_at_clocks(self, answered: asyncio.Future[None], deadline: float) -> None:
        """End the call at its deadline, or when its CPU time is used up; else look again when either can be."""
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

    async def _post_mortem(self, evidence: Evidence) -> None:
        self.is_usable = False
        ended = await self._zygote.end_child(self._child)
        self._child.take_end(evidence, ended)
        evidence.cpu_s = max(0.0, evidence.cpu_s - self._cpu_before)
        if self._ended_for is not None and evidence.how != "lost":
            evidence.how = self._ended_for

    def _is_sound(self, evidence: Evidence) -> bool:
        """Check that the child may answer again: nothing is left running or open, and it grew by under half its memory.

        Within one `ask` a program may leave things, since no other call comes after it.
        """
        answer = evidence.answer
        if evidence.fault is not None or not isinstance(answer, dict) or (answer.get("left") and self._level == "warm"):
            return False
        error = answer.get("error")
        if isinstance(error, dict) and error.get("kind") in _SPOILING:
            return False
        if self._level != "warm" or (self._calls > 1 and self._calls % _CALLS_A_LOOK):
            return True
        resident = self._child.resident_mb()
        if self._calls == 1:
            self._first_resident_mb = resident
        return resident - self._first_resident_mb <= self._limits.memory_mb / 2

    def is_clean(self) -> bool:
        """Nothing has come, and it has not ended, since its last answer."""
        return self.is_usable and not self._child.ended.done() and not self._child.has_extra

    async def close(self) -> None:
        """End the child; the zygote can be asked for another one."""
        try:
            if self._program.last_call and self._calls and self.is_clean():
                await self.call(request_of(self._program, json.loads(self._program.last_call)), _LAST_CALL_S)
            self.is_usable = False
            if not self._child.ended.done():
                await self._zygote.end_child(self._child)
        finally:
            self._child.close()


async def ask_all(
    zygote: ZygoteProcess, program: Program, calls: Sequence[bytes], limits: Limits, strength: Strength
) -> list[Outcome]:
    """Put questions to one fresh child, one at a time, within one limit of wall time for all.

    Where the child ends, or has to be ended, the remaining questions are not asked and fail as that one did.
    """
    session = await Session.start(zygote, program, limits, strength, "isolated")
    deadline = time.monotonic() + limits.wall_s
    outcomes: list[Outcome] = []
    try:
        for call in calls:
            if not session.is_usable and outcomes and outcomes[-1].failure is not None:
                outcomes.append(outcomes[-1])
                continue
            outcomes.append(await session.call(call, max(0.0, deadline - time.monotonic())))
    finally:
        await session.close()
    return outcomes
