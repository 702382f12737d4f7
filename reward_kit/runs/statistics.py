"""Statistics of scores: clustered intervals, unbiased pass@k, bootstrap, paired comparisons and their corrections.

All functions are pure. Unscored values (None) are excluded and counted, but never treated as zeros. Student's t
distribution is implemented here, because SciPy would be a large dependency for only two functions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Method = Literal["bca", "percentile"]
IntervalMethod = Literal["t", "wilson", "gaffke"]
_SQUARABLE = 1e100  # The sum of squares of many numbers up to this limit is finite
_ALIKE = 1e-12
_DRAWN_AT_ONCE = 200_000
_NORMAL = NormalDist()

# Means and their intervals


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval.

    The bounds are `None` if there are fewer than two samples. In `bounded_interval`, they are also `None` if all scores
    are equal and outside [0, 1].

    Attributes:
        mean: the mean of the scored values.
        low: the lower bound, or None.
        high: the upper bound, or None.
        standard_error: the cluster-robust standard error of the mean; None if there are fewer than two samples.
        n: the number of scored values.
        n_clusters: the number of samples that have a scored value.
        n_unscored: the number of unscored values, which are excluded.
        method: how the bounds were computed: "t" with the clustered standard error, "wilson", or "gaffke".
    """

    mean: float
    low: float | None
    high: float | None
    standard_error: float | None
    n: int
    n_clusters: int
    n_unscored: int = 0
    method: IntervalMethod = "t"

    def clipped(self, lowest: float, highest: float) -> Interval:
        """Clip the bounds to the range of possible means."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(self.low, lowest), high=min(self.high, highest))

    def scaled(self, factor: float) -> Interval:
        """Return the interval scaled by `factor`. The bounds are `None` if one of them overflows."""
        if self.low is None or self.high is None or self.standard_error is None:
            return replace(self, mean=self.mean * factor)
        low, high, error = self.low * factor, self.high * factor, self.standard_error * factor
        if not all(map(math.isfinite, (low, high, error))):
            return replace(self, mean=self.mean * factor, low=None, high=None, standard_error=None)
        return replace(self, mean=self.mean * factor, low=low, high=high, standard_error=error)


def safe_mean(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean. The sum is computed in a way that cannot overflow."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def mean_interval(scores: Sequence[float | None], clusters: Sequence[Hashable], confidence: float = 0.95) -> Interval:
    """Return the mean of scores and its confidence interval. Errors may be correlated within clusters.

    For N scores x_i in G clusters with mean m, the standard error is sqrt(G/(G−1) · Σ_g (Σ_{i in g} (x_i − m))²) / N,
    and the interval is m ± t · SE with Student's t for G−1 degrees of freedom (Liang and Zeger 1986; Miller 2024,
    "Adding Error Bars to Evals", eq. 4). If all scores are 0 or 1 and SE is 0, the bounds are Wilson's (1927) for G
    trials.

    Args:
        scores: (N,) the scores; None if unscored.
        clusters: (N,) the sample of each score.
        confidence: the probability that the interval covers the true mean.

    Raises:
        ValueError: the lengths differ, nothing is scored, a score is not finite, or `confidence` is not in (0, 1).
    """
    check_probability(confidence, "confidence")
    pairs = [(s, c) for s, c in zip(scores, clusters, strict=True) if s is not None]
    if not pairs:
        raise ValueError("no value is scored, so the mean is undefined")
    values = np.array([score for score, _ in pairs], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a score is not finite")
    if (largest := float(np.abs(values).max())) > _SQUARABLE:
        # Scale values to at most 0.5, since 0 and 1 get special bounds.
        scaled = mean_interval([None if s is None else s / largest / 2.0 for s in scores], clusters, confidence)
        return scaled.scaled(2.0).scaled(largest)
    is_constant = bool((values == values[0]).all())
    mean = float(values[0]) if is_constant else safe_mean(values)
    deviations: dict[Hashable, list[float]] = defaultdict(list)
    for value, (_, cluster) in zip(values.tolist(), pairs, strict=True):
        deviations[cluster].append(0.0 if is_constant else value - mean)
    sums = [math.fsum(items) for items in deviations.values()]
    counts: dict[str, Any] = {"n": len(values), "n_clusters": len(sums), "n_unscored": len(scores) - len(values)}
    if len(sums) < 2:
        return Interval(mean, None, None, None, **counts)
    error = math.sqrt(len(sums) / (len(sums) - 1) * math.fsum(s * s for s in sums)) / len(values)
    if error < 1e-12 and np.isin(values, (0.0, 1.0)).all():
        return Interval(mean, *wilson_bounds(mean, len(sums), confidence), error, **counts, method="wilson")
    half = t_quantile((1.0 + confidence) / 2.0, len(sums) - 1) * error
    return Interval(mean, mean - half, mean + half, error, **counts)


_FEW_CLUSTERS = 100
_LOG_TIMES = np.arange(-16.0, 14.0, 0.1)
_BISECTIONS = 30


def bounded_interval(
    scores: Sequence[float | None], clusters: Sequence[Hashable], confidence: float = 0.95
) -> Interval:
    """Return the mean of scores and an interval that is also valid for few samples if all scores are in [0, 1].

    Student's t interval is too narrow for few skewed scores, and has no width if all scores are equal. For up to 100
    clusters, Gaffke's bounds are therefore used (2005, "Three test statistics for a nonparametric one-sided hypothesis
    on the mean of a nonnegative variable"; Learned-Miller and Thomas 2019, arXiv:1905.06208): add a cluster with the
    score 1, weight all clusters by independent exponential variables, and take the upper quantile of the weighted mean.
    For the lower bound, the added score is 0. If all scores are 0 or 1 and each sample has one rollout, these are the
    exact bounds of Clopper and Pearson (1934). For more clusters, the interval of `mean_interval` is used and clipped
    to [0, 1].

    If a score is outside [0, 1], the interval of `mean_interval` is used, without bounds if all scores are equal.

    Args:
        scores: (N,) the scores; None if unscored.
        clusters: (N,) the sample of each score.
        confidence: the probability that the interval covers the true mean.

    Raises:
        ValueError: see `mean_interval`.
    """
    interval = mean_interval(scores, clusters, confidence)
    if interval.standard_error is None:
        return interval
    pairs = [(score, cluster) for score, cluster in zip(scores, clusters, strict=True) if score is not None]
    if not all(0.0 <= score <= 1.0 for score, _ in pairs):
        is_equal = all(score == pairs[0][0] for score, _ in pairs)
        return replace(interval, low=None, high=None) if is_equal else interval
    if interval.n_clusters > _FEW_CLUSTERS:
        return interval.clipped(0.0, 1.0)
    grouped: dict[Hashable, list[float]] = defaultdict(list)
    for score, cluster in pairs:
        grouped[cluster].append(score)
    mean_G = np.array([safe_mean(items) for items in grouped.values()])
    size_G = np.array([float(len(items)) for items in grouped.values()])
    tail = (1.0 - confidence) / 2.0
    low, high = 1.0 - _gaffke_upper(1.0 - mean_G, size_G, tail), _gaffke_upper(mean_G, size_G, tail)
    return replace(interval, low=min(low, interval.mean), high=max(high, interval.mean), method="gaffke")


def _gaffke_upper(mean_G: Floats, size_G: Floats, tail: float) -> float:
    """Return q with P(Σ w_g·(m_g − q) <= 0) = 1 − `tail`, found by bisection over the distinct clusters.

    w_g is exponential with mean n_g. One of the clusters is an added cluster with score 1 and mean size.
    """
    added = np.stack([np.append(mean_G, 1.0), np.append(size_G, size_G.mean())])
    (mean_D, size_D), count_D = np.unique(added, axis=1, return_counts=True)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if _probability_below_zero(size_D * (mean_D - middle), count_D) < 1.0 - tail:
            low = middle
        else:
            high = middle
    return high


def _probability_below_zero(weight_D: Floats, count_D: Integers) -> float:
    """Return P(S <= 0) for a weighted sum S of independent standard exponential variables.

    The characteristic function Π (1 − i·w_d·t)^(−c_d) is inverted (Gil-Pelaez 1951; Imhof 1961, eq. 3.2) with the
    trapezoidal rule over log t. For at least three variables, the error is below 1e-6.
    """
    scale = math.sqrt(float((count_D * weight_D**2).sum()))
    if scale < _TINY:
        return 1.0
    product_TD = np.exp(_LOG_TIMES)[:, None] / scale * weight_D
    angle_T = np.arctan(product_TD) @ count_D
    log_size_T = 0.5 * np.log1p(product_TD**2) @ count_D
    step = float(_LOG_TIMES[1] - _LOG_TIMES[0])
    return 0.5 - step / math.pi * float((np.sin(angle_T) * np.exp(-log_size_T)).sum())


def wilson_bounds(share: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval for `share` of `trials` (Wilson 1927, eq. 6), within [0, 1].

    The bounds are (p + z²/2n ± z · sqrt(p(1−p)/n + z²/4n²)) / (1 + z²/n), where z is the normal quantile.
    """
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    center = share + z * z / (2.0 * trials)
    half = z * math.sqrt(share * (1.0 - share) / trials + z * z / (4.0 * trials * trials))
    scale = 1.0 + z * z / trials
    low = 0.0 if share == 0.0 else (center - half) / scale
    high = 1.0 if share == 1.0 else (center + half) / scale
    return low, high


