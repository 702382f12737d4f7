"""The runs of the viewer. They are kept up to date while they are running.

Each line of the files of a run is read once. The displayed facts of each episode are kept in memory together with the
positions of its lines. The lines are read again when the episode is opened. Changes are numbered so that each open page
can request the changes since its last request. A running or killed run has no final summary, so its figures are
computed from its lines.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.display_text import escape_text
from reward_kit.episodes.record import get_attempt
from reward_kit.errors import ConfigError, RewardKitError, StoreError, boundary
from reward_kit.report.episode_chunks import StoredLines, curve_line, split_groups
from reward_kit.report.episode_search import EpisodeSearch
from reward_kit.report.rendering import NAME_LENGTH
from reward_kit.report.run_data import EpisodeOutline, RunFacts, RunSpending, episode_outline, score_facts
from reward_kit.runs.counterfactual_file import RunCurves, read_curves
from reward_kit.runs.files import (
    COUNTERFACTUALS_FILE,
    CREDIT_FILE,
    EPISODES_FILE,
    HELD_OUT_SCORE,
    KEPT_EPISODES,
    LABELS_FILE,
    METRICS_FILE,
    RUN_FILE,
    SCORES_FILE,
    SUMMARY_FILE,
    read_json,
    wrap_os_errors,
)
from reward_kit.runs.label_file import EpisodeLabels, add_label, check_label
from reward_kit.runs.results import LineRange, index_credit
from reward_kit.runs.run_folder import RunHeader, check_score, is_open_elsewhere, line_record
from reward_kit.runs.summary import PolicySummary, summarize, summary_from_json

# Growing files

_PART = 1 << 20
FileState = tuple[int, int, int] | None
"""The inode, size and modification time of a file, or None if it is missing."""
Check = Callable[[Mapping[str, Any]], None]


class PlacedRecord(NamedTuple):
    """A line and its position."""

    place: LineRange
    record: dict[str, Any]


class NewLines(NamedTuple):
    """The new lines of a file."""

    lines: list[PlacedRecord]
    is_new_file: bool  # True if the file was replaced or truncated, so earlier lines must be discarded
    is_all: bool  # True if there are no further complete lines yet


class TailReader:
    """A reader of the new lines of a file. An incomplete last line is returned once it is complete.

    Args:
        path: the file; a missing file has no lines.
        check: a function that raises a StoreError for an invalid record.
        most_bytes: the approximate number of bytes to read at a time, so that a long file does not block other work.
    """

    def __init__(self, path: Path, check: Check = lambda record: None, most_bytes: int = 16 * _PART) -> None:
        self.path = path
        self.bytes_read = 0  # the total, for tests
        self._check = check
        self._most_bytes = most_bytes
        self._inode: int | None = None
        self._offset = self._lines = self._seen_size = 0

    def news(self) -> NewLines:
        """Return the lines that are new since the last call, or the next part of these lines.

        Raises:
            StoreError: the file cannot be read, or a line is damaged; the message contains the location of the line.
        """
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            is_new_file = self._inode is not None
            self._inode, self._offset, self._lines, self._seen_size = None, 0, 0, 0
            return NewLines([], is_new_file, True)
        is_new_file = self._inode is not None and (facts.st_ino != self._inode or facts.st_size < self._offset)
        if is_new_file or self._inode is None:
            self._inode, self._offset, self._lines, self._seen_size = facts.st_ino, 0, 0, 0
        if facts.st_size == self._seen_size:
            return NewLines([], is_new_file, True)
        parts: list[bytes] = []
        size, has_line, part = 0, False, b"\n"
        with wrap_os_errors("read", self.path), self.path.open("rb", buffering=0) as file:
            file.seek(self._offset)
            while part and (size < self._most_bytes or not has_line):
                part = file.read(_PART) or b""
                parts.append(part)
                size += len(part)
                has_line = has_line or b"\n" in part
        self.bytes_read += size
        # Advance only if no line is damaged.
        offset, number, placed = self._offset, self._lines, []
        for line in b"".join(parts).split(b"\n")[:-1]:
            number += 1
            record = line_record(self.path, number, line, self._check)
            placed.append(PlacedRecord(LineRange(offset, len(line) + 1), record))
            offset += len(line) + 1
        self._offset, self._lines = offset, number
        self._seen_size = -1 if part else facts.st_size
        return NewLines(placed, is_new_file, not part)


# One run in memory

Attempt = tuple[str, int]


class GroupLines(NamedTuple):
    """The stored lines of the episodes of a group, or of a part of a large group."""

    size: int  # the number of episodes in the whole group
    first: int  # the index of the first of these episodes
    lines: list[StoredLines]


@dataclass(slots=True)
class _Known:
    """The latest attempt of an episode, and the number of its last change."""

    facts: EpisodeOutline
    change: int = 0


class _ReadLines:
    """The lines read from the files of a run. They are discarded when a file is replaced."""

    def __init__(self, path: Path) -> None:
        self.episodes = TailReader(path / EPISODES_FILE)
        self.scores = TailReader(path / SCORES_FILE, check_score)
        self.label_lines = TailReader(path / LABELS_FILE, check_label)
        self.labels: dict[str, EpisodeLabels] = {}
        self.known: dict[str, _Known] = {}
        self.by_change: dict[str, None] = {}
        self.groups: dict[str, list[str]] = defaultdict(list)
        self.rows: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.scores_of: dict[Attempt, Mapping[str, Any]] = {}
        self.earlier = 0
        self.spent = RunSpending()
        self.epoch = secrets.token_hex(4)


class WatchedRun:
    """A run in memory. `poll` may be called from any thread, but not concurrently.

    Raises:
        ConfigError: the run is a training run, which has no episodes.jsonl.
        StoreError: `run.json` is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.change = 0
        """The number of the last change."""
        self._lock = threading.RLock()
        self._header_is_from: tuple[int, int] | None = None
        self._memory = _ReadLines(path)
        self._credit: tuple[FileState, Mapping[str, LineRange]] = (None, {})
        self._search = EpisodeSearch(path)
        self._curves_are_from: FileState = None
        self.curves = RunCurves({})
        self._read_header()

    @property
    def epoch(self) -> str:
        """The epoch of the files of the run. A new epoch invalidates everything that was sent before."""
        return self._memory.epoch

    @property
    def pass_threshold(self) -> float:
        """The lowest score that passes."""
        return self.header.pass_threshold

    @property
    def bytes_read(self) -> int:
        """The number of bytes read, excluding those of opened episodes."""
        return self._memory.episodes.bytes_read + self._memory.scores.bytes_read

    def poll(self) -> bool:
        """Read new lines, or a bounded part of the new lines."""
        with self._lock:
            try:
                self._read_header()
                return self.read_lines()
            except RewardKitError:
                self._forget()  # otherwise the lines before the damaged line would be taken for all lines
                raise

    def poll_all(self) -> None:
        """Read all complete lines."""
        while not self.poll():
            continue

    def facts(self) -> RunFacts:
        """Return the facts of the run from memory."""
        with self._lock:
            latest = [known.facts for known in self._memory.known.values()]
            latest.sort(key=lambda facts: facts.place.offset if facts.place is not None else 0)
            finished = [facts for facts in latest if not facts.row.is_unfinished]
            unfinished = len(latest) - len(finished)
            earlier, labels, spent = self._memory.earlier, dict(self.labels), self._memory.spent.dollars
            return RunFacts(self.path, self.header, finished, earlier, unfinished, labels, spent, self.curves)

    @property
    def labels(self) -> Mapping[str, EpisodeLabels]:
        """The labels of users, keyed by rollout id."""
        return self._memory.labels

    def check_step(self, rollout_id: str, step: int | None) -> None:
        """Raise a ConfigError if the episode or step does not exist."""
        known = self._memory.known.get(rollout_id)
        if known is None:
            raise ConfigError(f"this run has no episode {rollout_id!r:.200}")
        if step is not None and step >= known.facts.row.num_steps:
            raise ConfigError(
                f"episode {rollout_id!r:.200} has {known.facts.row.num_steps} steps, so there is no step {step}"
            )

    def find(self, query: str) -> list[str]:
        """Return the ids of the episodes whose text contains the query."""
        search = self._search
        with search.lock:
            with self._lock:  # the texts are read without the lock so that other pages do not wait
                changed, change = self.changed_since(search.change), self.change
            search.add(changed)
            search.change = change
            return search.find(query)

    def changed_since(self, change: int) -> list[EpisodeOutline]:
        """Return the episodes that are new or newly scored since a change.

        The time is proportional to the number of these episodes.
        """
        with self._lock:
            changed = []
            for rollout_id in reversed(self._memory.by_change):
                known = self._memory.known[rollout_id]
                if known.change <= change:
                    break
                if not known.facts.row.is_unfinished:
                    changed.append(known.facts)
            return changed[::-1]

    def beside(self, episodes: Iterable[EpisodeOutline]) -> list[EpisodeOutline]:
        """Return all episodes that have the same sample and policy as one of these, for the table of samples."""
        with self._lock:
            keys = dict.fromkeys((facts.row.sample_id, facts.row.policy) for facts in episodes)
            known = [self._memory.known[one].facts for key in keys for one in self._memory.rows[key]]
            return [facts for facts in known if not facts.row.is_unfinished]

    def group_lines(self, group_id: str, around: str | None = None) -> GroupLines:
        """Return the stored lines of the episodes of a group.

        For a large group, return the part that contains the episode `around`.
        """
        with self._lock:
            group = [self._memory.known[name].facts for name in self._memory.groups.get(group_id, ())]
            parts = split_groups([facts for facts in group if not facts.row.is_unfinished])
            if not parts:
                raise ConfigError(f"group {group_id!r} has no episodes yet")
            named = (part for part in parts if around in {facts.row.rollout_id for facts in part.episodes})
            part, credit = next(named, parts[0]), self._index_credit()
            files = {name: self.path / f"{name}.jsonl" for name in ("episodes", "scores", "credit")}
            lines = [
                StoredLines(
                    episode=_read(files["episodes"], facts.place),
                    score=_read(files["scores"], facts.score.place) if facts.score is not None else None,
                    credit=_read(files["credit"], credit.get(facts.row.rollout_id)),
                    curves=curve_line(facts, self.curves),
                )
                for facts in part.episodes
            ]
            return GroupLines(part.size, part.first, lines)

    def episode_lines(self, rollout_id: str) -> GroupLines:
        """Return the stored lines of an episode and of its neighbors in the group."""
        with self._lock:
            known = self._memory.known.get(rollout_id)
            if known is None or known.facts.row.is_unfinished:
                raise ConfigError(f"episode {rollout_id!r} does not exist yet")
            return self.group_lines(known.facts.group_id, rollout_id)

    def _index_credit(self) -> Mapping[str, LineRange]:
        """Index `credit.jsonl` by episode. The file is written and read as a whole."""
        is_from = _file_state(self.path / CREDIT_FILE)
        if is_from is None:  # treat a damaged file as missing
            return {}
        if is_from != self._credit[0]:
            self._credit = is_from, index_credit(self.path)
        return self._credit[1]

    def read_lines(self) -> bool:
        # Read scores first, so that lines of episodes that already have a score are read only once.
        memory = self._memory
        scores, episodes, labels = memory.scores.news(), memory.episodes.news(), memory.label_lines.news()
        if scores.is_new_file or episodes.is_new_file or labels.is_new_file:
            self._forget()
            return False
        for place, record in scores.lines:
            name, attempt = record["rollout_id"], get_attempt(record)
            memory.scores_of[name, attempt] = score_facts(record, place)
            memory.spent.add_score(record)
            scored = memory.known.get(name)
            if scored is not None and scored.facts.row.attempt == attempt:
                file, place_of_episode = self.path / EPISODES_FILE, scored.facts.place
                line = line_record(file, 0, _read(file, place_of_episode))
                scored.facts = self._facts_of(line, place_of_episode)
                self._note(name, scored)
        for place, record in episodes.lines:
            facts = self._facts_of(record, place)
            row, known = facts.row, memory.known.get(facts.row.rollout_id)
            memory.earlier += known is not None
            memory.spent.add_attempt(row)
            if known is None:
                memory.groups[facts.group_id].append(row.rollout_id)
                memory.rows[row.sample_id, row.policy].append(row.rollout_id)
            if known is None or row.attempt >= known.facts.row.attempt:
                memory.known[row.rollout_id] = _Known(facts)
                self._note(row.rollout_id, memory.known[row.rollout_id])
        for _, record in labels.lines:
            add_label(memory.labels, record)
            if (labeled := memory.known.get(record["rollout_id"])) is not None:
                self._note(record["rollout_id"], labeled)
        self._read_curves()
        return scores.is_all and episodes.is_all and labels.is_all

    def _forget(self) -> None:
        self._memory, self._credit = _ReadLines(self.path), (None, {})
        self._search = EpisodeSearch(self.path)
        self.change += 1

    def _read_header(self) -> None:
        with wrap_os_errors("read", self.path / RUN_FILE):
            facts = (self.path / RUN_FILE).stat()
        is_from = (facts.st_ino, facts.st_mtime_ns)
        if is_from == self._header_is_from:
            return
        self.header = RunHeader.read(self.path)
        if self.header.training is not None:
            raise ConfigError(f"{self.path} is a training run, which has no episodes.jsonl")
        self._header_is_from = is_from
        self.change += 1

    def _read_curves(self) -> None:
        is_from = _file_state(self.path / COUNTERFACTUALS_FILE)
        if is_from != self._curves_are_from:
            before, self.curves, self._curves_are_from = self.curves, read_curves(self.path), is_from
            self.change += 1
            for name in {*before.curves, *self.curves.curves} & self._memory.known.keys():
                self._note(name, self._memory.known[name])

    def _facts_of(self, record: Mapping[str, Any], place: LineRange | None) -> EpisodeOutline:
        score = self._memory.scores_of.get((record["rollout_id"], get_attempt(record)))
        return episode_outline(record, self.header, score, place)

    def _note(self, rollout_id: str, known: _Known) -> None:
        self.change += 1
        known.change = self.change
        self._memory.by_change.pop(rollout_id, None)
        self._memory.by_change[rollout_id] = None


