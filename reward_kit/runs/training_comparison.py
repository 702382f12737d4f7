"""Comparison of training runs by their last held-out evaluation, of which only the mean and its error are stored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_kit.display_text import escape_text
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.runs.display import FigureTable, difference_text, figure
from reward_kit.runs.files import HELD_OUT_SCORE, METRICS_FILE, wrap_os_errors
from reward_kit.runs.inputs import TASK_FILE
from reward_kit.runs.run_folder import RunHeader
from reward_kit.runs.statistics import Interval

_Z = 1.96  # the half-width of a 95% normal interval in standard errors
_EVALUATION = "evaluation's "
_TASK_FILE = f"{_EVALUATION}{TASK_FILE}"
_ERROR, _COUNT, _UNSCORED = "held_out/standard_error", "held_out/count", "held_out/unscored"
_STEPS = "progress/env_steps"
_SHOWN = ("update", HELD_OUT_SCORE, _ERROR, _COUNT, _UNSCORED, _STEPS)
_NAME_LENGTH = 60
ONE_RUN_NOTE = (
    "one run per setting does not show the results of other seeds, which may differ more than these; "
    "`reward-kit sweep` compares settings over several seeds"
)


@dataclass(frozen=True, slots=True)
class TrainingSide:
    """A training run and the figures of its last held-out evaluation.

    Attributes:
        label: the unique name of the run in tables.
        header: the content of the run's `run.json`.
        evaluation: the `evaluation` section of the train file.
        figures: the line of `metrics.jsonl` with the last evaluation.
    """

    label: str
    header: RunHeader
    evaluation: Mapping[str, Any]
    figures: Mapping[str, float]

    @property
    def standard_error(self) -> float | None:
        """The standard error of the score over the held-out samples."""
        return self.figures.get(_ERROR)

    @property
    def samples(self) -> dict[str, Any]:
        """The inputs that determine the held-out samples and their scores, keyed by name."""
        keys = ("hold_out", "limit")
        chosen = {f"evaluation.{key}": self.evaluation.get(key) for key in keys}
        chosen |= {"seed": self.header.seed} if self.evaluation.get("hold_out") is not None else {}
        digests = {name: one for name, one in self.header.digests.items() if name.startswith(_EVALUATION)}
        digests.pop(_TASK_FILE, None)  # a comment changes it too, so a difference is only noted
        return digests | chosen


def are_training_runs(runs: Sequence[Path]) -> bool:
    """Return True if there are runs, and all of them are training runs."""
    return bool(runs) and all(RunHeader.read_folder(run).training is not None for run in runs)


def read_training_sides(runs: Sequence[Path]) -> list[TrainingSide]:
    """Read training runs; the baseline comes first.

    Raises:
        ConfigError: If a run has no held-out evaluation, or the held-out samples or their reward differ.
    """
    if len(runs) < 2 or len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("pass two different training runs")
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run) for run in runs]
    sides = [_side(run, label) for run, label in zip(runs, labels, strict=True)]
    base = sides[0]
    for side in sides[1:]:
        keys = base.samples.keys() | side.samples.keys()
        if differing := sorted(key for key in keys if base.samples.get(key) != side.samples.get(key)):
            raise ConfigError(
                f"{side.label} and {base.label} have different held-out samples or rewards ({', '.join(differing)}); "
                "run both models with `reward-kit run` on the same task, and compare those runs"
            )
    return sides


def _side(run: Path, label: str) -> TrainingSide:
    header = RunHeader.read(run)
    config = header.require_training(run).config
    found: dict[str, float] = {}
    if (run / METRICS_FILE).is_file():
        with wrap_os_errors("read", run / METRICS_FILE), boundary(StoreError, f"{run / METRICS_FILE} cannot be read"):
            records = map(json.loads, (run / METRICS_FILE).read_text(encoding="utf-8").split("\n")[:-1])
            evaluations = [record for record in records if record.get(HELD_OUT_SCORE) is not None]
            last = evaluations[-1] if evaluations else {}
            found = {name: float(last[name]) for name in _SHOWN if last.get(name) is not None}
    if not found:
        raise ConfigError(f"{run} has no held-out evaluation to compare; add an evaluation section to its train file")
    return TrainingSide(label, header, config.get("evaluation") or {}, found)


def training_difference(base: TrainingSide, side: TrainingSide) -> Interval:
    """Return the difference of two scores and its 95% interval, as if the samples were independent."""
    mean = side.figures[HELD_OUT_SCORE] - base.figures[HELD_OUT_SCORE]
    if side.standard_error is None or base.standard_error is None:
        return Interval(mean, None, None, None, 0, 0)
    error = math.hypot(side.standard_error, base.standard_error)
    return Interval(mean, mean - _Z * error, mean + _Z * error, error, 0, 0)


def training_lines(sides: Sequence[TrainingSide]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table. Each row consists of a name and a cell for each run."""

    def count(name: str) -> list[str]:
        values = [side.figures.get(name) for side in sides]
        return ["–" if value is None else f"{value:,.0f}" for value in values]

    errors = [side.standard_error for side in sides]
    return [
        ("held-out score", [figure(side.figures[HELD_OUT_SCORE]) for side in sides]),
        ("standard error", ["–" if error is None else figure(error) for error in errors]),
        ("difference", ["", *(difference_text(training_difference(sides[0], side)) for side in sides[1:])]),
        ("held-out episodes", count(_COUNT)),
        ("after update", count("update")),
        ("environment steps", count(_STEPS)),
    ]


def training_table(sides: Sequence[TrainingSide], *, plain: bool = False) -> FigureTable:
    """Return the table; `plain` omits lines and colors."""
    base, *others = (escape_text(side.label, _NAME_LENGTH) for side in sides)
    return FigureTable([f"{base}\n(baseline)", *others], training_lines(sides), is_plain=plain)


def training_notes(sides: Sequence[TrainingSide]) -> Iterator[str]:
    """Yield notes about the limitations of the figures."""
    yield (
        "training runs store no scores per sample, so the samples cannot be paired; the interval treats the two scores "
        "as independent"
    )
    yield ONE_RUN_NOTE
    for side in sides[1:]:
        if side.header.digests.get(_TASK_FILE) != sides[0].header.digests.get(_TASK_FILE):
            yield escape_text(f"{side.label}: the task file of the evaluation differs from the baseline's", 300)
        for key in ("temperature", "rollouts"):
            before, now = (one.evaluation.get(key) for one in (sides[0], side))
            if before != now:
                yield escape_text(f"{side.label}: evaluation.{key} is {now}, but {before} in the baseline", 300)
    for side in sides:
        if unscored := side.figures.get(_UNSCORED):
            yield f"{escape_text(side.label, _NAME_LENGTH)}: {unscored:,.0f} held-out episodes are unscored"


def training_json(sides: Sequence[TrainingSide]) -> dict[str, Any]:
    """Return the comparison as JSON."""
    intervals = [training_difference(sides[0], side) for side in sides[1:]]
    return {
        "runs": [
            {
                "run": side.label,
                "update": int(side.figures["update"]),
                "score": side.figures[HELD_OUT_SCORE],
                "standard_error": side.standard_error,
            }
            for side in sides
        ],
        "differences": [
            {"run": side.label, "mean": one.mean, "low": one.low, "high": one.high}
            for side, one in zip(sides[1:], intervals, strict=True)
        ],
        "notes": [*training_notes(sides)],
    }
