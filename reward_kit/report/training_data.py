"""The data of a training run's page: the course of each figure of `metrics.jsonl`, and the episodes that were kept."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reward_kit.display_text import shown
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError, StoreError
from reward_kit.report.episode_chunks import ChunkData, GroupPart, LineFitter, StoredLines, group_text
from reward_kit.report.rendering import NAME_LENGTH, number
from reward_kit.report.run_data import EpisodeOutline, episode_outline
from reward_kit.runs.files import HELD_OUT_SCORE, METRICS, TRAINING, kept_files, read_json, told_of
from reward_kit.runs.run_folder import RunHeader, line_record

# Figures


TRAINED = "score/mean"
ALARM = "learner/alarm/"
_DONE = "reward_agent/done"  # counts since its process began
_LARGEST = 1e100  # no scale is wide enough for more


class Series(NamedTuple):
    """The course of one figure.

    Attributes:
        updates_N: after which updates it was measured, ascending.
        values_N: what was measured; NaN where it was not finite.
    """

    updates_N: NDArray[np.int64]
    values_N: NDArray[np.float64]

    @property
    def finite(self) -> Series:
        """Without what was not."""
        is_finite = np.isfinite(self.values_N)
        return Series(self.updates_N[is_finite], self.values_N[is_finite])

    def at(self, update: int) -> float | None:
        """The value measured after an update; None if absent."""
        place = int(np.searchsorted(self.updates_N, update))
        is_there = place < len(self.updates_N) and int(self.updates_N[place]) == update
        return float(self.values_N[place]) if is_there and math.isfinite(self.values_N[place]) else None


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """A training run as far as its files tell.

    Attributes:
        training: the section of the header.
        series: each figure by its name.
        resumed_at: the first update of each process that went on.
        updates: how many are done.
        last_at: when the last line was written, in UTC; None without one.
        stopped: why it ended before its last update; None if it did not, or if that is unknown yet.
    """

    path: Path
    header: RunHeader
    training: Mapping[str, Any]
    series: Mapping[str, Series]
    resumed_at: Sequence[int]
    updates: int
    last_at: datetime.datetime | None
    stopped: str | None

    @property
    def config(self) -> Mapping[str, Any]:
        """The train file as it counts."""
        config = self.training.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def metric(self) -> str:
        """The figure by which the best checkpoint is chosen."""
        checkpoints = self.config.get("checkpoints")
        asked = checkpoints.get("best_by") if isinstance(checkpoints, Mapping) else None
        if isinstance(asked, str) and asked:
            return asked
        return HELD_OUT_SCORE if HELD_OUT_SCORE in self.series else TRAINED

    @property
    def best(self) -> tuple[int, float] | None:
        """After which update it was best, and how good; of equals the first that training made."""
        if self.metric not in self.series or not len((found := self.series[self.metric].finite).values_N):
            return None
        highest = np.flatnonzero(found.values_N == found.values_N.max())
        place = highest[0] if found.updates_N[highest[0]] or len(highest) == 1 else highest[1]
        return int(found.updates_N[place]), float(found.values_N[place])

    def last(self, name: str) -> float | None:
        """The latest value of a figure."""
        if name not in self.series:
            return None
        found = self.series[name].finite.values_N
        return float(found[-1]) if len(found) else None


def read_training(run: Path) -> TrainingFacts:
    """The training run in a folder, of which a process may still be writing the last line.

    Raises:
        ConfigError: it is no training run.
        StoreError: a file of it is damaged; the message names it.
    """
    header = RunHeader.read(run)
    if (training := header.training) is None:
        raise ConfigError(f"{run} is no run of `reward-kit train`")
    lines = _Lines()
    if (run / METRICS).exists():
        with told_of("read", run / METRICS), (run / METRICS).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise StoreError(f"{run / METRICS}:{number}: not JSON: {error}") from None
                if not isinstance(record, dict) or not isinstance(record.get("update"), int):
                    why = "a line is an object with an update, a whole number; edited by hand?"
                    raise StoreError(f"{run / METRICS}:{number}: {why}")
                lines.take(record)
    summary = read_json(run / "summary.json") if (run / "summary.json").is_file() else {}
    return TrainingFacts(
        path=run,
        header=header,
        training=training,
        series=lines.series(),
        resumed_at=lines.resumed_at,
        updates=lines.last_update,
        last_at=lines.last_at,
        stopped=str(told) if (told := summary.get("stopped")) is not None else None,
    )


@dataclass(slots=True)
class _Lines:
    """The figures of the lines read so far."""

    resumed_at: list[int] = field(default_factory=list)
    last_update: int = 0
    last_at: datetime.datetime | None = None
    _updates: dict[str, array[int]] = field(default_factory=dict)
    _values: dict[str, array[float]] = field(default_factory=dict)
    _done: float = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """One line."""
        update, done = record["update"], record.get(_DONE)
        if isinstance(done, int | float):
            if done < self._done:  # a new process counts from nothing again
                self.resumed_at.append(update)
            self._done = done
        self.last_update = update
        with contextlib.suppress(TypeError, ValueError):
            self.last_at = datetime.datetime.fromisoformat(record.get("at") or "")
        for name, value in record.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                continue
            if name not in self._values:
                self._updates[name], self._values[name] = array("q"), array("d")
            if name != "update":
                self._updates[name].append(update)
                self._values[name].append(math.nan if value is None or abs(value) >= _LARGEST else float(value))

    def series(self) -> dict[str, Series]:
        """Each figure that was measured."""
        return {
            name: Series(np.array(self._updates[name], np.int64), np.array(values, np.float64))
            for name, values in self._values.items()
            if len(values)
        }


# Curves of few points

MOST_POINTS = 320
STRETCHES = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of a series that are drawn.

    Attributes:
        updates_M: after which updates; of a stretch its last one.
        values_M: what was measured, of a stretch the mean; NaN parts the line.
        low_M, high_M: of each stretch the extremes; None where every point of the series is there.
    """

    updates_M: NDArray[np.int64]
    values_M: NDArray[np.float64]
    low_M: NDArray[np.float64] | None = None
    high_M: NDArray[np.float64] | None = None

    @property
    def all_values(self) -> NDArray[np.float64]:
        """Every finite value that is drawn, the extremes among them."""
        parts = [part for part in (self.values_M, self.low_M, self.high_M) if part is not None]
        values = np.concatenate(parts)
        return values[np.isfinite(values)]


