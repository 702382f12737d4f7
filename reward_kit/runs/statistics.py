"""How sure a figure is: intervals that respect samples with several rollouts, and pass@k and pass^k without bias.

Everything here is a pure function. Unscored values (None) are left out and counted; they are never zeros.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

_SERIES_FROM_DF = 10_000.0
_TINY = 1e-300
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
    _check_probability(confidence, "confidence")
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


@functools.lru_cache(maxsize=4_096)
def t_quantile(p: float, df: float) -> float:
    """The value that Student's t with `df` degrees of freedom stays below with probability `p`.

    By bisection of the distribution function, which is P(T <= t) = 1 − I_x(df/2, 1/2)/2 for t >= 0 and
    x = df/(df + t²), with I the regularised incomplete beta function (Abramowitz and Stegun 26.7.1). From 10,000
    degrees of freedom on by the expansion 26.7.5 about the normal quantile, whose error is then below 1e-9.

    Raises:
        ValueError: `p` is not in (0, 1) or `df` is not positive.
    """
    _check_probability(p, "p")
    if not df > 0:
        raise ValueError(f"degrees of freedom are positive, got {df}")
    if p < 0.5:
        return -_upper_quantile(p, df)
    return 0.0 if p == 0.5 else _upper_quantile(1.0 - p, df)


def _upper_quantile(tail: float, df: float) -> float:
    """The t > 0 with P(T > t) = `tail`."""
    if df >= _SERIES_FROM_DF:
        z = -NormalDist().inv_cdf(tail)
        return z + (z**3 + z) / (4.0 * df) + (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * df * df)
    low, high = 0.0, 1.0
    while _t_tail(high, df) > tail:
        low, high = high, 2.0 * high
    while True:
        middle = (low + high) / 2.0
        if not low < middle < high:
            return middle
        low, high = (middle, high) if _t_tail(middle, df) > tail else (low, middle)


def _t_tail(t: float, df: float) -> float:
    """P(T > t) for t > 0."""
    return 0.5 * incomplete_beta(df / 2.0, 0.5, df / (df + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b) (Abramowitz and Stegun 26.5.8), by its continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1.0 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by the modified method of Lentz."""
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + term * d)
            c = _away_from_zero(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-16:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _check_probability(value: float, name: str) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} lies between 0 and 1, got {value}")


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of `k` attempts passes: 1 − C(n−c, k)/C(n, k).

    Unbiased, from `c` passes in `n` attempts (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    eq. 1).

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n.
    """
    _check_counts(n, c, k)
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def pass_hat_k(n: int, c: int, k: int) -> float:
    """pass^k, the probability that all of `k` attempts pass: C(c, k)/C(n, k).

    Unbiased, from `c` passes in `n` attempts (Yao et al. 2024, "τ-bench", section 3).

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"{c} passes of {n} attempts cannot be")
    if not 1 <= k <= n:
        raise ValueError(f"k is between 1 and the {n} attempts, got {k}")


class SampleMean(NamedTuple):
    """A mean over samples: None where no sample counts; `left_out` had too few attempts."""

    mean: float | None
    n_samples: int
    left_out: int


def mean_pass_at_k(attempts: Iterable[tuple[int, int]], k: int) -> SampleMean:
    """The mean of `pass_at_k` over samples, each given as (scored attempts, passes)."""
    return _mean_over_samples(pass_at_k, attempts, k)


def mean_pass_hat_k(attempts: Iterable[tuple[int, int]], k: int) -> SampleMean:
    """The mean of `pass_hat_k` over samples, each given as (scored attempts, passes)."""
    return _mean_over_samples(pass_hat_k, attempts, k)


def _mean_over_samples(
    figure: Callable[[int, int, int], float], attempts: Iterable[tuple[int, int]], k: int
) -> SampleMean:
    counts = list(attempts)
    values = [figure(n, c, k) for n, c in counts if n >= k]
    mean = mean_of(values) if values else None
    return SampleMean(mean, len(values), len(counts) - len(values))
