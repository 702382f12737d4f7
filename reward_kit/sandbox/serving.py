"""The side of a back end that runs the code: an ordinary sandbox, asked over standard input, answering on output.

It ends when its input does, and everything that it has started ends with it. Nothing but messages goes to the output:
whatever else would write there, a library or a child, writes to the errors instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.kernel import libc
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.outcome import Outcome
from reward_kit.sandbox.program import Program
from reward_kit.sandbox.wire import (
    PROTOCOL,
    Answer,
    Greeting,
    Opened,
    Opening,
    Order,
    WireError,
    clean,
    packed,
    program_from,
    read_as,
    read_message,
    streams,
    told,
    values_of,
    version,
)

logger = logging.getLogger("reward_kit.sandbox")


def serve_here() -> None:
    """Serve on this process's standard input and output until the input ends.

    Raises:
        ConfigError: a person's terminal is on the other side, or something that does not speak the protocol.
    """
    if os.isatty(0):
        raise ConfigError("sandbox-serve is started by the other side of a back end, and speaks no language of people")
    orders, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        asyncio.run(_serve(orders, answers))
    except* WireError as group:
        raise ConfigError(f"the other side of the back end: {group.exceptions[0]}") from None


async def _serve(orders: int, answers: int) -> None:
    reader, writer = await streams(os.fdopen(orders, "rb", 0), os.fdopen(answers, "wb", 0))
    try:
        await _Server(reader, writer).run()
    except* (BrokenPipeError, ConnectionResetError):
        logger.info("nobody reads any more, which is the end as well")
    finally:
        writer.close()


class _Server:
    """One conversation, from the greeting to the end of the input."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._writing = asyncio.Lock()
        self._working: dict[int, asyncio.Task[None]] = {}
        self._is_ending = False

    async def run(self) -> None:
        processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        await self._send(packed(Greeting(protocol=PROTOCOL, reward_kit=version(), processors=processors)))
        message = await read_message(self._reader)
        if message is None:
            return
        opening = read_as(Opening, message[0])
        if opening.strength == "process":
            # Code of the same user runs beside us, and we hold the channel to the host: nobody may trace this process
            # or open its descriptors. Signals do not reach it where it is the container's first process.
            libc.prctl(libc.PR_SET_DUMPABLE, 0, "keep others from tracing this process")
        slots = opening.slots or processors
        async with contextlib.AsyncExitStack() as stack:
            try:
                sandbox = await stack.enter_async_context(Sandbox(strength=opening.strength, slots=slots))
            except ConfigError as error:
                await self._send(packed(Opened(strength=None, refusal=clean(str(error)))))
                return
            await self._send(packed(Opened(strength=sandbox.strength)))
            await self._obey(sandbox)

    async def _obey(self, sandbox: Sandbox) -> None:
        async with asyncio.TaskGroup() as tasks:
            while (message := await read_message(self._reader)) is not None:
                order = _order(message[0])
                if order.do != "cancel":
                    self._working[order.id] = tasks.create_task(self._answer(sandbox, order, message[1]))
                elif order.id in self._working:
                    self._working[order.id].cancel()
            self._is_ending = True
            for task in list(self._working.values()):
                task.cancel()

    async def _answer(self, sandbox: Sandbox, order: Order, body: bytes) -> None:
        outcomes: list[Outcome] = []
        try:
            outcomes = await _outcomes(sandbox, order, body)
            answer = Answer(id=order.id, outcomes=[told(outcome) for outcome in outcomes])
        except ConfigError as error:
            answer = Answer(id=order.id, refusal=clean(str(error)))
        except asyncio.CancelledError:
            if self._is_ending:
                raise
            answer = Answer(id=order.id, refusal="nobody waits for it any more")
        finally:
            del self._working[order.id]
        await self._send(packed(answer, values_of(outcomes)))

    async def _send(self, message: bytes) -> None:
        async with self._writing:
            self._writer.write(message)
            await self._writer.drain()


def _order(head: bytes) -> Order:
    """An order, whose program may hold half surrogate pairs, which the strict reading of the host refuses."""
    try:
        return Order.model_construct(**json.loads(head))
    except (ValueError, TypeError) as error:
        raise WireError(f"it sent what is no order: {error}") from None


async def _outcomes(sandbox: Sandbox, order: Order, body: bytes) -> list[Outcome]:
    program, limits = program_from(order.program), Limits(**order.limits)
    requests = [_request(program, call) for call in json.loads(body)]
    if order.do == "ask":
        return await sandbox.ask(program, requests, limits=limits)
    return [await sandbox.call(program, requests[0], limits=limits, level=order.level)]


def _request(program: Program, call: dict[str, Any]) -> Any:
    """What `worker.request_of` made a frame of."""
    return call["kwargs"] if program.form == "reward" else call["args"][0]
