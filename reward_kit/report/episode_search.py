"""Full-text search over the episodes of a run, for the viewer.

The lower-case texts are kept in memory and scanned: for 20,000 episodes with 37 MB of text, they are read in 0.8 s and
scanned in 0.03 s. An SQLite trigram index answers in 0.01 s but takes 30 s and 250 MB to build.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.episodes.json_codec import TAG, from_json_value
from reward_kit.report.run_data import EpisodeOutline
from reward_kit.runs.files import read_line, wrap_os_errors
from reward_kit.runs.results import LineRange

_MOST_BYTES = 256_000_000  # of all episodes; a longer text is searched up to its share
_LEAST_BYTES = 2_000


class _Text(NamedTuple):
    place: LineRange
    text: bytes


class EpisodeSearch:
    """The searchable texts of a run's episodes: messages and tool calls, or without messages, observations and actions.

    Each line is read once. May be used from any thread.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / "episodes.jsonl"
        self._texts: dict[str, _Text] = {}
        self._lock = threading.Lock()

    def find(self, episodes: Sequence[EpisodeOutline], query: str) -> list[str]:
        """Return the ids of the episodes whose text contains the query, ignoring case; none for an empty query."""
        with self._lock:
            self._read(episodes)
            needle = _lower(query)
            names = [facts.row.rollout_id for facts in episodes] if needle else []
            return [name for name in names if name in self._texts and needle in self._texts[name].text]

    def _read(self, episodes: Sequence[EpisodeOutline]) -> None:
        places = {facts.row.rollout_id: facts.place for facts in episodes if facts.place is not None}
        known = self._texts
        new = {name: place for name, place in places.items() if name not in known or known[name].place != place}
        if not new:
            return
        most = max(_LEAST_BYTES, _MOST_BYTES // len(places))
        with wrap_os_errors("read", self._file), self._file.open("rb") as file:
            for name, place in new.items():
                file.seek(place.offset)
                known[name] = _Text(place, _episode_text(file.read(place.length))[:most])


def _episode_text(line: bytes) -> bytes:
    try:
        record = read_line(line)
        messages = record.get("messages") or record.get("steps") or ()
        return _lower("\n".join(text for message in messages for text in _texts(message)))
    except (ValueError, TypeError, AttributeError, RecursionError):  # a damaged line is not found
        return b""


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a message or step, without the names of its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if TAG in value:
            value = from_json_value(value)
            yield value if isinstance(value, str) else ""
            return
        for key, part in value.items():
            if key not in _NOT_TEXT:
                yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


_NOT_TEXT = ("role", "type", "id", "tool_call_id", "state_key", "info", "outputs")


def _lower(text: str) -> bytes:
    return text.lower().encode("utf-8", "surrogatepass")
