"""The recording of exchanges with endpoints in a file, and their replay without network access.

The file consists of JSON lines. The first line of each recording session is a header. Every other line is one exchange:

    {"schema_version": 1, "created": "2026-01-31T12:00:00+00:00"}
    {"key": …, "scope": …, "occurrence": 0, "url": …, "request": {…}, "answer": {…}, "retries": 0}
    {"key": …, "scope": …, "occurrence": 1, "url": …, "request": {…}, "error": {"class": …, "message": …}}

`key` is the SHA-256 of the request as JSON with sorted keys. `scope` is the episode that sent the request, and
`occurrence` counts identical requests in the same scope. HTTP headers and API keys are not stored. Each line is flushed
when its exchange is complete, so a killed run loses at most the line that it was writing.

Only the offsets of the lines are kept in memory. A line is read from the file when it is needed.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple

from reward_kit.display_text import first_difference
from reward_kit.errors import ConfigError, DeadlineError, LimitError, ProviderError, describe_read_error
from reward_kit.private_files import private_opener
from reward_kit.processes import lock_file
from reward_kit.providers.faults import EndpointError, excerpt
from reward_kit.safe_input import RECORDED_LINE_BYTES, TooLargeError, complete_lines

SCHEMA_VERSION = 1
_HEADER_START = b'{"schema_version":'
_EXCHANGE_KEYS = {"key", "scope", "occurrence", "request"}
_CONVERSATION = {"messages", "input"}
_MOST_COMPARED = 200
_LONGEST_HEADER = 10_000
_ERRORS = {"ProviderError": ProviderError, "DeadlineError": DeadlineError, "LimitError": LimitError}


class CassetteRequest(NamedTuple):
    """A request to look up in the recording. The module docstring describes the fields."""

    key: str
    scope: str
    occurrence: int
    url: str
    request: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the fields to write to the file."""
        path = "/" + self.url.partition("://")[2].partition("/")[2]
        return {**self._asdict(), "url": path}


