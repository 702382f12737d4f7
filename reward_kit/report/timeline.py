"""The timeline of a run: episodes and reward calls in lanes, and the numbers that are active over time.

Times are seconds since the start of the run. Idle periods, such as the time before a resume, are excluded. If there are
more than a few hundred bars, the lanes are omitted and only the totals are drawn.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.display_text import escape_text
from reward_kit.report.rendering import Drawing, r2, round_step, seconds
from reward_kit.report.run_data import EpisodeOutline, RunFacts, grouped

MOST_BARS = 400
_MOST_LANES = 64
_BINS = 240
_SHORTEST_GAP_S = 30.0
_GAP_SHARE = 0.25
_WIDTH, _LEFT, _RIGHT = 960.0, 146.0, 12.0
_LANE_GAP, _BAND_GAP, _BAND_HEIGHT = 1.5, 14.0, 200.0
_THINNEST, _THICKEST, _LEAST_WIDTH = 4.0, 14.0, 0.8
_STRIP_HEIGHT, _CURVE_HEIGHT = 44.0, 72.0
_TICKS = 8
_STEPS_OF_TIME = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_BAR_KINDS = {
    "episode": "episode",
    "broken": "failed episode",
    "waiting": "score, waiting",
    "call": "reward call",
    "retried": "failed call, retried",
    "unscored": "failed call, unscored",
}
Floats = npt.NDArray[np.float64]
Kind = Literal["episode", "broken", "waiting", "call", "retried", "unscored"]


class Span(NamedTuple):
    """A time interval."""

    begin_s: float
    end_s: float


class Bar(NamedTuple):
    """A piece of work in a lane; `episode` is its episode, or the first episode of its group."""

    lane: int
    kind: Kind
    begin_s: float
    end_s: float
    episode: str

    @property
    def span(self) -> Span:
        """The time interval of the work."""
        return Span(self.begin_s, self.end_s)


class Band(NamedTuple):
    """The lanes of one kind of work."""

    title: str
    lanes: int
    bars: Sequence[Bar]


class Strip(NamedTuple):
    """A number that is averaged over equal intervals; `peak` is its maximum."""

    title: str
    kind: Kind
    mean_N: Floats
    peak: int


class ProgressCurve(NamedTuple):
    """The completed share over time, as a list of steps (second, share)."""

    title: str
    steps: Sequence[tuple[float, float]]
    done: int
    total: int


class Gap(NamedTuple):
    """The position and length of an idle period that was cut out."""

    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A request to the reward for one score or for the scores of a group."""

    episodes: Sequence[str]
    submitted_s: float  # the time of the request; the scores arrived at `done_s`
    done_s: float
    attempts: Sequence[Span]
    is_unscored: bool  # True if at least one score is missing

    @property
    def waits(self) -> list[Span]:
        """Return the times before and between calls during which the request was waiting."""
        edges = [self.submitted_s, *(edge for span in self.attempts for edge in span)]
        found = [Span(begin, end) for begin, end in zip(edges[::2], [*edges[1::2], self.done_s], strict=False)]
        return [span for span in (found[:-1] if self.attempts else found) if span.end_s > span.begin_s]


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """The content of the timeline."""

    length_s: float  # from the start of the run to its last known event
    bands: Sequence[Band]  # [] if there would be too many bars
    strips: Sequence[Strip]
    curves: Sequence[ProgressCurve]
    gaps: Sequence[Gap]  # idle periods
    collecting: Sequence[Span]  # the times when episodes were in progress
    calling: Sequence[Span]  # the times when calls were in progress
    calls: Sequence[RewardCall]

    @property
    def overlap_s(self) -> float:
        """The number of seconds during which both episodes and calls were active."""
        return covered_seconds(intersect_spans(self.collecting, self.calling))

    @property
    def alone_s(self) -> float | None:
        """The number of seconds that calls continued after the last episode had stopped, or None if unknown."""
        if not self.collecting or not self.calls:
            return None
        return max(0.0, max(call.done_s for call in self.calls) - self.collecting[-1].end_s)


