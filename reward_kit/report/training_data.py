"""The data of a training run's page: the series of each figure of `metrics.jsonl`, and the episodes that were kept."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reward_kit.display_text import escape_text
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError, StoreError
from reward_kit.report.episode_chunks import ChunkData, GroupPart, LineFitter, StoredLines, group_text
from reward_kit.report.rendering import NAME_LENGTH, number
from reward_kit.report.run_data import EpisodeOutline, episode_outline
from reward_kit.runs.files import HELD_OUT_SCORE, METRICS, TRAINING, episodes_files, read_json, wrap_os_errors
from reward_kit.runs.run_folder import RunHeader, line_record

# Figures


TRAINED = "score/mean"
ALARM = "learner/alarm/"
_DONE = "reward_agent/done"  # counts since its process began
_LARGEST = 1e100  # no scale is wide enough for more


class Series(NamedTuple):
    """The course of one figure."""

    updates_N: NDArray[np.int64]  # ascending
    values_N: NDArray[np.float64]  # NaN if not finite

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
    """A training run as far as its files tell."""

    path: Path
    header: RunHeader
    training: Mapping[str, Any]
    series: Mapping[str, Series]
    resumed_at: Sequence[int]  # first update after each resume
    updates: int  # done so far
    last_at: datetime.datetime | None  # of the last line, in UTC
    stopped: str | None  # why it ended before its last update

    @property
    def config(self) -> Mapping[str, Any]:
        """Effective train file."""
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
        if self.metric not in self.series or not len((series := self.series[self.metric].finite).values_N):
            return None
        highest = np.flatnonzero(series.values_N == series.values_N.max())
        at = highest[0] if series.updates_N[highest[0]] or len(highest) == 1 else highest[1]
        return int(series.updates_N[at]), float(series.values_N[at])

    def last(self, name: str) -> float | None:
        """The latest value of a figure."""
        if name not in self.series:
            return None
        values = self.series[name].finite.values_N
        return float(values[-1]) if len(values) else None


def read_training(run: Path) -> TrainingFacts:
    """The training run in a folder, of which a process may still be writing the last line."""
    header = RunHeader.read(run)
    if (training := header.training) is None:
        raise ConfigError(f"{run} is not a run of `reward-kit train`")
    resumed_at: list[int] = []
    last_update, last_at, last_done = 0, None, 0.0
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for record in _metrics(run / METRICS):
        last_update, done = record["update"], record.get(_DONE)
        if isinstance(done, int | float):
            if done < last_done:  # a new process counts from 0 again
                resumed_at.append(last_update)
            last_done = done
        with contextlib.suppress(TypeError, ValueError):
            last_at = datetime.datetime.fromisoformat(record.get("at") or "")
        for name, value in record.items():
            if name == "update" or (
                value is not None and (isinstance(value, bool) or not isinstance(value, int | float))
            ):
                continue
            updates, values = columns.setdefault(name, (array("q"), array("d")))
            updates.append(last_update)
            values.append(math.nan if value is None or abs(value) >= _LARGEST else float(value))
    summary = read_json(run / "summary.json") if (run / "summary.json").is_file() else {}
    return TrainingFacts(
        path=run,
        header=header,
        training=training,
        series={
            name: Series(np.array(updates, np.int64), np.array(values, np.float64))
            for name, (updates, values) in columns.items()
        },
        resumed_at=resumed_at,
        updates=last_update,
        last_at=last_at,
        stopped=str(stopped) if (stopped := summary.get("stopped")) is not None else None,
    )


def _metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a `metrics.jsonl`, which may be missing."""
    if not file.exists():
        return
    with wrap_os_errors("read", file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise StoreError(f"{file}:{number}: not JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get("update"), int):
                why = "expected an object with an integer 'update'; was the file edited?"
                raise StoreError(f"{file}:{number}: {why}")
            yield record


# Curves of few points

MOST_POINTS = 320
STRETCHES = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of a series that are drawn."""

    updates_M: NDArray[np.int64]  # of a stretch: its last one
    values_M: NDArray[np.float64]  # of a stretch: the mean; NaN interrupts the line
    low_M: NDArray[np.float64] | None = None  # of a stretch: the least; None if every point is drawn
    high_M: NDArray[np.float64] | None = None  # likewise, the greatest

    @property
    def all_values(self) -> NDArray[np.float64]:
        """Every finite value that is drawn, the extremes among them."""
        parts = [part for part in (self.values_M, self.low_M, self.high_M) if part is not None]
        values = np.concatenate(parts)
        return values[np.isfinite(values)]


def build_curve(series: Series, most: int = MOST_POINTS) -> Curve:
    """The series itself, or where it is long, equal stretches of it, so that no peak is lost."""
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


# Logged episodes

_MOST_UPDATES, _MOST_EPISODES, _MOST_MESSAGES = 8, 2, 24
_TEXT = 700


class ShownMessage(NamedTuple):
    """A message as text that is safe to show."""

    role: str
    text: str


class KeptEpisode(NamedTuple):
    """An episode: its name, end and return, and its messages."""

    rollout_id: str
    facts: str
    messages: Sequence[ShownMessage]


class ShownUpdate(NamedTuple):
    """The episodes of one update: how many there are, and a few of them."""

    update: int
    total: int
    episodes: Sequence[KeptEpisode]


def kept_updates(run: Path) -> list[ShownUpdate]:
    """Some of the updates whose episodes were kept, the first and the last among them."""
    files, found = list(episodes_files(run).items()), []
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
    """The episodes that a training run kept of one update."""
    with wrap_os_errors("read", file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            yield line_record(file, number, line, _has_messages)


def _has_messages(record: Mapping[str, Any]) -> None:
    if not isinstance(record.get("messages"), list):
        raise StoreError("expected an episode, an object with 'messages'; was the file edited?")


def _episode(record: Mapping[str, Any], file: Path) -> KeptEpisode:
    messages = record["messages"]
    # Where it is long, the beginning says what was asked, and the end how it came out.
    half = _MOST_MESSAGES // 2
    said = [_said(message) for message in messages]
    if (cut := len(messages) - 2 * half) > 0:
        said[half:-half] = [ShownMessage("…", f"{cut:,} messages omitted")]
    steps, reason = record.get("num_steps"), escape_text(record.get("stop_reason") or "", NAME_LENGTH)
    facts = [f"{steps} steps", reason] if isinstance(steps, int) else [reason]
    gave = record.get("environment_return")
    facts += [f"return {number(gave)}"] if isinstance(gave, int | float) else []
    return KeptEpisode(escape_text(record.get("rollout_id") or file.stem, NAME_LENGTH), ", ".join(facts), said)


def _said(message: Mapping[str, Any]) -> ShownMessage:
    """A message, with its calls as they were written."""
    content = from_json_value(message.get("content"))
    text = content if isinstance(content, str) else "" if content is None else json.dumps(message["content"])
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    parts = [text, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]
    return ShownMessage(
        escape_text(message.get("role") or "", NAME_LENGTH), escape_text("\n".join(filter(None, parts)), _TEXT)
    )


# Groups of the latest kept update

_MOST_BYTES = 1_500_000
_CREDIT = ("estimator", "step_rewards", "gamma", "omega", "combination", "step_weight", "default_step_reward")


class _Kept(NamedTuple):
    """An episode: its lines as a run would have stored them, and its facts."""

    lines: StoredLines
    facts: EpisodeOutline
    score: float | None


class KeptGroups(NamedTuple):
    """The groups that a page shows."""

    update: int
    data: ChunkData
    groups: Mapping[str, Sequence[str]]  # by id the rollouts of each, first those whose scores differ
    left_out: int  # groups for which the page has no room


def kept_groups(run: Path, header: RunHeader) -> KeptGroups | None:
    """The groups of the latest kept update, as many as fit a page; None if nothing was kept of them."""
    files = episodes_files(run)
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
    ordered.sort(key=_score_range, reverse=True)
    fitter, parts, texts, size = LineFitter(header), list[GroupPart](), list[str](), 0
    for group in ordered:
        text = group_text([kept.lines for kept in group], fitter).decode("ascii")
        if parts and size + len(text) > _MOST_BYTES:
            break
        facts = [kept.facts for kept in group]
        parts.append(GroupPart(facts[0].group_id, len(facts), 0, facts))
        texts.append(text)
        size += len(text)
    options = ((header.training or {}).get("config") or {}).get("credit") or {}
    is_full = isinstance(options, Mapping)
    credit = {key: options[key] for key in _CREDIT if key in options} if is_full else {"estimator": options}
    data = ChunkData("inline", credit, chunks=[[part] for part in parts], texts=texts)
    names = {part.group_id: [facts.row.rollout_id for facts in part.episodes] for part in parts}
    return KeptGroups(latest, data, names, len(ordered) - len(parts))


def _kept(record: dict[str, Any], header: RunHeader) -> _Kept:
    made = record.get(TRAINING)
    made = dict(made) if isinstance(made, Mapping) else {}
    credit, score = made.pop("credit", None) or [], made.pop("score", None)
    scored = _line({"rollout_id": record["rollout_id"], "attempt": record.get("attempt"), "score": score})
    lines = StoredLines(_line({**record, TRAINING: made}), scored, b"".join(map(_line, credit)))
    return _Kept(lines, episode_outline(record, header, None), score)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _score_range(group: Sequence[_Kept]) -> float:
    scores = [kept.score for kept in group if kept.score is not None]
    return max(scores) - min(scores) if scores else 0.0
