"""A mean and how far it may be off, where several rollouts of one sample share their luck.

Everything here is a pure function. Unscored values (None) are left out and counted; they are never zeros.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from reward_kit.runs.statistics.student import check_probability, t_quantile

_SQUARABLE = 1e100  # sums of squares of many such numbers are finite


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and how far it may be off.

    Attributes:
        mean: of the scored values.
        low: the lower bound; None where fewer than two samples leave it open.
        high: the upper bound; None as `low`.
        standard_error: of the mean, robust to clusters; None as `low`.
        n: the scored values.
        n_clusters: the samples that have a scored value.
        n_unscored: the values that were left out.
    """

    mean: float
    low: float | None
    high: float | None
    standard_error: float | None
    n: int
    n_clusters: int
    n_unscored: int = 0

    def clipped(self, lowest: float, highest: float) -> Interval:
        """The interval without what cannot be, for a mean that lies between `lowest` and `highest`."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(self.low, lowest), high=min(self.high, highest))

    def times(self, factor: float) -> Interval:
        """The interval of values that are so many times as large; where a bound is beyond every float, without one."""
        if self.low is None or self.high is None or self.standard_error is None:
            return replace(self, mean=self.mean * factor)
        low, high, error = self.low * factor, self.high * factor, self.standard_error * factor
        if not all(map(math.isfinite, (low, high, error))):
            return replace(self, mean=self.mean * factor, low=None, high=None, standard_error=None)
        return replace(self, mean=self.mean * factor, low=low, high=high, standard_error=error)


def mean_of(values: Sequence[float] | np.ndarray) -> float:
    """The mean, also where the sum would be beyond every float."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def mean_interval(scores: Sequence[float | None], clusters: Sequence[Hashable], confidence: float = 0.95) -> Interval:
    """The mean of scores whose errors are shared within clusters, with its confidence interval.

    With N scores x_i in G clusters and mean m, the standard error is
    sqrt(G/(G−1) · Σ_g (Σ_{i in g} (x_i − m))²) / N, and the interval m ± t · SE with Student's t for G−1 degrees of
    freedom (Liang and Zeger 1986; Miller 2024, "Adding Error Bars to Evals", eq. 4). Where all scores are 0 or 1 and
    SE is 0, five of five say less than certainty: the bounds are then Wilson's (1927) for G trials.

    Args:
        scores: (N,) None where unscored.
        clusters: (N,) the sample of each score.
        confidence: the probability that the interval covers the true mean.

    Raises:
        ValueError: the lengths differ, nothing is scored, a score is not finite, or `confidence` is not in (0, 1).
    """
    check_probability(confidence, "confidence")
    pairs = [(s, c) for s, c in zip(scores, clusters, strict=True) if s is not None]
    if not pairs:
        raise ValueError("no value is scored, so there is no mean")
    values = np.array([score for score, _ in pairs], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a score is not finite")
    if (largest := float(np.abs(values).max())) > _SQUARABLE:
        # To at most a half, since 0 and 1 have bounds of their own.
        scaled = mean_interval([None if s is None else s / largest / 2.0 for s in scores], clusters, confidence)
        return scaled.times(2.0).times(largest)
    mean, sums = _mean_and_cluster_sums(values, [cluster for _, cluster in pairs])
    counts = {"n": len(values), "n_clusters": len(sums), "n_unscored": len(scores) - len(values)}
    if len(sums) < 2:
        return Interval(mean, None, None, None, **counts)
    error = math.sqrt(len(sums) / (len(sums) - 1) * math.fsum(s * s for s in sums)) / len(values)
    if error < 1e-12 and np.isin(values, (0.0, 1.0)).all():
        return Interval(mean, *wilson_bounds(mean, len(sums), confidence), error, **counts)
    half = t_quantile((1.0 + confidence) / 2.0, len(sums) - 1) * error
    return Interval(mean, mean - half, mean + half, error, **counts)


def _mean_and_cluster_sums(values: np.ndarray, clusters: Sequence[Hashable]) -> tuple[float, list[float]]:
    """The mean, and the sum of the deviations from it in each cluster; exactly 0 where all values are equal."""
    if (values == values[0]).all():
        return float(values[0]), [0.0] * len(set(clusters))
    mean = mean_of(values)
    deviations: dict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values.tolist(), clusters, strict=True):
        deviations[cluster].append(value - mean)
    return mean, [math.fsum(items) for items in deviations.values()]


def wilson_bounds(share: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for `share` of `trials` (Wilson 1927, eq. 6), within [0, 1].

    (p + z²/2n ± z · sqrt(p(1−p)/n + z²/4n²)) / (1 + z²/n), with z the normal quantile.
    """
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    centre = share + z * z / (2.0 * trials)
    half = z * math.sqrt(share * (1.0 - share) / trials + z * z / (4.0 * trials * trials))
    scale = 1.0 + z * z / trials
    low = 0.0 if share == 0.0 else (centre - half) / scale
    high = 1.0 if share == 1.0 else (centre + half) / scale
    return low, high
