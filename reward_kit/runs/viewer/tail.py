"""Reading a file of JSON lines that grows: each whole line once, and a bounded part at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.runs.files import told_of
from reward_kit.runs.results import Place
from reward_kit.runs.run_folder import line_record

_PART = 1 << 20
Check = Callable[[Mapping[str, Any]], None]


class Placed(NamedTuple):
    """One line, and where it is."""

    place: Place
    record: dict[str, Any]


class News(NamedTuple):
    """What a file had to say.

    Attributes:
        lines: the whole lines that were not read before.
        is_new_file: they are of another file than before, or of one that was cut: what was known of it is void.
        is_all: there is no further whole line at present.
    """

    lines: list[Placed]
    is_new_file: bool
    is_all: bool


class TailReader:
    """The lines of one file, read as they come. What follows the last line break is left until its line is whole.

    Args:
        path: the file; one that is not there has no lines.
        check: raises a StoreError where more is to be refused than what is no line of a run.
        most_bytes: about how much is read at a time, so that a long file does not hold up what else there is to do.
    """

    def __init__(self, path: Path, check: Check = lambda record: None, most_bytes: int = 16 * _PART) -> None:
        self.path = path
        self._check = check
        self.bytes_read = 0
        """In all, so that a test can tell that nothing is read twice."""
        self._most_bytes = most_bytes
        self._inode: int | None = None
        self._offset = 0
        self._lines = 0
        self._seen_size = 0

    def news(self) -> News:
        """The lines that came since the last call, or the next part of them.

        Raises:
            StoreError: the file cannot be read, or a line is damaged; the message names it.
        """
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            is_new_file = self._inode is not None
            self._restart(None)
            return News([], is_new_file, True)
        is_new_file = self._inode is not None and (facts.st_ino != self._inode or facts.st_size < self._offset)
        if is_new_file or self._inode is None:
            self._restart(facts.st_ino)
        if facts.st_size == self._seen_size:
            return News([], is_new_file, True)
        with told_of("read", self.path), self.path.open("rb") as file:
            file.seek(self._offset)
            data, is_all = self._part(file.fileno())
        lines = self._parsed(data)
        self._seen_size = facts.st_size if is_all else -1
        return News(lines, is_new_file, is_all)

    def _restart(self, inode: int | None) -> None:
        self._inode = inode
        self._offset = self._lines = self._seen_size = 0

    def _part(self, descriptor: int) -> tuple[bytes, bool]:
        """Whole lines of at least `most_bytes` together, or all that there are; and whether they are all."""
        parts: list[bytes] = []
        size, has_line = 0, False
        while size < self._most_bytes or not has_line:
            part = os.read(descriptor, _PART)
            self.bytes_read += len(part)
            if not part:
                return self._whole(parts), True
            parts.append(part)
            size += len(part)
            has_line = has_line or b"\n" in part
        return self._whole(parts), False

    def _whole(self, parts: list[bytes]) -> bytes:
        data = b"".join(parts)
        return data[: data.rfind(b"\n") + 1]

    def _parsed(self, data: bytes) -> list[Placed]:
        """The lines of `data`; what was read counts as read only where none of them is damaged."""
        offset, number, placed = self._offset, self._lines, []
        for line in data.split(b"\n")[:-1]:
            number += 1
            record = line_record(self.path, number, line, self._check)
            placed.append(Placed(Place(offset, len(line) + 1), record))
            offset += len(line) + 1
        self._offset, self._lines = offset, number
        return placed
