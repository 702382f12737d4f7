"""From figures to shapes: the pictures of the page in units of its drawing area, each with a bounded number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reward_kit.display_text import shown
from reward_kit.runs.report.figures import Histogram
from reward_kit.runs.report.timeline import Band, Bar, Curve, Strip, Timeline
from reward_kit.runs.report.wording import number, seconds

_WIDTH, _LEFT, _RIGHT = 960.0, 146.0, 12.0
_LANE_GAP, _BAND_GAP = 1.5, 14.0
_BAND_HEIGHT = 200.0
_THINNEST, _THICKEST = 4.0, 14.0
_STRIP_HEIGHT, _CURVE_HEIGHT = 44.0, 72.0
_LEAST_WIDTH = 0.8
_TICKS = 8
_STEPS_OF_TIME = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_BAR_KINDS = {
    "episode": "episode",
    "broken": "episode that broke",
    "waiting": "score, waiting",
    "call": "call of the reward",
    "retried": "call that failed and was made again",
    "unscored": "call that left no score",
}
_CURVE_KINDS = ("episode", "call", "group")


class Rect(NamedTuple):
    """A bar; `note` is shown where the pointer rests."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    note: str = ""


class Path(NamedTuple):
    """A line, or an area where it is closed, in SVG's form."""

    d: str
    kind: str


class Label(NamedTuple):
    """A text; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    kind: str = ""


@dataclass(slots=True)
class Drawing:
    """One picture.

    Attributes:
        told: what it shows, for those who do not see it.
        width, height: of the drawing area.
        legend: the kinds that occur, with what they are.
    """

    told: str
    width: float
    height: float = 0.0
    rects: list[Rect] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    legend: dict[str, str] = field(default_factory=dict)


def draw_histogram(histogram: Histogram) -> Drawing:
    """Bars of one policy's scores."""
    width, height, left, base, top = 420.0, 168.0, 8.0, 140.0, 22.0
    told = f"Distribution of {histogram.scored} scores from {number(histogram.low)} to {number(histogram.high)}"
    drawing = Drawing(told, width, height)
    bin_width, most = (width - 2 * left) / len(histogram.counts), max([1, *histogram.counts])
    step = (histogram.high / 2 - histogram.low / 2) / len(histogram.counts) * 2
    for place, count in enumerate(histogram.counts):
        if not count:
            continue
        x, tall = left + place * bin_width, max(1.5, (base - top) * count / most)
        begin = histogram.low + place * step
        note = f"{number(begin)} to {number(begin + step)}: {count:,}"
        drawing.rects.append(_rect(x + 1, base - tall, bin_width - 2, tall, "score", note))
        if _has_room(list(histogram.counts), place):
            drawing.labels.append(Label(_r(x + bin_width / 2), _r(base - tall - 4), _short(count), "middle", "count"))
    drawing.paths.append(Path(f"M{left} {base}H{width - left}", "axis"))
    for at, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = histogram.low * (1 - at) + histogram.high * at
        drawing.labels.append(Label(_r(left + at * (width - 2 * left)), base + 18, number(value), anchor))
    return drawing


def _has_room(counts: list[int], place: int) -> bool:
    """Whether the label of a bar does not meet those of its neighbours; the highest bar has one in any case."""
    if max(counts) < 100:
        return True
    return counts[place] == max(counts) or not any(counts[max(0, place - 1) : place] + counts[place + 1 : place + 2])


def draw_timeline(timeline: Timeline) -> Drawing:
    """Lanes, where there are some, the course of the sums below them, and what was done by when."""
    drawing = Drawing(_told(timeline), _WIDTH)
    scale = (_WIDTH - _LEFT - _RIGHT) / (timeline.length_s or 1.0)
    for band in timeline.bands:
        _draw_band(drawing, band, scale)
    for strip in timeline.strips:
        _draw_strip(drawing, strip, _STRIP_HEIGHT if timeline.bands else 2 * _STRIP_HEIGHT)
    if timeline.curves:
        _draw_curves(drawing, timeline.curves, scale)
    _draw_axis(drawing, timeline, scale)
    return drawing


def _told(timeline: Timeline) -> str:
    parts = [f"{strip.title.lower()}: at most {strip.peak} at once" for strip in timeline.strips]
    return f"Timeline of {seconds(timeline.length_s)}; {'; '.join(parts)}"


def _draw_band(drawing: Drawing, band: Band, scale: float) -> None:
    pitch = min(_THICKEST, max(_THINNEST, _BAND_HEIGHT / band.lanes))
    top = drawing.height + 4
    drawing.labels.append(Label(_LEFT - 10, _r(top + 10), band.title.split(",")[0], "end", "title"))
    drawing.labels.append(Label(_LEFT - 10, _r(top + 24), f"{band.lanes} slot{'s'[: band.lanes != 1]}", "end", "faint"))
    for bar in band.bars:
        drawing.rects.append(_bar(bar, top + bar.lane * pitch, pitch - _LANE_GAP, scale))
        drawing.legend[bar.kind] = _BAR_KINDS[bar.kind]
    drawing.height = top + max(26.0, band.lanes * pitch) + _BAND_GAP


