"""Which exchange of a recording answers a request, and which comes nearest where none does.

Only places in the file are held in memory; a line is read again when it is asked for.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from reward_kit.differences import first_difference
from reward_kit.errors import ConfigError, ProviderError, why_unreadable
from reward_kit.input_limits import RECORDED_LINE_BYTES, shown_size
from reward_kit.providers.faults import excerpt

SCHEMA_VERSION = 1
_HEADER_START = b'{"schema_version":'
_EXCHANGE_KEYS = {"key", "scope", "occurrence", "request"}
_MOST_COMPARED = 200
_LONGEST_HEADER = 10_000


class Question(NamedTuple):
    """A request as it is looked up; see `cassette` for its fields."""

    key: str
    scope: str
    occurrence: int
    url: str
    request: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The fields of its line."""
        path = "/" + self.url.partition("://")[2].partition("/")[2]
        return {**self._asdict(), "url": path}


@dataclass(slots=True)
class _Place:
    """Where an exchange stands, and of whom."""

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
    _by_key: dict[str, list[_Place]] = field(default_factory=lambda: defaultdict(list))
    _queues: dict[tuple[str, str], list[_Place]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, file: IO[bytes]) -> CassetteIndex:
        """The index of an open file.

        Raises:
            ConfigError: it is no cassette, or a line in its middle is none of its lines.
        """
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
            elif number == 1 or line is None or not _is_exchange(line):
                raise ConfigError(f"{path}:{number}: this line is no recorded exchange; the file is damaged")
            else:
                index._add(line, session, number)
            index.end += len(raw)
        index._arrange()
        return index

    def _add(self, line: Mapping[str, Any], session: int, number: int) -> None:
        messages = line["request"].get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        place = _Place(self.end, number, line["scope"], line["occurrence"], session, count)
        self._by_key[line["key"]].append(place)

    def _arrange(self) -> None:
        """The exchanges of each episode and request in the order in which a replay uses them.

        An episode that was recorded in several sessions was begun anew in the last one, so that one comes first.
        """
        latest: dict[str, int] = {}
        for place in self._places():
            latest[place.scope] = max(latest.get(place.scope, 0), place.session)
        for key, places in self._by_key.items():
            for place in places:
                if place.session == latest[place.scope]:
                    self._queues.setdefault((place.scope, key), []).append(place)
        for queue in self._queues.values():
            queue.sort(key=lambda place: place.occurrence)

    def __len__(self) -> int:
        """The number of exchanges."""
        return sum(map(len, self._by_key.values()))

    def occurrences(self) -> Iterator[tuple[str, str, int]]:
        """(scope, key, occurrence) of every exchange."""
        for key, places in self._by_key.items():
            for place in places:
                yield place.scope, key, place.occurrence

    def take(self, question: Question) -> dict[str, Any]:
        """The line that answers a request.

        Raises:
            ProviderError: there is none.
        """
        own = self._queues.get((question.scope, question.key), [])
        if question.occurrence < len(own) and not own[question.occurrence].is_taken:
            place = own[question.occurrence]
        else:
            places = self._by_key.get(question.key, [])
            found = next((place for place in places if not place.is_taken), None)
            if found is None:
                raise ProviderError(self._miss(question, len(places)))
            place = found
        place.is_taken = True
        return self._line(place)

    def _line(self, place: _Place) -> dict[str, Any]:
        self.file.seek(place.offset)
        line: dict[str, Any] = json.loads(self.file.readline())
        return line

    def _places(self) -> Iterator[_Place]:
        for places in self._by_key.values():
            yield from places

    def _miss(self, question: Question, recorded: int) -> str:
        what = f"{self.path} has no answer to {describe(question.request, question.scope)}"
        if recorded:
            times = "once" if recorded == 1 else f"{recorded} times"
            return f"{what}: it was recorded {times}, and all of that is used up"
        nearest = self._nearest(question)
        if nearest is None:
            return f"{what}: nothing is recorded in it"
        place, line = nearest
        near = f"line {place.number}, {describe(line['request'], place.scope)}"
        return f"{what}; the nearest is {near}; they differ{_difference(line['request'], question.request)}"

    def _nearest(self, question: Question) -> tuple[_Place, dict[str, Any]] | None:
        """The exchange that shares most with a request: of the same episode and length first, then what it says."""
        messages = question.request.get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        places = sorted(self._places(), key=lambda place: (place.scope != question.scope, abs(place.messages - count)))
        candidates = ((place, self._line(place)) for place in places[:_MOST_COMPARED])
        return max(candidates, key=lambda found: _likeness(found[1]["request"], question.request), default=None)


def open_cassette(path: Path) -> IO[bytes]:
    """The file, open for reading behind nothing.

    Raises:
        ConfigError: it cannot be read, or does not begin like a cassette.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cassette {path} cannot be read: {why_unreadable(path, error)}") from error
    with ExitStack() as undo:
        undo.callback(file.close)
        read_header(path, file)
        undo.pop_all()
    file.seek(0)
    return file


def read_header(path: Path, file: IO[bytes]) -> None:
    """Check the first line.

    Raises:
        ConfigError: it is not that of a cassette, or of a later version.
    """
    try:
        first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigError(f"cassette {path} cannot be read: {why_unreadable(path, error)}") from error
    if not first.endswith(b"\n") and _HEADER_START.startswith(first[: len(_HEADER_START)]):
        return  # nothing, or a header whose writer was killed
    header = _parsed(first)
    if header is None or not isinstance(header.get("schema_version"), int):
        raise ConfigError(f"{path} is no cassette: its first line is {excerpt(first, limit=80)!r}")
    if header["schema_version"] > SCHEMA_VERSION:
        raise ConfigError(f"{path} was recorded by a later version (schema_version {header['schema_version']})")


def describe(request: Mapping[str, Any], scope: str) -> str:
    """A request in a few words."""
    messages = request.get("messages") or [{}]
    last = messages[-1] if isinstance(messages[-1], Mapping) else {}
    content = last.get("content")
    text = content if isinstance(content, str) else json.dumps(content if content else last.get("tool_calls"))
    said = f"the last from {last.get('role')}: {excerpt(text, limit=80)!r}"
    asker = f" of episode {scope}" if scope else ""
    return f"the request{asker} to {request.get('model')} with {len(messages)} messages, {said}"


def _is_exchange(line: Mapping[str, Any]) -> bool:
    return line.keys() >= _EXCHANGE_KEYS and isinstance(line["request"], Mapping)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _likeness(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[int, int]:
    """How many messages are the same from the first on, and how many other fields."""
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
    """The first difference of two requests: in their messages, else in how many there are, else in another field."""
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
