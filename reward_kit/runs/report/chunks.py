"""The episodes behind the page: their stored lines as they are, group by group, in chunks that a browser opens singly.

Nothing is parsed here but what would make a page slow, so that a run of any size costs little more than its bytes.
The text of a chunk is lines again, each with a letter before it: `E` an episode, and after it, where they are known,
`S` its score and `C` the list of its lines of `credit.jsonl`. What they mean, the page finds out (`objects.js`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from reward_kit.runs.files import told_of
from reward_kit.runs.report.fitting import LineFitter
from reward_kit.runs.report.reading import EpisodeOutline, RunFacts
from reward_kit.runs.results import STEP, Place, credit_places

MOST_TOGETHER = 64
"""Episodes of a group that are shown side by side; of a larger one in parts."""
_PART_BYTES = 4_000_000
_CHUNK_BYTES = 500_000


class StoredLines(NamedTuple):
    """The lines of one episode as they stand in the files of its run; those of its steps' credit one after another."""

    episode: bytes
    score: bytes | None = None
    credit: bytes = b""


class Part(NamedTuple):
    """Episodes that are shown together: a group, or a part of a large one.

    Attributes:
        group_id: the group.
        size: how many episodes it has in all.
        first: the place of the first of these in it.
        episodes: in the order of their rollouts.
    """

    group_id: str
    size: int
    first: int
    episodes: Sequence[EpisodeOutline]


def group_text(episodes: Iterable[StoredLines], fitter: LineFitter) -> bytes:
    """The part of a chunk that these episodes of one group are: ASCII without `<`, which would end a script."""
    found: list[bytes] = []
    for lines in episodes:
        found += b"E", fitter.fitted(lines.episode), b"\n"
        if lines.score is not None:
            found += b"S", fitter.fitted(lines.score), b"\n"
        if lines.credit:
            found += b"C[", _lean_credit(lines.credit), b"]\n"
    return b"".join(found).replace(b"<", b"\\u003c")


def _lean_credit(block: bytes) -> bytes:
    """The lines as items of a list, without what all of them begin with: whose they are, which the page knows."""
    prefix = block[1 : max(1, block.find(STEP))]
    lean = block.replace(prefix, b"") if prefix else block
    return lean.strip().replace(b"\n", b",")


def parts_of(episodes: Iterable[EpisodeOutline]) -> list[Part]:
    """The groups of a run in the order of samples and policies; a large one in parts."""
    groups: dict[str, list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        groups[facts.group_id].append(facts)
    names = sorted(groups, key=lambda name: (str(groups[name][0].row.sample_id), groups[name][0].row.policy, name))
    return [part for name in names for part in _parts(name, groups[name])]


def _parts(group_id: str, episodes: Sequence[EpisodeOutline]) -> Iterator[Part]:
    ordered = sorted(episodes, key=lambda facts: (facts.rollout_index, facts.row.rollout_id))
    first, size = 0, 0
    for place, facts in enumerate(ordered):
        if place > first and (place - first == MOST_TOGETHER or size + _size(facts) > _PART_BYTES):
            yield Part(group_id, len(ordered), first, ordered[first:place])
            first, size = place, 0
        size += _size(facts)
    yield Part(group_id, len(ordered), first, ordered[first:])


def chunks_of(parts: Iterable[Part]) -> list[list[Part]]:
    """Parts that are opened together, about half a megabyte of stored lines at a time."""
    chunks: list[list[Part]] = []
    size = _CHUNK_BYTES
    for part in parts:
        if size >= _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(part)
        size += sum(map(_size, part.episodes))
    return chunks


def _size(facts: EpisodeOutline) -> int:
    score = facts.score.place if facts.score is not None else None
    return (facts.place.length if facts.place is not None else 0) + (score.length if score is not None else 0)


class ChunkReader:
    """Reads the stored lines of a run's chunks. Use it as a context manager.

    Args:
        run: whose `episodes` know their places, since they were read from its files.

    Attributes:
        chunks: the parts of each chunk.
        stored_bytes: what the lines of all of them take.

    Raises:
        StoreError: `credit.jsonl` is damaged.
    """

    def __init__(self, run: RunFacts) -> None:
        self._path, self._fitter = run.path, LineFitter(run.header)
        self._credit = credit_places(run.path)
        self.chunks = chunks_of(parts_of(run.episodes))
        lines = sum(_size(facts) for facts in run.episodes)
        self.stored_bytes = lines + sum(place.length for place in self._credit.values())

    def __enter__(self) -> ChunkReader:
        """Open the files.

        Raises:
            StoreError: one of them cannot be opened.
        """
        with ExitStack() as opened:
            self._episodes, self._scores, self._steps = (
                self._open(name, opened) for name in ("episodes.jsonl", "scores.jsonl", "credit.jsonl")
            )
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open(self, name: str, opened: ExitStack) -> int:
        path = self._path / name
        if not path.exists():
            return -1
        with told_of("open", path):
            descriptor = os.open(path, os.O_RDONLY)
        opened.callback(os.close, descriptor)
        return descriptor

    def texts(self) -> Iterator[bytes]:
        """The text of each chunk, read as it is asked for.

        Raises:
            StoreError: a file cannot be read.
        """
        for number in range(len(self.chunks)):
            yield self.text(number)

    def text(self, number: int) -> bytes:
        """The text of one chunk.

        Raises:
            StoreError: a file cannot be read.
        """
        with told_of("read", self._path):
            return b"".join(self._text_of(part) for part in self.chunks[number])

    def _text_of(self, part: Part) -> bytes:
        return group_text(map(self._stored, part.episodes), self._fitter)

    def _stored(self, facts: EpisodeOutline) -> StoredLines:
        score, credit = facts.score, self._credit.get(facts.row.rollout_id)
        return StoredLines(
            _read(self._episodes, facts.place) or b"{}",
            _read(self._scores, score.place) if score is not None else None,
            _read(self._steps, credit) or b"",
        )


def _read(descriptor: int, place: Place | None) -> bytes | None:
    return os.pread(descriptor, place.length, place.offset) if place is not None else None