def fisher_test(passed_a: int, n_a: int, passed_b: int, n_b: int) -> float:
    """Return the two-sided p-value of Fisher's exact test for two shares (Fisher 1922).

    It sums the hypergeometric probabilities of all tables with the same margins that are not more likely than this one.
    """
    passed = passed_a + passed_b
    weights = [
        math.comb(n_a, k) * math.comb(n_b, passed - k) for k in range(max(0, passed - n_b), min(n_a, passed) + 1)
    ]
    own = math.comb(n_a, passed_a) * math.comb(n_b, passed_b)
    return sum(weight for weight in weights if weight <= own) / sum(weights)


# Student's t

_SERIES_FROM_DF = 10_000.0
_TINY = 1e-300
_LARGE = 300.0


@functools.lru_cache(maxsize=4_096)
def t_quantile(p: float, df: float) -> float:
    """Return the `p` quantile of Student's t distribution with `df` degrees of freedom.

    The quantile is computed by bisection of the distribution function, P(T <= t) = 1 − I_x(df/2, 1/2)/2 for t >= 0 and
    x = df/(df + t²), where I is the regularized incomplete beta function (Abramowitz and Stegun 26.7.1). From 10,000
    degrees of freedom, the expansion 26.7.5 about the normal quantile is used; its error is then below 1e-12.

    Raises:
        ValueError: `p` is not in (0, 1) or `df` is not positive.
    """
    check_probability(p, "p")
    if not df > 0:
        raise ValueError(f"df must be positive, got {df}")
    if p < 0.5:
        return -_upper_quantile(p, df)
    return 0.0 if p == 0.5 else _upper_quantile(1.0 - p, df)