def build_timeline(run: RunFacts) -> RunTimeline | None:
    """Build the timeline of a run, or return None if its files contain no times."""
    pairs = ((facts, facts.begin_s, facts.end_s) for facts in run.episodes)
    episodes = [(facts, Span(begin, end)) for facts, begin, end in pairs if begin is not None and end is not None]
    calls = _calls_of(run.episodes)
    if not episodes and not calls:
        return None
    axis = _Axis([*(span for _, span in episodes), *(Span(call.submitted_s, call.done_s) for call in calls)])
    works = [
        Bar(0, "broken" if facts.row.error_class else "episode", *axis.span(span), facts.row.rollout_id)
        for facts, span in episodes
    ]
    calls = [axis.call(call) for call in calls]
    edges = np.linspace(0.0, axis.length_s or 1.0, _BINS + 1)
    kinds: list[tuple[str, Kind, list[Span]]] = [
        ("Episodes in progress", "episode", [work.span for work in works]),
        ("Scores waiting", "waiting", [span for call in calls for span in call.waits]),
        ("Calls in flight", "call", [span for call in calls for span in call.attempts]),
    ]
    return RunTimeline(
        length_s=axis.length_s,
        bands=_bands(works, calls),
        strips=[
            Strip(title, kind, occupancy(spans, edges), most_at_once(spans))
            for title, kind, spans in kinds
            if spans or (calls and kind != "episode")
        ],
        curves=_curves(run.episodes, axis),
        gaps=axis.gaps,
        collecting=merge_spans(work.span for work in works),
        calling=merge_spans(span for call in calls for span in call.attempts),
        calls=calls,
    )


