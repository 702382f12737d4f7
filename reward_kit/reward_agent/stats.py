"""What a reward agent has done and is doing, in figures; its memory does not grow with what it counts."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reward_kit.errors import FailureClass
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rewards.judge_questions import METRIC

PREFIX = "reward_agent/"
_COST = re.compile(r"\bcost_usd=(\d{1,12}(?:\.\d{1,12})?)(?=\s|$)")
_KEPT_LATENCIES = 4096


def cost_of(usage: str) -> float | None:
    """The dollars that a judge's usage tells of; None where its price is not known."""
    told = _COST.search(usage)
    return float(told[1]) if told is not None else None


@dataclass(frozen=True, slots=True)
class AgentStats:
    """Figures since the agent was made. Each is right by itself; read in another thread, two may be of two moments.

    Attributes:
        submitted: requests.
        pending: of them, those without a result.
        waiting: of those, the ones for which no call is being made: the depth of the queue.
        in_flight: calls being made; that of a group is one.
        done: results of complete groups, scores and failures.
        failed: of those, the unscored ones by their class.
        groups_complete: groups that can be handed out, or were.
        groups_outstanding: groups that are not complete; none once the agent was left.
        retries: calls made again.
        cached: calls not made, since the answer of an equal one was known or on its way.
        latency_p50_s, latency_p90_s, latency_p99_s: seconds from the begin of a call to its end, each attempt by
            itself; what a ticket gave up does not count. None before the first one ended.
        cost_usd: dollars that scores say they took, also those of attempts that were made again; None where none does.
        unpriced: what was taken at a price that is not known: the cost is at least `cost_usd`.
    """

    submitted: int
    pending: int
    waiting: int
    in_flight: int
    done: int
    failed: Mapping[FailureClass, int]
    groups_complete: int
    groups_outstanding: int
    retries: int
    cached: int
    latency_p50_s: float | None
    latency_p90_s: float | None
    latency_p99_s: float | None
    cost_usd: float | None
    unpriced: int

    def metrics(self) -> dict[str, float]:
        """The figures under flat names, as for TensorBoard; what is not known is left out, which is not zero."""
        known = {name: getattr(self, name) for name in self.__slots__ if name != "failed"}
        known |= {f"failed/{name}": count for name, count in sorted(self.failed.items())}
        known["failed"] = sum(self.failed.values())
        return {PREFIX + name: float(value) for name, value in known.items() if value is not None}


class Latencies:
    """Percentiles of any number of durations: exact of the first few thousand, of a uniform sample beyond that.

    The sample is drawn by reservoir sampling (Vitter 1985, algorithm R).

    Args:
        size: how many are kept.
        seed: of the draw.
    """

    def __init__(self, size: int = _KEPT_LATENCIES, seed: int = 0) -> None:
        self._size, self._draw = size, random.Random(seed).random
        self._kept: list[float] = []
        self._count = 0

    def add(self, seconds: float) -> None:
        """One more duration."""
        self._count += 1
        if self._count <= self._size:
            self._kept.append(seconds)
        elif (place := int(self._draw() * self._count)) < self._size:
            self._kept[place] = seconds

    def percentiles(self, wanted: Sequence[float]) -> list[float | None]:
        """Each in seconds; None where nothing was added."""
        if not self._kept:
            return [None] * len(wanted)
        return [float(value) for value in np.percentile(self._kept.copy(), wanted)]


@dataclass(slots=True)
class Tally:
    """What an agent and its caller count; `stats` reads it."""

    submitted: int = 0
    groups_complete: int = 0
    groups_outstanding: int = 0
    done: int = 0
    failed: Counter[FailureClass] = field(default_factory=Counter)
    in_flight: int = 0
    requests_in_flight: int = 0
    retries: int = 0
    cached: int = 0
    latencies: Latencies = field(default_factory=Latencies)
    cost_usd: float | None = None
    unpriced: int = 0

    def submit(self, requests: int, groups: int) -> None:
        """A batch was submitted."""
        self.submitted += requests
        self.groups_outstanding += groups

    def begin_call(self, requests: int) -> None:
        """A call is being made for so many requests."""
        self.in_flight += 1
        self.requests_in_flight += requests

    def end_call(self, requests: int) -> None:
        """A call is over, whatever came of it."""
        self.in_flight -= 1
        self.requests_in_flight -= requests

    def complete_group(self, results: Iterable[Scored | None]) -> None:
        """A group has its last word."""
        self.groups_complete += 1
        self.groups_outstanding -= 1
        for result in results:
            self.done += 1
            if result is not None and result.failure is not None:
                self.failed[result.failure.failure_class] += 1

    def spend(self, scored: Iterable[Scored]) -> None:
        """Add what the results of one call say that they took."""
        # Rollouts of a group that were judged together all say what that took, which is taken once.
        usages = (one.result.metrics.get(METRIC) for one in scored if one.result is not None)
        for usage in dict.fromkeys(metric.reason for metric in usages if metric is not None):
            if (cost := cost_of(usage)) is None:
                self.unpriced += 1
            else:
                self.cost_usd = (self.cost_usd or 0.0) + cost

    def stats(self, pending: int) -> AgentStats:
        """The figures as they are, with so many requests that have no result."""
        p50, p90, p99 = self.latencies.percentiles((50, 90, 99))
        return AgentStats(
            submitted=self.submitted,
            pending=pending,
            # A call for a ticket that was given up may be made for those of equal calls alone.
            waiting=max(0, pending - self.requests_in_flight),
            in_flight=self.in_flight,
            done=self.done,
            failed=dict(self.failed),
            groups_complete=self.groups_complete,
            groups_outstanding=self.groups_outstanding,
            retries=self.retries,
            cached=self.cached,
            latency_p50_s=p50,
            latency_p90_s=p90,
            latency_p99_s=p99,
            cost_usd=self.cost_usd,
            unpriced=self.unpriced,
        )
