"""Test `relative`: values relative to their group, in each of the four normalizations."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.credit.options import check_normalization
from reward_kit.credit.step_arrays import first_positions, relative, renumber_groups
from reward_kit.errors import ConfigError
from tests.credit.batches import eighths

MEASURES = [("std", None), ("mean", None), ("constant", 4.0), ("leave_one_out", None)]
every_measure = pytest.mark.parametrize(("normalization", "constant"), MEASURES)
values_in_groups = st.lists(st.tuples(eighths, st.integers(0, 3)), max_size=12)


def of(values: list[float], groups: list[int], normalization: str, constant: float | None, **options: object) -> list:
    found = relative(
        np.array(values, dtype=np.float64),
        np.array(groups, dtype=np.int64),
        normalization,
        0.5,
        normalization_constant=constant,
        **options,  # type: ignore[arg-type]
    )
    return found.tolist()


def expected(value: float, others: list[float], normalization: str) -> float:
    among = [value, *others]
    if normalization == "leave_one_out":
        return value - statistics.fmean(others) if others else 0.0
    scale = {"std": statistics.stdev(among) + 0.5 if others else 1.0, "mean": 1.0, "constant": 4.0}[normalization]
    return (value - statistics.fmean(among)) / scale


@every_measure
@given(pairs=values_in_groups)
def test_normalizations_match_their_formulas(
    normalization: str, constant: float | None, pairs: list[tuple[float, int]]
) -> None:
    values, groups = [value for value, _ in pairs], [group for _, group in pairs]
    others = [[x for j, (x, group) in enumerate(pairs) if group == groups[i] and j != i] for i in range(len(pairs))]
    wanted = [expected(value, rest, normalization) for value, rest in zip(values, others, strict=True)]
    np.testing.assert_allclose(of(values, groups, normalization, constant), wanted, rtol=1e-12, atol=1e-12)


@every_measure
@given(rows=st.lists(st.tuples(eighths, st.integers(0, 3)), min_size=2, max_size=6))
def test_weight_equals_that_many_copies(
    normalization: str, constant: float | None, rows: list[tuple[float, int]]
) -> None:
    values, weights = [value for value, _ in rows], [weight for _, weight in rows]
    found = of(values, [0] * len(rows), normalization, constant, weights_N=np.array(weights, dtype=np.float64))
    for i, (value, weight) in enumerate(rows):
        own = [] if normalization == "leave_one_out" else [value] * (weight - 1)
        others = [x for j, (x, n) in enumerate(rows) if j != i for _ in range(n)]
        if weight:
            wanted = expected(value, own + others, normalization)
            assert found[i] == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@every_measure
def test_equal_and_single_values_give_exact_zeros(normalization: str, constant: float | None) -> None:
    found = of([0.1] * 7 + [0.7, 1e300], [0] * 7 + [1, 2], normalization, constant)
    assert found == [0.0] * 9


@every_measure
def test_nan_is_ignored_and_kept(normalization: str, constant: float | None) -> None:
    found = of([1.0, math.nan, 3.0, math.nan], [0, 0, 0, 1], normalization, constant)
    alone = of([1.0, 3.0], [0, 0], normalization, constant)
    np.testing.assert_array_equal(found, [alone[0], math.nan, alone[1], math.nan])
    assert of([], [], normalization, constant) == []


@every_measure
def test_groups_below_the_minimum_size_give_zeros(normalization: str, constant: float | None) -> None:
    found = of([0.0, 1.0, 0.0, 1.0, 5.0], [0, 0, 1, 1, 1], normalization, constant, min_group_size=3)
    assert found[:2] == [0.0, 0.0]
    assert found[2:] == of([0.0, 1.0, 5.0], [0, 0, 0], normalization, constant)


def test_constant_group_without_epsilon_gives_zeros() -> None:
    zeros = relative(np.array([2.0, 2.0]), np.array([0, 0]), "std", 0.0)
    assert zeros.tolist() == [0.0, 0.0]


def test_group_ids_may_be_any_numbers() -> None:
    far = of([0.0, 1.0, 5.0], [10**15, 10**15, 3], "mean", None)
    assert far == of([0.0, 1.0, 5.0], [0, 0, 1], "mean", None) == [-0.5, 0.5, 0.0]
    assert renumber_groups(np.array([7, 10**15, 7])).tolist() == [0, 1, 0]
    assert first_positions(np.array([1, 0, 1, 3])).tolist() == [1, 0, 0, 3]


def test_normalization_constant_is_required_and_only_for_constant() -> None:
    for bad in (None, 0.0, -1.0, math.inf, "4"):
        with pytest.raises(ConfigError, match="normalization_constant"):
            check_normalization("constant", bad, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'leave_one_out'"):
        check_normalization("leave_one", None, 0.0)
    with pytest.raises(ConfigError, match="not to 'mean'"):
        check_normalization("mean", 4.0, 0.0)


# Numbers near the ends of what a float holds


@pytest.mark.parametrize("size", [1e160, 1e300, 1.6e308, 1e-160, 1e-300])
def test_std_is_exact_for_values_whose_squares_overflow(size: float) -> None:
    # Beside a group of usual size, which they must not disturb.
    values, groups = np.array([size, -size, 0.0, 3.0, 1.0]), np.array([0, 0, 0, 1, 1])
    found = relative(values, groups, "std", 0.0)
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0, 0.5**0.5, -(0.5**0.5)], rtol=1e-12)


@pytest.mark.parametrize("size", [1e160, 1e-160])
def test_extreme_values_keep_their_scale_without_std(size: float) -> None:
    values, groups = np.array([size, -size, 0.0]), np.array([0, 0, 0])
    np.testing.assert_allclose(relative(values, groups, "mean"), values, rtol=1e-12)
    np.testing.assert_allclose(relative(values, groups, "leave_one_out"), 1.5 * values, rtol=1e-12)
    measured = relative(values, groups, "constant", normalization_constant=2.0)
    np.testing.assert_allclose(measured, values / 2.0, rtol=1e-12)


def test_epsilon_has_the_unit_of_the_values() -> None:
    values, groups = np.array([2e-200, 0.0]), np.array([0, 0])
    found = relative(values, groups, "std", 1e-200)
    np.testing.assert_allclose(found, [1.0 / (2.0**0.5 + 1.0), -1.0 / (2.0**0.5 + 1.0)], rtol=1e-12)
