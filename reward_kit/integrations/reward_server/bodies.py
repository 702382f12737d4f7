"""The body of a request: read within limits of size and time, as strict JSON, every fault named with its field."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
import pydantic
from aiohttp import web

from reward_kit.errors import EpisodeError
from reward_kit.integrations.reward_server.options import MIB, RefusedError, ServerOptions, busy
from reward_kit.integrations.reward_server.wire import (
    MOST_PARTS,
    Codec,
    RolloutBody,
    decoded,
    problems_in,
    request_of,
)
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.safe_input import strict_decoder

_PARSED_IN_A_THREAD = 2**17
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONGEST_FIELD = 200


class Held:
    """The bytes of bodies that are held at a time.

    Args:
        most: of all.
    """

    def __init__(self, most: int) -> None:
        self.bytes = 0
        self._most = most

    def take(self, count: int) -> None:
        """Hold so many more.

        Raises:
            RefusedError: there is no room.
        """
        if self.bytes + count > self._most:
            raise busy(f"the server holds {self.bytes / MIB:.0f} MiB of requests (max_held_mb)", 1.0)
        self.bytes += count

    def give_back(self, count: int) -> None:
        """Let go of so many."""
        self.bytes -= count


@asynccontextmanager
async def body_of(request: web.BaseRequest, options: ServerOptions, held: Held) -> AsyncIterator[bytearray]:
    """The body, whose bytes count as held inside of the block, also when they were read and only their values are left.

    Raises:
        RefusedError: it is too large or too slow, is compressed, or says that it is no JSON.
    """
    _check_headers(request, options)
    taken = request.content_length or 0
    held.take(taken)
    try:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        body = bytearray()
        try:
            async with asyncio.timeout(options.body_timeout_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > options.body_bytes:
                        raise _too_large(options)
                    if len(body) > taken:
                        held.take(len(body) - taken)
                        taken = len(body)
        except TimeoutError:
            told = f"the body was not there after {options.body_timeout_s:g} s (body_timeout)"
            raise RefusedError(408, "too_slow", told, closes=True) from None
        except (web.RequestPayloadError, OSError) as error:
            raise RefusedError(400, "invalid_request", f"the body is broken: {error}", closes=True) from None
        yield body
    finally:
        held.give_back(taken)


def _check_headers(request: web.BaseRequest, options: ServerOptions) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RefusedError(415, "unsupported_media_type", "send the body uncompressed", closes=True)
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
        told = f"send Content-Type: application/json, in UTF-8, not {request.headers.get('Content-Type')!r:.100}"
        raise RefusedError(415, "unsupported_media_type", told, closes=True)
    if (request.content_length or 0) > options.body_bytes:
        raise _too_large(options)


def _too_large(options: ServerOptions) -> RefusedError:
    return RefusedError(413, "too_large", f"a body has at most {options.max_body_mb:g} MiB (max_body_mb)", closes=True)


async def requests_in(
    body: bytearray, options: ServerOptions, *, is_batch: bool, wants_episodes: bool
) -> tuple[list[ScoringRequest], Codec]:
    """What a body asks for, and how its values are coded.

    Raises:
        RefusedError: it is no such request; the field is named.
    """
    arguments = (body, options, is_batch, wants_episodes)
    if len(body) > _PARSED_IN_A_THREAD:
        return await anyio.to_thread.run_sync(_requests_in, *arguments)
    return _requests_in(*arguments)


def _requests_in(
    body: bytearray, options: ServerOptions, is_batch: bool, wants_episodes: bool
) -> tuple[list[ScoringRequest], Codec]:
    value = _read(body)
    if not isinstance(value, dict):
        raise _wrong("(top level): expected an object")
    codec = value.pop("codec", "plain")
    if codec not in ("plain", "typed"):
        raise _wrong('codec: "plain" or "typed"')
    rollouts = _rollouts_in(value, options) if is_batch else [value]
    found = []
    for index, rollout in enumerate(rollouts):
        place = f"rollouts.{index}." if is_batch else ""
        try:
            values = decoded(rollout, codec)
            _check_sizes(values, options, place)
            model = RolloutBody.model_validate(values, strict=True)
        except pydantic.ValidationError as error:
            raise _wrong(problems_in(error, place)) from None
        except EpisodeError as error:
            raise _wrong(f"{place or '(top level)'}: {error}") from None
        found.append(request_of(model, index, wants_episode=wants_episodes))
    return found, codec


def _rollouts_in(value: dict[str, Any], options: ServerOptions) -> list[Any]:
    rollouts = value.pop("rollouts", None)
    if value:
        raise _wrong(f"{next(iter(value))!r:.60}: unknown key; a batch has rollouts and codec")
    if not isinstance(rollouts, list) or not rollouts:
        raise _wrong("rollouts: expected a list of one rollout or more")
    if len(rollouts) > options.max_batch:
        raise _wrong(f"rollouts: {len(rollouts)} of them; a request has at most {options.max_batch} (max_batch)")
    return rollouts


def _check_sizes(rollout: Any, options: ServerOptions, place: str) -> None:
    """Refuse long lists before each of their items could be found wrong, and reported."""
    messages = rollout.get("messages") if isinstance(rollout, dict) else None
    if not isinstance(messages, list):
        return
    if len(messages) > options.max_messages:
        told = f"{len(messages)} of them; a rollout has at most {options.max_messages} (max_messages)"
        raise _wrong(f"{place}messages: {told}")
    for index, message in enumerate(messages):
        for name in ("content", "tool_calls"):
            parts = message.get(name) if isinstance(message, dict) else None
            if isinstance(parts, list) and len(parts) > MOST_PARTS:
                raise _wrong(f"{place}messages.{index}.{name}: {len(parts)} parts; at most {MOST_PARTS}")


def _wrong(message: str) -> RefusedError:
    return RefusedError(422, "invalid_request", message)


def _no_json(message: str) -> RefusedError:
    return RefusedError(400, "invalid_json", message)


def _read(body: bytearray) -> Any:
    """The JSON value.

    Raises:
        RefusedError: it is none as RFC 8259 has it, an object has a key twice, or a text is none that UTF-8 can hold.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_json(f"the body is no UTF-8 text: byte {error.start}") from None
    try:
        value = _decode(text)
    except RecursionError:
        raise _no_json("the body nests deeper than it can be read") from None
    except ValueError as error:
        raise _no_json(_where(text) or str(error)[:200]) from None
    if _SURROGATE.search(text):
        for field, leaf in _leaves(value):
            if isinstance(leaf, str) and not _is_unicode(leaf):
                raise _no_json(f"{field}: a lone surrogate, which no UTF-8 text can hold")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in an object twice")
    return found


