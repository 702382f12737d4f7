"""Limits on external input, functions that enforce them, a strict JSON parser, and a reader of appended lines.

Each limit is well above normal use, and low enough that an endless response costs less than 200 MB. If input is larger,
reading stops, the connection is closed or the process is ended, and one error names the limit. Parsed JSON that
consists of very short values takes about 25 times the size of its text, so the number of values is also limited.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import aiohttp


MIB = 2**20
MODEL_ANSWER_BYTES = 32 * MIB
"""Maximum size of a complete model response, or of the stored parts of a streamed response. 128,000 sampled tokens with
their log-probabilities take about 13 MiB; 16,000 tokens with 20 alternatives each take about 27 MiB.
"""
MODEL_ANSWER_VALUES = 2_000_000
"""Maximum number of JSON values in a model response. 128,000 tokens with log-probabilities have about 1.3 million."""
MODEL_STREAM_BYTES = 128 * MIB
"""Maximum size of a streamed response. An event adds about 300 bytes to each token, so 128,000 tokens take 40 to 60
MiB.
"""
MODEL_ANSWER_CALLS = 1_000
"""Maximum number of tool calls, output items or content blocks in one streamed response."""
ERROR_BODY_BYTES = 256 * 1024
"""Maximum number of bytes read from the body of an HTTP error. A message shows 1,000 characters of the body."""
ENVIRONMENT_ANSWER_BYTES = 64 * MIB
"""Maximum size of a response from an HTTP or OpenEnv environment. A camera image as a list of numbers takes 20 MiB."""
ENVIRONMENT_ANSWER_VALUES = 8_000_000
"""Maximum number of JSON values in a response from an HTTP or OpenEnv environment. Such an image has six million."""
MCP_MESSAGE_BYTES = 64 * MIB
"""Maximum size of a message from an MCP server: a line over stdio or a response over HTTP. A tool may return a file of
50 MB.
"""
MCP_STREAM_BYTES = 128 * MIB
"""Maximum size of all events that an MCP server sends over HTTP for one request: notifications and the response."""
MCP_MESSAGE_VALUES = 2_000_000
"""Maximum number of JSON values in one message from an MCP server."""
MCP_TOOLS_BYTES = 32 * MIB
"""Maximum size of an MCP server's list of tools as JSON, over all pages."""
MCP_TOOLS = 10_000
"""Maximum number of tools of an MCP server, both in one message and over all pages."""
ENGINE_ANSWER_BYTES = 16 * MIB
"""Maximum size of a response from a worker process that runs an engine (text games, the household)."""
REWARD_ANSWER_BYTES = 64 * MIB
"""Maximum size of a response from a reward server, which may contain the scores of a whole batch."""
AGENT_REQUEST_BYTES = 64 * MIB
"""Maximum size of an agent's request to the recording endpoint: the conversation so far, including images."""
MODEL_LIST_BYTES = 4 * MIB
"""Maximum number of bytes of a list of models that `reward-kit doctor` reads."""
LOG_DOCUMENT_BYTES = 256 * MIB
"""Maximum size of one document of an imported log, uncompressed: a sample, a trajectory, or a line."""
LOG_DOCUMENT_VALUES = 16_000_000
"""Maximum number of JSON values in one document of an imported log."""
LOG_EXPANSION = 200
"""Maximum ratio of the uncompressed to the compressed size of an imported log that expands to more than 256 MiB. Logs
that repeat a long conversation in every event reach about 50.
"""
RECORDED_LINE_BYTES = 128 * MIB
"""Maximum size of an exchange in a recording: a request and its response, in ASCII."""
PROCESS_LOG_BYTES = 64 * MIB
"""Maximum size of the log of one started server or engine; a longer log is cut to its last MiB."""
TEMPLATE_BYTES = MIB
"""Maximum number of characters in one message template of a task file."""
TEMPLATE_OUTPUT_CHARS = 16 * MIB
"""Maximum number of characters in one rendered message, which is four times a context of a million tokens."""
TEMPLATE_WORK = 32 * MIB
"""Maximum number of characters that one rendering produces. A list item counts as 8, a loop step or a call as 16."""
TEMPLATE_CPU_S = 3.0
"""Maximum CPU time of one rendering, in seconds."""
TEMPLATE_NUMBER = 10_000
"""Maximum width, count or precision for a filter or a format."""
YAML_BYTES = 8 * MIB
"""Maximum size of a YAML file. PyYAML reads less than 1 MB per second, so large datasets should be JSONL."""
YAML_VALUES = 500_000
"""Maximum number of keys, values and list items in a YAML file, with aliases expanded."""
NESTING = 100
"""Maximum nesting depth of a YAML file or a dataset row."""


class TooLargeError(Exception):
    """The input exceeds its limit. The message is the limit itself, such as "32 MiB".

    Callers catch this error and raise the error type of their own boundary.
    """


def format_size(size: int) -> str:
    """Return a size as text, such as "32 MiB"."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def check_values(text: str | bytes, most_values: int) -> None:
    """Raise a TooLargeError if a JSON text contains too many values. Call this before parsing."""
    if len(text) <= most_values:
        return
    if isinstance(text, str):
        count = text.count(",") + text.count("[") + text.count("{")
    else:
        count = text.count(b",") + text.count(b"[") + text.count(b"{")
    if count > most_values:
        raise TooLargeError(f"{most_values:,} JSON values")


def is_nested_too_deeply(value: Any) -> bool:
    """Return True if lists and mappings are nested more than `NESTING` levels deep."""
    level = [value]
    for _ in range(NESTING + 1):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        if not inner:
            return False
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


async def read_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Read the whole body of a response and decompress it."""
    body = await read_prefix(response, most_bytes)
    if len(body) > most_bytes:
        raise TooLargeError(format_size(most_bytes))
    return body


async def read_prefix(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Read at most about `most_bytes` of a response body. If there is more, close the connection."""
    body = bytearray()  # A list would need 40 bytes per piece, and a server may send single bytes.
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            response.close()
            break
    return bytes(body)


Pairs = list[tuple[str, Any]]


def strict_decoder(object_pairs_hook: Callable[[Pairs], Any] | None = None) -> json.JSONDecoder:
    """Return a strict JSON decoder. `object_pairs_hook` creates the value of each JSON object."""
    return json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite, object_pairs_hook=object_pairs_hook)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly (RFC 8259): NaN and infinity are errors, and bytes must be UTF-8, UTF-16 or UTF-32."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return _decode(text)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is out of the range of floats")
    return number


_decode = strict_decoder().decode


def complete_lines(path: Path, most_bytes: int = -1) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and bytes of each complete line of an append-only file. An incomplete last line is skipped.

    Raises:
        OSError: the file cannot be read.
        TooLargeError: a line is longer than `most_bytes`; a negative limit means no limit.
    """
    offset, limit = 0, most_bytes + 1 if most_bytes >= 0 else -1
    with path.open("rb", buffering=1 << 18) as file:  # lines are longer than Python's own buffer
        while line := file.readline(limit):
            if 0 <= most_bytes < len(line):
                raise TooLargeError(format_size(most_bytes))
            if not line.endswith(b"\n"):  # the process that wrote it was killed
                return
            yield offset, line
            offset += len(line)