def _calls_of(episodes: Iterable[EpisodeOutline]) -> list[RewardCall]:
    """Return the requests to the reward in order. The request for a group is included only once."""
    units: dict[tuple[str, float], list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        if facts.score is not None and facts.score.submitted_s is not None and facts.score.done_s is not None:
            units[facts.score.unit, facts.score.submitted_s].append(facts)
    calls = []
    for (_, submitted), unit in units.items():
        scores = [facts.score for facts in unit if facts.score is not None]
        spans = [Span(*span) for span in sorted(scores[0].attempts)]
        ends = [score.done_s or 0.0 for score in scores]
        done = max([*ends, submitted, *(span.end_s for span in spans)])
        is_unscored = any(facts.row.score is None for facts in unit)
        calls.append(RewardCall([facts.row.rollout_id for facts in unit], submitted, done, spans, is_unscored))
    return sorted(calls, key=lambda call: call.submitted_s)


class _Axis:
    """The time axis, from which idle periods are cut out."""

    def __init__(self, spans: Sequence[Span]) -> None:
        busy = merge_spans(spans)
        longest = max(_SHORTEST_GAP_S, _GAP_SHARE * covered_seconds(busy))
        idle = [Span(a.end_s, b.begin_s) for a, b in zip([Span(0.0, 0.0), *busy], busy, strict=False)]
        left_out = [span for span in idle if span.end_s - span.begin_s > longest]
        self._ends = [span.end_s for span in left_out]
        self._skipped = [0.0, *accumulate(span.end_s - span.begin_s for span in left_out)]
        self.length_s = self.at(busy[-1].end_s)
        self.gaps = [Gap(self.at(span.end_s), span.end_s - span.begin_s) for span in left_out]

    def at(self, second: float) -> float:
        return second - self._skipped[bisect_right(self._ends, second)]

    def span(self, span: Span) -> Span:
        return Span(self.at(span.begin_s), self.at(span.end_s))

    def call(self, call: RewardCall) -> RewardCall:
        attempts = [self.span(span) for span in call.attempts]
        return replace(call, submitted_s=self.at(call.submitted_s), done_s=self.at(call.done_s), attempts=attempts)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin_s <= found[-1].end_s:
            found[-1] = Span(found[-1].begin_s, max(found[-1].end_s, span.end_s))
        else:
            found.append(span)
    return found


def intersect_spans(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the intersection of two merged lists of spans."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i].begin_s, other[j].begin_s), min(one[i].end_s, other[j].end_s)
        if begin < end:
            found.append(Span(begin, end))
        if one[i].end_s < other[j].end_s:
            i += 1
        else:
            j += 1
    return found


def covered_seconds(spans: Iterable[Span]) -> float:
    """Return the total length of the spans in seconds."""
    return sum(span.end_s - span.begin_s for span in spans)


def _bands(works: Sequence[Bar], calls: Sequence[RewardCall]) -> list[Band]:
    """Return all lanes if they fit, otherwise only the lanes of calls if those fit, otherwise none."""
    if len(works) + sum(max(1, len(call.attempts)) for call in calls) > MOST_BARS:
        return []
    collecting = Band("Collecting", *_assign_lanes([(work.span, [work]) for work in works]))
    scoring = Band("Scoring", *_assign_lanes([(Span(c.submitted_s, c.done_s), _bars_of(c)) for c in calls]))
    if scoring.lanes > _MOST_LANES:
        made = [(bar.span, [bar]) for c in calls for bar in _bars_of(c) if bar.kind != "waiting"]
        scoring = Band("Scoring, without waiting requests", *_assign_lanes(made))
    return [band for band in (collecting, scoring) if band.bars and band.lanes <= _MOST_LANES]


def _bars_of(call: RewardCall) -> list[Bar]:
    name = call.episodes[0]
    kinds: list[Kind] = ["retried" for _ in call.attempts]
    kinds[-1:] = ["unscored" if call.is_unscored else "call"]
    waits = [Bar(0, "waiting", *span, name) for span in call.waits]
    return waits + [Bar(0, kind, *span, name) for kind, span in zip(kinds, call.attempts, strict=False)]


def _assign_lanes(items: Sequence[tuple[Span, Sequence[Bar]]]) -> tuple[int, list[Bar]]:
    """Assign each item to the first free lane, and return the number of lanes and all bars."""
    bars: list[Bar] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = 0
    for span, own in sorted(items, key=lambda item: item[0]):
        while busy and busy[0][0] <= span.begin_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
        heapq.heappush(busy, (span.end_s, lane))
        bars += [bar._replace(lane=lane) for bar in own]
    return lanes, bars


def occupancy(spans: Sequence[Span], edges: Floats) -> Floats:
    """Return an (N,) array: the mean number of active spans between each two of the (N + 1,) `edges`."""

    def elapsed(moments: Sequence[float]) -> Floats:
        """Return, for each edge, the total number of seconds since all earlier moments."""
        ordered = np.sort(np.array(moments))
        before = np.searchsorted(ordered, edges)
        return np.asarray(before * edges - np.concatenate([[0.0], np.cumsum(ordered)])[before], dtype=np.float64)

    begun, ended = (elapsed(side) for side in zip(*spans, strict=True)) if spans else (edges, edges)
    return np.asarray(np.diff(begun - ended) / np.diff(edges), dtype=np.float64)


def most_at_once(spans: Sequence[Span]) -> int:
    """Return the largest number of overlapping spans. Adjacent spans do not overlap."""
    changes = sorted([(span.begin_s, 1) for span in spans] + [(span.end_s, -1) for span in spans])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def _curves(episodes: Sequence[EpisodeOutline], axis: _Axis) -> list[ProgressCurve]:
    """Return the curves of finished episodes, available scores and complete groups over time."""
    stopped = [facts.end_s for facts in episodes if facts.end_s is not None]
    scored = [facts.score.done_s for facts in episodes if facts.score is not None and facts.score.done_s is not None]
    complete, groups = groups_complete(episodes)
    expected = sum(not facts.row.error_class for facts in episodes)
    curves = [
        _curve("Episodes stopped", stopped, len(episodes), axis),
        _curve("Scores received", scored, expected, axis),
        _curve("Groups complete", complete, groups, axis),
    ]
    return [curve for curve in curves if curve.steps]


def _curve(title: str, moments: Iterable[float], total: int, axis: _Axis) -> ProgressCurve:
    moments_s = np.sort(np.array([axis.at(moment) for moment in moments]))
    kept = np.unique(np.linspace(0, len(moments_s) - 1, min(_BINS, len(moments_s))).round().astype(int))
    steps = [(float(moments_s[place]), (int(place) + 1) / max(total, 1)) for place in kept]
    return ProgressCurve(title, steps, len(moments_s), total)


def groups_complete(episodes: Iterable[EpisodeOutline]) -> tuple[list[float], int]:
    """Return the known times at which groups were completed, and the number of groups."""

    def settled_s(facts: EpisodeOutline) -> float:
        if facts.row.error_class is not None and facts.end_s is not None:
            return facts.end_s
        return math.inf if facts.score is None or facts.score.done_s is None else facts.score.done_s

    groups = grouped(episodes, lambda facts: facts.group_id)
    moments = (max(map(settled_s, group), default=math.inf) for group in groups.values())
    return [moment for moment in moments if moment != math.inf], len(groups)


# Drawing


def draw_timeline(timeline: RunTimeline) -> Drawing:
    """Draw the lanes, if any, and below them the totals and the completed shares."""
    parts = [f"{strip.title.lower()}: peak {strip.peak}" for strip in timeline.strips]
    drawing = Drawing(f"Timeline of {seconds(timeline.length_s)}; {'; '.join(parts)}", _WIDTH)
    scale = (_WIDTH - _LEFT - _RIGHT) / (timeline.length_s or 1.0)
    for band in timeline.bands:
        _draw_band(drawing, band, scale)
    for strip in timeline.strips:
        _draw_strip(drawing, strip, _STRIP_HEIGHT if timeline.bands else 2 * _STRIP_HEIGHT)
    if timeline.curves:
        _draw_curves(drawing, timeline.curves, scale)
    bottom = drawing.height + 4
    for tick in ticks(timeline.length_s):
        x = r2(_LEFT + tick * scale)
        drawing.path(f"M{x} 0V{r2(bottom)}", "grid")
        drawing.label(x, bottom + 14, seconds(tick), "middle")
    for gap in timeline.gaps:
        x = r2(_LEFT + gap.at_s * scale)
        drawing.path(f"M{x} 0V{r2(bottom)}", "gap")
        drawing.label(x, bottom + 28, f"{seconds(gap.seconds)} left out", "middle", "faint")
    drawing.height = bottom + (34 if timeline.gaps else 20)
    return drawing


def _draw_titles(drawing: Drawing, y: float, title: str, below: str) -> None:
    drawing.label(_LEFT - 10, y, title, "end", "title")
    drawing.label(_LEFT - 10, y + 14, below, "end", "faint")


def _draw_rule(drawing: Drawing, y: float) -> None:
    drawing.path(f"M{_LEFT} {r2(y)}H{_WIDTH - _RIGHT}", "axis")


def _draw_band(drawing: Drawing, band: Band, scale: float) -> None:
    pitch = min(_THICKEST, max(_THINNEST, _BAND_HEIGHT / band.lanes))
    top = drawing.height + 4
    _draw_titles(drawing, top + 10, band.title.split(",")[0], f"{band.lanes} slot{'s'[: band.lanes != 1]}")
    for bar in band.bars:
        y, tall = top + bar.lane * pitch, pitch - _LANE_GAP
        if bar.kind == "waiting":  # thin, to differ from a call without relying on color
            y, tall = y + tall * 0.35, tall * 0.3
        lasted_s, what = bar.end_s - bar.begin_s, _BAR_KINDS[bar.kind]
        note = f"{escape_text(bar.episode, 80)}: {what}, at {seconds(bar.begin_s)} for {seconds(lasted_s)}"
        drawing.rect(_LEFT + bar.begin_s * scale, y, max(_LEAST_WIDTH, lasted_s * scale), tall, bar.kind, note)
        drawing.legend[bar.kind] = what
    drawing.height = top + max(26.0, band.lanes * pitch) + _BAND_GAP


def _draw_strip(drawing: Drawing, strip: Strip, tall: float) -> None:
    base, peak = drawing.height + tall, max(strip.peak, 1)
    step = (_WIDTH - _LEFT - _RIGHT) / len(strip.mean_N)
    points = [f"M{_LEFT} {base}"]
    for index, value in enumerate(strip.mean_N.tolist()):
        y = r2(base - (tall - 8) * value / peak)
        points.append(f"L{r2(_LEFT + index * step)} {y}H{r2(_LEFT + (index + 1) * step)}")
    drawing.path(f"{''.join(points)}V{base}Z", f"area {strip.kind}")
    _draw_rule(drawing, base)
    _draw_titles(drawing, base - 18, strip.title, f"peak {strip.peak:,}")
    drawing.height = base + _BAND_GAP


def _draw_curves(drawing: Drawing, curves: Sequence[ProgressCurve], scale: float) -> None:
    base, tall = drawing.height + _CURVE_HEIGHT, _CURVE_HEIGHT - 8
    for index, curve in enumerate(curves):
        steps = [f"H{r2(_LEFT + at_s * scale)}V{r2(base - tall * min(1.0, done))}" for at_s, done in curve.steps]
        drawing.path(f"M{_LEFT} {base}{''.join(steps)}", f"curve c{index}")
        drawing.legend[f"c{index}"] = f"{curve.title.lower()}: {curve.done:,} of {curve.total:,}"
    _draw_rule(drawing, base)
    _draw_titles(drawing, base - tall / 2 - 4, "Done", "share of all")
    drawing.height = base + 4


def ticks(length_s: float) -> list[float]:
    """Return about `_TICKS` round times from 0.

    The very end of the axis is left out, since a label would not fit there.
    """
    if length_s <= 0:
        return [0.0]
    wanted = length_s / _TICKS
    days = 86400 * math.ceil(wanted / 86400)
    step = round_step(wanted) if wanted <= 1 else next((one for one in _STEPS_OF_TIME if one >= wanted), days)
    return [index * step for index in range(_TICKS + 2) if index * step <= length_s * 0.97]
