"""Exchanges with endpoints, recorded to a file and replayed from it without any network.

A file of JSON lines. A header opens each recording session; every other line is one exchange:

    {"schema_version": 1, "created": "2026-01-31T12:00:00+00:00"}
    {"key": …, "scope": …, "occurrence": 0, "url": …, "request": {…}, "answer": {…}, "retries": 0}
    {"key": …, "scope": …, "occurrence": 1, "url": …, "request": {…}, "error": {"class": …, "message": …}}

`key` is the SHA-256 of the canonical request: every field of it, its JSON with sorted keys. `scope` is the episode that
asked, and `occurrence` counts equal requests in it. No HTTP header and no API key is kept. A line is flushed when its
exchange is over, so that a killed run loses at most the line being written.

Only offsets are held in memory; a line is read again when it is needed.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from reward_kit.display_text import first_difference
from reward_kit.errors import ConfigError, DeadlineError, LimitError, ProviderError, why_unreadable
from reward_kit.private_files import private_opener
from reward_kit.processes import lock_for_this_process
from reward_kit.providers.faults import EndpointError, excerpt
from reward_kit.safe_input import RECORDED_LINE_BYTES, shown_size

SCHEMA_VERSION = 1
_HEADER_START = b'{"schema_version":'
_EXCHANGE_KEYS = {"key", "scope", "occurrence", "request"}
_MOST_COMPARED = 200
_LONGEST_HEADER = 10_000
_ERRORS = {"ProviderError": ProviderError, "DeadlineError": DeadlineError, "LimitError": LimitError}


class CassetteRequest(NamedTuple):
    """A request as it is looked up; see the module for its fields."""

    key: str
    scope: str
    occurrence: int
    url: str
    request: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of its line."""
        path = "/" + self.url.partition("://")[2].partition("/")[2]
        return {**self._asdict(), "url": path}


class CassetteAnswer(NamedTuple):
    """An answer: the JSON value as read, a streamed one added up, and how many retries it took."""

    value: Any
    retries: int


