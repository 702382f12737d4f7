"""The data for a training run's page: the series in `metrics.jsonl`, and the logged episodes."""

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

from reward_kit.credit.state_hashes import describe_state_hash
from reward_kit.display_text import escape_text
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError, StoreError
from reward_kit.report.episode_chunks import ChunkData, GroupPart, LineFitter, StoredLines, group_text
from reward_kit.report.rendering import NAME_LENGTH, number
from reward_kit.report.run_data import EpisodeOutline, episode_outline
from reward_kit.runs.files import (
    HELD_OUT_SCORE,
    METRICS_FILE,
    SUMMARY_FILE,
    TRAINING,
    episodes_files,
    read_json,
    wrap_os_errors,
)
from reward_kit.runs.run_folder import RunHeader, line_record

# Figures


TRAINED = "score/mean"
ALARM = "learner/alarm/"
_DONE = "reward_agent/done"  # counted from the start of its process
_LARGEST = 1e100  # the largest value that axes can show


class Series(NamedTuple):
    """The values of one figure."""

    updates_N: NDArray[np.int64]  # in ascending order
    values_N: NDArray[np.float64]  # NaN if not finite

    @property
    def finite(self) -> Series:
        """The series without its non-finite values."""
        is_finite = np.isfinite(self.values_N)
        return Series(self.updates_N[is_finite], self.values_N[is_finite])

    def at(self, update: int) -> float | None:
        """Return the value after an update, or None."""
        place = int(np.searchsorted(self.updates_N, update))
        is_there = place < len(self.updates_N) and int(self.updates_N[place]) == update
        return float(self.values_N[place]) if is_there and math.isfinite(self.values_N[place]) else None


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The data that a page shows about a training run."""

    path: Path
    header: RunHeader
    training: Mapping[str, Any]
    series: Mapping[str, Series]
    resumed_at: Sequence[int]  # the first update after each resume
    updates: int  # the number of updates finished so far
    last_at: datetime.datetime | None  # the time of the last line, in UTC
    stopped: str | None  # the reason why the run ended before its last update

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of the train file, including overrides and defaults."""
        config = self.training.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def metric(self) -> str:
        """The metric that selects the best checkpoint."""
        checkpoints = self.config.get("checkpoints")
        asked = checkpoints.get("best_by") if isinstance(checkpoints, Mapping) else None
        if isinstance(asked, str) and asked:
            return asked
        return HELD_OUT_SCORE if HELD_OUT_SCORE in self.series else TRAINED

    @property
    def best(self) -> tuple[int, float] | None:
        """Return the best update and its value; if there is a tie, return the first such update."""
        if self.metric not in self.series or not len((series := self.series[self.metric].finite).values_N):
            return None
        highest = np.flatnonzero(series.values_N == series.values_N.max())
        at = highest[0] if series.updates_N[highest[0]] or len(highest) == 1 else highest[1]
        return int(series.updates_N[at]), float(series.values_N[at])

    def last(self, name: str) -> float | None:
        """Return the latest value of a figure."""
        if name not in self.series:
            return None
        values = self.series[name].finite.values_N
        return float(values[-1]) if len(values) else None


def read_training(run: Path) -> TrainingFacts:
    """Read the training run in a directory, which may still be running."""
    header = RunHeader.read(run)
    if (training := header.training) is None:
        raise ConfigError(f"{run} is not a run of `reward-kit train`")
    resumed_at: list[int] = []
    last_update, last_at, last_done = 0, None, 0.0
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for record in _metrics(run / METRICS_FILE):
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
    summary = read_json(run / SUMMARY_FILE) if (run / SUMMARY_FILE).is_file() else {}
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
    """Yield the complete lines of a `metrics.jsonl`, or nothing if it does not exist."""
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
                why = "expected an object with an integer 'update'; was the file edited by hand?"
                raise StoreError(f"{file}:{number}: {why}")
            yield record


# Downsampled curves

MOST_POINTS = 320
STRETCHES = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """The points to draw for a series. Each point stands for one update or for consecutive updates."""

    updates_M: NDArray[np.int64]  # the last update of each point
    values_M: NDArray[np.float64]  # means; NaN interrupts the line
    low_M: NDArray[np.float64] | None = None  # minima; None if every point is drawn
    high_M: NDArray[np.float64] | None = None  # maxima; None if every point is drawn

    @property
    def all_values(self) -> NDArray[np.float64]:
        """Return all finite values that are drawn, including the extremes."""
        parts = [part for part in (self.values_M, self.low_M, self.high_M) if part is not None]
        values = np.concatenate(parts)
        return values[np.isfinite(values)]


