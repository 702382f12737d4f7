"""What the page knows of a training run: its header, and the course of each figure of `metrics.jsonl`.

The file is read once, a line after the other; what is kept of a line are its numbers.
"""

from __future__ import annotations

import datetime
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.files import HELD_OUT_SCORE, METRICS, read_json
from reward_kit.runs.run_folder import RunHeader, placed_lines

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
        """What was measured after an update; None where nothing was."""
        place = int(np.searchsorted(self.updates_N, update))
        is_there = place < len(self.updates_N) and int(self.updates_N[place]) == update
        return float(self.values_N[place]) if is_there and math.isfinite(self.values_N[place]) else None


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """A training run as far as its files tell.

    Attributes:
        path: its folder.
        header: its `run.json`.
        training: what that says under `training`.
        series: each figure by its name.
        resumed_at: the first update of each process that went on.
        updates: how many are done.
        last_at: when the last line was written, in UTC; None without one.
        stopped: why it ended before its last update; None where it did not, or nobody knows yet.
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
        """What decides which checkpoint is the best one."""
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


def is_training(run: Path) -> bool:
    """Whether the run in a folder is one of training.

    Raises:
        ConfigError: the folder is not that of a run.
        StoreError: its header is damaged.
    """
    return RunHeader.of_folder(run).training is not None


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
    for number, (_, line) in enumerate(placed_lines(run / METRICS), 1):
        lines.take(_record(line, f"{run / METRICS}:{number}"))
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


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise StoreError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("update"), int):
        raise StoreError(f"{place}: a line is an object with an update, a whole number; edited by hand?")
    return record


@dataclass(slots=True)
class _Lines:
    """What is kept of the lines read so far."""

    resumed_at: list[int] = field(default_factory=list)
    last_update: int = 0
    last_at: datetime.datetime | None = None
    _updates: dict[str, array[int]] = field(default_factory=dict)
    _values: dict[str, array[float]] = field(default_factory=dict)
    _done: float = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """One line."""
        update = record["update"]
        self._note_process(update, record.get(_DONE))
        self.last_update = update
        self.last_at = _time(record.get("at")) or self.last_at
        for name, value in record.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                continue
            if name not in self._values:
                self._updates[name], self._values[name] = array("q"), array("d")
            if name != "update":
                self._updates[name].append(update)
                self._values[name].append(math.nan if value is None or abs(value) >= _LARGEST else float(value))

    def _note_process(self, update: int, done: Any) -> None:
        """A new process counts what its reward agent did from nothing again."""
        if not isinstance(done, int | float):
            return
        if done < self._done:
            self.resumed_at.append(update)
        self._done = done

    def series(self) -> dict[str, Series]:
        """Each figure that was measured."""
        return {
            name: Series(np.array(self._updates[name], np.int64), np.array(values, np.float64))
            for name, values in self._values.items()
            if len(values)
        }


def _time(told: Any) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(told)
    except (TypeError, ValueError):
        return None