_decode = strict_decoder(_unique).decode


class _Fault:
    """Stands where a value was refused."""

    def __init__(self, why: str) -> None:
        self.why = why


def _where(text: str) -> str:
    """The first value that strict JSON refuses and other readers take, with its field; "" where there is none."""
    try:
        value = _forgiving(text)
    except (ValueError, RecursionError):
        return ""
    return next((f"{field}: {leaf.why}" for field, leaf in _leaves(value) if isinstance(leaf, _Fault)), "")


def _pairs(found: list[tuple[str, Any]]) -> Any:
    counts = Counter(key for key, _ in found)
    twice = [key for key, count in counts.items() if count > 1]
    return _Fault(f"the key {twice[0]!r:.60} is given twice") if twice else dict(found)


def _number(text: str) -> Any:
    return 0.0 if math.isfinite(float(text)) else _Fault(f"{text:.40} is beyond every float")


_forgiving = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_float=_number, parse_constant=lambda name: _Fault(f"{name} is no JSON")
).decode


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, and every key, with its field, in the order of the text."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        field, found = waiting.pop()
        start = f"{field}." if field else ""
        if isinstance(found, dict):
            yield from ((f"{field or '(top level)'}, a key", key) for key in found)
            inner = [(f"{start}{key}"[-_LONGEST_FIELD:], item) for key, item in found.items()]
        elif isinstance(found, list):
            inner = [(f"{start}{index}"[-_LONGEST_FIELD:], item) for index, item in enumerate(found)]
        else:
            yield field or "(top level)", found
            continue
        waiting += reversed(inner)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
