"""Values relative to their group: the one place where a baseline is subtracted and a scale divided by."""

from __future__ import annotations

import numpy as np

from reward_kit.credit.step_arrays import Codes, Floats

# Between these, values and their differences can be squared and added up.
_SMALL, _LARGE = 1e-100, 1e140


def relative(
    values_N: Floats,
    groups_N: Codes,
    normalization: str = "std",
    epsilon: float = 1e-6,
    *,
    normalization_constant: float | None = None,
    weights_N: Floats | None = None,
    min_group_size: int = 1,
) -> Floats:
    """(N,) each value relative to its group; NaN takes no part and stays NaN.

    With the mean and the unbiased standard deviation over the group (over `weights_N` copies of each value):

        "std"            (x - mean) / (std + epsilon)
        "mean"           x - mean
        "constant"       (x - mean) / normalization_constant
        "leave_one_out"  x - the mean of the others = (x - mean) n / (n - 1)

    Values are taken relative to the first of their group. A constant group is then zero before anything is rounded, and
    a large offset costs no precision. A group of one gives zero. Numbers whose squares no float holds are measured in a
    unit of their group first; only what is itself too large for a float becomes infinite.

    Args:
        values_N: (N,) the values.
        groups_N: (N,) the group of each, a number that is not negative.
        normalization: which of the four.
        epsilon: added to each standard deviation.
        normalization_constant: for "constant".
        weights_N: (N,) how often each value counts; leaving one out leaves out all its copies.
        min_group_size: smaller groups give zeros.
    """
    valued_N = ~np.isnan(values_N)
    values, groups = values_N[valued_N], without_gaps(groups_N[valued_N])
    weights = np.ones(len(values)) if weights_N is None else weights_N[valued_N]
    units = _units(values, groups)
    centred = values / units
    centred -= centred[first_of_each(groups)][groups]
    totals = np.bincount(groups, weights)
    # Where all weights are zero, as of trajectories without steps, there is no mean to take away.
    centred -= (np.bincount(groups, weights * centred) / np.where(totals > 0, totals, 1.0))[groups]
    scales = _scales(centred, groups, weights, normalization, epsilon / units, normalization_constant)
    counts = (scales > 0) & (np.bincount(groups) >= min_group_size)[groups]
    out_N = np.full(len(values_N), np.nan)
    measured = np.divide(centred, scales, out=np.zeros_like(centred), where=counts)
    with np.errstate(over="ignore"):
        out_N[valued_N] = measured if normalization == "std" else measured * units
    return out_N


def _units(values: Floats, groups: Codes) -> Floats:
    """What the values of each group are counted in: ones, or powers of two near the largest where that is needed."""
    sizes = np.abs(values)
    if not ((sizes > _LARGE) | ((sizes < _SMALL) & (sizes > 0.0))).any():
        return np.ones(1)
    largest = np.zeros(int(groups.max(initial=-1)) + 1)
    np.maximum.at(largest, groups, sizes)
    exponents = np.clip(np.frexp(largest)[1] - 1, -1000, 1023)
    return np.asarray(np.ldexp(1.0, exponents)[groups], dtype=np.float64)


def _scales(
    centred: Floats, groups: Codes, weights: Floats, normalization: str, epsilons: Floats, constant: float | None
) -> Floats:
    """What each centred value is divided by; zero where its group has nothing to compare it with."""
    if normalization == "mean":
        return np.ones_like(centred)
    if normalization == "constant":
        return np.full_like(centred, constant)
    totals = np.bincount(groups, weights)
    if normalization == "leave_one_out":
        return np.asarray((totals[groups] - weights) / np.where(totals > 0, totals, 1.0)[groups], dtype=np.float64)
    variances = np.bincount(groups, weights * centred**2) / np.maximum(totals - 1.0, 1.0)
    return np.asarray(np.sqrt(variances)[groups] + epsilons, dtype=np.float64)


def first_of_each(groups: Codes) -> Codes:
    """The position at which each group appears first."""
    first = np.zeros(int(groups.max(initial=-1)) + 1, dtype=np.int64)
    # Of a position that is written twice the last value stays.
    first[groups[::-1]] = np.arange(len(groups))[::-1]
    return first


def without_gaps(groups: Codes) -> Codes:
    """The groups, numbered anew where their numbers would make the tables of groups much longer than the values."""
    if int(groups.max(initial=0)) <= 4 * len(groups):
        return groups
    return np.asarray(np.unique(groups, return_inverse=True)[1], dtype=np.int64)
