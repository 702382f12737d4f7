"""The runs that the viewer shows, kept up to date while they go on: their rows in the table of runs, and their lines.

Every line of a run's files is read once, however many come. Of an episode there is kept what the page shows of it, and
the place of its lines; these are read again when a reader opens it. Each change has a number, so that any number of
pages can ask for what is new to them.

A run that goes on, or was killed, has no summary that counts, so its figures are made of its lines as they come. A run
that cannot be read has a row with the reason, and hides nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.display_text import shown
from reward_kit.episodes.record import attempt_of
from reward_kit.errors import ConfigError, RewardKitError, StoreError, boundary
from reward_kit.report.episode_chunks import StoredLines, parts_of
from reward_kit.report.rendering import NAME_LENGTH
from reward_kit.report.run_data import EpisodeOutline, RunFacts, episode_outline, lean_score
from reward_kit.runs.files import EPISODES, HELD_OUT_SCORE, METRICS, read_json, told_of
from reward_kit.runs.results import Place, credit_places
from reward_kit.runs.run_folder import FILE, RunHeader, check_score, is_open_elsewhere, line_record
from reward_kit.runs.summary import PolicySummary, summarise, summary_from_json

# Files that grow

_PART = 1 << 20
Check = Callable[[Mapping[str, Any]], None]


class PlacedRecord(NamedTuple):
    """One line, and where it is."""

    place: Place
    record: dict[str, Any]


class News(NamedTuple):
    """The lines that a file has gained.

    Attributes:
        lines: the whole lines that were not read before.
        is_new_file: they are of another file than before, or of one that was cut: what was known of it is void.
        is_all: there is no further whole line at present.
    """

    lines: list[PlacedRecord]
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
        size, has_line, part = 0, False, b"\n"
        while size < self._most_bytes or not has_line:
            part = os.read(descriptor, _PART)
            self.bytes_read += len(part)
            if not part:
                break
            parts.append(part)
            size += len(part)
            has_line = has_line or b"\n" in part
        data = b"".join(parts)
        return data[: data.rfind(b"\n") + 1], not part

    def _parsed(self, data: bytes) -> list[PlacedRecord]:
        """The lines of `data`; what was read counts as read only where none of them is damaged."""
        offset, number, placed = self._offset, self._lines, []
        for line in data.split(b"\n")[:-1]:
            number += 1
            record = line_record(self.path, number, line, self._check)
            placed.append(PlacedRecord(Place(offset, len(line) + 1), record))
            offset += len(line) + 1
        self._offset, self._lines = offset, number
        return placed


# One run in memory

Attempt = tuple[str, int]


class GroupLines(NamedTuple):
    """The stored lines of a group's episodes; of a large one those of a part of it.

    Attributes:
        size: how many episodes the group has in all.
        first: the place of the first of these in it.
        lines: of each.
    """

    size: int
    first: int
    lines: list[StoredLines]


@dataclass(slots=True)
class _Known:
    """An episode by its latest attempt: what the page shows of it, and the number of its last change."""

    facts: EpisodeOutline
    change: int = 0


@dataclass(slots=True)
class _ReadLines:
    """The lines read from one set of files. It is thrown away as a whole when one of them is replaced."""

    episodes: TailReader
    scores: TailReader
    known: dict[str, _Known] = field(default_factory=dict)
    by_change: dict[str, None] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    scores_of: dict[Attempt, Mapping[str, Any]] = field(default_factory=dict)
    earlier: int = 0
    epoch: str = field(default_factory=lambda: secrets.token_hex(4))

    @classmethod
    def of(cls, path: Path) -> _ReadLines:
        """An empty one."""
        return cls(TailReader(path / "episodes.jsonl"), TailReader(path / "scores.jsonl", check_score))


class WatchedRun:
    """One run. `look` may be called from any thread, one call after the other; what it learned is read under its lock.

    Args:
        path: its folder.

    Raises:
        ConfigError: it is a training run, which has no episodes of its own.
        StoreError: its `run.json` is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.change = 0
        """Grows with everything that is new."""
        self._lock = threading.RLock()
        self._header_is_from: tuple[int, int] | None = None
        self._memory = _ReadLines.of(path)
        self._credit: tuple[tuple[int, int, int] | None, Mapping[str, Place]] = (None, {})
        self._read_header()

    @property
    def epoch(self) -> str:
        """Another one means that nothing that was sent before is valid."""
        return self._memory.epoch

    @property
    def pass_threshold(self) -> float:
        """A score of at least this passes."""
        return self.header.pass_threshold

    @property
    def bytes_read(self) -> int:
        """Of its lines, without those that are read again for an episode that is opened."""
        return self._memory.episodes.bytes_read + self._memory.scores.bytes_read

    def look(self) -> bool:
        """Read what is new, or a bounded part of it.

        Returns:
            Whether that was all there is at present.

        Raises:
            StoreError: a file cannot be read, or a line of it is damaged; the message names it.
        """
        with self._lock:
            try:
                self._read_header()
                return self._read_lines()
            except RewardKitError:
                self._forget()  # or what stands before the damage would count as all there is
                raise

    def look_at_all(self) -> None:
        """Read everything there is at present."""
        while not self.look():
            continue

    def facts(self) -> RunFacts:
        """The run as its page shows it, from memory alone."""
        with self._lock:
            latest = [known.facts for known in self._memory.known.values()]
            latest.sort(key=lambda facts: facts.place.offset if facts.place is not None else 0)
            finished = [facts for facts in latest if not facts.row.is_unfinished]
            return RunFacts(self.path, self.header, finished, self._memory.earlier, len(latest) - len(finished))

    def changed_since(self, change: int) -> list[EpisodeOutline]:
        """The episodes that are new or were scored after a change; what takes time is their number alone."""
        with self._lock:
            found = []
            for rollout_id in reversed(self._memory.by_change):
                known = self._memory.known[rollout_id]
                if known.change <= change:
                    break
                if not known.facts.row.is_unfinished:
                    found.append(known.facts)
            return found[::-1]

    def beside(self, episodes: Iterable[EpisodeOutline]) -> list[EpisodeOutline]:
        """All episodes of the samples and policies that these are of, as the table of samples needs them."""
        with self._lock:
            keys = dict.fromkeys((facts.row.sample_id, facts.row.policy) for facts in episodes)
            found = [self._memory.known[one].facts for key in keys for one in self._memory.rows[key]]
            return [facts for facts in found if not facts.row.is_unfinished]

    def lines_of_group(self, group_id: str, around: str | None = None) -> GroupLines:
        """The stored lines of a group's episodes; of a large one the part in which an episode is.

        Args:
            group_id: the group.
            around: the name of an episode; None takes the first part.

        Raises:
            ConfigError: there is no such group.
            StoreError: they cannot be read.
        """
        with self._lock:
            group = [self._memory.known[name].facts for name in self._memory.groups.get(group_id, ())]
            parts = parts_of([facts for facts in group if not facts.row.is_unfinished])
            if not parts:
                raise ConfigError(f"no episode of group {group_id!r} is there yet")
            named = (part for part in parts if around in {facts.row.rollout_id for facts in part.episodes})
            part, credit = next(named, parts[0]), self._credit_places()
            files = {name: self.path / f"{name}.jsonl" for name in ("episodes", "scores", "credit")}
            lines = [
                StoredLines(
                    episode=_read(files["episodes"], facts.place),
                    score=_read(files["scores"], facts.score.place) if facts.score is not None else None,
                    credit=_read(files["credit"], credit.get(facts.row.rollout_id)),
                )
                for facts in part.episodes
            ]
            return GroupLines(part.size, part.first, lines)

    def lines_of_episode(self, rollout_id: str) -> GroupLines:
        """The stored lines of an episode and of those beside it in its group.

        Raises:
            ConfigError: there is no such episode.
            StoreError: they cannot be read.
        """
        with self._lock:
            known = self._memory.known.get(rollout_id)
            if known is None or known.facts.row.is_unfinished:
                raise ConfigError(f"episode {rollout_id!r} is not there yet")
            return self.lines_of_group(known.facts.group_id, rollout_id)

    def _credit_places(self) -> Mapping[str, Place]:
        """The lines of `credit.jsonl` by episode. The file is written as a whole, and so it is read."""
        try:
            facts = (self.path / "credit.jsonl").stat()
        except OSError:  # as good as not there
            return {}
        is_from = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if is_from != self._credit[0]:
            self._credit = is_from, credit_places(self.path)
        return self._credit[1]

    def _read_lines(self) -> bool:
        # Scores first: what is there from the beginning then needs no line to be read a second time.
        scores = self._memory.scores.news()
        episodes = self._memory.episodes.news()
        if scores.is_new_file or episodes.is_new_file:
            self._forget()
            return False
        for placed in scores.lines:
            self._add_score(placed)
        for placed in episodes.lines:
            self._add_episode(placed)
        return scores.is_all and episodes.is_all

    def _forget(self) -> None:
        self._memory, self._credit = _ReadLines.of(self.path), (None, {})
        self.change += 1

    def _read_header(self) -> None:
        with told_of("read", self.path / FILE):
            facts = (self.path / FILE).stat()
        is_from = (facts.st_ino, facts.st_mtime_ns)
        if is_from == self._header_is_from:
            return
        self.header = RunHeader.read(self.path)
        if self.header.training is not None:
            raise ConfigError(f"{self.path} is a training run, which has no episodes of its own")
        self._header_is_from = is_from
        self.change += 1

    def _add_score(self, placed: PlacedRecord) -> None:
        name, attempt = placed.record["rollout_id"], attempt_of(placed.record)
        self._memory.scores_of[name, attempt] = lean_score(placed.record, placed.place)
        known = self._memory.known.get(name)
        if known is not None and known.facts.row.attempt == attempt:
            place = known.facts.place
            line = _read(self.path / "episodes.jsonl", place)
            known.facts = self._facts_of(line_record(self.path / "episodes.jsonl", 0, line), place)
            self._note(name, known)

    def _add_episode(self, placed: PlacedRecord) -> None:
        memory, facts = self._memory, self._facts_of(placed.record, placed.place)
        row = facts.row
        known = memory.known.get(row.rollout_id)
        memory.earlier += known is not None
        if known is None:
            memory.groups[facts.group_id].append(row.rollout_id)
            memory.rows[row.sample_id, row.policy].append(row.rollout_id)
        if known is None or row.attempt >= known.facts.row.attempt:
            memory.known[row.rollout_id] = _Known(facts)
            self._note(row.rollout_id, memory.known[row.rollout_id])

    def _facts_of(self, record: Mapping[str, Any], place: Place | None) -> EpisodeOutline:
        score = self._memory.scores_of.get((record["rollout_id"], attempt_of(record)))
        return episode_outline(record, self.header, score, place)

    def _note(self, rollout_id: str, known: _Known) -> None:
        self.change += 1
        known.change = self.change
        self._memory.by_change.pop(rollout_id, None)
        self._memory.by_change[rollout_id] = None


