"""Curves as shapes: each picture in units of its drawing area, with a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from reward_kit.runs.files import HELD_OUT_SCORE
from reward_kit.runs.report.training.captions import Line, Picture
from reward_kit.runs.report.training.reading import TrainingFacts
from reward_kit.runs.report.training.thinning import Curve, curve_of

_Z = 1.96  # of a normal distribution, 95% lie within so many standard errors
_MOST_DOTS = 40
_FAR_APART = 30.0  # a logarithmic scale shows what a linear one would crush
_Y_TICKS, _X_TICKS = 4, 6


class Box(NamedTuple):
    """The drawing area within its picture: left, top, right and bottom, and the size of the whole."""

    left: float
    top: float
    right: float
    bottom: float
    width: float
    height: float


SMALL = Box(54.0, 12.0, 432.0, 176.0, 460.0, 202.0)
LARGE = Box(54.0, 14.0, 1050.0, 296.0, 1080.0, 324.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Where values and updates stand in a box."""

    box: Box
    low: float
    high: float
    is_log: bool
    first: int
    last: int

    def x(self, update: float) -> float:
        """From the left, in units of the picture."""
        share = (update - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(self.box.left + share * (self.box.right - self.box.left), 1)

    def y(self, value: float) -> float:
        """From the top."""
        low, high, value = (math.log10(n) if self.is_log else n for n in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.box.bottom - min(1.0, max(0.0, share)) * (self.box.bottom - self.box.top), 1)


class Drawn(NamedTuple):
    """One curve: its label, its latest value, its path, its extremes as an area, and dots where it has few points."""

    label: str
    latest: str
    d: str
    extremes: str
    dots: Sequence[tuple[float, float]]


class Tick(NamedTuple):
    """A place on an axis, and the value there."""

    at: float
    text: str


class Mark(NamedTuple):
    """Something that happened after an update: "best" or "resumed"."""

    x: float
    update: int
    kind: str


@dataclass(slots=True)
class Chart:
    """One picture.

    Attributes:
        key: names it on the page.
        picture: what it shows, with its words.
        box: its drawing area.
        aloud: what it shows, for those who do not see it.
        data: its points, for the script: box, scale, and of each line its points.
        band: an area, in SVG's form; "" for none.
    """

    key: str
    picture: Picture
    box: Box
    aloud: str
    data: dict[str, Any]
    lines: list[Drawn] = field(default_factory=list)
    band: str = ""
    y_ticks: list[Tick] = field(default_factory=list)
    x_ticks: list[Tick] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def draw(key: str, picture: Picture, run: TrainingFacts, box: Box = SMALL) -> Chart | None:
    """A picture of the run; None where the run has nothing for it.

    Args:
        key: names it.
        picture: which figures it shows.
        run: the run.
        box: its size.
    """
    found = [(line, curve_of(run.series[line.name])) for line in picture.lines if line.name in run.series]
    found = [(line, curve) for line, curve in found if np.isfinite(curve.values_M).any()]
    values = np.concatenate([curve.all_values for _, curve in found]) if found else np.empty(0)
    if not len(values) or (picture.hides_zeros and not values.any()):
        return None
    band = _band(run, found)
    scale = _scale(picture, values, band, run, box)
    aloud = f"{picture.title}. {'; '.join(_aloud(line, run, picture) for line, _ in found)}"
    chart = Chart(key, picture, box, aloud, _data(scale, picture, found, band))
    chart.lines = [_drawn(line, curve, scale, told(run.last(line.name) or 0.0, picture)) for line, curve in found]
    chart.band = _area(band, scale)
    chart.y_ticks = [Tick(scale.y(value), told(value, picture)) for value in y_ticks(scale)]
    chart.x_ticks = [Tick(scale.x(tick), f"{tick:,}") for tick in whole_ticks(scale.first, scale.last, _X_TICKS)]
    chart.marks = _marks(run, scale)
    return chart


Band = Sequence[tuple[int, float, float]]


def _band(run: TrainingFacts, found: Iterable[tuple[Line, Curve]]) -> Band:
    """Mean ± 1.96 standard errors of the held-out score, within [0, 1] where all scores are."""
    error = run.series.get("held_out/standard_error")
    curve = next((curve for line, curve in found if line.name == HELD_OUT_SCORE), None)
    if error is None or curve is None:
        return ()
    extremes = [run.series[name].finite.values_N for name in ("held_out/min", "held_out/max") if name in run.series]
    is_share = bool(extremes) and all((of >= 0.0).all() and (of <= 1.0).all() for of in extremes)
    band = []
    for update, value in zip(curve.updates_M.tolist(), curve.values_M.tolist(), strict=True):
        half = error.at(update)
        if half is not None and math.isfinite(value):
            low, high = value - _Z * half, value + _Z * half
            band.append((update, max(0.0, low), min(1.0, high)) if is_share else (update, low, high))
    return band


def _scale(picture: Picture, values: np.ndarray, band: Band, run: TrainingFacts, box: Box) -> Scale:
    low, high = float(values.min()), float(values.max())
    if band:
        low, high = min(low, *(bottom for _, bottom, _ in band)), max(high, *(top for _, _, top in band))
    updates = run.series["update"].updates_N if "update" in run.series else np.arange(run.updates + 1)
    first, last = (int(updates[0]), run.updates) if len(updates) else (0, run.updates)
    is_log = picture.is_log and low > 0.0 and high / low > _FAR_APART
    if is_log:
        return Scale(box, low / 1.15, high * 1.15, True, first, last)
    if picture.title == "Score" and low >= 0.0 and high <= 1.0:
        return Scale(box, 0.0, 1.0, False, first, last)
    low, high = (min(0.0, low), max(0.0, high)) if picture.has_zero else (low, high)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # What ends at 0 needs no room there.
    low, high = low if low == 0.0 else low - room, high if high == 0.0 > low else high + room
    return Scale(box, low, high, False, first, last)


def _drawn(line: Line, curve: Curve, scale: Scale, latest: str) -> Drawn:
    pairs = list(zip(curve.updates_M.tolist(), curve.values_M.tolist(), strict=True))
    points = [(scale.x(update), scale.y(value)) if math.isfinite(value) else None for update, value in pairs]
    parts, is_begin = [], True
    for point in points:
        if point is not None:
            parts.append(f"{'M' if is_begin else 'L'}{point[0]:g} {point[1]:g}")
        is_begin = point is None
    dots = [point for point in points if point is not None] if len(points) <= _MOST_DOTS else []
    return Drawn(line.label, latest, "".join(parts), _area(_extremes(curve), scale), dots)


def _extremes(curve: Curve) -> Band:
    if curve.low_M is None or curve.high_M is None:
        return ()
    rows = zip(curve.updates_M.tolist(), curve.low_M.tolist(), curve.high_M.tolist(), strict=True)
    return [row for row in rows if math.isfinite(row[1])]


def _area(band: Band, scale: Scale) -> str:
    if len(band) < 2:
        return ""
    above = [f"{scale.x(update):g} {scale.y(top):g}" for update, _, top in band]
    below = [f"{scale.x(update):g} {scale.y(bottom):g}" for update, bottom, _ in reversed(band)]
    return f"M{'L'.join([*above, *below])}Z"


def _marks(run: TrainingFacts, scale: Scale) -> list[Mark]:
    marks = [Mark(scale.x(update), update, "resumed") for update in run.resumed_at]
    if run.best is not None:
        marks.append(Mark(scale.x(run.best[0]), run.best[0], "best"))
    return marks


def _data(scale: Scale, picture: Picture, found: Iterable[tuple[Line, Curve]], band: Band) -> dict[str, Any]:
    """What the script needs to say the values under the pointer, and to draw the curves over another axis."""
    return {
        "box": list(scale.box[:4]),
        "scale": [scale.low, scale.high, int(scale.is_log)],
        "updates": [scale.first, scale.last],
        "share": int(picture.is_share),
        "lines": [_line_data(line, curve) for line, curve in found],
        "band": [[update, _digits(low), _digits(high)] for update, low, high in band],
    }


def _line_data(line: Line, curve: Curve) -> dict[str, Any]:
    columns = {"v": curve.values_M, "low": curve.low_M, "high": curve.high_M}
    told = {key: list(map(_digits, column.tolist())) for key, column in columns.items() if column is not None}
    return {"label": line.label, "u": curve.updates_M.tolist(), **told}


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _aloud(line: Line, run: TrainingFacts, picture: Picture) -> str:
    values = run.series[line.name].finite.values_N
    first, last, least, most = (
        told(float(value), picture) for value in (values[0], values[-1], values.min(), values.max())
    )
    return f"{line.label}: from {first} to {last}, at least {least}, at most {most}"


# Numbers


def told(value: float, picture: Picture) -> str:
    """A value as the picture says it."""
    if not picture.is_share:
        return short(value)
    return f"{100.0 * value:.2g}%" if 0.0 < abs(value) < 0.001 else f"{value:.1%}"


def short(value: float) -> str:
    """A number with three digits that count, in thousands with a comma, and very small ones with an exponent."""
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return f"{value:.3g}"


def y_ticks(scale: Scale) -> list[float]:
    """Round values within a scale; of a logarithmic one the powers of ten, or its ends where it spans less than two."""
    if not scale.is_log:
        return _round_ticks(scale.low, scale.high, _Y_TICKS)
    powers = range(math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high)) + 1)
    every = max(1, math.ceil(len(powers) / _Y_TICKS))
    found = [10.0**power for power in powers[::every]]
    return found if len(found) > 1 else [scale.low * 1.15, scale.high / 1.15]


def whole_ticks(first: int, last: int, most: int) -> list[int]:
    """Round whole numbers from `first` to `last`."""
    return sorted({int(tick) for tick in _round_ticks(float(first), float(last), most) if tick == int(tick)})


def _round_ticks(low: float, high: float, most: int) -> list[float]:
    wanted = (high - low) / most
    if not wanted > 0.0:
        return [low]
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= wanted * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]
