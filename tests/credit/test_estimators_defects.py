"""Test that the estimators avoid known defects of other implementations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from reward_kit.agent.models import StepData
from reward_kit.errors import ConfigError
from reward_kit.rl_helpers import ESTIMATORS
from tests.credit.batches import Trajectory, step, trajectory, with_tokens


def advantages(name: str, batch: list[Trajectory], scores: list[float | None], **options: object) -> list[float]:
    found: list[float] = ESTIMATORS[name](batch, scores, **options).advantages_S.tolist()
    return found


# One in its group, one in its batch


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline"])
def test_singleton_group_gets_zero_instead_of_its_raw_score(name: str) -> None:
    assert advantages(name, [trajectory("ab", [0.0, 0.0])], [0.75]) == [0.0, 0.0]


def test_rloo_equals_grpo_with_leave_one_out_for_singletons() -> None:
    batch, scores, ids = [[step()] for _ in range(4)], [0.75, 1.0, 0.0, 0.5], [0, 1, 1, 1]
    as_rloo = advantages("rloo", batch, scores, group_ids=ids)
    assert as_rloo == advantages("grpo", batch, scores, group_ids=ids, normalization="leave_one_out")
    assert as_rloo == [0.0, 0.75, -0.75, 0.0]


def test_whitening_a_single_step_gives_zero() -> None:
    assert advantages("reinforce_plus_plus", [[step("a", 3.0)]], [1.0], gamma=1.0) == [0.0]


# Rounding


def test_nearly_tied_scores_are_normalized() -> None:
    batch = [[step()] for _ in range(3)]
    found = advantages("grpo", batch, [1e-9, 2e-9, 3e-9], epsilon=0.0)
    np.testing.assert_allclose(found, [-1.0, 0.0, 1.0], rtol=1e-12, atol=1e-6)


def test_large_offset_costs_no_precision() -> None:
    batch = [[step("a", 1e9 + k)] for k in range(3)]
    for name, options in (("grpo", {}), ("reinforce_plus_plus", {"gamma": 1.0})):
        assert advantages(name, batch, [1e9, 1e9 + 1, 1e9 + 2], epsilon=0.0, **options) == [-1.0, 0.0, 1.0]


def test_empty_trajectory_does_not_change_equal_values_without_epsilon() -> None:
    # An episode without steps has no weight among steps. Its score must not be subtracted first, which would round.
    batch = [[], [], trajectory("ab", [0.0, 0.0]), [step()]]
    options = {"omega": 1.0, "gamma": 1.0, "epsilon": 0.0, "episode_statistics": "step"}
    assert advantages("gigpo", batch, [0.0, 0.1, 0.1, 0.1], **options) == [0.0, 0.0, 0.0]
    assert advantages("gigpo", batch, [0.3, 0.7, 0.1, 0.1], **options) == [0.0, 0.0, 0.0]


# What a trajectory's length must not change


def test_long_trajectory_counts_once_in_its_group() -> None:
    batch = [trajectory("abcde", [0.0] * 5), [step()], [step()]]
    assert advantages("grpo", batch, [1.0, 0.0, 0.5], normalization="mean") == [0.5] * 5 + [-0.5, 0.0]


def test_constant_group_stays_zero_beside_long_trajectories() -> None:
    batch = [trajectory("abcde", [0.0] * 5), [step()], [step()], [step()]]
    found = advantages("reinforce_plus_plus_baseline", batch, [1.0, 0.0, 0.5, 0.5], group_ids=[0, 0, 1, 1])
    assert found[6:] == [0.0, 0.0]


def test_trajectories_do_not_leak_into_each_other() -> None:
    first, second = trajectory("ab", [1.0, 2.0]), trajectory("abc", [4.0, 8.0, 16.0])
    for name in ("discounted_returns", "gae"):
        rows = [[item.model_copy(update={"policy_value_estimate": 1.0}) for item in row] for row in (first, second)]
        options = {"gamma": 0.5, **({"lam": 0.5} if name == "gae" else {})}
        alone = [advantages(name, [row], [0.0], **options) for row in rows]
        assert advantages(name, rows, [0.0, 0.0], **options) == alone[0] + alone[1]


# The critic


def critic_row(*, ending: dict[str, object], values: tuple[float | None, ...] = (2.0, 4.0)) -> Trajectory:
    row = [step("a", 1.0, value=value) for value in values]
    row[-1].step_info.update(ending)
    return row


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ({}, 1.0 - 4.0),
        ({"terminated": True, "truncated": False}, 1.0 - 4.0),
        ({"terminated": True, "truncated": True, "bootstrap_value": 8.0}, 1.0 - 4.0),
        ({"terminated": False, "truncated": True, "bootstrap_value": 8.0}, 1.0 + 0.5 * 8.0 - 4.0),
        ({"terminated": False, "truncated": True}, 1.0 + 0.5 * 4.0 - 4.0),
        # A piece of an episode that goes on.
        ({"terminated": False, "truncated": False}, 1.0 + 0.5 * 4.0 - 4.0),
    ],
)
def test_gae_bootstraps_truncated_but_not_terminated_episodes(ending: dict[str, object], expected: float) -> None:
    found = advantages("gae", [critic_row(ending=ending)], [0.0], gamma=0.5, lam=0.25)
    assert found == [1.0 + 0.5 * 4.0 - 2.0 + 0.125 * expected, expected]


def test_gae_skips_unscored_trajectories_without_values() -> None:
    batch = [critic_row(ending={}), critic_row(ending={}, values=(None, None)), critic_row(ending={})]
    alone = advantages("gae", batch[:1], [0.0], gamma=0.5, lam=0.5)
    found = advantages("gae", batch, [0.0, None, 0.0], gamma=0.5, lam=0.5)
    np.testing.assert_array_equal(found, [*alone, math.nan, math.nan, *alone])


def test_gae_names_the_step_without_a_value() -> None:
    batch = [critic_row(ending={}), critic_row(ending={}, values=(1.0, None))]
    with pytest.raises(ConfigError, match="trajectory 1, step 1: policy_value_estimate is None"):
        advantages("gae", batch, [0.0, 0.0], gamma=0.5, lam=0.5)
    with pytest.raises(ConfigError, match=r"trajectory 0, step 1: step_info\['bootstrap_value'\]"):
        bad = critic_row(ending={"truncated": True, "bootstrap_value": "8"})
        advantages("gae", [bad], [0.0], gamma=0.5, lam=0.5)


def test_gae_does_not_whiten_the_critic_target() -> None:
    batch = [critic_row(ending={"terminated": True})]
    found = advantages("gae", batch, [0.0], gamma=0.5, lam=1.0)
    # With lam 1, A + V is the return whatever the critic said.
    assert [a + item.policy_value_estimate for a, item in zip(found, batch[0], strict=True)] == [1.5, 1.0]


# One number for a group


def test_pass_at_k_gives_zero_to_tied_winners() -> None:
    batch = [[step()] for _ in range(3)]
    assert advantages("grpo_passk", batch, [1.0, 1.0, 0.0]) == [0.0, 0.0, 0.0]
    assert advantages("grpo_passk", batch, [0.25, 1.0, 0.5]) == [0.0, 0.5, 0.0]


def test_gpg_scales_by_groups_with_a_gradient() -> None:
    batch = [[step()] for _ in range(4)]
    # Scores of zero and one: both of the first group move the policy, neither of the second does.
    assert advantages("gpg", batch, [1.0, 0.0, 1.0, 1.0], group_ids=[0, 0, 1, 1]) == [1.0, -1.0, 0.0, 0.0]
    assert advantages("gpg", batch, [1.0, 0.0, 0.0, 0.0], group_ids=[0, 0, 1, 1]) == [1.0, -1.0, 0.0, 0.0]


def tokens(*counts: int | None) -> Trajectory:
    return [with_tokens(step(), count) for count in counts]


def test_opo_measures_length_in_one_unit_per_group() -> None:
    batch = [tokens(1, 2), tokens(1), tokens(5), tokens(None, 3)]
    scores, ids = [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]
    # Three tokens against one; one step against two, since not all of the second group's tokens are known.
    expected = [0.25, 0.25, -0.75, 1.0 - 1 / 3, -1 / 3, -1 / 3]
    np.testing.assert_allclose(advantages("opo", batch, scores, group_ids=ids), expected, rtol=1e-12)
    with pytest.raises(ConfigError, match=r"trajectory 3, step 0 has no policy_logprobs\['token_ids'\]"):
        advantages("opo", batch, scores, group_ids=ids, length="tokens")
    # An unscored trajectory's tokens need not be known.
    found = advantages("opo", batch, [1.0, 0.0, 1.0, None], group_ids=ids, length="tokens")
    np.testing.assert_array_equal(found, [0.25, 0.25, -0.75, 0.0, math.nan, math.nan])


# The bias of the stopping time (verl issue 7244)

STOP = 0.25
"""The policy's chance to stop at each turn; its one parameter is the logit of this chance."""