def curve_of(series: Series, most: int = MOST_POINTS) -> Curve:
    """The series itself, or where it is long, equal stretches of it, so that no peak is lost.

    Args:
        series: N points.
        most: a series of more is parted into stretches.
    """
    count = len(series.values_N)
    if count <= most:
        return Curve(series.updates_N, series.values_N)
    rows: list[tuple[int, float, float, float]] = []
    for stretch in np.array_split(np.arange(count), STRETCHES):
        last, values = int(series.updates_N[stretch[-1]]), series.values_N[stretch]
        finite = values[np.isfinite(values)]
        if len(finite):
            rows.append((last, float(finite.mean()), float(finite.min()), float(finite.max())))
        if len(finite) < len(values):
            rows.append((last, math.nan, math.nan, math.nan))
    updates, means, low, high = (np.array(column) for column in zip(*rows, strict=True))
    return Curve(updates.astype(np.int64), means, low, high)


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """The series with about `most` of its points, evenly chosen, the first and the last among them."""
    count = len(series.values_N)
    if count <= most:
        return series
    places = np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
    return Series(series.updates_N[places], series.values_N[places])


# Episodes along the way

_MOST_UPDATES, _MOST_EPISODES, _MOST_MESSAGES = 8, 2, 24
_TEXT = 700


class ShownMessage(NamedTuple):
    """One message, in words that are harmless."""

    role: str
    text: str


class KeptEpisode(NamedTuple):
    """One episode: its name, how it ended, what its environment gave, and what was said."""

    rollout_id: str
    facts: str
    messages: Sequence[ShownMessage]


class ShownUpdate(NamedTuple):
    """The episodes of one update: how many there are, and a few of them."""

    update: int
    total: int
    episodes: Sequence[KeptEpisode]


def kept_updates(run: Path) -> list[ShownUpdate]:
    """Some of the updates whose episodes were kept, the first and the last among them.

    Args:
        run: the folder of a training run.

    Raises:
        StoreError: a file of them is damaged.
    """
    files, found = list(kept_files(run).items()), []
    chosen = {round(index * (len(files) - 1) / (_MOST_UPDATES - 1)) for index in range(_MOST_UPDATES)} if files else ()
    for index in sorted(chosen):
        (update, file), total, episodes = files[index], 0, list[KeptEpisode]()
        for record in kept_records(file):
            total += 1
            if len(episodes) < _MOST_EPISODES:
                episodes.append(_episode(record, file))
        found.append(ShownUpdate(update, total, episodes))
    return found


