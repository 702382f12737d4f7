"""The runs of a folder as a table: a row for each policy of each run, made again where a file of the run changed.

A run that goes on, or was killed, has no summary that counts, so its figures are made of its lines as they come. What
cannot be read has a row that says why, and hides nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from reward_kit.display_text import shown
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.runs.files import EPISODES, METRICS, read_json
from reward_kit.runs.run_folder import FILE, RunHeader, is_open_elsewhere
from reward_kit.runs.summary import PolicySummary, summarise, summary_from_json
from reward_kit.runs.viewer.training_tail import last_held_out
from reward_kit.runs.viewer.watched_run import WatchedRun

SUMMARY = "summary.json"
_FILES = (FILE, SUMMARY, "episodes.jsonl", "scores.jsonl", METRICS)
_FOLDERS = (EPISODES,)
"""Of files that a page reads."""
_NAME_LENGTH = 120
_NOTE_LENGTH = 300
_SHARE_OF_TIME = 0.05
Signature = tuple[tuple[int, int, int] | None, ...]


class RunRow(NamedTuple):
    """What the table says of one policy of one run.

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


class Catalogue:
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
        return shown(self._only or self._folder.resolve().name, _NAME_LENGTH)

    @property
    def names(self) -> list[str]:
        """The names of the runs, as they are shown."""
        with self._lock:
            return [shown(name, _NAME_LENGTH) for name in self._entries]

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
        # Trying the lock of a run that nobody has open takes it for a moment, so it is done where something changed.
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
        known = _of_header(path, header, is_open=entry.is_open)
        if header.training is not None:
            return [_of_training(path, header, known)]
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
    """Whether a path leads to something in a folder; links that lead in a circle lead nowhere, and open nothing."""
    return root in Path(os.path.realpath(part)).parents


def _links_in(folder: Path) -> list[Path]:
    """The links in a folder, none where there is no such folder."""
    try:
        with os.scandir(folder) as found:
            return [Path(one.path) for one in found if one.is_symlink()]
    except OSError:
        return []


def _signature(path: Path) -> Signature:
    """What changes when one of the files does."""
    found: list[tuple[int, int, int] | None] = []
    for name in _FILES:
        try:
            facts = (path / name).stat()
            found.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _of_header(path: Path, header: RunHeader, *, is_open: bool) -> RunRow:
    """What `run.json` says alone."""
    return RunRow(
        run=path.name,
        task=shown(header.task_name, _NAME_LENGTH),
        status=header.status_now(is_open),
        total=header.total,
        began=f"{header.timing.started_at.astimezone(datetime.UTC):%Y-%m-%d %H:%M}",
    )


def _of_training(path: Path, header: RunHeader, known: RunRow) -> RunRow:
    done = (header.training or {}).get("updates")
    updates = f", {done:,} updates" if isinstance(done, int) else ""
    return known._replace(policy=f"in training{updates}", total=None, mean=last_held_out(path))


def _with_figures(known: RunRow, summaries: Sequence[PolicySummary]) -> list[RunRow]:
    done, total = sum(summary.episodes for summary in summaries), known.total or 0
    known = known._replace(note=f"{done:,} of {total:,} episodes" if done < total else "")
    return [
        known._replace(
            policy=shown(summary.policy, _NAME_LENGTH),
            episodes=summary.episodes,
            mean=summary.score.mean if summary.score else None,
            low=summary.score.low if summary.score else None,
            high=summary.score.high if summary.score else None,
            cost=summary.cost,
        )
        for summary in summaries
    ] or [known]
