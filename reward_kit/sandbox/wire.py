"""What passes between a sandbox elsewhere and the host that uses it: messages of JSON with a body, of known lengths.

A message is `magic, length of the head, length of the body, head, body`; the head is a JSON object, the body the JSON
of requests or of values. The side that runs the code greets first, the host opens, and then every call and its answer
share an id, so many are under way at once. The host reads strictly: what comes from elsewhere may have been written by
the code that ran there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Annotated, Any, Final, Literal, TypeVar

import pydantic

from reward_kit.errors import Failure, FailureClass
from reward_kit.sandbox.frames import FrameError, decode
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.outcome import Level, Outcome, OutcomeKind, Strength
from reward_kit.sandbox.program import Program

MAGIC: Final = b"RKS1"
PROTOCOL: Final = 1
HEADER: Final = struct.Struct("!4sII")
MOST_BYTES: Final = 1 << 30
"""The longest message that the side which runs the code takes; the host names its own bound for each answer."""

_CHUNK_BYTES = 1 << 20
_SHOWN_BYTES = 80
_M = TypeVar("_M", bound=pydantic.BaseModel)


class WireError(Exception):
    """What came is no message of this protocol. The text says what is wrong, for people."""


class _Told(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class Greeting(_Told):
    """The first message of the side that runs the code."""

    protocol: int
    reward_kit: str = pydantic.Field(max_length=100)
    processors: int = pydantic.Field(ge=1, le=1 << 16)


class Opening(_Told):
    """The host's first message: which walls it wants, and how many calls at once; None for one a processor."""

    strength: Strength | Literal["auto"]
    slots: Annotated[int, pydantic.Field(ge=1, le=1 << 16)] | None


class Opened(_Told):
    """The answer to an opening: the walls that stand, or why none do."""

    strength: Strength | None
    refusal: str = pydantic.Field(default="", max_length=10_000)


class Order(_Told):
    """A call, questions to one child, or the word that nobody waits for the answer with this id any more."""

    id: int
    do: Literal["call", "ask", "cancel"]
    program: dict[str, Any] = pydantic.Field(default_factory=dict)
    limits: dict[str, Any] = pydantic.Field(default_factory=dict)
    level: Level = "isolated"


class ToldFailure(_Told):
    """A failure, whose place is always the sandbox."""

    failure_class: FailureClass
    message: str
    traceback: str


class ToldOutcome(_Told):
    """An outcome without its value, which is in the body, and without the walls, which the host knows."""

    kind: OutcomeKind
    failure: ToldFailure | None
    stdout: str
    stderr: str
    is_output_cut: bool
    wall_s: float = pydantic.Field(ge=0)
    cpu_s: float = pydantic.Field(ge=0)
    peak_memory_mb: float = pydantic.Field(ge=0)
    exit: int | None


class Answer(_Told):
    """What became of an order; `refusal` where nothing was run."""

    id: int
    outcomes: list[ToldOutcome] = pydantic.Field(default_factory=list)
    refusal: str = ""


def version() -> str:
    """This package's version; both sides must have the same, since they share how rewards are called."""
    try:
        return importlib.metadata.version("reward-kit")
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout"


def packed(head: pydantic.BaseModel | Mapping[str, Any], body: bytes = b"") -> bytes:
    """One message."""
    told = head.model_dump() if isinstance(head, pydantic.BaseModel) else head
    data = json.dumps(told, separators=(",", ":")).encode("ascii")
    return HEADER.pack(MAGIC, len(data), len(body)) + data + body


async def read_message(
    reader: asyncio.StreamReader, most_bytes: Callable[[], int] = lambda: MOST_BYTES
) -> tuple[bytes, bytes] | None:
    """The head and the body of the next message; None where the other side has ended in good order.

    Args:
        reader: where they come from.
        most_bytes: tells how long both together may be; asked when a message has begun.

    Raises:
        WireError: it is too long, is cut off, or is something else.
    """
    try:
        start = await reader.readexactly(HEADER.size)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise WireError(_not_ours(error.partial)) from None
    magic, of_head, of_body = HEADER.unpack(start)
    if magic != MAGIC:
        raise WireError(_not_ours(start + await _more(reader)))
    if of_head + of_body > (most := most_bytes()):
        raise WireError(f"it sent a message of {of_head + of_body:,} bytes where at most {most:,} are due")
    try:
        return await reader.readexactly(of_head), await reader.readexactly(of_body)
    except asyncio.IncompleteReadError:
        raise WireError("it ended in the middle of a message") from None


def read_as(model: type[_M], head: bytes) -> _M:
    """A head as the message that is due.

    Raises:
        WireError: it is another, or no strict JSON.
    """
    try:
        return model.model_validate(decode(head))
    except (FrameError, pydantic.ValidationError) as error:
        raise WireError(f"it sent what is no {model.__name__.lower()}: {str(error).splitlines()[0]:.200}") from None


def fields_of(program: Program) -> dict[str, Any]:
    """A program for an `Order`; half surrogate pairs in its source survive, as they occur in what models write."""
    return {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}


def program_from(fields: Mapping[str, Any]) -> Program:
    """The inverse of `fields_of`.

    Raises:
        ConfigError: it cannot be.
        TypeError: it has other fields than programs have.
    """
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Program(**given)


def told(outcome: Outcome) -> ToldOutcome:
    """An outcome for an `Answer`."""
    failure = outcome.failure
    return ToldOutcome(
        kind=outcome.kind,
        failure=None if failure is None else _told_failure(failure),
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        is_output_cut=outcome.is_output_cut,
        wall_s=outcome.wall_s,
        cpu_s=outcome.cpu_s,
        peak_memory_mb=outcome.peak_memory_mb,
        exit=outcome.exit,
    )


def _told_failure(failure: Failure) -> ToldFailure:
    return ToldFailure(
        failure_class=failure.failure_class, message=clean(failure.message), traceback=clean(failure.traceback)
    )


def values_of(outcomes: Sequence[Outcome]) -> bytes:
    """The body of an `Answer`."""
    values = [outcome.value for outcome in outcomes]
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def most_bytes_of(limits: Limits, count: int) -> int:
    """How long an honest answer to `count` requests is at most: JSON writes a byte in six characters at worst."""
    return 4096 + count * (2048 + 12 * limits.output_bytes + 24 * (limits.result_bytes + 4096))


def clean(text: str) -> str:
    """Text without half surrogate pairs."""
    return text.encode("utf-8", "replace").decode()


async def streams(source: IO[bytes], sink: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Two pipes as asyncio's streams, which close them."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    # The writing end needs a protocol with flow control; the reader in it reads nothing.
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), sink
    )
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def _more(reader: asyncio.StreamReader) -> bytes:
    """What else is there of something that is no message, for the person who has to find out what it is."""
    try:
        async with asyncio.timeout(0.2):
            return await reader.read(_SHOWN_BYTES)
    except TimeoutError:
        return b""


def _not_ours(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return f"it wrote {text[:_SHOWN_BYTES]!r}, which is no message of a sandbox"