def _bar(bar: Bar, y: float, tall: float, scale: float) -> Rect:
    """Waiting is thin, so that it is told from a call without its colour too."""
    if bar.kind == "waiting":
        y, tall = y + tall * 0.35, tall * 0.3
    width = max(_LEAST_WIDTH, (bar.end_s - bar.begin_s) * scale)
    lasted = seconds(bar.end_s - bar.begin_s)
    note = f"{shown(bar.episode, 80)}: {_BAR_KINDS[bar.kind]}, at {seconds(bar.begin_s)} for {lasted}"
    return _rect(_LEFT + bar.begin_s * scale, y, width, tall, bar.kind, note)


def _draw_strip(drawing: Drawing, strip: Strip, tall: float) -> None:
    base, peak = drawing.height + tall, max(strip.peak, 1)
    step = (_WIDTH - _LEFT - _RIGHT) / len(strip.mean_N)
    points = [f"M{_LEFT} {base}"]
    for place, value in enumerate(strip.mean_N.tolist()):
        y = _r(base - (tall - 8) * value / peak)
        points.append(f"L{_r(_LEFT + place * step)} {y}H{_r(_LEFT + (place + 1) * step)}")
    drawing.paths += [Path(f"{''.join(points)}V{base}Z", f"area {strip.kind}"), _rule(base)]
    drawing.labels.append(Label(_LEFT - 10, _r(base - 18), strip.title, "end", "title"))
    drawing.labels.append(Label(_LEFT - 10, _r(base - 4), f"at most {strip.peak:,}", "end", "faint"))
    drawing.height = base + _BAND_GAP


def _draw_curves(drawing: Drawing, curves: Sequence[Curve], scale: float) -> None:
    base, tall = drawing.height + _CURVE_HEIGHT, _CURVE_HEIGHT - 8
    for place, curve in enumerate(curves):
        steps = [f"H{_r(_LEFT + at_s * scale)}V{_r(base - tall * min(1.0, done))}" for at_s, done in curve.steps]
        drawing.paths.append(Path(f"M{_LEFT} {base}{''.join(steps)}", f"curve c{place}"))
        drawing.legend[f"c{place}"] = f"{curve.title.lower()}: {curve.done:,} of {curve.total:,}"
    drawing.paths.append(_rule(base))
    drawing.labels.append(Label(_LEFT - 10, _r(base - tall / 2 - 4), "Done", "end", "title"))
    drawing.labels.append(Label(_LEFT - 10, _r(base - tall / 2 + 10), "share of all", "end", "faint"))
    drawing.height = base + 4


def _draw_axis(drawing: Drawing, timeline: Timeline, scale: float) -> None:
    bottom = drawing.height + 4
    for tick in ticks(timeline.length_s):
        x = _r(_LEFT + tick * scale)
        drawing.paths.append(Path(f"M{x} 0V{_r(bottom)}", "grid"))
        drawing.labels.append(Label(x, _r(bottom + 14), seconds(tick), "middle"))
    for gap in timeline.gaps:
        x = _r(_LEFT + gap.at_s * scale)
        drawing.paths.append(Path(f"M{x} 0V{_r(bottom)}", "gap"))
        drawing.labels.append(Label(x, _r(bottom + 28), f"{seconds(gap.seconds)} left out", "middle", "faint"))
    drawing.height = bottom + (34 if timeline.gaps else 20)


def ticks(length_s: float) -> list[float]:
    """Round moments from 0 on, about `_TICKS` at most, and none at the very end, where its label would not fit."""
    if length_s <= 0:
        return [0.0]
    wanted = length_s / _TICKS
    if wanted <= 1:
        power = 10.0 ** math.floor(math.log10(wanted))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * 0.999)
    else:
        days = 86400 * math.ceil(wanted / 86400)
        step = float(next((known for known in _STEPS_OF_TIME if known >= wanted), days))
    return [place * step for place in range(_TICKS + 2) if place * step <= length_s * 0.97]


def _rule(y: float) -> Path:
    return Path(f"M{_LEFT} {_r(y)}H{_WIDTH - _RIGHT}", "axis")


def _rect(x: float, y: float, width: float, height: float, kind: str, note: str) -> Rect:
    return Rect(_r(x), _r(y), _r(width), _r(height), kind, note)


def _r(value: float) -> float:
    return round(value, 2)


def _short(count: int) -> str:
    return f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k"