def _upper_quantile(tail: float, df: float) -> float:
    """Return the t > 0 for which P(T > t) = `tail`."""
    if df >= _SERIES_FROM_DF:
        z = -NormalDist().inv_cdf(tail)
        first, second = (z**3 + z) / 4.0, (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
        third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
        return z + first / df + second / df**2 + third / df**3
    low, high = 0.0, 1.0
    while 0.5 * t_two_sided(high, df) > tail:
        low, high = high, 2.0 * high
    while True:
        middle = (low + high) / 2.0
        if not low < middle < high:
            return middle
        low, high = (middle, high) if 0.5 * t_two_sided(middle, df) > tail else (low, middle)


def t_two_sided(t: float, df: float) -> float:
    """Return P(|T| >= |t|) of Student's t with `df` degrees of freedom: the p-value of a two-sided test.

    The probability is I_x(df/2, 1/2) with x = df/(df + t²) (Abramowitz and Stegun 26.7.1).
    """
    if not df > 0:
        raise ValueError(f"degrees of freedom must be positive, got {df}")
    share = t / df * t  # t²/df is finite even if t² is not
    return incomplete_beta(df / 2.0, 0.5, 1.0 / (1.0 + share), 1.0 / (1.0 + 1.0 / share) if share else 0.0)


def incomplete_beta(a: float, b: float, x: float, rest: float | None = None) -> float:
    """Return the regularized incomplete beta function I_x(a, b).

    It is computed as a continued fraction (Abramowitz and Stegun 26.5.8). Pass 1 − x as `rest` if it is known more
    precisely than x allows.
    """
    rest = 1.0 - x if rest is None else rest
    if x <= 0.0 or rest <= 0.0:
        return float(x > 0.0)
    log_x = math.log1p(-rest) if rest < x else math.log(x)
    front = math.exp(a * log_x + b * math.log(rest) - _log_beta(a, b))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, rest) / b


