"""Answers of judges that are known already: in memory for one worker, and in a file where the user names one.

The file has JSON lines: a header, then one line an answer, under the SHA-256 of the endpoint and the whole request. It
is only ever appended to, so several runs may use it at once; a line that a killed run left torn is passed over.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from reward_kit.errors import ConfigError, why_unreadable
from reward_kit.private_files import private_opener

_HEADER = {"judge_cache": 1}
_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What a judge said, and what that took; None where the endpoint does not say."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    finish_reason: str | None = None


def key_of(url: str, request: Mapping[str, Any]) -> str:
    """The key of a request to an endpoint."""
    canonical = json.dumps([url, request], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class AnswerCache:
    """Answers by key.

    Args:
        path: the file; None for memory alone.

    Raises:
        ConfigError: the file cannot be read or written, or is no cache.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, Answer] = {}
        self._path, self._file = path, None if path is None else _open(path)
        if path is not None and self._file is not None:
            with ExitStack() as undo:
                undo.callback(self._file.close)
                self._read(path, self._file)
                undo.pop_all()

    def get(self, key: str) -> Answer | None:
        """The answer, None where it is not known."""
        return self._known.get(key)

    def keep(self, key: str, answer: Answer) -> None:
        """Keep an answer; one that is known stays."""
        if key in self._known:
            return
        self._known[key] = answer
        self._append({"key": key, **answer._asdict()})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path, file: IO[bytes]) -> None:
        file.seek(0)
        lines = file.read().split(b"\n")
        if lines == [b""]:
            self._append(_HEADER)
            return
        if _parsed(lines[0]) != _HEADER:
            raise ConfigError(f"{path} is no cache of a judge: its first line is {lines[0][:80]!r}; name another file")
        for line in lines[1:]:
            entry = _parsed(line)
            if isinstance(entry, dict) and isinstance(entry.get("key"), str) and isinstance(entry.get("text"), str):
                others = (entry.get(name) for name in Answer._fields[1:])
                self._known.setdefault(entry["key"], Answer(entry["text"], *others))
            elif line:
                _log.warning("%s: a torn line is passed over", path)
        if lines[-1]:
            file.write(b"\n")

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
        except OSError as error:  # the answer is there all the same
            _log.warning("%s takes no more answers: %s", self._path, error.strerror)
            self.close()


def _open(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line is one write, so that lines of several writers do not mix.
        return open(path, "a+b", buffering=0, opener=private_opener)
    except OSError as error:
        raise ConfigError(f"cache {path} cannot be written: {why_unreadable(path, error)}") from error


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
