"""When what was done: episodes in their slots, calls of the reward in theirs, and how much of each at every moment.

Times are seconds since the run began, without the stretches in which nothing was done, such as the night before a
resume. Beyond a few hundred bars the slots are left out, and the course of the sums is what is left.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.runs.report.reading import EpisodeOutline, RunFacts

MOST_BARS = 400
_MOST_LANES = 64
_BINS = 240
_SHORTEST_GAP_S = 30.0
_GAP_SHARE = 0.25

Floats = npt.NDArray[np.float64]
Kind = Literal["episode", "broken", "waiting", "call", "retried", "unscored"]


class Span(NamedTuple):
    """From when to when."""

    begin_s: float
    end_s: float


class Bar(NamedTuple):
    """Something that was done in one lane; `episode` names it, or the first one of the group that it is for."""

    lane: int
    kind: Kind
    begin_s: float
    end_s: float
    episode: str


class Band(NamedTuple):
    """Lanes of one kind of work."""

    title: str
    lanes: int
    bars: Sequence[Bar]


class Strip(NamedTuple):
    """How much of something there was, on the average of each of equal stretches of time; `peak` is at one moment."""

    title: str
    kind: Kind
    mean_N: Floats
    peak: int


class Curve(NamedTuple):
    """Which share of something was done, as steps (second, share)."""

    title: str
    steps: Sequence[tuple[float, float]]
    done: int
    total: int


class Gap(NamedTuple):
    """Where a stretch without work was left out, and how long it was."""

    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked of the reward at once: one score, or those of a group.

    Attributes:
        episodes: whose scores.
        submitted_s, done_s: from when to when they were waited for.
        attempts: the calls that were made.
        is_unscored: there is no score of one of them.
    """

    episodes: Sequence[str]
    submitted_s: float
    done_s: float
    attempts: Sequence[Span]
    is_unscored: bool

    @property
    def waits(self) -> list[Span]:
        """When no call was being made, though the score was not there."""
        edges = [self.submitted_s, *(edge for span in self.attempts for edge in span)]
        found = [Span(begin, end) for begin, end in zip(edges[::2], [*edges[1::2], self.done_s], strict=False)]
        return [span for span in (found[:-1] if self.attempts else found) if span.end_s > span.begin_s]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is drawn.

    Attributes:
        length_s: from the beginning of the run to the last thing known of it.
        bands: lanes of bars; none where they would be too many.
        strips: how much was going on.
        curves: how much was done.
        gaps: what was left out.
        collecting: when episodes were under way, joined.
        calling: when calls were under way, joined.
        calls: all of them.
    """

    length_s: float
    bands: Sequence[Band]
    strips: Sequence[Strip]
    curves: Sequence[Curve]
    gaps: Sequence[Gap]
    collecting: Sequence[Span]
    calling: Sequence[Span]
    calls: Sequence[Call]

    @property
    def overlap_s(self) -> float:
        """For how long both went on at once."""
        return length_of(crossed(self.collecting, self.calling))

    @property
    def alone_s(self) -> float | None:
        """For how long calls went on after the last episode had stopped; None where one of the two is not known."""
        if not self.collecting or not self.calls:
            return None
        return max(0.0, max(call.done_s for call in self.calls) - self.collecting[-1].end_s)


def timeline_of(run: RunFacts) -> Timeline | None:
    """The timeline of a run; None where its files tell no times."""
    episodes = _timed(run.episodes)
    calls = calls_of(run.episodes)
    if not episodes and not calls:
        return None
    axis = _Axis([*(span for _, span in episodes), *(Span(call.submitted_s, call.done_s) for call in calls)])
    works = [_Work(facts.row.rollout_id, axis.span(span), bool(facts.row.error_class)) for facts, span in episodes]
    calls = [axis.call(call) for call in calls]
    return Timeline(
        length_s=axis.length_s,
        bands=_bands(works, calls),
        strips=_strips(works, calls, axis.length_s),
        curves=_curves(run.episodes, axis),
        gaps=axis.gaps,
        collecting=joined(work.span for work in works),
        calling=joined(span for call in calls for span in call.attempts),
        calls=calls,
    )


def _timed(episodes: Iterable[EpisodeOutline]) -> list[tuple[EpisodeOutline, Span]]:
    pairs = ((facts, facts.begin_s, facts.end_s) for facts in episodes)
    return [(facts, Span(begin, end)) for facts, begin, end in pairs if begin is not None and end is not None]


def calls_of(episodes: Iterable[EpisodeOutline]) -> list[Call]:
    """What was asked of the reward, in the order in which it was; a call for a whole group is one."""
    units: dict[tuple[str, float], list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        if facts.score is not None and facts.score.submitted_s is not None and facts.score.done_s is not None:
            units[facts.score.unit, facts.score.submitted_s].append(facts)
    return sorted((_call(unit) for unit in units.values()), key=lambda call: call.submitted_s)


def _call(unit: Sequence[EpisodeOutline]) -> Call:
    scores = [facts.score for facts in unit if facts.score is not None]
    submitted = scores[0].submitted_s or 0.0
    spans = [Span(*span) for span in sorted(scores[0].attempts)]
    ends = [score.done_s or 0.0 for score in scores]
    return Call(
        episodes=[facts.row.rollout_id for facts in unit],
        submitted_s=submitted,
        done_s=max([*ends, submitted, *(span.end_s for span in spans)]),
        attempts=spans,
        is_unscored=any(facts.row.score is None for facts in unit),
    )


class _Work(NamedTuple):
    """An episode under way."""

    episode: str
    span: Span
    is_broken: bool


class _Axis:
    """Leaves out the stretches in which nothing was done."""

    def __init__(self, spans: Sequence[Span]) -> None:
        busy = joined(spans)
        longest = max(_SHORTEST_GAP_S, _GAP_SHARE * length_of(busy))
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

    def call(self, call: Call) -> Call:
        whole = self.span(Span(call.submitted_s, call.done_s))
        attempts = [self.span(span) for span in call.attempts]
        return Call(call.episodes, whole.begin_s, whole.end_s, attempts, call.is_unscored)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The time that spans cover, each moment once, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin_s <= found[-1].end_s:
            found[-1] = Span(found[-1].begin_s, max(found[-1].end_s, span.end_s))
        else:
            found.append(span)
    return found


def crossed(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """The time that two joined lists of spans both cover."""
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


def length_of(spans: Iterable[Span]) -> float:
    """The seconds of spans together."""
    return sum(span.end_s - span.begin_s for span in spans)


def _bands(works: Sequence[_Work], calls: Sequence[Call]) -> list[Band]:
    """The lanes, where they can be told apart; else of calls those that were being made, else none."""
    if len(works) + sum(max(1, len(call.attempts)) for call in calls) > MOST_BARS:
        return []
    collecting = Band("Collecting", *_placed([(work.span, [_bar_of(work)]) for work in works]))
    scoring = Band("Scoring", *_placed([(Span(c.submitted_s, c.done_s), _bars_of(c)) for c in calls]))
    if scoring.lanes > _MOST_LANES:
        made = [(Span(bar.begin_s, bar.end_s), [bar]) for c in calls for bar in _bars_of(c) if bar.kind != "waiting"]
        scoring = Band("Scoring, without what waits", *_placed(made))
    return [band for band in (collecting, scoring) if band.bars and band.lanes <= _MOST_LANES]


def _bar_of(work: _Work) -> Bar:
    return Bar(0, "broken" if work.is_broken else "episode", *work.span, work.episode)


def _bars_of(call: Call) -> list[Bar]:
    name = call.episodes[0]
    kinds: list[Kind] = ["retried" for _ in call.attempts]
    kinds[-1:] = ["unscored" if call.is_unscored else "call"]
    waits = [Bar(0, "waiting", *span, name) for span in call.waits]
    return waits + [Bar(0, kind, *span, name) for kind, span in zip(kinds, call.attempts, strict=False)]


def _placed(items: Sequence[tuple[Span, Sequence[Bar]]]) -> tuple[int, list[Bar]]:
    """Each item in the first lane that is free when it begins: how many lanes that takes, and all bars."""
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


def _strips(works: Sequence[_Work], calls: Sequence[Call], length_s: float) -> list[Strip]:
    edges = np.linspace(0.0, length_s or 1.0, _BINS + 1)
    kinds: list[tuple[str, Kind, list[Span]]] = [
        ("Episodes under way", "episode", [work.span for work in works]),
        ("Scores waiting", "waiting", [span for call in calls for span in call.waits]),
        ("Calls in flight", "call", [span for call in calls for span in call.attempts]),
    ]
    asked = bool(calls)
    return [
        Strip(title, kind, occupancy(spans, edges), most_at_once(spans))
        for title, kind, spans in kinds
        if spans or (asked and kind != "episode")
    ]


def occupancy(spans: Sequence[Span], edges: Floats) -> Floats:
    """(N,) how many spans cover the stretches between `edges` (N + 1,), on the average over each of them."""
    begun, ended = (_reached_s(side, edges) for side in zip(*spans, strict=True)) if spans else (edges, edges)
    return np.asarray(np.diff(begun - ended) / np.diff(edges), dtype=np.float64)


def _reached_s(moments: Sequence[float], edges: Floats) -> Floats:
    """(N + 1,) how long ago at each edge the moments before it were, all of them together."""
    ordered = np.sort(np.array(moments))
    before = np.searchsorted(ordered, edges)
    return np.asarray(before * edges - np.concatenate([[0.0], np.cumsum(ordered)])[before], dtype=np.float64)


def most_at_once(spans: Sequence[Span]) -> int:
    """How many of them there were at most at one moment; where one ends as another begins they are not two."""
    changes = sorted([(span.begin_s, 1) for span in spans] + [(span.end_s, -1) for span in spans])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def _curves(episodes: Sequence[EpisodeOutline], axis: _Axis) -> list[Curve]:
    """How many episodes had stopped, had their score, and were of a group whose last score was there."""
    stopped = [facts.end_s for facts in episodes if facts.end_s is not None]
    scored = [facts.score.done_s for facts in episodes if facts.score is not None and facts.score.done_s is not None]
    complete, groups = groups_complete(episodes)
    expected = sum(not facts.row.error_class for facts in episodes)
    curves = [
        _curve("Episodes stopped", stopped, len(episodes), axis),
        _curve("Scores there", scored, expected, axis),
        _curve("Groups complete", complete, groups, axis),
    ]
    return [curve for curve in curves if curve.steps]


def _curve(title: str, moments: Iterable[float], total: int, axis: _Axis) -> Curve:
    moments_s = np.sort(np.array([axis.at(moment) for moment in moments]))
    kept = np.unique(np.linspace(0, len(moments_s) - 1, min(_BINS, len(moments_s))).round().astype(int))
    steps = [(float(moments_s[place]), (int(place) + 1) / max(total, 1)) for place in kept]
    return Curve(title, steps, len(moments_s), total)


def groups_complete(episodes: Iterable[EpisodeOutline]) -> tuple[list[float], int]:
    """When each group was complete whose times are known, and how many groups there are."""
    groups: dict[str, list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        groups[facts.group_id].append(facts)
    moments = (max(map(_settled_s, group), default=None) for group in groups.values())
    return [moment for moment in moments if moment is not None and moment != float("inf")], len(groups)


def _settled_s(facts: EpisodeOutline) -> float:
    """When nothing more was to come of an episode; infinity where that is not known."""
    if facts.row.error_class is not None and facts.end_s is not None:
        return facts.end_s
    if facts.score is None or facts.score.done_s is None:
        return float("inf")
    return facts.score.done_s
