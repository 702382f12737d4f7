"""Several comparisons at once: p-values so corrected that many tries do not make a finding of chance."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected so that a false finding among all of them is as seldom as in one alone (Holm 1979).

    The i-th smallest of m is multiplied by m − i + 1; none is then below a smaller one, or above 1.

    Raises:
        ValueError: one is not between 0 and 1.
    """
    order, size, worst = _order(p_values), len(p_values), 0.0
    corrected = [0.0] * size
    for place, at in enumerate(order):
        worst = max(worst, min(1.0, (size - place) * p_values[at]))
        corrected[at] = worst
    return corrected


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Corrected so that of what is found the share of false findings is bounded (Benjamini and Hochberg 1995).

    The i-th smallest of m is multiplied by m/i; none is then above a larger one. For tests that are independent, or
    that go together.

    Raises:
        ValueError: one is not between 0 and 1.
    """
    order, size, least = _order(p_values), len(p_values), 1.0
    corrected = [0.0] * size
    for place in reversed(range(size)):
        at = order[place]
        least = min(least, p_values[at] * size / (place + 1))
        corrected[at] = least
    return corrected


def _order(p_values: Sequence[float]) -> list[int]:
    """The places of the p-values, the smallest first."""
    if bad := [p for p in p_values if not 0.0 <= p <= 1.0]:
        raise ValueError(f"a p-value is between 0 and 1, got {bad[0]}")
    return sorted(range(len(p_values)), key=p_values.__getitem__)