def build_curve(series: Series, most: int = MOST_POINTS) -> Curve:
    """Return the points of a series.

    If the series is long, return the means and extremes over equal numbers of updates.
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
    """Return about `most` evenly chosen points, including the first and last."""
    count = len(series.values_N)
    if count <= most:
        return series
    places = np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
    return Series(series.updates_N[places], series.values_N[places])


# Logged episodes

_MOST_UPDATES, _MOST_EPISODES, _MOST_MESSAGES = 8, 2, 24
_TEXT = 700


class ShownMessage(NamedTuple):
    """A message as text that is safe to display."""

    role: str
    text: str


class KeptEpisode(NamedTuple):
    """A logged episode: its name, stop reason, return and messages."""

    rollout_id: str
    facts: str
    messages: Sequence[ShownMessage]


class ShownUpdate(NamedTuple):
    """The number of episodes of an update, and some of these episodes."""

    update: int
    total: int
    episodes: Sequence[KeptEpisode]


def kept_updates(run: Path) -> list[ShownUpdate]:
    """Return some of the updates that have logged episodes, including the first and the last."""
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
    """Yield the logged episodes of an update."""
    with wrap_os_errors("read", file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            yield line_record(file, number, line, _has_messages)


def _has_messages(record: Mapping[str, Any]) -> None:
    if not isinstance(record.get("messages"), list):
        raise StoreError("expected an episode, which is an object with 'messages'; was the file edited by hand?")


def _episode(record: Mapping[str, Any], file: Path) -> KeptEpisode:
    messages = record["messages"]
    # Keep the beginning (the task) and the end (the outcome) of long episodes.
    half = _MOST_MESSAGES // 2
    shown = [_shown(message) for message in messages]
    if (cut := len(messages) - 2 * half) > 0:
        shown[half:-half] = [ShownMessage("…", f"{cut:,} messages omitted")]
    steps, reason = record.get("num_steps"), escape_text(record.get("stop_reason") or "", NAME_LENGTH)
    facts = [f"{steps} steps", reason] if isinstance(steps, int) else [reason]
    gave = record.get("environment_return")
    facts += [f"return {number(gave)}"] if isinstance(gave, int | float) else []
    return KeptEpisode(escape_text(record.get("rollout_id") or file.stem, NAME_LENGTH), ", ".join(facts), shown)


def _shown(message: Mapping[str, Any]) -> ShownMessage:
    """Return a message and its tool calls as text."""
    content = from_json_value(message.get("content"))
    text = content if isinstance(content, str) else "" if content is None else json.dumps(message["content"])
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    parts = [text, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]
    return ShownMessage(
        escape_text(message.get("role") or "", NAME_LENGTH), escape_text("\n".join(filter(None, parts)), _TEXT)
    )


# Groups of the latest logged update

_MOST_BYTES = 1_500_000
_CREDIT = ("estimator", "step_rewards", "gamma", "omega", "combination", "step_weight", "default_step_reward")


class _Kept(NamedTuple):
    """A logged episode: its lines in the format of a run, and its outline."""

    lines: StoredLines
    facts: EpisodeOutline
    score: float | None


class KeptGroups(NamedTuple):
    """The groups that the page shows."""

    update: int
    data: ChunkData
    groups: Mapping[str, Sequence[str]]  # the rollouts, keyed by group id; groups with different scores come first
    left_out: int  # the number of groups that did not fit


def kept_groups(run: Path, header: RunHeader) -> KeptGroups | None:
    """Return those groups of the latest logged update that fit on a page, or None."""
    files = episodes_files(run)
    if not files:
        return None
    latest = max(files)
    groups: dict[str, list[_Kept]] = defaultdict(list)
    firsts: list[Mapping[str, Any]] = []
    for record in kept_records(files[latest]):
        if TRAINING in record:  # earlier releases logged only the episode, without its scores
            kept = _kept(record, header)
            firsts += record["steps"][:1]
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
    if is_full and "state_hash" in options:
        credit["state_hash"] = describe_state_hash(options["state_hash"], firsts)
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