def kept_records(file: Path) -> Iterator[dict[str, Any]]:
    """The episodes that a training run kept of one update.

    Raises:
        StoreError: a line is none; the message says where.
    """
    with told_of("read", file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            yield line_record(file, number, line, _has_messages)


def _has_messages(record: Mapping[str, Any]) -> None:
    if not isinstance(record.get("messages"), list):
        raise StoreError("a line is an episode, an object with messages; edited by hand?")


def _episode(record: Mapping[str, Any], file: Path) -> KeptEpisode:
    messages = record["messages"]
    # Where it is long, the beginning says what was asked, and the end how it came out.
    half = _MOST_MESSAGES // 2
    said = [_said(message) for message in messages]
    if (cut := len(messages) - 2 * half) > 0:
        said[half:-half] = [ShownMessage("…", f"{cut:,} messages are left out")]
    steps, reason = record.get("num_steps"), shown(record.get("stop_reason") or "", NAME_LENGTH)
    facts = [f"{steps} steps", reason] if isinstance(steps, int) else [reason]
    gave = record.get("environment_return")
    facts += [f"return {number(gave)}"] if isinstance(gave, int | float) else []
    return KeptEpisode(shown(record.get("rollout_id") or file.stem, NAME_LENGTH), ", ".join(facts), said)


def _said(message: Mapping[str, Any]) -> ShownMessage:
    """A message, with its calls as they were written."""
    content = from_json_value(message.get("content"))
    text = content if isinstance(content, str) else "" if content is None else json.dumps(message["content"])
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    parts = [text, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]
    return ShownMessage(shown(message.get("role") or "", NAME_LENGTH), shown("\n".join(filter(None, parts)), _TEXT))


# Groups of the latest kept update

_MOST_BYTES = 1_500_000
_CREDIT = ("estimator", "step_rewards", "gamma", "omega", "combination", "step_weight", "default_step_reward")


class _Kept(NamedTuple):
    """One episode: its lines as a run would have stored them, and its facts."""

    lines: StoredLines
    facts: EpisodeOutline
    score: float | None


class KeptGroups(NamedTuple):
    """The groups that a page shows.

    Attributes:
        update: whose episodes they are.
        data: for the page's script.
        groups: by id the names of its episodes, those first in which scores differ.
        left_out: groups that the page has no room for.
    """

    update: int
    data: ChunkData
    groups: Mapping[str, Sequence[str]]
    left_out: int


def kept_groups(run: Path, header: RunHeader) -> KeptGroups | None:
    """The groups of the latest kept update, as many as fit a page; None where nothing was kept of them.

    Args:
        run: the folder of a training run.
        header: its `run.json`.

    Raises:
        StoreError: the file of the update is damaged.
    """
    files = kept_files(run)
    if not files:
        return None
    latest = max(files)
    groups: dict[str, list[_Kept]] = defaultdict(list)
    for record in kept_records(files[latest]):
        if TRAINING in record:  # an earlier release kept the episode alone
            kept = _kept(record, header)
            groups[kept.facts.group_id].append(kept)
    if not groups:
        return None
    ordered = [sorted(one, key=lambda kept: kept.facts.rollout_index) for one in groups.values()]
    ordered.sort(key=_spread, reverse=True)
    fitter, parts, texts, size = LineFitter(header), list[GroupPart](), list[str](), 0
    for group in ordered:
        text = group_text([kept.lines for kept in group], fitter).decode("ascii")
        if parts and size + len(text) > _MOST_BYTES:
            break
        facts = [kept.facts for kept in group]
        parts.append(GroupPart(facts[0].group_id, len(facts), 0, facts))
        texts.append(text)
        size += len(text)
    told = ((header.training or {}).get("config") or {}).get("credit") or {}
    credit = {key: told[key] for key in _CREDIT if key in told} if isinstance(told, Mapping) else {"estimator": told}
    data = ChunkData("inline", credit, chunks=[[part] for part in parts], texts=texts)
    names = {part.group_id: [facts.row.rollout_id for facts in part.episodes] for part in parts}
    return KeptGroups(latest, data, names, len(ordered) - len(parts))


def _kept(record: dict[str, Any], header: RunHeader) -> _Kept:
    made = record.get(TRAINING)
    made = dict(made) if isinstance(made, Mapping) else {}
    credit, score = made.pop("credit", None) or [], made.pop("score", None)
    told = _line({"rollout_id": record["rollout_id"], "attempt": record.get("attempt"), "score": score})
    lines = StoredLines(_line({**record, TRAINING: made}), told, b"".join(map(_line, credit)))
    return _Kept(lines, episode_outline(record, header, None), score)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _spread(group: Sequence[_Kept]) -> float:
    scores = [kept.score for kept in group if kept.score is not None]
    return max(scores) - min(scores) if scores else 0.0