def walk(length: int) -> tuple[list[StepData], float, list[float]]:
    """A trajectory of up to three turns, its chance, and the slope of the log of each action's chance.

    Every turn pays 1 whatever the action, so that going on is worth exactly the turns that follow.
    """
    went_on, stopped = length - 1, length < 3
    # After the third turn it is over, whatever the action was.
    chance = (1 - STOP) ** went_on * (STOP if stopped else 1.0)
    slopes = [-STOP] * went_on + ([1 - STOP] if stopped else [0.0])
    return [step("s", 1.0) for _ in range(length)], chance, slopes


def test_turn_level_baselines_do_not_reward_stopping() -> None:
    exact = sum(walk(n)[1] * n * sum(walk(n)[2]) for n in (1, 2, 3))
    expected = 0.0
    for lengths in itertools.product((1, 2, 3), repeat=3):
        group, chances, slopes = zip(*map(walk, lengths), strict=True)
        every_slope = [slope for row in slopes for slope in row]
        found = advantages("turn_level_grpo", list(group), [0.0] * 3, gamma=1.0)
        expected += math.prod(chances) * float(np.dot(every_slope, found)) / 3
    # Each turn's reward less that turn's mean, added up to the own end, is zero here: it would never learn to go on.
    assert exact < -0.1
    assert expected == pytest.approx(exact, rel=1e-12)
