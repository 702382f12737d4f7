"""Measures of agreement between two raters: kappa and correlations.

All functions are pure and return NaN for undefined values.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_LEAF = 128


def cohens_kappa(a_N: Integers, b_N: Integers, levels: int, *, quadratic: bool = False) -> float:
    """Return Cohen's kappa, the agreement beyond chance: 1 − Σ w_ij O_ij / Σ w_ij E_ij.

    O is the contingency table of the two raters, and E is the table expected for independent raters with the same
    margins. w_ij is 0 on the diagonal. Off the diagonal, it is 1 or, if `quadratic` is true, (i − j)², so near misses
    have less weight. The result is NaN if both raters used the same single category for all items. For unweighted
    kappa, see Cohen 1960; for weighted kappa, see Cohen 1968.

    Args:
        a_N, b_N: each rater's categories, from 0 to `levels` − 1.
        levels: the number of categories, including unused ones.
        quadratic: whether to weight disagreements by the squared distance between the categories.
    """
    observed = np.zeros((levels, levels))
    np.add.at(observed, (a_N, b_N), 1.0)
    expected = np.outer(observed.sum(axis=1), observed.sum(axis=0)) / max(len(b_N), 1)
    distances = np.subtract.outer(np.arange(levels), np.arange(levels)).astype(np.float64)
    weights = distances**2 if quadratic else (distances != 0).astype(np.float64)
    chance = float((weights * expected).sum())
    return math.nan if chance == 0 else 1.0 - float((weights * observed).sum()) / chance


def pearson(x_N: Floats, y_N: Floats) -> float:
    """Return Pearson's product-moment correlation, or NaN if either input is constant."""
    if len(x_N) < 2 or _is_constant(x_N) or _is_constant(y_N):
        return math.nan
    x, y = x_N - x_N.mean(), y_N - y_N.mean()
    scale = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / scale)) if scale > 0 else math.nan


def midranks(values_N: Floats) -> Floats:
    """Return ranks that start at 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: Floats = ((last - counts + 1 + last) / 2.0)[inverse]
    return shared


def spearman(x_N: Floats, y_N: Floats) -> float:
    """Return Spearman's rank correlation (Pearson's correlation of midranks), or NaN if either input is constant."""
    return pearson(midranks(x_N), midranks(y_N))


def kendall_tau_b(x_N: Floats, y_N: Floats) -> float:
    """Return Kendall's tau-b: (C − D) / sqrt((n₀ − n₁)(n₀ − n₂)) (Kendall 1945); NaN if either input is constant.

    C and D are the numbers of concordant and discordant pairs, n₀ is the total number of pairs, and n₁ and n₂ are the
    numbers of pairs tied in x and y, respectively. The computation takes O(n log² n) time (Knight 1966).
    """
    n = len(x_N)
    if n < 2 or _is_constant(x_N) or _is_constant(y_N):
        return math.nan
    order = np.lexsort((y_N, x_N))
    x, y = x_N[order], y_N[order]
    pairs = n * (n - 1) // 2
    y_sorted = np.sort(y)
    tied_x, tied_y = _count_tied_pairs(x[1:] == x[:-1]), _count_tied_pairs(y_sorted[1:] == y_sorted[:-1])
    tied_both = _count_tied_pairs((x[1:] == x[:-1]) & (y[1:] == y[:-1]))
    balance = pairs - tied_x - tied_y + tied_both - 2 * inversions(y)
    tau = balance / math.sqrt(float(pairs - tied_x)) / math.sqrt(float(pairs - tied_y))
    return max(-1.0, min(1.0, tau))


def inversions(values_N: Floats) -> int:
    """Return the number of pairs that are in the wrong order: i < j and a_i > a_j."""
    if len(values_N) <= _LEAF:
        return int(np.triu(values_N[:, None] > values_N[None, :], 1).sum())
    middle = len(values_N) // 2
    left, right = values_N[:middle], values_N[middle:]
    across = middle - np.searchsorted(np.sort(left), right, side="right")
    return inversions(left) + inversions(right) + int(across.sum())


def _is_constant(values_N: Floats) -> bool:
    return bool((values_N == values_N[0]).all())


def _count_tied_pairs(equal: npt.NDArray[np.bool_]) -> int:
    """Return the number of pairs within runs of equal values."""
    group = np.concatenate(([0], np.cumsum(~equal)))
    sizes = np.bincount(group)
    return int((sizes * (sizes - 1) // 2).sum())