def _log_beta(a: float, b: float) -> float:
    """Return ln B(a, b). For large a and b = 1/2, a series is used to avoid cancellation.

    The series is ln Γ(a + 1/2) − ln Γ(a) = ln(a)/2 − 1/8a + 1/192a³ − 1/640a⁵ + … (from Abramowitz and Stegun 6.1.41).
    """
    if a > _LARGE and b == 0.5:
        return math.lgamma(b) - math.log(a) / 2.0 + 1.0 / (8.0 * a) - 1.0 / (192.0 * a**3) + 1.0 / (640.0 * a**5)
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function, computed by the modified Lentz method."""
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


def check_probability(value: float, name: str) -> None:
    """Raise a ValueError unless `value` lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


# pass@k and pass^k


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of `k` attempts passes: 1 − C(n−c, k)/C(n, k).

    This is an unbiased estimate from `c` passes in `n` attempts (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", eq. 1).

    Raises:
        ValueError: `c` is not between 0 and `n`, or `k` is not between 1 and `n`.
    """
    _check_counts(n, c, k)
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Return pass^k, the probability that all `k` attempts pass: C(c, k)/C(n, k).

    This is an unbiased estimate from `c` passes in `n` attempts (Yao et al. 2024, "τ-bench", section 3).

    Raises:
        ValueError: `c` is not between 0 and `n`, or `k` is not between 1 and `n`.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"c must be between 0 and n = {n}, got {c}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and n = {n}, got {k}")


class SampleMean(NamedTuple):
    """A mean over samples; None without samples. `left_out` counts the samples that have too few attempts."""

    mean: float | None
    n_samples: int
    left_out: int


def mean_pass_at_k(attempts: Iterable[tuple[int, int]], k: int) -> SampleMean:
    """Return the mean of `pass_at_k` over samples. Each sample is a pair (scored attempts, passes)."""
    return _mean_over_samples(pass_at_k, attempts, k)


def mean_pass_hat_k(attempts: Iterable[tuple[int, int]], k: int) -> SampleMean:
    """Return the mean of `pass_hat_k` over samples. Each sample is a pair (scored attempts, passes)."""
    return _mean_over_samples(pass_hat_k, attempts, k)


def _mean_over_samples(
    figure: Callable[[int, int, int], float], attempts: Iterable[tuple[int, int]], k: int
) -> SampleMean:
    counts = list(attempts)
    values = [figure(n, c, k) for n, c in counts if n >= k]
    return SampleMean(safe_mean(values) if values else None, len(values), len(counts) - len(values))


# Bootstrap


_MOST_LEFT_OUT = 200
_FEWEST_DEFINED = 0.5


class Bounds(NamedTuple):
    """The bounds of an interval; None if they are undefined."""

    low: float | None
    high: float | None


def bootstrap_bounds(
    figures: Callable[[Integers], Floats],
    clusters: Sequence[Hashable],
    *,
    seed: int = 0,
    resamples: int = 1_000,
    confidence: float = 0.95,
    method: Method = "bca",
) -> list[Bounds]:
    """Return the bootstrap interval of each figure, by default BCa (bias-corrected and accelerated; Efron 1987).

    Rows of the same cluster are drawn together. Let z₀ = Φ⁻¹(share of the replicates below the figure, where ties count
    half), and let a be the acceleration, obtained by leaving clusters out (in at most 200 blocks). The bounds are the
    quantiles Φ(z₀ + (z₀ + z)/(1 − a(z₀ + z))) of the replicates. If z₀ or a is undefined, the bounds are plain
    percentiles.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, cluster in enumerate(clusters):
        rows.setdefault(cluster, []).append(row)
    members = [np.array(indices, dtype=np.int64) for indices in rows.values()]
    everyone = np.arange(len(clusters))
    value_F = figures(everyone)
    if len(members) < 2:
        return [Bounds(None, None)] * len(value_F)
    chance = np.random.default_rng(seed)
    drawn = (chance.integers(0, len(members), len(members)) for _ in range(resamples))
    replicate_RF = np.stack([figures(np.concatenate([members[at] for at in draw])) for draw in drawn])
    count = min(len(members), _MOST_LEFT_OUT)
    cuts = [round(at * len(members) / count) for at in range(count + 1)]
    blocks = [np.concatenate(members[start:end]) for start, end in itertools.pairwise(cuts)]
    left_out_JF = np.stack([figures(np.setdiff1d(everyone, block)) for block in blocks])
    columns = zip(value_F, replicate_RF.T, left_out_JF.T, strict=True)
    is_plain = method == "percentile"
    return [
        _bounds(float(value), drawn_R, None if is_plain else left_J, confidence) for value, drawn_R, left_J in columns
    ]


def bootstrap_mean(
    values: Sequence[float] | Floats,
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    resamples: int = 10_000,
    confidence: float = 0.95,
    method: Method = "bca",
) -> Bounds:
    """Return the bootstrap interval of a mean.

    This is faster than `bootstrap_bounds`, because cluster sums are resampled.
    """
    value_N = np.asarray(values, dtype=np.float64)
    if not np.isfinite(value_N).all():
        raise ValueError("a value is not finite")
    sum_G, count_G = value_N, np.ones(len(value_N))
    if clusters is not None:
        if len(clusters) != len(value_N):
            raise ValueError(f"expected one cluster per value, got {len(value_N)} values and {len(clusters)} clusters")
        indices: dict[Hashable, int] = {}
        index_N = np.array([indices.setdefault(cluster, len(indices)) for cluster in clusters], dtype=np.int64)
        sum_G = np.bincount(index_N, value_N, len(indices)).astype(np.float64)
        count_G = np.bincount(index_N, minlength=len(indices)).astype(np.float64)
    if len(sum_G) < 2:
        return Bounds(None, None)
    chance, size, alike = np.random.default_rng(seed), len(sum_G), bool((count_G == count_G[0]).all())
    at_once, means = max(1, _DRAWN_AT_ONCE // size), []
    for begin in range(0, resamples, at_once):  # In parts so that memory use does not grow with the number of clusters
        drawn_RG = chance.integers(0, size, (min(at_once, resamples - begin), size))
        counted = size * count_G[0] if alike else count_G[drawn_RG].sum(axis=1)
        means.append(sum_G[drawn_RG].sum(axis=1) / counted)
    replicate_R = np.concatenate(means)
    left_out_G = (sum_G.sum() - sum_G) / (count_G.sum() - count_G) if method == "bca" else None
    return _bounds(float(sum_G.sum() / count_G.sum()), replicate_R, left_out_G, confidence)


def _bounds(value: float, replicates_R: Floats, left_out_J: Floats | None, confidence: float) -> Bounds:
    """Return the BCa bounds, or percentiles if the bias or the acceleration is undefined."""
    defined = np.sort(replicates_R[np.isfinite(replicates_R)])
    if not math.isfinite(value) or len(defined) <= _FEWEST_DEFINED * len(replicates_R) or defined[0] == defined[-1]:
        return Bounds(None, None)
    low, high = tails = ((1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0)
    slack = _ALIKE * float(np.abs(defined).max())  # ties despite rounding
    below = ((defined < value - slack).mean() + (defined <= value + slack).mean()) / 2.0
    is_known = left_out_J is not None and np.isfinite(left_out_J).all()
    deviation = left_out_J.mean() - left_out_J if left_out_J is not None and is_known else np.zeros(1)
    spread = float((deviation**2).sum())
    if spread > 1e-24 and 0.0 < below < 1.0:
        bias, acceleration = _NORMAL.inv_cdf(float(below)), float((deviation**3).sum()) / (6.0 * spread**1.5)

        def corrected(tail: float) -> float:
            shifted = bias + _NORMAL.inv_cdf(tail)
            return _NORMAL.cdf(bias + shifted / (1.0 - acceleration * shifted))

        low, high = corrected(tails[0]), corrected(tails[1])
    if not low < high:
        low, high = tails
    return Bounds(*(float(np.quantile(defined, p)) for p in (low, high)))


# Paired comparison of two runs on the same samples, with one difference of means per sample. Each sample counts once,
# regardless of its number of rollouts.

_MOST_ENUMERATED = 32


class SignFlipTest(NamedTuple):
    """The p-value of the test. `is_exact` is True if all signs were enumerated instead of sampled."""

    p: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class PairedFigures:
    """Statistics of the differences between two sides, one difference per sample.

    Attributes:
        interval: the mean and Student's t interval.
        bootstrap: the BCa interval of the mean; None if all differences are equal.
        permutation: the sign-flip test.
        p_t: the p-value of the paired t-test; None if all differences are equal.
        cohens_dz: the mean in standard deviations of the differences; None if all differences are equal.
        cliffs_delta: the share of better samples minus the share of worse samples.
    """

    interval: Interval
    bootstrap: Bounds
    permutation: SignFlipTest
    p_t: float | None
    cohens_dz: float | None
    cliffs_delta: float


def paired_figures(
    differences: Sequence[float] | Floats,
    *,
    reach: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = 10_000,
) -> PairedFigures:
    """Return all statistics of the differences, one difference per sample.

    Args:
        differences: (G,) the difference of each sample.
        reach: the largest possible difference, which is 1 for scores in [0, 1]; None if unknown.
        confidence: the confidence level of the intervals.
        seed: the random seed for the bootstrap and for sampled permutations.
        resamples: the number of bootstrap resamples.

    Raises:
        ValueError: `differences` is empty or contains a non-finite value.
    """
    difference_G = _checked(differences)
    interval = difference_interval(difference_G, reach=reach, confidence=confidence)
    deviation = _deviation(difference_G)
    return PairedFigures(
        interval=interval,
        bootstrap=bootstrap_mean(difference_G, seed=seed, resamples=resamples, confidence=confidence)
        if deviation
        else Bounds(None, None),
        permutation=sign_flip_test(difference_G, seed=seed),
        p_t=paired_t_test(difference_G),
        cohens_dz=cohens_dz(difference_G),
        cliffs_delta=paired_cliffs_delta(difference_G),
    )


def difference_interval(
    differences: Sequence[float] | Floats, *, reach: float | None = None, confidence: float = 0.95
) -> Interval:
    """Return the mean difference and its interval: m ± t · s/√G, with Student's t for G − 1 degrees of freedom.

    If all differences are equal, their spread is unknown. If `reach` is known, the interval then allows for unseen
    values: at most a share u = z²/(G + z²) of the samples differs (Wilson 1927) by up to `reach` in either direction,
    which gives m(1 − u) ± u · reach.
    """
    difference_G = _checked(differences)
    size, mean = len(difference_G), safe_mean(difference_G)
    if size < 2:
        return Interval(mean, None, None, None, size, size)
    deviation = _deviation(difference_G)
    if deviation is None and reach is not None:
        unseen = 1.0 - wilson_bounds(1.0, size, confidence)[0]
        middle, half, error = mean * (1.0 - unseen), unseen * reach, 0.0
    else:
        middle, error = mean, (deviation or 0.0) / math.sqrt(size)
        half = t_quantile((1.0 + confidence) / 2.0, size - 1) * error
    found = Interval(mean, middle - half, middle + half, error, size, size)
    return found if reach is None else found.clipped(-reach, reach)


def sign_flip_test(differences: Sequence[float] | Floats, *, draws: int = 19_999, seed: int = 0) -> SignFlipTest:
    """Return the two-sided p-value of the mean difference under random signs.

    Under the null hypothesis, each difference has either sign with equal probability (Fisher 1935, "The Design of
    Experiments", section 21). For up to 32 nonzero differences, all signs are enumerated by combining the sums of two
    halves. For more differences, m = `draws` sets of signs are sampled. If b of their means are at least as large as
    the observed one, p is (b + 1)/(m + 1), which is never 0 (Phipson and Smyth 2010).
    """
    difference_G = _checked(differences)
    moved_G = difference_G[difference_G != 0.0]
    least = abs(math.fsum(moved_G)) - _ALIKE * float(np.abs(moved_G).sum())
    if least <= 0.0:
        return SignFlipTest(1.0, True)
    if len(moved_G) <= _MOST_ENUMERATED:
        half = len(moved_G) // 2
        one, other = np.sort(_signed_sums(moved_G[:half])), _signed_sums(moved_G[half:])
        pairs = int(
            (len(one) - np.searchsorted(one, least - other)).sum()
        )  # The sign choices whose sum is at least `least` > 0
        return SignFlipTest(min(1.0, 2.0 * pairs / 2.0 ** len(moved_G)), True)
    chance, total, as_large = np.random.default_rng(seed), float(moved_G.sum()), 0
    at_once = max(1, _DRAWN_AT_ONCE // len(moved_G))
    for begin in range(0, draws, at_once):  # In parts so that memory use does not grow with the number of samples
        heads = chance.integers(0, 2, (min(at_once, draws - begin), len(moved_G)), dtype=np.int8)
        as_large += int((np.abs(2.0 * (heads.astype(np.float64) @ moved_G) - total) >= least).sum())
    return SignFlipTest((as_large + 1) / (draws + 1), False)


def _signed_sums(values: Floats) -> Floats:
    """Return the (2^G,) sums of the values, one for each choice of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def paired_t_test(differences: Sequence[float] | Floats) -> float | None:
    """Return the two-sided p-value of Student's paired t-test; None if all differences are equal."""
    difference_G = _checked(differences)
    deviation = _deviation(difference_G)
    if deviation is None:
        return None
    return t_two_sided(safe_mean(difference_G) / deviation * math.sqrt(len(difference_G)), len(difference_G) - 1)


def cohens_dz(differences: Sequence[float] | Floats) -> float | None:
    """Return the mean difference in standard deviations of the differences (Cohen 1988, section 2.3.5).

    This is the effect size for paired samples, not the d for two separate groups.
    """
    difference_G = _checked(differences)
    deviation = _deviation(difference_G)
    return None if deviation is None else safe_mean(difference_G) / deviation


def paired_cliffs_delta(differences: Sequence[float] | Floats) -> float:
    """Return the share of differences above zero minus the share below zero (Cliff 1993, the within-pairs d)."""
    difference_G = _checked(differences)
    return float(np.sign(difference_G).mean())


def mcnemar_test(won: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's test (1947), computed exactly from the binomial distribution."""
    if won < 0 or lost < 0:
        raise ValueError(f"won and lost must not be negative, got {won} and {lost}")
    size, tail, ways = won + lost, 0, 1
    for count in range(min(won, lost) + 1):
        tail += ways
        ways = ways * (size - count) // (count + 1)
    return min(1.0, 2 * tail / (1 << size))


def _checked(differences: Sequence[float] | Floats) -> Floats:
    difference_G = np.asarray(differences, dtype=np.float64)
    if not len(difference_G):
        raise ValueError("no sample is scored in both, so the difference is undefined")
    if not (np.abs(difference_G) <= _SQUARABLE).all():
        raise ValueError("a difference is not finite or exceeds 1e100")
    return difference_G


def _deviation(difference_G: Floats) -> float | None:
    """Return the standard deviation; None if it is only rounding error or there are fewer than two values."""
    if len(difference_G) < 2 or np.ptp(difference_G) <= _ALIKE * float(np.abs(difference_G).max()):
        return None
    return float(np.std(difference_G, ddof=1))


# Corrections for multiple comparisons


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for the family-wise error rate (Holm 1979).

    The i-th smallest of m p-values is multiplied by m − i + 1. The results are made non-decreasing and limited to 1.
    """
    order, size, worst = _order(p_values), len(p_values), 0.0
    corrected = [0.0] * size
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, (size - rank) * p_values[index]))
        corrected[index] = worst
    return corrected


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for the false discovery rate (Benjamini and Hochberg 1995).

    The i-th smallest of m p-values is multiplied by m/i, and the results are made non-decreasing. The correction is
    valid for independent or positively dependent tests.
    """
    order, size, least = _order(p_values), len(p_values), 1.0
    corrected = [0.0] * size
    for rank in reversed(range(size)):
        index = order[rank]
        least = min(least, p_values[index] * size / (rank + 1))
        corrected[index] = least
    return corrected


def _order(p_values: Sequence[float]) -> list[int]:
    """Return the indices of the p-values in ascending order."""
    if bad := [p for p in p_values if not 0.0 <= p <= 1.0]:
        raise ValueError(f"a p-value must be between 0 and 1, got {bad[0]}")
    return sorted(range(len(p_values)), key=p_values.__getitem__)
