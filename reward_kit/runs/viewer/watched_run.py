"""A run in memory, kept up to date while it goes on: every line of its files is read once, however many come.

Of an episode there is kept what the page shows of it, and where its lines are; what it said is read again from there
when somebody opens it. Each change has a number, so that any number of pages can ask for what is new to them.
"""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.episodes.record import attempt_of
from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.runs.files import told_of
from reward_kit.runs.report.chunks import Part, StoredLines, parts_of
from reward_kit.runs.report.reading import EpisodeOutline, RunFacts, episode_outline, lean_score
from reward_kit.runs.results import Place, credit_places
from reward_kit.runs.run_folder import FILE, RunHeader, check_score, line_record
from reward_kit.runs.viewer.tail import Placed, TailReader

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
class _Memory:
    """What was read of one set of files. It is thrown away as a whole when one of them is replaced."""

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
    def of(cls, path: Path) -> _Memory:
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
        self._memory = _Memory.of(path)
        self._credit = CreditPlaces(path)
        self._read_header()

    @property
    def epoch(self) -> str:
        """Another one means that nothing of what was told before holds."""
        return self._memory.epoch

    @property
    def pass_threshold(self) -> float:
        """A score of at least this passes."""
        return RunFacts(self.path, self.header, (), 0, 0).pass_threshold

    @property
    def bytes_read(self) -> int:
        """Of its lines, without those that are read again for somebody who opens an episode."""
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
            latest = sorted(self._memory.known.values(), key=lambda known: _offset(known.facts))
            finished = [known.facts for known in latest if not known.facts.row.is_unfinished]
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
            return self._lines_of(next((part for part in parts if around in _names_of(part)), parts[0]))

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

    def _lines_of(self, part: Part) -> GroupLines:
        credit = self._credit.places()
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
        self._memory, self._credit = _Memory.of(self.path), CreditPlaces(self.path)
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

    def _add_score(self, placed: Placed) -> None:
        name, attempt = placed.record["rollout_id"], attempt_of(placed.record)
        self._memory.scores_of[name, attempt] = lean_score(placed.record, placed.place)
        known = self._memory.known.get(name)
        if known is not None and known.facts.row.attempt == attempt:
            place = known.facts.place
            line = _read(self.path / "episodes.jsonl", place)
            known.facts = self._facts_of(line_record(self.path / "episodes.jsonl", 0, line), place)
            self._note(name, known)

    def _add_episode(self, placed: Placed) -> None:
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


class CreditPlaces:
    """Where each episode's lines of `credit.jsonl` are. The file is written as a whole, and so it is read.

    Args:
        run: the folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._is_from: tuple[int, int, int] | None = None
        self._places: Mapping[str, Place] = {}

    def places(self) -> Mapping[str, Place]:
        """By the name of the episode; none where no credit was assigned.

        Raises:
            StoreError: the file cannot be read, or a line of it is damaged.
        """
        try:
            facts = (self._run / "credit.jsonl").stat()
        except OSError:  # as good as not there
            return {}
        is_from = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if is_from != self._is_from:
            self._places, self._is_from = credit_places(self._run), is_from
        return self._places


def _offset(facts: EpisodeOutline) -> int:
    return facts.place.offset if facts.place is not None else 0


def _names_of(part: Part) -> set[str]:
    return {facts.row.rollout_id for facts in part.episodes}


def _read(path: Path, place: Place | None) -> bytes:
    """What is at a place of a file; nothing at none.

    Raises:
        StoreError: the file cannot be read.
    """
    if place is None:
        return b""
    with told_of("read", path), path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)
