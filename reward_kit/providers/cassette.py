"""Exchanges with endpoints, recorded to a file and replayed from it without any network.

A file of JSON lines. A header opens each recording session; every other line is one exchange:

    {"schema_version": 1, "created": "2026-01-31T12:00:00+00:00"}
    {"key": …, "scope": …, "occurrence": 0, "url": …, "request": {…}, "answer": {…}, "retries": 0}
    {"key": …, "scope": …, "occurrence": 1, "url": …, "request": {…}, "error": {"class": …, "message": …}}

`key` is the SHA-256 of the canonical request: every field of it, its JSON with sorted keys. `scope` is the episode that
asked, and `occurrence` counts equal requests in it. No HTTP header and no API key is kept. A line is flushed when its
exchange is over, so that a killed run loses at most the line being written.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from reward_kit.errors import ConfigError, DeadlineError, LimitError, ProviderError
from reward_kit.private_files import private_opener
from reward_kit.processes import lock_for_this_process
from reward_kit.providers.cassette_index import SCHEMA_VERSION, CassetteIndex, Question, open_cassette, read_header
from reward_kit.providers.faults import EndpointError

_ERRORS = {"ProviderError": ProviderError, "DeadlineError": DeadlineError, "LimitError": LimitError}


class Answer(NamedTuple):
    """What came back to a request: the JSON value as read, a streamed one added up, and how many retries it took."""

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
            ConfigError: the file is there and is no cassette, another process records to it, or it cannot be written.
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
            ConfigError: it cannot be read, or is no cassette.
        """
        path = Path(path)
        file = open_cassette(path)
        with ExitStack() as undo:
            undo.callback(file.close)
            made = cls(path, file, CassetteIndex.read(path, file))
            undo.pop_all()
        return made

    def __repr__(self) -> str:
        return f"Cassette({str(self.path)!r}, {'replaying' if self.is_replaying else 'recording'})"

    @property
    def is_replaying(self) -> bool:
        """Whether answers come from the file."""
        return self._index is not None

    def question(self, body: bytes, scope: str, url: str) -> Question:
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
        return Question(key, scope, occurrence, url, request)

    def answer(self, question: Question) -> Answer:
        """The recorded answer: the one of the same episode, else the first of the same request that nobody took yet.

        Raises:
            ProviderError: the recorded one, or there is no recording; then the message names the nearest.
            DeadlineError, LimitError: the recorded one.
        """
        assert self._index is not None, "this cassette records"
        line = self._index.take(question)
        error = line.get("error")
        if error is None:
            return Answer(line["answer"], line["retries"])
        raise _ERRORS[error["class"]](error["message"])

    def keep(self, question: Question, value: Any, retries: int) -> None:
        """Record an answer."""
        self._write({**question.to_json(), "answer": value, "retries": retries})

    def keep_error(self, question: Question, error: EndpointError) -> None:
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
        """Go on after what is recorded: drop a torn last line, and count on from the recorded occurrences."""
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
