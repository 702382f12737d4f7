"""Student's t: its distribution function and its quantiles, since SciPy is too much to install for two functions."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

_SERIES_FROM_DF = 10_000.0
_TINY = 1e-300
_LARGE = 300.0


@functools.lru_cache(maxsize=4_096)
def t_quantile(p: float, df: float) -> float:
    """The value that Student's t with `df` degrees of freedom stays below with probability `p`.

    By bisection of the distribution function, which is P(T <= t) = 1 − I_x(df/2, 1/2)/2 for t >= 0 and
    x = df/(df + t²), with I the regularised incomplete beta function (Abramowitz and Stegun 26.7.1). From 10,000
    degrees of freedom on by the expansion 26.7.5 about the normal quantile, whose error is then below 1e-12.

    Raises:
        ValueError: `p` is not in (0, 1) or `df` is not positive.
    """
    check_probability(p, "p")
    if not df > 0:
        raise ValueError(f"degrees of freedom are positive, got {df}")
    if p < 0.5:
        return -_upper_quantile(p, df)
    return 0.0 if p == 0.5 else _upper_quantile(1.0 - p, df)


def _upper_quantile(tail: float, df: float) -> float:
    """The t > 0 with P(T > t) = `tail`."""
    if df >= _SERIES_FROM_DF:
        z = -NormalDist().inv_cdf(tail)
        first, second = (z**3 + z) / 4.0, (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
        third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
        return z + first / df + second / df**2 + third / df**3
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
    return 0.5 * t_two_sided(t, df)


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) of Student's t with `df` degrees of freedom: the p-value of a two-sided test.

    I_x(df/2, 1/2) with x = df/(df + t²) (Abramowitz and Stegun 26.7.1).

    Raises:
        ValueError: `df` is not positive.
    """
    if not df > 0:
        raise ValueError(f"degrees of freedom are positive, got {df}")
    share = t / df * t  # t²/df, which is finite where t² alone may not be
    return incomplete_beta(df / 2.0, 0.5, 1.0 / (1.0 + share), 1.0 / (1.0 + 1.0 / share) if share else 0.0)


def incomplete_beta(a: float, b: float, x: float, rest: float | None = None) -> float:
    """The regularised incomplete beta function I_x(a, b) (Abramowitz and Stegun 26.5.8), by its continued fraction.

    `rest` is 1 − x, for who knows it to more digits than x leaves of it.
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
    """ln B(a, b). Of a large a and b = 1/2 by a series: two large logarithms leave few digits of their difference.

    ln Γ(a + 1/2) − ln Γ(a) = ln(a)/2 − 1/8a + 1/192a³ − 1/640a⁵ + … (from Abramowitz and Stegun 6.1.41).
    """
    if a > _LARGE and b == 0.5:
        return math.lgamma(b) - math.log(a) / 2.0 + 1.0 / (8.0 * a) - 1.0 / (192.0 * a**3) + 1.0 / (640.0 * a**5)
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


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


def check_probability(value: float, name: str) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} lies between 0 and 1, got {value}")
