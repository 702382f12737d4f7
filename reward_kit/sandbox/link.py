"""One connection to a sandbox elsewhere: orders go out, answers come back in any order, and everything ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

import anyio

from reward_kit.errors import ConfigError
from reward_kit.processes import ChildProcess, child_environment, start_process
from reward_kit.sandbox.back_ends import CLIENT_VARIABLES, BackEnd, Launch
from reward_kit.sandbox.outcome import Strength
from reward_kit.sandbox.wire import (
    PROTOCOL,
    Answer,
    Greeting,
    Opened,
    Opening,
    WireError,
    packed,
    read_as,
    read_message,
    streams,
    version,
)

_GREETING_S = 60.0
_OPENING_S = 130.0
_GRACE_S = 5.0
_END_S = 30.0
_LONGEST_GREETING = 1 << 16
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_M = TypeVar("_M", Greeting, Opened)


class LinkLost(Exception):
    """The connection ended before the answer came; the text says how."""


class NotConfined(ConfigError):
    """The back end answers, and can put up no walls."""


class _Pending:
    """An order that is not answered yet."""

    def __init__(self, max_bytes: int, timer: asyncio.TimerHandle) -> None:
        self.answered: asyncio.Future[tuple[Answer, bytes]] = asyncio.get_running_loop().create_future()
        # Where the link is lost after the caller has gone, nobody asks for the error.
        self.answered.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.max_bytes, self.timer = max_bytes, timer


class Link:
    """An open connection; `open` makes one.

    Attributes:
        is_alive: orders can be given.
        strength: the walls that stand on the other side.
        processors: of the other side.
    """

    strength: Strength
    processors: int

    def __init__(self, back_end: BackEnd, launch: Launch, child: ChildProcess, streams: _Streams) -> None:
        self._back_end, self._launch, self._child = back_end, launch, child
        self._reader, self._writer = streams
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._writing = asyncio.Lock()
        self._listening: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.is_alive = True

    @classmethod
    async def open(
        cls, back_end: BackEnd, launch: Launch, *, strength: Strength | Literal["auto"], slots: int | None
    ) -> Link:
        """Connect, and wait until walls stand on the other side.

        Raises:
            NotConfined: it answers, and has no walls of the strength that is wanted.
            ConfigError: it cannot be reached, or is of another version.
        """
        log_name = f"sandbox-{back_end.name.partition(':')[0]}"
        child = await start_process(
            launch.command, cwd=None, env=child_environment(also=CLIENT_VARIABLES), log_name=log_name, piped=True
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(child.end)
            self = cls(back_end, launch, child, await streams(child.pipes[1], child.pipes[0]))
            undo.pop_all()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self._greet(strength, slots)
            undo.pop_all()
        self._listening = asyncio.get_running_loop().create_task(self._listen())
        return self

    @property
    def is_idle(self) -> bool:
        """No order waits for its answer."""
        return not self._pending

    async def ask(self, order: dict[str, Any], body: bytes, *, wait_s: float, max_bytes: int) -> tuple[Answer, bytes]:
        """Give an order and wait for the answer. Where the caller is cancelled, the other side is told.

        Args:
            order: fields of `wire.Order`, without its id.
            body: goes with it.
            wait_s: after which the connection counts as lost.
            max_bytes: of an honest answer.

        Raises:
            LinkLost: no answer came.
        """
        if not self.is_alive:
            raise LinkLost("it had ended")
        number, loop = next(self._ids), asyncio.get_running_loop()
        timer = loop.call_later(wait_s, self.lose, f"no answer came within {wait_s:g} s")
        pending = self._pending[number] = _Pending(max_bytes, timer)
        try:
            await self._send(packed({"id": number, **order}, body))
            return await asyncio.shield(pending.answered)
        except asyncio.CancelledError:
            # Sent without waiting: what is written is whole, and the answer is still taken off the line when it comes.
            if self.is_alive and not pending.answered.done():
                self._writer.write(packed({"id": number, "do": "cancel"}))
            raise

    async def _send(self, message: bytes) -> None:
        self._writer.write(message)
        async with self._writing:
            with contextlib.suppress(OSError):  # whoever listens learns of it, and why
                await self._writer.drain()

    async def _greet(self, strength: Strength | Literal["auto"], slots: int | None) -> None:
        greeting = await self._first(Greeting, _GREETING_S)
        if (greeting.protocol, greeting.reward_kit) != (PROTOCOL, version()):
            raise ConfigError(
                f"{self._back_end.name} runs reward-kit {greeting.reward_kit} (protocol {greeting.protocol}), and this "
                f"is {version()} (protocol {PROTOCOL}); install the same version on both sides"
            )
        self.processors = greeting.processors
        await self._send(packed(Opening(strength=strength, slots=slots)))
        opened = await self._first(Opened, _OPENING_S)
        if opened.strength is None or strength not in ("auto", opened.strength):
            refusal = opened.refusal or f"it put up {opened.strength} where {strength} was wanted"
            raise NotConfined(f"{self._back_end.name}: {refusal}")
        self.strength = opened.strength

    async def _first(self, model: type[_M], timeout_s: float) -> _M:
        try:
            async with asyncio.timeout(timeout_s):
                message = await read_message(self._reader, lambda: _LONGEST_GREETING)
            if message is not None:
                return read_as(model, message[0])
            problem = ""
        except TimeoutError:
            problem = f"it said nothing within {timeout_s:g} s"
        except WireError as error:
            problem = str(error)
        raise ConfigError(await self._why_not(problem))

    async def _why_not(self, problem: str) -> str:
        """Why there is no connection: what it said instead, its exit status, its last words, and what helps."""
        if not problem:
            await self._exited(_GRACE_S)
        status, lines = self._child.returncode, self._child.log_tail().splitlines()
        output = " ".join(line.strip() for line in lines[-4:] if line.strip() and "--help'" not in line)
        parts = [problem, f"exit status {status}" if status and not output else "", output]
        told = "; ".join(part for part in parts if part) or "it ended without a word"
        hint = self._back_end.hint(output, status)
        return f"{self._back_end.name} cannot be used: {told}{f'; {hint}' if hint else ''}"

    async def _listen(self) -> None:
        try:
            while (message := await read_message(self._reader, self._most_bytes)) is not None:
                self._take(read_as(Answer, message[0]), message[1])
            self.lose(self._child.log_tail(1) or "the other side ended")
        except (WireError, OSError) as error:
            self.lose(str(error))

    def _most_bytes(self) -> int:
        return max((pending.max_bytes for pending in self._pending.values()), default=_LONGEST_GREETING)

    def _take(self, answer: Answer, body: bytes) -> None:
        pending = self._pending.pop(answer.id, None)
        if pending is None:
            raise WireError("it answered what it was not asked")
        pending.timer.cancel()
        pending.answered.set_result((answer, body))

    def lose(self, reason: str) -> None:
        """End it at once, such as for an answer that cannot be; every order under way fails with this reason."""
        if not self.is_alive:
            return
        self._fail(reason)
        self._writer.transport.abort()
        self._ending = self._ending or asyncio.get_running_loop().create_task(self._end())

    def _fail(self, reason: str) -> None:
        self.is_alive = False
        lost, self._pending = self._pending, {}
        for pending in lost.values():
            pending.timer.cancel()
            pending.answered.set_exception(LinkLost(reason))

    async def close(self) -> None:
        """End it and what it started, and wait until that is gone. Also where the caller is being cancelled."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._fail("the sandbox was closed")
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        self._writer.close()
        await self._exited(_GRACE_S)
        is_over = self._child.returncode == 0
        await self._child.end()
        if self._launch.end and not is_over:
            await _run(self._launch.end)

    async def _exited(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            # A status that nobody reaped yet can only be polled.
            while self._child.returncode is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)


async def _run(command: tuple[str, ...]) -> None:
    """A command that clears away; that it fails says that nothing was left."""
    child = await start_process(command, cwd=None, env=child_environment(also=CLIENT_VARIABLES), log_name="sandbox-end")
    with anyio.move_on_after(_END_S):
        while child.returncode is None:  # noqa: ASYNC110
            await anyio.sleep(0.02)
    await child.end()