class Cassette:
    """A recording that is open for recording or for replay. Only one process may record to a file at a time.

    Attributes:
        held: the number of exchanges that the file contained when it was opened.
        redact: a function that is applied to each line before it is written. A replay returns the redacted response.
    """

    def __init__(self, path: Path, file: IO[bytes], index: CassetteIndex | None) -> None:
        self.path = path
        self._file = file
        self._index = index
        self.held = 0 if index is None else len(index.exchanges)
        self.redact: Callable[[bytes], bytes] = bytes
        self._asked: defaultdict[tuple[str, str], int] = defaultdict(int)

    @classmethod
    def record(cls, path: str | Path) -> Cassette:
        """Open a file for recording. Existing exchanges remain in the file.

        If an episode runs again, its new exchanges replace the earlier ones.

        Raises:
            ConfigError: If the file exists and is not a cassette, if another process is recording to it, or if it
                cannot be written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+b", opener=private_opener)  # noqa: SIM115 - takes an opener, and is kept
        except OSError as error:
            raise ConfigError(f"the recording {path} cannot be written: {error.strerror}") from error
        with ExitStack() as undo:
            undo.callback(file.close)
            try:
                lock_file(file.fileno())
            except OSError as error:
                raise ConfigError(f"the recording {path} is being written by a different process") from error
            cassette = cls(path, file, None)
            if path.stat().st_size:
                # Continue an existing file: drop an incomplete last line, and continue to count from the recorded
                # occurrences.
                index = CassetteIndex.read(path, file)
                file.truncate(index.end)
                cassette.held = len(index.exchanges)
                for exchange in index.exchanges:
                    count = cassette._asked[exchange.scope, exchange.key]
                    cassette._asked[exchange.scope, exchange.key] = max(count, exchange.occurrence + 1)
            created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            cassette._write({"schema_version": SCHEMA_VERSION, "created": created})
            undo.pop_all()
        return cassette

    @classmethod
    def replay(cls, path: str | Path) -> Cassette:
        """Open a file for replay.

        Raises:
            ConfigError: If the file cannot be read or is not a cassette.
        """
        path = Path(path)
        try:
            file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"the recording {path} cannot be read: {describe_read_error(path, error)}") from error
        with ExitStack() as undo:
            undo.callback(file.close)
            cassette = cls(path, file, CassetteIndex.read(path, file))
            undo.pop_all()
        return cassette

    def __repr__(self) -> str:
        return f"Cassette({str(self.path)!r}, {'replaying' if self.is_replaying else 'recording'})"

    @property
    def is_replaying(self) -> bool:
        """True if responses come from the file."""
        return self._index is not None

    def lookup(self, body: bytes, scope: str, url: str) -> CassetteRequest:
        """Count this occurrence of a request from `scope`, such as an episode, and return the request to look up."""
        request = json.loads(body)
        canonical = json.dumps(request, sort_keys=True, separators=(",", ":"))
        key = hashlib.sha256(canonical.encode("ascii")).hexdigest()
        occurrence = self._asked[scope, key]
        self._asked[scope, key] += 1
        return CassetteRequest(key, scope, occurrence, url, request)

    def answer(self, question: CassetteRequest) -> tuple[Any, int]:
        """Return the recorded response to a request, and the number of retries that were needed to get it.

        The response is the one recorded in the same episode. If there is none, it is the first unused response to an
        identical request.

        Raises:
            ProviderError: If the recording has no unused response. A recorded error of any type is raised again.
        """
        assert self._index is not None, "this cassette is recording"
        line = self._index.take(question)
        error = line.get("error")
        if error is None:
            return line["answer"], line["retries"]
        raise _ERRORS[error["class"]](error["message"])

    def record_answer(self, question: CassetteRequest, value: Any, retries: int) -> None:
        self._write({**question.to_json(), "answer": value, "retries": retries})

    def record_error(self, question: CassetteRequest, error: EndpointError) -> None:
        kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
        self._write({**question.to_json(), "error": {"class": kind, "message": str(error)}})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        text = self.redact(json.dumps(line, separators=(",", ":")).encode("ascii"))
        self._file.write(text + b"\n")
        self._file.flush()


@dataclass(slots=True)
class _Exchange:
    """An exchange in the file: its offset and its request."""

    offset: int
    number: int
    key: str
    scope: str
    occurrence: int
    session: int
    messages: int
    is_taken: bool = False


class CassetteIndex:
    """An index of the exchanges in a file."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self.end = 0  # the byte after the last whole line
        self.exchanges: list[_Exchange] = []
        self._by_key: defaultdict[str, list[_Exchange]] = defaultdict(list)
        self._queues: defaultdict[tuple[str, str], list[_Exchange]] = defaultdict(list)

    @classmethod
    def read(cls, path: Path, file: IO[bytes]) -> CassetteIndex:
        """Read the index of an open file.

        Raises:
            ConfigError: If the file is not a cassette, or if a line other than the last is damaged.
        """
        index = cls(path, file)
        _check_header(path, file)
        session = number = 0
        try:
            for number, (offset, raw) in enumerate(complete_lines(path, RECORDED_LINE_BYTES), 1):
                line = _parsed(raw)
                if line is not None and "schema_version" in line:
                    session += 1
                elif (
                    number == 1
                    or line is None
                    or not (line.keys() >= _EXCHANGE_KEYS and isinstance(line["request"], Mapping))
                ):
                    raise ConfigError(f"{path}:{number}: this line is not a recorded exchange; the file is damaged")
                else:
                    named = line["key"], line["scope"], line["occurrence"]
                    index.exchanges.append(_Exchange(offset, number, *named, session, len(_messages(line["request"]))))
                index.end = offset + len(raw)
        except TooLargeError as error:
            where = f"{path}:{number + 1}"
            raise ConfigError(f"{where}: this line is larger than the limit of {error} for a recording") from None
        # If multiple sessions recorded an episode, the last session started it again, so prefer that session.
        latest: dict[str, int] = {}
        for exchange in index.exchanges:
            index._by_key[exchange.key].append(exchange)
            latest[exchange.scope] = max(latest.get(exchange.scope, 0), exchange.session)
        for exchange in sorted(index.exchanges, key=lambda exchange: exchange.occurrence):
            if exchange.session == latest[exchange.scope]:
                index._queues[exchange.scope, exchange.key].append(exchange)
        return index

    def take(self, question: CassetteRequest) -> dict[str, Any]:
        """Return the line that answers a request, and mark it as used.

        Raises:
            ProviderError: If no unused exchange is left.
        """
        own = self._queues.get((question.scope, question.key), [])
        if question.occurrence < len(own) and not own[question.occurrence].is_taken:
            exchange = own[question.occurrence]
        else:
            exchanges = self._by_key.get(question.key, [])
            unused = next((exchange for exchange in exchanges if not exchange.is_taken), None)
            if unused is None:
                raise ProviderError(self._miss(question, len(exchanges)))
            exchange = unused
        exchange.is_taken = True
        return self._line(exchange)

    def _line(self, exchange: _Exchange) -> dict[str, Any]:
        self._file.seek(exchange.offset)
        line: dict[str, Any] = json.loads(self._file.readline())
        return line

    def _miss(self, question: CassetteRequest, recorded: int) -> str:
        """Describe a request that has no recorded response.

        The description also shows how the request differs from the most similar recorded request.
        """
        asked = question.request
        what = f"{self._path} has no response to {describe(asked, question.scope)}"
        if recorded:
            times = "once" if recorded == 1 else f"{recorded} times"
            return f"{what}: it was recorded {times}, and all recorded responses have been used"
        # The exchange that has the most in common with the request: first by episode and length, then by content.
        count = len(_messages(asked))
        candidates = sorted(
            self.exchanges, key=lambda exchange: (exchange.scope != question.scope, abs(exchange.messages - count))
        )[:_MOST_COMPARED]

        def likeness(pair: tuple[_Exchange, dict[str, Any]]) -> tuple[int, int]:
            request = pair[1]["request"]
            pairs = zip(_messages(request), _messages(asked), strict=False)
            shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], pairs))
            return shared, sum(request.get(key) == value for key, value in asked.items() if key not in _CONVERSATION)

        nearest = max(((exchange, self._line(exchange)) for exchange in candidates), key=likeness, default=None)
        if nearest is None:
            return f"{what}: the recording is empty"
        exchange, request = nearest[0], nearest[1]["request"]
        near = f"in line {exchange.number}, {describe(request, exchange.scope)}"
        return f"{what}; the most similar request is {near}; the two requests differ{_difference(request, asked)}"


