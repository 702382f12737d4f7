"""The simulated schedules as lines of text: what runs when, for two steps of each, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.overlap.latency import Floats
from reward_kit.reward_agent.overlap.settings import Schedule
from reward_kit.reward_agent.overlap.simulation import Doing, Interval, Overlap, ScheduleResult

LETTERS: dict[Doing, str] = {
    "rollout": "R",
    "log_probs": "L",
    "update": "U",
    "publish": "P",
    "waits_for_rewards": "·",
    "waits_for_rollouts": "-",
}
LEGEND = (
    "R rollout  L log-probabilities  U update  P weights published  · waits for rewards  - waits for rollouts\n"
    "step: whose batch it is (last digit)  calls: reward calls in flight, █ all of max_concurrency"
)
_LEVELS = " ▁▂▃▄▅▆▇█"
_STEPS = 2
_MARGIN = len("  rollouts ")
NARROWEST = _MARGIN + 10
_DOINGS: tuple[Doing, ...] = get_args(Doing)


class TimelineRow(NamedTuple):
    """One row of the drawing: whose it is, what it shows (machine, rollouts, step, calls), and its cells."""

    schedule: Schedule
    shows: str
    cells: str


class Timeline(NamedTuple):
    """A drawing of the schedules; `cell_s` seconds are one cell, and the steps are counted from 1."""

    rows: tuple[TimelineRow, ...]
    cell_s: float
    first_step: int
    last_step: int

    def __str__(self) -> str:
        lines = [f"steps {self.first_step} to {self.last_step}, {self.cell_s:.3g} s a character"]
        if self.first_step == self.last_step:
            lines = [f"step {self.first_step}, {self.cell_s:.3g} s a character"]
        for row in self.rows:
            if row.shows == "machine":
                lines += ["", row.schedule.value]
            lines.append(f"  {row.shows:8} {row.cells}".rstrip())
        return "\n".join(lines)


def draw_timeline(overlap: Overlap, width: int = 80) -> Timeline:
    """Draw two steps of each schedule from the second step on, or from the first where there are fewer than four.

    Args:
        overlap: what was simulated.
        width: characters of the longest line.

    Raises:
        ConfigError: nothing can be seen in so few characters.
    """
    if width < NARROWEST:
        raise ConfigError(f"a timeline needs {NARROWEST} characters, not {width}")
    steps = overlap.settings.steps
    first = 1 if steps >= _STEPS + 2 else 0
    last = min(first + _STEPS, steps) - 1
    spans = {schedule: _span(result, first, last) for schedule, result in overlap.results.items()}
    cell_s = max(end - begin for begin, end in spans.values()) / (width - _MARGIN)
    rows: list[TimelineRow] = []
    for schedule, (begin, end) in spans.items():
        cells = max(1, round((end - begin) / cell_s))
        rows += _rows(overlap, overlap.results[schedule], np.array([begin + cell_s * n for n in range(cells + 1)]))
    return Timeline(tuple(rows), cell_s, first + 1, last + 1)


def _span(result: ScheduleResult, first: int, last: int) -> tuple[float, float]:
    ends = result.step_ends_s
    return (ends[first - 1] if first else 0.0), ends[last]


def _rows(overlap: Overlap, result: ScheduleResult, edges: Floats) -> list[TimelineRow]:
    rows = [("machine", _letters(result.intervals, edges))]
    if result.rollouts:
        rows.append(("rollouts", _letters(result.rollouts, edges)))
    rows.append(("step", _steps(result.intervals, edges)))
    slots = min(overlap.settings.max_concurrency, overlap.settings.calls_per_step)
    rows.append(("calls", _calls(result, edges, slots)))
    return [TimelineRow(result.schedule, shows, cells) for shows, cells in rows]


def _shares(intervals: Sequence[Interval], edges: Floats, kinds: Sequence[object], of: int) -> list[int | None]:
    """For each cell the place in `kinds` of what fills most of it, None where nothing does; `of` is the field."""
    filled = np.zeros((len(kinds), len(edges) - 1))
    places = {kind: place for place, kind in enumerate(kinds)}
    for item in intervals:
        inside = np.minimum(edges[1:], item.end_s) - np.maximum(edges[:-1], item.begin_s)
        filled[places[item[of]]] += np.maximum(inside, 0.0)
    return [int(cell.argmax()) if cell.any() else None for cell in filled.T]


def _letters(intervals: Sequence[Interval], edges: Floats) -> str:
    shares = _shares(intervals, edges, _DOINGS, Interval._fields.index("doing"))
    return "".join(" " if place is None else LETTERS[_DOINGS[place]] for place in shares)


def _steps(intervals: Sequence[Interval], edges: Floats) -> str:
    steps = range(max(item.step for item in intervals) + 1)
    shares = _shares(intervals, edges, steps, Interval._fields.index("step"))
    return "".join(" " if step is None else str((step + 1) % 10) for step in shares)


def _calls(result: ScheduleResult, edges: Floats, slots: int) -> str:
    """How many calls are in flight in each cell, on the average; the lowest level says that there are any."""
    done = np.zeros(len(edges))
    for batch in result.batches:
        if batch.submitted_s < edges[-1] and batch.ends_C.max() > edges[0]:
            lengths = batch.ends_C - batch.begins_C
            done += [np.clip(edge - batch.begins_C, 0.0, lengths).sum() for edge in edges]
    shares = np.diff(done) / (np.diff(edges) * slots)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, max(round(share * top), int(share > 1e-9)))] for share in shares.tolist())
