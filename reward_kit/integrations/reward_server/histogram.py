"""Durations in buckets, as Prometheus counts them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Labels = Mapping[str, str]


class Histogram:
    """Durations in buckets.

    Attributes:
        count: how many.
        sum: of all, in seconds.
    """

    def __init__(self) -> None:
        self.count, self.sum = 0, 0.0
        self._buckets = [0] * (len(_BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.sum += seconds
        self._buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def samples(self, labels: Labels) -> Iterator[tuple[str, Labels, float]]:
        """As Prometheus has them: each bucket with all that are smaller."""
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), itertools.accumulate(self._buckets), strict=True):
            yield "_bucket", {**labels, "le": bound}, count
        yield "_sum", labels, self.sum
        yield "_count", labels, self.count
