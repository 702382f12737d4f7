"""The page of a sweep: its tables, and the learning curves of its arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reward_kit.display_text import escape_text
from reward_kit.report.rendering import NAME_LENGTH, Drawing, render, status_text
from reward_kit.report.training_data import TRAINED, TrainingFacts, read_training
from reward_kit.report.training_page import Axes, Band, Box, area_path, short, whole_ticks, y_ticks
from reward_kit.runs.files import HELD_OUT_SCORE, METRICS_FILE, REPORT_FILE, write_atomically
from reward_kit.runs.run_folder import software_versions

_BOX = Box(54.0, 12.0, 690.0, 250.0, 720.0, 290.0)
_POINTS = 120
_COLORS = 6  # the number of line styles in training.css
_STEPS = "progress/env_steps"
_CURVES = (
    (HELD_OUT_SCORE, "Held-out score in training"),
    (TRAINED, "Score of the training batches"),
)


class SweepTable(NamedTuple):
    """A table of a sweep. The first column contains names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class ArmCurve(NamedTuple):
    """The curves of an arm's seeds at (P,) numbers of environment steps: their mean and extremes."""

    arm: str
    steps_P: np.ndarray
    mean_P: np.ndarray
    low_P: np.ndarray
    high_P: np.ndarray


def write_sweep_page(folder: Path, summary: Mapping[str, Any], tables: Sequence[SweepTable]) -> Path:
    """Write the page of a sweep in its directory, and return the path of the file."""
    runs: dict[str, list[TrainingFacts]] = {}
    rows = []
    for arm, of_arm in summary["arms"].items():
        paths = [folder / f"{arm}-{seed}" for seed in of_arm["runs"]]
        runs[arm] = [read_training(path) for path in paths if (path / METRICS_FILE).is_file()]
        for path, (seed, run) in zip(paths, of_arm["runs"].items(), strict=True):
            link = f"{path.name}/{REPORT_FILE}" if (path / REPORT_FILE).is_file() else ""
            error = escape_text(run.get("error") or "", 300)
            counts = [f"{run[key]:,}" if key in run else "" for key in ("updates", "env_steps")]
            rows.append((path.name, link, seed, *counts, escape_text(run["status"], 20), error))
    curves = [(title, arm_curves(runs, name)) for name, title in _CURVES]
    page = {
        "title": escape_text(summary["name"], NAME_LENGTH),
        "status": status_text(summary["status"]),
        "facts": [f"baseline {summary['baseline']}", f"seeds {', '.join(map(str, summary['seeds']))}"],
        "notes": [escape_text(note, 1_000) for note in summary["notes"]],
        "tables": tables,
        "charts": [(title, draw_curves(title, of), legend(of)) for title, of in curves if of],
        "runs": rows,
        "version": software_versions()["reward_kit"],
    }
    html = render("sweep.html.j2", page, styles=("page.css", "training.css"), script="", trusted={"data": ""})
    write_atomically(folder / REPORT_FILE, html.encode("utf-8"))
    return folder / REPORT_FILE


def arm_curves(runs: Mapping[str, Sequence[TrainingFacts]], name: str) -> list[ArmCurve]:
    """Return the curves of a figure, for the arms that have it.

    An arm's curves are interpolated over the environment steps that all of its runs have reached.
    """
    curves = []
    for arm, of_arm in runs.items():
        points = [found for run in of_arm if len((found := _points(run, name))[0])]
        if not points:
            continue
        first, last = max(steps[0] for steps, _ in points), min(steps[-1] for steps, _ in points)
        steps_P = np.linspace(first, max(first, last), _POINTS if last > first else 1)
        values_RP = np.stack([np.interp(steps_P, steps, values) for steps, values in points])
        extremes = values_RP.min(axis=0), values_RP.max(axis=0)
        curves.append(ArmCurve(arm, steps_P, values_RP.mean(axis=0), *extremes))
    return curves


def _points(run: TrainingFacts, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the (N,) environment steps and values of a figure."""
    if name not in run.series:
        return np.empty(0), np.empty(0)
    series = run.series[name].finite
    steps = [0.0 if update == 0 else run.series[_STEPS].at(update) for update in series.updates_N.tolist()]
    pairs = [(at, value) for at, value in zip(steps, series.values_N.tolist(), strict=True) if at is not None]
    return np.array([at for at, _ in pairs]), np.array([value for _, value in pairs])


def draw_curves(title: str, curves: Sequence[ArmCurve]) -> Drawing:
    """Draw the mean over the seeds of each arm, with a band from the smallest to the largest value."""
    values = np.concatenate([[*curve.low_P, *curve.high_P] for curve in curves])
    low, high = float(values.min()), float(values.max())
    low, high = (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high)
    ends = [
        f"{curve.arm}: from {short(float(curve.mean_P[0]))} to {short(float(curve.mean_P[-1]))}" for curve in curves
    ]
    last = round(max(float(curve.steps_P[-1]) for curve in curves))
    axes = Axes(_BOX, low, high if high > low else low + 1.0, False, 0, last)
    drawing = Drawing(f"{title} by environment steps. {'; '.join(ends)}", _BOX.width, _BOX.height)
    for value in y_ticks(axes):
        drawing.path(f"M{_BOX.left} {axes.y(value)}H{_BOX.right}", "grid")
        drawing.label(_BOX.left - 6, axes.y(value) + 4, short(value), "end")
    drawing.path(f"M{_BOX.left} {_BOX.bottom}H{_BOX.right}", "axis")
    for tick in whole_ticks(0, last, 6):
        drawing.label(axes.x(tick), _BOX.bottom + 15, f"{tick:,}", "middle")
    drawing.label((_BOX.left + _BOX.right) / 2, _BOX.bottom + 32, "environment steps", "middle", "faint")
    for index, curve in enumerate(curves):
        steps, means = curve.steps_P.tolist(), curve.mean_P.tolist()
        band: Band = list(zip(steps, curve.low_P.tolist(), curve.high_P.tolist(), strict=True))
        drawing.path(area_path(band, axes), f"extremes l{index % _COLORS}")
        line = "L".join(f"{axes.x(x):g} {axes.y(y):g}" for x, y in zip(steps, means, strict=True))
        drawing.path(f"M{line}" if len(steps) > 1 else f"M{line}h3", f"line l{index % _COLORS}")
    return drawing


def legend(curves: Sequence[ArmCurve]) -> list[tuple[str, str]]:
    """Return the line style and the name of each arm."""
    return [(f"line l{index % _COLORS}", curve.arm) for index, curve in enumerate(curves)]
