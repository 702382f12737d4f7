"""JSON frames that the host and the sandboxed code exchange. Each call has a nonce.

The harness in the child repeats the host's nonce and answers a call with exactly one frame. Data before or after the
frame, or a different nonce, invalidates the answer. Nothing is unpickled, and ambiguous JSON is rejected. The child
imports this file, so this file has few imports.
"""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any, Final, Literal

MAGIC: Final = b"RKF1"
HEADER: Final = struct.Struct("!4s16sI")
NONCE_BYTES: Final = 16
READY: Final = b"R"
"""The byte that a sandboxed child writes before it reads a program."""
MAX_DEPTH: Final = 100
MAX_INTEGER_DIGITS: Final = 1_000
FrameFault = Literal[
    "no_result",
    "forged_frame",
    "truncated_frame",
    "extra_frame",
    "result_size",
    "not_json",
    "non_finite",
    "huge_integer",
    "duplicate_key",
    "nesting",
    "surrogate",
]

# An unterminated string extends to the end of the bytes, so no quote is read twice.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class FrameError(ValueError):
    """Raised if the bytes are not exactly one valid answer. `kind` is the type of the error."""

    def __init__(self, kind: FrameFault, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def pack(nonce: bytes, payload: bytes) -> bytes:
    """Encode a payload as one frame."""
    return HEADER.pack(MAGIC, nonce, len(payload)) + payload


def encode_request(value: Any) -> bytes:
    """Encode a request as JSON. Lone surrogates are allowed, because they occur in model output."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def answer_end(data: bytes | bytearray, nonce: bytes, max_bytes: int) -> int | None:
    """Return the position at which the frame at the start of `data` ends, or None if the frame is incomplete.

    The ready byte is not part of the frame.

    Raises:
        FrameError: The kind is `forged_frame` for a wrong magic number or nonce, or `result_size` if the payload is too
            long. Both errors are raised as early as possible, so the host neither waits for an invalid frame nor stores
            it.
    """
    expected = MAGIC + nonce
    head = bytes(data[: len(expected)])
    if head != expected[: len(head)]:
        raise FrameError("forged_frame", "the data on the result channel was not written by the harness")
    if len(data) < HEADER.size:
        return None
    length = HEADER.unpack_from(data)[2]
    if length > max_bytes:
        raise FrameError("result_size", f"the result has {length:,} bytes")
    end = HEADER.size + length
    return end if len(data) >= end else None


def read_answer(data: bytes | bytearray, nonce: bytes, max_bytes: int) -> Any:
    """Decode `data`, which must be exactly one frame."""
    if not data:
        raise FrameError("no_result", "the process ended without a result")
    end = answer_end(data, nonce, max_bytes)
    if end is None:
        raise FrameError("truncated_frame", "the process ended in the middle of its result")
    if len(data) > end:
        raise FrameError("extra_frame", "there is more data on the result channel after the result")
    return decode(bytes(data[HEADER.size : end]))


def decode(payload: bytes) -> Any:
    """Parse JSON strictly. If it is invalid, raise a FrameError with the type of the error."""
    if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH:
        depth = 0
        for match in _BRACKETS.finditer(payload):
            first = match.group()[0]
            if first in b"[{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise FrameError("nesting", f"the result is nested more than {MAX_DEPTH} levels deep")
            elif first in b"]}":
                depth -= 1
    try:
        text = payload.decode("utf-8")
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
            object_pairs_hook=_without_duplicates,
        )
    except FrameError:
        raise
    except RecursionError as error:
        raise FrameError("nesting", "the result is nested too deeply") from error
    except ValueError as error:
        raise FrameError("not_json", f"the result is not JSON: {error}") from error
    if _SURROGATE_ESCAPE.search(payload):
        _check_text(value)
    return value


def _refuse_constant(text: str) -> Any:
    raise FrameError("non_finite", f"the result contains {text}, which is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FrameError("non_finite", f"the result contains {text[:40]}, which is out of the range of floats")
    return value


def _bounded(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise FrameError("huge_integer", f"the result contains an integer with {len(text):,} digits")
    return int(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise FrameError("duplicate_key", f"the result has the key {name[:80]!r} twice")
            seen.add(name)
    return value


def _check_text(value: Any) -> None:
    """Raise a FrameError if a string contains a lone surrogate. The nesting depth has already been checked."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FrameError("surrogate", "the result contains a lone surrogate, which is not valid text") from error
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_text(name)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)
