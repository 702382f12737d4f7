"""Full-text search over the episodes of a run, for the viewer.

The lower-case texts are kept in memory and scanned. For 20,000 episodes with 37 MB of text, reading takes 0.8 s and a
scan takes 0.03 s. A trigram index in SQLite would answer a query in 0.01 s but take 30 s and 250 MB to build.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.episodes.json_codec import TAG, from_json_value
from reward_kit.report.run_data import EpisodeOutline
from reward_kit.runs.files import EPISODES_FILE, read_line, wrap_os_errors

_MOST_BYTES = 256_000_000  # for all episodes; a longer text is searched only up to its share
_LEAST_BYTES = 2_000


class EpisodeSearch:
    """The searchable texts of a run's episodes: messages and tool calls or, if absent, observations and actions.

    Attributes:
        lock: the lock that callers of `add` and `find` must hold.
        change: the number of the run's last change whose texts were added.
    """

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.change = 0
        self._file = path / EPISODES_FILE
        self._texts: dict[str, bytes] = {}

    def add(self, episodes: Sequence[EpisodeOutline]) -> None:
        """Read the texts of new or changed episodes."""
        if not episodes:
            return
        most = max(_LEAST_BYTES, _MOST_BYTES // (len(episodes) + len(self._texts)))
        with wrap_os_errors("read", self._file), self._file.open("rb") as file:
            for facts in episodes:
                if facts.place is not None:
                    file.seek(facts.place.offset)
                    self._texts[facts.row.rollout_id] = _episode_text(file.read(facts.place.length))[:most]

    def find(self, query: str) -> list[str]:
        """Return the ids of the episodes whose text contains the query, ignoring case; empty for an empty query."""
        needle = _lower(query)
        return [name for name, text in self._texts.items() if needle in text] if needle else []


def _episode_text(line: bytes) -> bytes:
    try:
        record = read_line(line)
        messages = record.get("messages") or record.get("steps") or ()
        return _lower("\n".join(text for message in messages for text in _texts(message)))
    except (ValueError, TypeError, AttributeError, RecursionError):  # a damaged line is skipped
        return b""


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings of a message or step, except the names of its keys."""
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


_NOT_TEXT = ("role", "type", "id", "tool_call_id", "state_key", "state_and_results", "info", "outputs")


def _lower(text: str) -> bytes:
    return text.lower().encode("utf-8", "surrogatepass")