class Cassette:
    """A recording. Made by `record` or `replay`; one process records at a time.

    Attributes:
        held: how many exchanges the file had when it was opened.
        redact: applied to each line before it is written. What an answer loses by it, a replay lacks.
    """

    def __init__(self, path: Path, file: IO[bytes], index: CassetteIndex | None) -> None:
        self.path = path
        self._file = file
        self._index = index
        self.held = 0 if index is None else len(index)
        self.redact: Callable[[bytes], bytes] = bytes
        self._asked: defaultdict[tuple[str, str], int] = defaultdict(int)

    @classmethod
    def record(cls, path: str | Path) -> Cassette:
        """Record to `path`. What it holds already stays; an episode that is run again replaces its earlier exchanges.

        Raises:
            ConfigError: the file exists and is not a cassette, another process records to it, or it cannot be written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+b", opener=private_opener)  # noqa: SIM115 - takes an opener, and is kept
        except OSError as error:
            raise ConfigError(f"cassette {path} cannot be written: {error.strerror}") from error
        with ExitStack() as undo:
            undo.callback(file.close)
            cassette = cls(path, file, None)
            cassette._begin_session()
            undo.pop_all()
        return cassette

    @classmethod
    def replay(cls, path: str | Path) -> Cassette:
        """Replay from `path`.

        Raises:
            ConfigError: it cannot be read, or is not a cassette.
        """
        path = Path(path)
        try:
            file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cassette {path} cannot be read: {why_unreadable(path, error)}") from error
        with ExitStack() as undo:
            undo.callback(file.close)
            read_header(path, file)
            file.seek(0)
            made = cls(path, file, CassetteIndex.read(path, file))
            undo.pop_all()
        return made

    def __repr__(self) -> str:
        return f"Cassette({str(self.path)!r}, {'replaying' if self.is_replaying else 'recording'})"

    @property
    def is_replaying(self) -> bool:
        """True if answers come from the file."""
        return self._index is not None

    def question(self, body: bytes, scope: str, url: str) -> CassetteRequest:
        """A request as it is looked up; its occurrence is counted now.

        Args:
            body: the request as it is sent.
            scope: who asks, such as the episode's id.
            url: where it is sent.
        """
        request = json.loads(body)
        canonical = json.dumps(request, sort_keys=True, separators=(",", ":"))
        key = hashlib.sha256(canonical.encode("ascii")).hexdigest()
        occurrence = self._asked[scope, key]
        self._asked[scope, key] += 1
        return CassetteRequest(key, scope, occurrence, url, request)

    def answer(self, question: CassetteRequest) -> CassetteAnswer:
        """Return the recorded answer: of the same episode, else the first unused one of the same request.

        Raises:
            ProviderError: the recorded one, or nothing fits; then the message names the nearest.
            DeadlineError, LimitError: the recorded one.
        """
        assert self._index is not None, "this cassette records"
        line = self._index.take(question)
        error = line.get("error")
        if error is None:
            return CassetteAnswer(line["answer"], line["retries"])
        raise _ERRORS[error["class"]](error["message"])

    def keep(self, question: CassetteRequest, value: Any, retries: int) -> None:
        """Record an answer."""
        self._write({**question.to_json(), "answer": value, "retries": retries})

    def keep_error(self, question: CassetteRequest, error: EndpointError) -> None:
        """Record how the endpoint failed."""
        kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
        self._write({**question.to_json(), "error": {"class": kind, "message": str(error)}})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin_session(self) -> None:
        try:
            lock_for_this_process(self._file.fileno())
        except OSError as error:
            raise ConfigError(f"cassette {self.path} is being recorded by another process") from error
        self._file.seek(0)
        if self._file.read(1):
            self._continue()
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write({"schema_version": SCHEMA_VERSION, "created": created})

    def _continue(self) -> None:
        """Continue after what is recorded: drop a torn last line, and count on from the recorded occurrences."""
        self._file.seek(0)
        read_header(self.path, self._file)
        self._file.seek(0)
        index = CassetteIndex.read(self.path, self._file)
        self._file.truncate(index.end)
        self.held = len(index)
        for scope, key, occurrence in index.occurrences():
            self._asked[scope, key] = max(self._asked[scope, key], occurrence + 1)

    def _write(self, line: Mapping[str, Any]) -> None:
        text = self.redact(json.dumps(line, separators=(",", ":")).encode("ascii"))
        self._file.write(text + b"\n")
        self._file.flush()


@dataclass(slots=True)
class _Exchange:
    """The offset of an exchange, and its episode."""

    offset: int
    number: int
    scope: str
    occurrence: int
    session: int
    messages: int
    is_taken: bool = False


@dataclass(slots=True)
class CassetteIndex:
    """The exchanges of a file.

    Attributes:
        path: the file's name, for messages.
        file: the open file.
        end: the byte after the last whole line.
    """

    path: Path
    file: IO[bytes]
    end: int = 0
    _by_key: dict[str, list[_Exchange]] = field(default_factory=lambda: defaultdict(list))
    _queues: dict[tuple[str, str], list[_Exchange]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, file: IO[bytes]) -> CassetteIndex:
        """Return the index of an open file."""
        index = cls(path, file)
        session = 0
        for number, raw in enumerate(iter(lambda: file.readline(RECORDED_LINE_BYTES + 1), b""), 1):
            if len(raw) > RECORDED_LINE_BYTES:
                limit = shown_size(RECORDED_LINE_BYTES)
                raise ConfigError(
                    f"{path}:{number}: this line has more than {limit}, which is the limit of a recording"
                )
            if not raw.endswith(b"\n"):  # its writer was killed
                break
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
                messages = len(_messages(line["request"]))
                exchange = _Exchange(index.end, number, line["scope"], line["occurrence"], session, messages)
                index._by_key[line["key"]].append(exchange)
            index.end += len(raw)
        index._arrange()
        return index

    def _arrange(self) -> None:
        """Put the exchanges of each episode and request in the order in which a replay uses them."""
        latest: dict[str, int] = {}
        for exchange in self._exchanges():
            latest[exchange.scope] = max(latest.get(exchange.scope, 0), exchange.session)
        for key, exchanges in self._by_key.items():
            for exchange in exchanges:
                if exchange.session == latest[exchange.scope]:
                    self._queues.setdefault((exchange.scope, key), []).append(exchange)
        for queue in self._queues.values():
            queue.sort(key=lambda exchange: exchange.occurrence)

    def __len__(self) -> int:
        """Return the number of exchanges."""
        return sum(map(len, self._by_key.values()))

    def occurrences(self) -> Iterator[tuple[str, str, int]]:
        """Yield (scope, key, occurrence) of every exchange."""
        for key, exchanges in self._by_key.items():
            for exchange in exchanges:
                yield exchange.scope, key, exchange.occurrence

    def take(self, question: CassetteRequest) -> dict[str, Any]:
        """Return the line that answers a request."""
        own = self._queues.get((question.scope, question.key), [])
        if question.occurrence < len(own) and not own[question.occurrence].is_taken:
            exchange = own[question.occurrence]
        else:
            exchanges = self._by_key.get(question.key, [])
            found = next((exchange for exchange in exchanges if not exchange.is_taken), None)
            if found is None:
                raise ProviderError(self._miss(question, len(exchanges)))
            exchange = found
        exchange.is_taken = True
        return self._line(exchange)

    def _line(self, exchange: _Exchange) -> dict[str, Any]:
        self.file.seek(exchange.offset)
        line: dict[str, Any] = json.loads(self.file.readline())
        return line

    def _exchanges(self) -> Iterator[_Exchange]:
        for exchanges in self._by_key.values():
            yield from exchanges

    def _miss(self, question: CassetteRequest, recorded: int) -> str:
        what = f"{self.path} has no answer to {describe(question.request, question.scope)}"
        if recorded:
            times = "once" if recorded == 1 else f"{recorded} times"
            return f"{what}: it was recorded {times}, and all of that is used up"
        nearest = self._nearest(question)
        if nearest is None:
            return f"{what}: nothing is recorded in it"
        exchange, line = nearest
        near = f"line {exchange.number}, {describe(line['request'], exchange.scope)}"
        return f"{what}; the nearest is {near}; they differ{_difference(line['request'], question.request)}"

    def _nearest(self, question: CassetteRequest) -> tuple[_Exchange, dict[str, Any]] | None:
        """Return the exchange that shares most with a request: of its episode and length first, then by content."""
        messages = question.request.get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        exchanges = sorted(
            self._exchanges(), key=lambda exchange: (exchange.scope != question.scope, abs(exchange.messages - count))
        )
        candidates = ((exchange, self._line(exchange)) for exchange in exchanges[:_MOST_COMPARED])
        return max(candidates, key=lambda found: _likeness(found[1]["request"], question.request), default=None)


def read_header(path: Path, file: IO[bytes]) -> None:
    """Check the first line."""
    try:
        first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigError(f"cassette {path} cannot be read: {why_unreadable(path, error)}") from error
    if not first.endswith(b"\n") and _HEADER_START.startswith(first[: len(_HEADER_START)]):
        return  # nothing, or a header whose writer was killed
    header = _parsed(first)
    if header is None or not isinstance(header.get("schema_version"), int):
        raise ConfigError(f"{path} is not a cassette: its first line is {excerpt(first, limit=80)!r}")
    if header["schema_version"] > SCHEMA_VERSION:
        raise ConfigError(f"{path} was recorded by a later version (schema_version {header['schema_version']})")


def describe(request: Mapping[str, Any], scope: str) -> str:
    """Describe a request in a few words."""
    messages = request.get("messages") or [{}]
    last = messages[-1] if isinstance(messages[-1], Mapping) else {}
    content = last.get("content")
    text = content if isinstance(content, str) else json.dumps(content if content else last.get("tool_calls"))
    last_message = f"the last from {last.get('role')}: {excerpt(text, limit=80)!r}"
    asker = f" of episode {scope}" if scope else ""
    return f"the request{asker} to {request.get('model')} with {len(messages)} messages, {last_message}"


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _likeness(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[int, int]:
    """Count the messages that are the same from the first on, and the other fields that are."""
    shared = 0
    for one, other in zip(_messages(recorded), _messages(asked), strict=False):
        if one != other:
            break
        shared += 1
    return shared, sum(recorded.get(key) == value for key, value in asked.items() if key != "messages")


def _messages(request: Mapping[str, Any]) -> Sequence[Any]:
    messages = request.get("messages")
    return messages if isinstance(messages, list) else []


def _difference(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return the first difference of two requests: in a message, in their number, or in another field."""
    before, now = _messages(recorded), _messages(asked)
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        if found := first_difference(one, other, f"messages[{number}]"):
            return found
    if len(before) != len(now):
        return f" at messages: {len(before)} became {len(now)}"
    fields = sorted((recorded.keys() | asked.keys()) - {"messages"})
    missing = "(absent)"
    differences = (first_difference(recorded.get(key, missing), asked.get(key, missing), key) for key in fields)
    return next((found for found in differences if found), "")
