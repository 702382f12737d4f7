"""Test `StepArrays`: the arrays of a batch, validation, and discounted sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.credit.step_arrays import StepArrays, discounted, factorize, locate_step
from reward_kit.errors import ConfigError, InvalidResultError
from tests.credit.batches import eighths, step, trajectory


def test_arrays_hold_every_field_of_the_batch() -> None:
    batch = [
        [step("a", 1.0, value=2.0, group_id="y"), step("b", None, is_action_valid=False, truncated=True)],
        [],
        [step("a", 0.5, group_id="x", is_action_valid=True, terminated=True, truncated=True)],
    ]
    arrays = StepArrays.from_batch(batch, [1.0, 0.0, None])
    assert arrays.lengths_B.tolist() == [2, 0, 1]
    assert arrays.groups_B.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(arrays.scores_B, [1.0, 0.0, np.nan])
    np.testing.assert_array_equal(arrays.rewards_S, [1.0, np.nan, 0.5])
    np.testing.assert_array_equal(arrays.values_S, [2.0, np.nan, np.nan])
    assert arrays.is_valid_S.tolist() == [True, False, True]
    assert arrays.is_scored_S.tolist() == [True, True, False]
    assert arrays.is_truncated_B.tolist() == [True, False, False]
    assert arrays.sums_B(np.array([1.0, 2.0, 4.0])).tolist() == [3.0, 0.0, 4.0]
    assert arrays.describe_step(2) == "trajectory 2, step 0"


def test_unset_rewards_are_filled_and_the_score_is_added_last() -> None:
    batch = [trajectory("ab", [None, 1.0]), [], trajectory("ab", [0.5, 1.0]), trajectory("a", [None])]
    arrays = StepArrays.from_batch(batch, [8.0, 8.0, 8.0, None])
    np.testing.assert_array_equal(arrays.earned_S(-0.25), [-0.25, 9.0, 0.5, 1.0, np.nan])


def test_nan_reward_is_rejected_and_not_treated_as_unset() -> None:
    batch = [trajectory("a", [None]), [], trajectory("ab", [None, float("nan")])]
    with pytest.raises(InvalidResultError, match="trajectory 2, step 1: a base reward is not finite"):
        StepArrays.from_batch(batch, [0.0, 0.0, None])


def test_overflowing_return_is_rejected() -> None:
    arrays = StepArrays.from_batch([trajectory("a", [1.0]), trajectory("ab", [1e308, 1e308])], [0.0, 0.0])
    with pytest.raises(InvalidResultError, match="trajectory 1, step 0: a return is not finite"):
        arrays.returns_S(1.0)


def test_invalid_batch_or_score_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"a list of trajectories \(lists of steps\), got a single list"):
        StepArrays.from_batch(trajectory("a", [1.0]), [1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the score of trajectory 1 must be a number, .* got '1'"):
        StepArrays.from_batch([[step()], [step()]], [1.0, "1"])  # type: ignore[list-item]


def test_partially_recorded_groups_are_rejected() -> None:
    batch = [[step(group_id="x")], [], [step()]]
    with pytest.raises(ConfigError, match="trajectory 2 has no group_id, but other trajectories do"):
        StepArrays.from_batch(batch, [0.0] * 3)
    assert StepArrays.from_batch(batch, [0.0] * 3, ["g", "h", "g"]).groups_B.tolist() == [0, 1, 0]


@given(st.lists(st.lists(eighths, max_size=6), max_size=6), st.sampled_from([0.0, 0.5, 1.0]))
def test_discounted_sums_match_the_formula(rows: list[list[float]], decay: float) -> None:
    expected = [sum(decay ** (j - k) * row[j] for j in range(k, len(row))) for row in rows for k in range(len(row))]
    flat = np.array([x for row in rows for x in row], dtype=np.float64)
    found = discounted(flat, np.array([len(row) for row in rows], dtype=np.int64), decay)
    np.testing.assert_array_equal(found, expected)


def test_very_long_trajectory_beside_many_short_trajectories() -> None:
    lengths = np.array([1] * 1000 + [20_000] + [1] * 1000)
    found = discounted(np.ones(int(lengths.sum())), lengths, 1.0)
    assert found[1000:21_000].tolist() == list(range(20_000, 0, -1))
    assert found[:1000].tolist() + found[21_000:].tolist() == [1.0] * 2000


@pytest.mark.parametrize("lengths", [[700, 0, 3], [300, 40] + [9] * 70, [*range(130)], [5] * 64 + [0] * 3])
def test_discounted_sums_of_few_long_and_many_short_trajectories(lengths: list[int]) -> None:
    rewards = np.random.default_rng(3).normal(size=sum(lengths))
    expected, end = rewards.copy(), 0
    for length in lengths:
        end += length
        for k in range(end - 2, end - length - 1, -1):
            expected[k] += 0.9 * expected[k + 1]
    np.testing.assert_array_equal(discounted(rewards, np.array(lengths), 0.9), expected)


def test_factorize_numbers_values_and_locate_step_finds_positions() -> None:
    assert factorize(["b", "a", "b", ("a",)]).tolist() == [0, 1, 0, 2]
    assert factorize([]).tolist() == []
    lengths = np.array([2, 0, 0, 3])
    assert [locate_step(k, lengths) for k in range(5)] == [(0, 0), (0, 1), (3, 0), (3, 1), (3, 2)]
