"""How sure any figure is: intervals by drawing the rows anew, for several figures of the same rows at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from reward_kit.runs.calibration.agreement import Floats, Integers

_NORMAL = NormalDist()
_MOST_LEFT_OUT = 200
_FEWEST_DEFINED = 0.5


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
) -> list[Bounds]:
    """BCa intervals (bias-corrected and accelerated; Efron 1987) of each figure.

    Rows of one cluster are drawn together. With z₀ = Φ⁻¹(share of the replicates below the figure, ties half) and the
    acceleration a from leaving clusters out (in at most 200 blocks), the bounds are the quantiles
    Φ(z₀ + (z₀ + z)/(1 − a(z₀ + z))) of the replicates. Where z₀ or a is not defined they are the plain percentiles.

    Args:
        figures: (F,) the figures of the rows at these positions; NaN where one is not defined.
        clusters: (N,) the cluster of each row.
        seed: of what is drawn.
        resamples: how often rows are drawn.
        confidence: the probability that an interval covers the true figure.

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
    left_out_JF = np.stack([figures(np.setdiff1d(everyone, block)) for block in _blocks(members)])
    return [
        _bounds(float(value_F[at]), replicate_RF[:, at], left_out_JF[:, at], confidence) for at in range(len(value_F))
    ]


def _members(clusters: Sequence[Hashable]) -> list[Integers]:
    places: dict[Hashable, list[int]] = {}
    for position, cluster in enumerate(clusters):
        places.setdefault(cluster, []).append(position)
    return [np.array(found, dtype=np.int64) for found in places.values()]


def _blocks(members: Sequence[Integers]) -> list[Integers]:
    count = min(len(members), _MOST_LEFT_OUT)
    cuts = [round(at * len(members) / count) for at in range(count + 1)]
    return [np.concatenate(members[start:end]) for start, end in itertools.pairwise(cuts)]


def _bounds(value: float, replicates_R: Floats, left_out_J: Floats, confidence: float) -> Bounds:
    defined = np.sort(replicates_R[np.isfinite(replicates_R)])
    if not math.isfinite(value) or len(defined) <= _FEWEST_DEFINED * len(replicates_R) or defined[0] == defined[-1]:
        return Bounds(None, None)
    tails = ((1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0)
    low, high = (float(np.quantile(defined, p)) for p in _levels(value, defined, left_out_J, tails))
    return Bounds(low, high)


def _levels(value: float, replicates: Floats, left_out_J: Floats, tails: tuple[float, float]) -> tuple[float, float]:
    """At which quantiles of the replicates the bounds are."""
    below = ((replicates < value).mean() + (replicates <= value).mean()) / 2.0
    acceleration = _acceleration(left_out_J)
    if not 0.0 < below < 1.0 or acceleration is None:
        return tails
    bias = _NORMAL.inv_cdf(float(below))

    def corrected(tail: float) -> float:
        shifted = bias + _NORMAL.inv_cdf(tail)
        return _NORMAL.cdf(bias + shifted / (1.0 - acceleration * shifted))

    low, high = corrected(tails[0]), corrected(tails[1])
    return (low, high) if low < high else tails


def _acceleration(left_out_J: Floats) -> float | None:
    """Σ d³ / (6 (Σ d²)^1.5) of the deviations d from the mean; None where it is not defined."""
    if not np.isfinite(left_out_J).all():
        return None
    deviation = left_out_J.mean() - left_out_J
    spread = float((deviation**2).sum())
    return float((deviation**3).sum()) / (6.0 * spread**1.5) if spread > 1e-24 else None
