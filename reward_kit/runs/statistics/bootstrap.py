"""How sure any figure is: intervals by drawing the rows anew, for several figures of the same rows at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Method = Literal["bca", "percentile"]

_NORMAL = NormalDist()
_MOST_LEFT_OUT = 200
_FEWEST_DEFINED = 0.5
_ALIKE = 1e-12
_DRAWN_AT_ONCE = 200_000


class Bounds(NamedTuple):
    """An interval; None where the rows say nothing of it."""

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
    """Bootstrap intervals of each figure, by default BCa (bias-corrected and accelerated; Efron 1987).

    Rows of one cluster are drawn together. With z₀ = Φ⁻¹(share of the replicates below the figure, ties half) and the
    acceleration a from leaving clusters out (in at most 200 blocks), the bounds are the quantiles
    Φ(z₀ + (z₀ + z)/(1 − a(z₀ + z))) of the replicates. Where z₀ or a is not defined they are the plain percentiles.

    Args:
        figures: (F,) the figures of the rows at these positions; NaN where one is not defined.
        clusters: (N,) the cluster of each row.
        seed: of what is drawn.
        resamples: how often rows are drawn.
        confidence: the probability that an interval covers the true figure.
        method: "percentile" leaves the corrections out.

    Returns:
        For each figure its bounds. None where it is not defined, or in no more than half of the draws, or where all
        draws give the same: the rows are then too few or too much alike to say how sure it is.
    """
    members = _members(clusters)
    everyone = np.arange(len(clusters))
    value_F = figures(everyone)
    if len(members) < 2:
        return [Bounds(None, None)] * len(value_F)
    chance = np.random.default_rng(seed)
    drawn = (chance.integers(0, len(members), len(members)) for _ in range(resamples))
    replicate_RF = np.stack([figures(np.concatenate([members[at] for at in draw])) for draw in drawn])
    blocks = _blocks(members) if method == "bca" else ()
    left_out_JF = np.stack([figures(np.setdiff1d(everyone, block)) for block in blocks]) if blocks else None
    return [
        _bounds(float(value), replicate_RF[:, at], left_out_JF[:, at] if left_out_JF is not None else None, confidence)
        for at, value in enumerate(value_F)
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
    """The bootstrap interval of a mean, as `bootstrap_bounds` has it, many times as fast: sums are drawn, not rows.

    Args:
        values: (N,) what the mean is of.
        clusters: (N,) the cluster of each value; None where each is one of its own.
        seed: of what is drawn.
        resamples: how often clusters are drawn.
        confidence: the probability that the interval covers the true mean.
        method: "percentile" leaves the corrections out.

    Raises:
        ValueError: the lengths differ, or a value is not finite.
    """
    value_N = np.asarray(values, dtype=np.float64)
    if not np.isfinite(value_N).all():
        raise ValueError("a value is not finite")
    sum_G, count_G = _sums(value_N, clusters)
    if len(sum_G) < 2:
        return Bounds(None, None)
    replicate_R = _replicated_means(sum_G, count_G, resamples, seed)
    left_out_G = (sum_G.sum() - sum_G) / (count_G.sum() - count_G) if method == "bca" else None
    return _bounds(float(sum_G.sum() / count_G.sum()), replicate_R, left_out_G, confidence)


def _sums(value_N: Floats, clusters: Sequence[Hashable] | None) -> tuple[Floats, Floats]:
    """The sum and the number of the values of each cluster."""
    if clusters is None:
        return value_N, np.ones(len(value_N))
    if len(clusters) != len(value_N):
        raise ValueError(f"{len(value_N)} values have {len(clusters)} clusters")
    places: dict[Hashable, int] = {}
    place_N = np.array([places.setdefault(cluster, len(places)) for cluster in clusters], dtype=np.int64)
    size = len(places)
    return np.bincount(place_N, value_N, size).astype(np.float64), np.bincount(place_N, minlength=size).astype(
        np.float64
    )


def _replicated_means(sum_G: Floats, count_G: Floats, resamples: int, seed: int) -> Floats:
    """(R,) the mean of each draw; in parts, so that memory does not grow with the number of clusters."""
    chance, size, alike = np.random.default_rng(seed), len(sum_G), bool((count_G == count_G[0]).all())
    at_once = max(1, _DRAWN_AT_ONCE // size)
    means = []
    for begin in range(0, resamples, at_once):
        drawn_RG = chance.integers(0, size, (min(at_once, resamples - begin), size))
        counted = size * count_G[0] if alike else count_G[drawn_RG].sum(axis=1)
        means.append(sum_G[drawn_RG].sum(axis=1) / counted)
    return np.concatenate(means)


def _members(clusters: Sequence[Hashable]) -> list[Integers]:
    places: dict[Hashable, list[int]] = {}
    for position, cluster in enumerate(clusters):
        places.setdefault(cluster, []).append(position)
    return [np.array(found, dtype=np.int64) for found in places.values()]


def _blocks(members: Sequence[Integers]) -> list[Integers]:
    count = min(len(members), _MOST_LEFT_OUT)
    cuts = [round(at * len(members) / count) for at in range(count + 1)]
    return [np.concatenate(members[start:end]) for start, end in itertools.pairwise(cuts)]


def _bounds(value: float, replicates_R: Floats, left_out_J: Floats | None, confidence: float) -> Bounds:
    defined = np.sort(replicates_R[np.isfinite(replicates_R)])
    if not math.isfinite(value) or len(defined) <= _FEWEST_DEFINED * len(replicates_R) or defined[0] == defined[-1]:
        return Bounds(None, None)
    tails = ((1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0)
    low, high = (float(np.quantile(defined, p)) for p in _levels(value, defined, left_out_J, tails))
    return Bounds(low, high)


def _levels(
    value: float, replicates: Floats, left_out_J: Floats | None, tails: tuple[float, float]
) -> tuple[float, float]:
    """At which quantiles of the replicates the bounds are: the plain ones where nothing was left out."""
    slack = _ALIKE * float(np.abs(replicates).max())  # a tie is one whatever the order in which was summed
    below = ((replicates < value - slack).mean() + (replicates <= value + slack).mean()) / 2.0
    acceleration = _acceleration(left_out_J)
    if not 0.0 < below < 1.0 or acceleration is None:
        return tails
    bias = _NORMAL.inv_cdf(float(below))

    def corrected(tail: float) -> float:
        shifted = bias + _NORMAL.inv_cdf(tail)
        return _NORMAL.cdf(bias + shifted / (1.0 - acceleration * shifted))

    low, high = corrected(tails[0]), corrected(tails[1])
    return (low, high) if low < high else tails


def _acceleration(left_out_J: Floats | None) -> float | None:
    """Σ d³ / (6 (Σ d²)^1.5) of the deviations d from the mean; None where it is not defined."""
    if left_out_J is None or not np.isfinite(left_out_J).all():
        return None
    deviation = left_out_J.mean() - left_out_J
    spread = float((deviation**2).sum())
    return float((deviation**3).sum()) / (6.0 * spread**1.5) if spread > 1e-24 else None
