"""The picture of a comparison: the interval of each difference on one scale, about the line of no difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reward_kit.display_text import shown
from reward_kit.runs.comparison.comparing import Comparison, Difference
from reward_kit.runs.display import signed
from reward_kit.runs.report.drawing import Drawing, Label, Path

_WIDTH, _EDGE, _ROW, _TOP = 480.0, 24.0, 64.0, 4.0
_BAR, _HALF = 48.0, 10.0  # where in a row the bar lies, and how far lines go beyond it
_NAME = 70
_TICKS = 3
_KINDS = {"better": "better", "worse": "worse"}


def draw_forest(comparison: Comparison) -> Drawing:
    """A bar for each run beside the baseline, below its name and its figures; narrow, so that it fits a phone."""
    differences = comparison.differences
    height = _TOP + _ROW * len(differences) + 20
    reach = _reach(comparison)
    told = "; ".join(f"{each.side.label}: {_told(each)}" for each in differences)
    drawing = Drawing(f"Differences to the baseline: {shown(told, 2_000)}", _WIDTH, height)
    step = _step(reach)
    marks = [count * step for count in range(-int(reach / step), int(reach / step) + 1)]
    for place, each in enumerate(differences):
        _draw_row(drawing, each, _TOP + place * _ROW, reach, marks)
    for mark in marks:
        drawing.labels.append(Label(_x(mark, reach), height - 6, signed(mark), "middle", "faint"))
    return drawing


def _draw_row(drawing: Drawing, difference: Difference, top: float, reach: float, marks: Sequence[float]) -> None:
    interval, y = difference.figures.interval, top + _BAR
    drawing.labels.append(Label(_EDGE, top + 14, shown(difference.side.label, _NAME), "start", "title"))
    drawing.labels.append(Label(_EDGE, top + 30, _told(difference)))
    for mark in marks:
        kind = "grid" if mark else "zero"
        drawing.paths.append(Path(f"M{_x(mark, reach)} {y - _HALF}V{y + _HALF}", kind))
    if interval.low is not None and interval.high is not None:
        kind = _KINDS.get(difference.verdict, "open")
        drawing.paths.append(Path(f"M{_x(interval.low, reach)} {y}H{_x(interval.high, reach)}", f"range {kind}"))
    x = _x(interval.mean, reach)
    drawing.paths.append(Path(f"M{x} {y - 6}L{round(x + 6, 2)} {y}L{x} {y + 6}L{round(x - 6, 2)} {y}Z", "point"))


def _told(difference: Difference) -> str:
    interval = difference.figures.interval
    return f"{signed(interval.mean)} [{signed(interval.low)}, {signed(interval.high)}]"


def _reach(comparison: Comparison) -> float:
    """How far the scale goes to either side."""
    intervals = [each.figures.interval for each in comparison.differences]
    ends = [abs(end) for one in intervals for end in (one.low, one.mean, one.high) if end is not None]
    return max(1.05 * max(ends), 1e-9)


def _x(value: float, reach: float) -> float:
    return round(_WIDTH / 2 + (value / reach) * (_WIDTH / 2 - _EDGE), 2)


def _step(reach: float) -> float:
    """A distance of 1, 2 or 5 times a power of ten between lines, a few of them on each side."""
    rough = reach / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
