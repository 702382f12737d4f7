"""Test `vine_credit`: advantages from values that were measured at some of the steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.credit import rloo_credit, vine_credit
from reward_kit.errors import ConfigError
from reward_kit.rl_helpers import ESTIMATORS
from tests.credit import loops
from tests.credit.batches import ScoredBatch, batches, step, trajectory
from tests.profiles import examples

fast = settings(max_examples=examples(60), deadline=None)


def draw_values(rows: ScoredBatch, seed: int) -> list[list[float | None] | None]:
    """Return values for about half of the steps, and none for some trajectories."""
    source = random.Random(seed)
    return [
        [source.choice([None, float("nan"), source.randint(-8, 8) / 8]) for _ in steps]
        if source.random() < 0.8
        else None
        for steps in rows.batch
    ]


def loop(rows: ScoredBatch, values: list[list[float | None] | None]) -> list[float]:
    found = []
    for b, steps in enumerate(rows.batch):
        others = [rows.scores[c] for c in loops.scored(rows, b) if c != b]
        known = [(k, v) for k, v in enumerate(values[b] or []) if v is not None and v == v]
        for k in range(len(steps)):
            after = next((v for j, v in known if j > k), rows.scores[b])
            before = next((v for j, v in reversed(known) if j <= k), loops.mean(others) if others else after)
            found.append(np.nan if rows.scores[b] is None else after - before)
    return found


@fast
@given(rows=batches(), seed=st.integers(0, 1000))
def test_advantage_is_the_difference_of_the_measured_values_around_the_step(rows: ScoredBatch, seed: int) -> None:
    values = draw_values(rows, seed)
    credit = vine_credit(rows.batch, rows.scores, values, group_ids=rows.ids, gamma=0.5, default_step_reward=-0.125)
    np.testing.assert_allclose(credit.advantages_S, loop(rows, values), rtol=1e-12, atol=1e-12)
    returns = [x for b in loops.scored(rows) for x in loops.returns_of(rows, b)]
    np.testing.assert_array_equal(credit.returns_S[~np.isnan(credit.advantages_S)], returns)
    assert (credit.anchors_S == -1).all()


@fast
@given(rows=batches())
def test_unmeasured_trajectories_get_leave_one_out_advantages(rows: ScoredBatch) -> None:
    found = vine_credit(rows.batch, rows.scores, [None] * len(rows.batch), group_ids=rows.ids).advantages_S
    expected = rloo_credit(rows.batch, rows.scores, group_ids=rows.ids).advantages_S
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_advantages_of_a_measured_trajectory_sum_to_its_score_minus_the_first_value() -> None:
    credit = vine_credit([trajectory("abc", [0.0] * 3)], [1.0], [[0.5, 0.75, 0.25]])
    assert credit.advantages_S.tolist() == [0.25, -0.5, 0.75]


def test_steps_between_two_measured_values_share_their_difference() -> None:
    values = [[0.25, None, None, 0.75, None]]
    credit = vine_credit([trajectory("abcde", [0.0] * 5)], [1.0], values)
    assert credit.advantages_S.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]


def test_steps_before_the_first_value_get_zero_if_the_group_has_no_other_trajectory() -> None:
    assert vine_credit([trajectory("ab", [0.0] * 2)], [1.0], [[None, 0.25]]).advantages_S.tolist() == [0.0, 0.75]
    assert vine_credit([trajectory("ab", [0.0] * 2)], [1.0], [None]).advantages_S.tolist() == [0.0, 0.0]


def test_batches_without_steps_are_valid() -> None:
    assert all(len(part) == 0 for part in vine_credit([], [], []))
    assert vine_credit([[], [step()]], [1.0, 0.0], [[], [0.5]]).advantages_S.tolist() == [-0.5]


def test_values_that_do_not_match_the_batch_are_rejected() -> None:
    batch = [trajectory("ab", [0.0] * 2)]
    with pytest.raises(ConfigError, match="step_values has 2 items, but there are 1 trajectories"):
        vine_credit(batch, [1.0], [None, None])
    with pytest.raises(ConfigError, match=r"step_values\[0\] has 1 values, but the trajectory has 2 steps"):
        vine_credit(batch, [1.0], [[0.5]])
    with pytest.raises(ConfigError, match="trajectory 0, step 1 has an infinite value"):
        vine_credit(batch, [1.0], [[0.5, float("inf")]])


def test_vine_reads_measured_values_from_steps() -> None:
    batch = [[step("a"), step("b")], [step("a"), step("c")]]
    batch[0][1].step_info["measured_value"] = 0.75
    measured = ESTIMATORS["vine"](batch, [1.0, 0.0], group_ids=[0, 0])
    expected = vine_credit(batch, [1.0, 0.0], [[None, 0.75], None], group_ids=[0, 0])
    np.testing.assert_array_equal(measured.advantages_S, expected.advantages_S)
    with pytest.raises(ConfigError, match="vine requires measured values, but no step has one"):
        ESTIMATORS["vine"](batch[1:], [1.0], group_ids=[0])
