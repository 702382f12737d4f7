"""What a comparison could have found: the power of the paired t-test, and the least difference that it would show."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from reward_kit.runs.statistics.bootstrap import Floats
from reward_kit.runs.statistics.student import check_probability, t_quantile

_NODES = 16
_PANELS = 32
_LOWEST = 1e-15
_STEPS = (-9.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 9.0)
_SPREADS = 12.0  # standard deviations beyond which nothing is left of a spread that chance drew


def minimum_detectable_difference(deviation: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """The true mean difference that the two-sided paired t-test shows with probability `power`.

    Args:
        deviation: the standard deviation of the differences.
        n: how many there are.
        alpha: the p-value below which a difference is taken for one.
        power: the probability that it is found.

    Raises:
        ValueError: there are fewer than two, `deviation` is negative, a probability is not in (0, 1), or `power` is
            not above `alpha`.
    """
    check_probability(power, "power")
    if deviation < 0 or power <= alpha:
        raise ValueError(f"a deviation of {deviation} and a power of {power} at {alpha} cannot be")
    low, high = 0.0, 1.0
    while t_test_power(high, n, alpha) < power:
        low, high = high, 2.0 * high
    while True:
        middle = (low + high) / 2.0
        if high - low < 1e-13 * high or not low < middle < high:
            return middle * deviation
        low, high = (middle, high) if t_test_power(middle, n, alpha) < power else (low, middle)


def t_test_power(effect: float, n: int, alpha: float = 0.05) -> float:
    """The probability that the two-sided paired t-test finds a true difference of `effect` standard deviations.

    Over the spread S = s/σ that chance draws, with ν = n − 1 degrees of freedom, of
    P(Z > t·S − d√n) + P(Z < −t·S − d√n), with t the critical value: the tails of the noncentral t.

    Args:
        effect: the true mean difference in true standard deviations of the differences.
        n: how many differences there are.
        alpha: the p-value below which a difference is taken for one.

    Raises:
        ValueError: there are fewer than two, or `alpha` is not in (0, 1).
    """
    if n < 2:
        raise ValueError(f"a test takes two differences or more, got {n}")
    check_probability(alpha, "alpha")
    critical, shift = t_quantile(1.0 - alpha / 2.0, n - 1), abs(effect) * math.sqrt(n)
    # Both tails change within a few 1/t, about these places.
    turns = [(place + step) / critical for place in (shift, 0.0) for step in _STEPS]
    spreads, weights = _spreads(n - 1, turns)
    found = [_above(critical * s - shift) + _above(critical * s + shift) for s in spreads]
    return min(1.0, math.fsum(map(math.prod, zip(found, weights, strict=True))))


def _above(z: float) -> float:
    """P(Z > z) of the normal distribution."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def _spreads(df: int, turns: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Values of S = √(χ²/ν), and what each weighs in an integral over their density.

    By Gauss and Legendre's rule in panels, with ends among them at `turns`, where what is integrated changes fast.
    """
    spread = _SPREADS / math.sqrt(2.0 * df)
    lowest, highest = max(_LOWEST, 1.0 - spread), 1.0 + spread
    ends = np.unique(np.clip([*np.linspace(lowest, highest, _PANELS + 1), *turns], lowest, highest))
    node, weight = _rule()
    half = np.diff(ends)[:, None] / 2.0
    value = (ends[:-1, None] + half * (node + 1.0)).ravel()
    # Less the logarithm of the density at 1, so that nothing is beyond every float however large ν is.
    logs = (df - 1.0) * np.log(value) - df * (value**2 - 1.0) / 2.0
    density = np.exp(logs) * (half * weight).ravel()
    return value.tolist(), (density / density.sum()).tolist()


@functools.cache
def _rule() -> tuple[Floats, Floats]:
    return np.polynomial.legendre.leggauss(_NODES)