def _read(path: Path, place: LineRange | None) -> bytes:
    """Return the bytes of a line range, or b"" if it is `None`."""
    if place is None:
        return b""
    with wrap_os_errors("read", path), path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


# All runs in a directory

_END = 1 << 18


def last_held_out(run: Path) -> float | None:
    """Return the last held-out score of a training run, or None if the end of its metrics contains no such score."""
    path = run / METRICS_FILE
    if not path.exists():
        return None
    with wrap_os_errors("read", path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        data = file.read()
    for line in reversed(data[: data.rfind(b"\n") + 1].split(b"\n")):
        with contextlib.suppress(ValueError):  # a partial first line, or a damaged line
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(score := record.get(HELD_OUT_SCORE), int | float):
                return float(score)
    return None


_FILES = (RUN_FILE, SUMMARY_FILE, EPISODES_FILE, SCORES_FILE, METRICS_FILE)
_FOLDERS = (KEPT_EPISODES,)
"""A value that identifies the state of a page's files."""
_NOTE_LENGTH = 300
_SHARE_OF_TIME = 0.05
Signature = tuple[FileState, ...]


class RunRow(NamedTuple):
    """A row in the table of runs: one policy of a run."""

    run: str
    task: str
    policy: str = ""  # for training runs: the progress
    status: str = "unreadable"  # "killed" if no process has the run open, "unreadable" if a file is damaged
    episodes: int | None = None
    total: int | None = None  # the expected number of episodes of all policies
    mean: float | None = None  # for training runs: the last held-out score
    low: float | None = None  # the lower bound of the 95% interval
    high: float | None = None
    cost: float | None = None
    began: str = ""  # in UTC, to the second
    note: str = ""


@dataclass(slots=True)
class _Entry:
    """A run in the directory, and the signature of its files at the time they were read."""

    signature: Signature = ()
    rows: Sequence[RunRow] = ()
    is_open: bool = False
    watch: WatchedRun | None = None
    counted: tuple[int, RunRow] | None = None
    due_s: float = 0.0
    change: int = 0


class RunCatalog:
    """The runs of a directory. It may be used from any thread; `held` makes multiple reads consistent."""

    def __init__(self, folder: Path, only: str | None = None) -> None:
        self._folder = folder
        self._only = only
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self.change = 0
        """The number of the last change to a row."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Prevent other threads from polling, so that rows, names and `change` stay consistent."""
        with self._lock:
            yield

    @property
    def rows(self) -> list[RunRow]:
        """Return the rows as of the last poll; the newest run comes first."""
        with self._lock:
            rows = [row for entry in self._entries.values() for row in entry.rows]
        return sorted(rows, key=lambda row: (row.began, row.run), reverse=True)

    @property
    def title(self) -> str:
        """The displayed name of the directory."""
        return escape_text(self._only or self._folder.resolve().name, NAME_LENGTH)

    @property
    def names(self) -> list[str]:
        """Return the displayed names of the runs."""
        with self._lock:
            return [escape_text(name, NAME_LENGTH) for name in self._entries]

    def changed_since(self, change: int) -> list[RunRow]:
        """Return the rows of runs that changed after the change with this number."""
        with self._lock:
            return [row for entry in self._entries.values() if entry.change > change for row in entry.rows]

    def run_path(self, name: str) -> Path | None:
        """Return the directory of a run, or None if it is unknown.

        Names and links that refer to a path outside the directory are rejected.
        """
        if self._only not in (None, name) or name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
            return None
        path, root = self._folder / name, self._folder.resolve()
        parts = [path, *(path / file for file in (*_FILES, CREDIT_FILE, COUNTERFACTUALS_FILE, LABELS_FILE, *_FOLDERS))]
        for folder in _FOLDERS:
            with contextlib.suppress(OSError), os.scandir(path / folder) as entries:
                parts += [Path(entry.path) for entry in entries if entry.is_symlink()]
        # Circular links cannot be resolved.
        is_inside = all(root in Path(os.path.realpath(part)).parents for part in parts)
        return path if is_inside and (path / RUN_FILE).is_file() else None

    def poll(self) -> None:
        """Read the changes in the directory since the last poll. The amount read for each run is bounded."""
        with self._lock:
            names = [self._only] if self._only is not None else []
            if self._only is None:
                with contextlib.suppress(OSError), os.scandir(self._folder) as entries:  # a removed directory is empty
                    names = sorted(entry.name for entry in entries if Path(entry.path).is_dir())
            for name in self._entries.keys() - set(names):
                self._forget(name)
            for name in names:
                self._look_at(name)

    def _look_at(self, name: str) -> None:
        path, entry = self._folder / name, self._entries.get(name)
        signature = _signature(path)
        if entry is None or signature != entry.signature:
            if self.run_path(name) is None:
                self._forget(name)
                return
            entry = self._entries.setdefault(name, _Entry())
            entry.is_open = is_open_elsewhere(path)
        # Testing the lock of a run takes the lock briefly, so test only after a change.
        elif entry.is_open and not is_open_elsewhere(path):
            entry.is_open = False
        elif entry.watch is None:
            return
        entry.signature = signature
        try:
            with boundary(StoreError, f"{path.name} cannot be read"):
                rows = self._rows_of(path, entry)
        except (StoreError, ConfigError) as error:
            entry.watch = None
            begun = entry.rows[0] if entry.rows else RunRow(run=path.name, task="?")
            note = escape_text(str(error), _NOTE_LENGTH)
            rows = [RunRow(run=path.name, task=begun.task, began=begun.began, note=note)]
        if rows is not None and list(rows) != list(entry.rows):
            self.change += 1
            entry.rows, entry.change = rows, self.change

    def _forget(self, name: str) -> None:
        if self._entries.pop(name, None) is not None:
            self.change += 1

    def _rows_of(self, path: Path, entry: _Entry) -> Sequence[RunRow] | None:
        """Return the rows of a run, or None if they are to be computed later."""
        header = RunHeader.read(path)
        known = RunRow(
            run=path.name,
            task=escape_text(header.task_name, NAME_LENGTH),
            status=header.status_now(entry.is_open),
            total=header.total,
            began=f"{header.timing.started_at.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}",
        )
        if header.training is not None:
            done = header.training.get("updates")
            updates = f", {done:,} updates" if isinstance(done, int) else ""
            return [known._replace(policy=f"in training{updates}", total=None, mean=last_held_out(path))]
        if known.status not in ("running", "killed") and (path / SUMMARY_FILE).is_file():
            entry.watch = None
            with boundary(StoreError, f"{path / SUMMARY_FILE} is damaged"):
                return _with_figures(known, summary_from_json(read_json(path / SUMMARY_FILE)))
        return self._counted(path, entry, known)

    def _counted(self, path: Path, entry: _Entry, known: RunRow) -> Sequence[RunRow] | None:
        """Compute figures from the data in memory. For each run, this takes up at most 5% of the time."""
        watch = entry.watch = entry.watch or WatchedRun(path)
        is_all = watch.poll()
        began_s, state = time.monotonic(), (watch.change, known)
        is_over = is_all and known.status != "running"
        if state == entry.counted or (began_s < entry.due_s and not is_over):
            return None
        facts = watch.facts()
        rows = _with_figures(known, summarize((one.row for one in facts.episodes), facts.pass_threshold))
        ended_s = time.monotonic()
        entry.counted, entry.due_s = state, ended_s + (ended_s - began_s) / _SHARE_OF_TIME
        if is_over:
            entry.watch = None
        return rows


def _signature(path: Path) -> Signature:
    """Return a value that changes when one of the files changes."""
    return tuple(_file_state(path / name) for name in _FILES)


def _file_state(path: Path) -> FileState:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _with_figures(known: RunRow, summaries: Sequence[PolicySummary]) -> list[RunRow]:
    done, total = sum(summary.episodes for summary in summaries), known.total or 0
    known = known._replace(note=f"{done:,} of {total:,} episodes" if done < total else "")
    return [
        known._replace(
            policy=escape_text(summary.policy, NAME_LENGTH),
            episodes=summary.episodes,
            mean=summary.score.mean if summary.score else None,
            low=summary.score.low if summary.score else None,
            high=summary.score.high if summary.score else None,
            cost=summary.total_cost,
        )
        for summary in summaries
    ] or [known]
