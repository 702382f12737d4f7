"""Statistics of a reward agent. They are collected in constant memory."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reward_kit.errors import FailureClass
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rewards.judge_prompts import METRIC

PREFIX = "reward_agent/"
_COST = re.compile(r"\bcost_usd=(\d{1,12}(?:\.\d{1,12})?)(?=\s|$)")
_KEPT_LATENCIES = 4096


def usage_cost(usage: str) -> float | None:
    """Return the cost in US dollars that a usage record contains, or None if the price is unknown."""
    cost = _COST.search(usage)
    return float(cost[1]) if cost is not None else None


@dataclass(frozen=True, slots=True)
class AgentStats:
    """Statistics since the agent was created.

    If they are read from a different thread, they may be slightly inconsistent.

    Attributes:
        submitted: the number of submitted requests.
        pending: the number of requests without a result.
        waiting: the number of pending requests whose call is not in flight. This is the length of the queue.
        in_flight: the number of calls in flight. A call for a group counts as one call.
        done: the number of results in complete groups, including failures.
        failed: the number of unscored results for each failure class.
        groups_complete: the number of complete groups, whether delivered or not.
        groups_outstanding: the number of incomplete groups. It is 0 after the agent is closed.
        retries: the number of calls that were repeated.
        cached: the number of calls that were saved because an identical call was cached or in flight.
        latency_p50_s, latency_p90_s, latency_p99_s: percentiles of the duration of an attempt in seconds. Cancelled
            attempts are excluded. They are None before the first attempt has ended.
        cost_usd: the cost that the scores report in US dollars, including retried attempts. None if no score reports a
            cost.
        unpriced: the number of usage records without a known price. If it is positive, `cost_usd` is a lower bound.
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
        """Return the known statistics as a flat dictionary, for example for TensorBoard."""
        known = {name: getattr(self, name) for name in self.__slots__ if name != "failed"}
        known |= {f"failed/{name}": count for name, count in sorted(self.failed.items())}
        known["failed"] = sum(self.failed.values())
        return {PREFIX + name: float(value) for name, value in known.items() if value is not None}


class Latencies:
    """Percentiles of durations. They are exact for the first few thousand durations. After that, they are estimated.

    The estimate uses a uniform sample that is drawn by reservoir sampling (Vitter 1985, algorithm R).
    """

    def __init__(self, size: int = _KEPT_LATENCIES, seed: int = 0) -> None:
        self._size, self._draw = size, random.Random(seed).random
        self._kept: list[float] = []
        self._count = 0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._count += 1
        if self._count <= self._size:
            self._kept.append(seconds)
        elif (index := int(self._draw() * self._count)) < self._size:
            self._kept[index] = seconds

    def percentiles(self, wanted: Sequence[float]) -> list[float | None]:
        """Return the percentiles in seconds. If there are no durations, each of them is None."""
        if not self._kept:
            return [None] * len(wanted)
        return [float(value) for value in np.percentile(self._kept.copy(), wanted)]


@dataclass(slots=True)
class Tally:
    """The counters from which `AgentStats` are computed."""

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

    def begin_call(self, requests: int) -> None:
        """Count a started call and its requests."""
        self.in_flight += 1
        self.requests_in_flight += requests

    def complete_group(self, results: Iterable[Scored | None]) -> None:
        """Count a complete group and its results."""
        self.groups_complete += 1
        self.groups_outstanding -= 1
        for result in results:
            self.done += 1
            if result is not None and result.failure is not None:
                self.failed[result.failure.failure_class] += 1

    def spend(self, scored: Iterable[Scored]) -> None:
        """Add the cost that the results of a call report."""
        # Rollouts that were judged together all record the cost of the whole call.
        usages = (one.result.metrics.get(METRIC) for one in scored if one.result is not None)
        for usage in dict.fromkeys(metric.reason for metric in usages if metric is not None):
            if (cost := usage_cost(usage)) is None:
                self.unpriced += 1
            else:
                self.cost_usd = (self.cost_usd or 0.0) + cost

    def stats(self, pending: int) -> AgentStats:
        """Return the statistics. `pending` is the number of requests without a result."""
        p50, p90, p99 = self.latencies.percentiles((50, 90, 99))
        counters = {name: getattr(self, name) for name in AgentStats.__slots__ if hasattr(self, name)}
        return AgentStats(
            **{**counters, "failed": dict(self.failed)},
            pending=pending,
            # The call of a cancelled ticket may continue for equal calls.
            waiting=max(0, pending - self.requests_in_flight),
            latency_p50_s=p50,
            latency_p90_s=p90,
            latency_p99_s=p99,
        )