def _read(path: Path, place: Place | None) -> bytes:
    """The bytes at a place of a file; nothing without a place.

    Raises:
        StoreError: the file cannot be read.
    """
    if place is None:
        return b""
    with told_of("read", path), path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


# All runs of a folder

_END = 1 << 18


def last_held_out(run: Path) -> float | None:
    """The last score on held-out samples of the training run in a folder; None where the end of the file has none.

    Raises:
        StoreError: the file cannot be read.
    """
    path = run / METRICS
    if not path.exists():
        return None
    with told_of("read", path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        data = file.read()
    for line in reversed(data[: data.rfind(b"\n") + 1].split(b"\n")):
        with contextlib.suppress(ValueError):  # the rest of a line whose begin was not read, or a damaged one
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(score := record.get(HELD_OUT_SCORE), int | float):
                return float(score)
    return None


SUMMARY = "summary.json"
_FILES = (FILE, SUMMARY, "episodes.jsonl", "scores.jsonl", METRICS)
_FOLDERS = (EPISODES,)
"""Of files that a page reads."""
_NOTE_LENGTH = 300
_SHARE_OF_TIME = 0.05
Signature = tuple[tuple[int, int, int] | None, ...]


class RunRow(NamedTuple):
    """One policy of one run in the table.

    Attributes:
        run: the name of its folder.
        task: the task's name.
        policy: whose figures these are; of a training run how far that is.
        status: "running", "complete", "interrupted", "failed"; "killed" where it says running and no process has it
            open; "unreadable" where a file of it is damaged.
        episodes: that are there.
        total: that there will be, of all policies together.
        mean: of the scores; of a training run the last one on held-out samples.
        low: where its 95% interval begins.
        high: where it ends.
        cost: US dollars.
        began: when, in UTC, to the minute.
        note: what is wrong with it, or missing.
    """

    run: str
    task: str
    policy: str = ""
    status: str = "unreadable"
    episodes: int | None = None
    total: int | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    cost: float | None = None
    began: str = ""
    note: str = ""


@dataclass(slots=True)
class _Entry:
    """One run of the folder, as it was when its files had this signature."""

    signature: Signature = ()
    rows: Sequence[RunRow] = ()
    is_open: bool = False
    watch: WatchedRun | None = None
    counted: tuple[int, RunRow] | None = None
    due_s: float = 0.0
    change: int = 0


class RunCatalogue:
    """The runs of a folder. Any thread may look and read; `held` keeps what it reads of one moment.

    Args:
        folder: that of the runs.
        only: the name of the one that is shown; None shows all.
    """

    def __init__(self, folder: Path, only: str | None = None) -> None:
        self._folder = folder
        self._only = only
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self.change = 0
        """Grows when a row is another than before."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block no other thread looks, so that rows, names and `change` belong together."""
        with self._lock:
            yield

    @property
    def rows(self) -> list[RunRow]:
        """The rows, the newest run first, as they were at the last look."""
        with self._lock:
            rows = [row for entry in self._entries.values() for row in entry.rows]
        return sorted(rows, key=lambda row: (row.began, row.run), reverse=True)

    @property
    def title(self) -> str:
        """The name of the folder, as a page shows it."""
        return shown(self._only or self._folder.resolve().name, NAME_LENGTH)

    @property
    def names(self) -> list[str]:
        """The names of the runs, as they are shown."""
        with self._lock:
            return [shown(name, NAME_LENGTH) for name in self._entries]

    def changed_since(self, change: int) -> list[RunRow]:
        """The rows of the runs of which one changed after that."""
        with self._lock:
            return [row for entry in self._entries.values() if entry.change > change for row in entry.rows]

    def path_of(self, name: str) -> Path | None:
        """The folder of a run, None where there is none of this name.

        A name never leads out of the folder, nor does a link in it, to a folder or to one of the files that are read.
        """
        if self._only not in (None, name) or name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
            return None
        path, root = self._folder / name, self._folder.resolve()
        parts = [path, *(path / file for file in (*_FILES, "credit.jsonl", *_FOLDERS))]
        if not (path / FILE).is_file() or not all(_is_inside(root, part) for part in parts):
            return None
        links = [link for folder in _FOLDERS for link in _links_in(path / folder)]
        return path if all(_is_inside(root, link) for link in links) else None

    def look(self) -> None:
        """Read what changed in the folder since the last look, a bounded part of it for each run."""
        with self._lock:
            names = list(self._names())
            for name in self._entries.keys() - set(names):
                self._forget(name)
            for name in names:
                self._look_at(name)

    def _names(self) -> Iterator[str]:
        if self._only is not None:
            return iter([self._only])
        try:
            with os.scandir(self._folder) as found:
                names = sorted(one.name for one in found if Path(one.path).is_dir())
        except OSError:  # the folder was removed, which is as good as empty
            names = []
        return iter(names)

    def _look_at(self, name: str) -> None:
        path, entry = self._folder / name, self._entries.get(name)
        signature = _signature(path)
        if entry is None or signature != entry.signature:
            if self.path_of(name) is None:
                self._forget(name)
                return
            entry = self._entries.setdefault(name, _Entry())
            entry.is_open = is_open_elsewhere(path)
        # Trying the lock of a run that is not open takes it for a moment, so it is done only after a change.
        elif entry.is_open and not is_open_elsewhere(path):
            entry.is_open = False
        elif entry.watch is None:
            return
        entry.signature = signature
        rows = self._rows_or_why(path, entry)
        if rows is not None and list(rows) != list(entry.rows):
            self.change += 1
            entry.rows, entry.change = rows, self.change

    def _forget(self, name: str) -> None:
        if self._entries.pop(name, None) is not None:
            self.change += 1

    def _rows_or_why(self, path: Path, entry: _Entry) -> Sequence[RunRow] | None:
        """The rows of a run, one that says why where there are none, None where they are to be made later."""
        try:
            with boundary(StoreError, f"{path.name} cannot be read"):
                return self._rows_of(path, entry)
        except (StoreError, ConfigError) as error:
            entry.watch = None
            begun = entry.rows[0] if entry.rows else RunRow(run=path.name, task="?")
            note = shown(str(error), _NOTE_LENGTH)
            return [RunRow(run=path.name, task=begun.task, began=begun.began, note=note)]

    def _rows_of(self, path: Path, entry: _Entry) -> Sequence[RunRow] | None:
        header = RunHeader.read(path)
        known = RunRow(
            run=path.name,
            task=shown(header.task_name, NAME_LENGTH),
            status=header.status_now(entry.is_open),
            total=header.total,
            began=f"{header.timing.started_at.astimezone(datetime.UTC):%Y-%m-%d %H:%M}",
        )
        if header.training is not None:
            done = header.training.get("updates")
            updates = f", {done:,} updates" if isinstance(done, int) else ""
            return [known._replace(policy=f"in training{updates}", total=None, mean=last_held_out(path))]
        if known.status not in ("running", "killed") and (path / SUMMARY).is_file():
            entry.watch = None
            with boundary(StoreError, f"{path / SUMMARY} is damaged"):
                return _with_figures(known, summary_from_json(read_json(path / SUMMARY)))
        return self._counted(path, entry, known)

    def _counted(self, path: Path, entry: _Entry, known: RunRow) -> Sequence[RunRow] | None:
        """The figures of what is there, from memory, and no more often than that they take a twentieth of the time."""
        watch = entry.watch = entry.watch or WatchedRun(path)
        is_all = watch.look()
        began_s, state = time.monotonic(), (watch.change, known)
        is_over = is_all and known.status != "running"
        if state == entry.counted or (began_s < entry.due_s and not is_over):
            return None
        facts = watch.facts()
        rows = _with_figures(known, summarise((one.row for one in facts.episodes), facts.pass_threshold))
        ended_s = time.monotonic()
        entry.counted, entry.due_s = state, ended_s + (ended_s - began_s) / _SHARE_OF_TIME
        if is_over:
            entry.watch = None
        return rows


def _is_inside(root: Path, part: Path) -> bool:
    """True if a path leads to something in a folder; links that lead in a circle lead nowhere, and open nothing."""
    return root in Path(os.path.realpath(part)).parents


def _links_in(folder: Path) -> list[Path]:
    """The links in a folder, none if the folder is missing."""
    try:
        with os.scandir(folder) as found:
            return [Path(one.path) for one in found if one.is_symlink()]
    except OSError:
        return []


def _signature(path: Path) -> Signature:
    """The state of the files, which changes when one of them does."""
    found: list[tuple[int, int, int] | None] = []
    for name in _FILES:
        try:
            facts = (path / name).stat()
            found.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _with_figures(known: RunRow, summaries: Sequence[PolicySummary]) -> list[RunRow]:
    done, total = sum(summary.episodes for summary in summaries), known.total or 0
    known = known._replace(note=f"{done:,} of {total:,} episodes" if done < total else "")
    return [
        known._replace(
            policy=shown(summary.policy, NAME_LENGTH),
            episodes=summary.episodes,
            mean=summary.score.mean if summary.score else None,
            low=summary.score.low if summary.score else None,
            high=summary.score.high if summary.score else None,
            cost=summary.cost,
        )
        for summary in summaries
    ] or [known]