def _check_header(path: Path, file: IO[bytes]) -> None:
    try:
        file.seek(0)
        first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigError(f"the recording {path} cannot be read: {describe_read_error(path, error)}") from error
    if not first.endswith(b"\n") and _HEADER_START.startswith(first[: len(_HEADER_START)]):
        return  # the file is empty, or its writer was killed while it wrote the header
    header = _parsed(first)
    if header is None or not isinstance(header.get("schema_version"), int):
        raise ConfigError(f"{path} is not a recording: its first line is {excerpt(first, limit=80)!r}")
    if header["schema_version"] > SCHEMA_VERSION:
        raise ConfigError(f"{path} was recorded by a later version (schema_version {header['schema_version']})")


def describe(request: Mapping[str, Any], scope: str) -> str:
    """Return a short description of a request."""
    messages = _messages(request)
    last = messages[-1] if messages and isinstance(messages[-1], Mapping) else {}
    content = last.get("content", last.get("output"))
    text = content if isinstance(content, str) else json.dumps(content if content else last.get("tool_calls"))
    last_message = f"the last one from {last.get('role') or last.get('type')}: {excerpt(text, limit=80)!r}"
    asker = f" of episode {scope}" if scope else ""
    return f"the request{asker} to {request.get('model')} with {len(messages)} messages, {last_message}"


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _messages(request: Mapping[str, Any]) -> Sequence[Any]:
    messages = request.get("messages", request.get("input"))  # `input` in Responses
    return messages if isinstance(messages, list) else []


def _difference(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Describe the first difference between two requests.

    The difference may be in a message, in the number of messages, or in a different field.
    """
    before, now = _messages(recorded), _messages(asked)
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if difference := first_difference(old, new, f"messages[{number}]"):
            return difference
    if len(before) != len(now):
        return f" at messages: {len(before)} became {len(now)}"
    fields = sorted((recorded.keys() | asked.keys()) - _CONVERSATION)
    missing = "(absent)"
    differences = (first_difference(recorded.get(key, missing), asked.get(key, missing), key) for key in fields)
    return next((difference for difference in differences if difference), "")
