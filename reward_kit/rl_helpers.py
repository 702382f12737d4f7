"""Advantage estimators: what each action was worth above its peers. Pure functions in NumPy, in float64.

An estimator takes a batch of trajectories (lists of `StepData`), their final scores and their groups, and keyword-only
hyper-parameters, and returns a `StepCredit`: flat arrays with one item per step of the batch, in order. `ESTIMATORS`
lists them by name. `with_credit` writes a `StepCredit` onto copies of the steps; nothing given is ever changed.

Unscored is not zero: a trajectory whose score is None gets advantage None on every step and has no part in a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np

from reward_kit.agent.models import StepData
from reward_kit.credit.estimators import (
    discounted_returns_credit,
    gae_credit,
    gpg_credit,
    grpo_credit,
    grpo_passk_credit,
    opo_credit,
    reinforce_plus_plus_baseline_credit,
    reinforce_plus_plus_credit,
    rloo_credit,
    turn_level_grpo_credit,
)
from reward_kit.credit.options import Normalization, check_choice, check_normalization, check_number, check_returns
from reward_kit.credit.state_hashes import StateHash, anchor_codes, check_state_hash
from reward_kit.credit.step_arrays import Batch, StepArrays, overflow_allowed, relative
from reward_kit.credit.step_credit import StepCredit, check_advantages, with_credit
from reward_kit.errors import ConfigError

Combination = Literal["convex", "additive"]
EpisodeStatistics = Literal["trajectory", "step"]
Estimator = Callable[..., StepCredit]


def system_apply_gigpo_to_batch_steps(
    batch_of_step_data_lists: Batch,
    final_scores_for_rollouts: Sequence[float | None],
    omega: float | None,
    gamma: float,
    state_hashing_function: StateHash,
    default_step_reward: float = 0.0,
    *,
    group_ids: Sequence[Hashable] | None = None,
    combination: Combination = "convex",
    step_weight: float | None = None,
    epsilon: float = 1e-6,
    normalization: Normalization = "std",
    normalization_constant: float | None = None,
    episode_statistics: EpisodeStatistics = "trajectory",
    min_anchor_group_size: int = 2,
    invalid_action_penalty: float = 0.0,
) -> list[list[StepData]]:
    """GiGPO advantages on copies of the steps; `gigpo_credit` gives the formulas, the arguments and the errors.

    Args:
        batch_of_step_data_lists: the trajectories, each a list of steps in time order.
        final_scores_for_rollouts: one score per trajectory, None where it is unscored.
        omega: the weight of A_E in the convex combination.
        gamma: the discount of G_k.
        state_hashing_function: what makes two steps share an anchor state.
        default_step_reward: see `gigpo_credit`.
        group_ids: one per trajectory. None takes `step_info["group_id"]` of the steps; without any, all are one group.
        combination: "convex" or "additive".
        step_weight: the weight of A_S in the additive combination.
        epsilon: added to each standard deviation.
        normalization: what A_E and A_S are measured in, and the options that follow: see `gigpo_credit`.

    Returns:
        Copies with `advantage`, A, and `return_to_go` set (A + V where the policy gave a value, else G_k); None on the
        steps of an unscored trajectory.
    """
    credit = gigpo_credit(
        batch_of_step_data_lists,
        final_scores_for_rollouts,
        group_ids=group_ids,
        omega=omega,
        gamma=gamma,
        state_hash=state_hashing_function,
        default_step_reward=default_step_reward,
        combination=combination,
        step_weight=step_weight,
        epsilon=epsilon,
        normalization=normalization,
        normalization_constant=normalization_constant,
        episode_statistics=episode_statistics,
        min_anchor_group_size=min_anchor_group_size,
        invalid_action_penalty=invalid_action_penalty,
    )
    return with_credit(batch_of_step_data_lists, credit)


def gigpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    omega: float | None,
    gamma: float,
    state_hash: StateHash = None,
    default_step_reward: float = 0.0,
    combination: Combination = "convex",
    step_weight: float | None = None,
    epsilon: float = 1e-6,
    normalization: Normalization = "std",
    normalization_constant: float | None = None,
    episode_statistics: EpisodeStatistics = "trajectory",
    min_anchor_group_size: int = 2,
    invalid_action_penalty: float = 0.0,
) -> StepCredit:
    """Group-in-group advantages (Feng et al. 2025, "Group-in-Group Policy Optimization", equations 3 to 8).

    With ~ over the scored trajectories of one group, std unbiased (n - 1):

        A_E = (score - mean(score)) / (std(score) + epsilon)                       one per trajectory
        G_k = r_k + gamma G_{k+1}                                                   one per step
        A_S = (G_k - mean(G)) / (std(G) + epsilon)    over the group's steps whose state key equals this step's
        A   = omega A_E + (1 - omega) A_S             convex
        A   = A_E + step_weight A_S                   additive, the paper's

    r_k is the step's `base_reward`. Only in a trajectory where some base reward is None do those count as
    `default_step_reward`, and the final score is added at its last step. A group of one gives exact zeros, and so do
    values that are all equal. An `invalid_action_penalty` is taken from r_k where `step_info["is_action_valid"]` is
    False, and the sum of a trajectory's from the score in A_E; a score that is added at the last step stays as it is.

    Args:
        batch: B trajectories, S steps in all.
        scores: (B,) None where unscored.
        group_ids: (B,) the group of each trajectory; None takes the recorded ones, else one group.
        omega: in [0, 1] for "convex", None for "additive".
        gamma: in [0, 1].
        state_hash: a name of `STATE_HASHES`, which sees the whole step (None: "state_key"), such a name with options
            as a mapping, a function of the step's `observation_data`, or a list of these, all of which have to agree.
        default_step_reward: what an unset base reward counts.
        combination: which of the two rules.
        step_weight: for "additive", None for "convex".
        epsilon: not negative.
        normalization: what A_E and A_S are divided by: "std", as above; "mean", nothing; "constant", the next option;
            "leave_one_out", nothing, and the mean is that of the others.
        normalization_constant: for "constant", None for the others.
        episode_statistics: in the mean and std of A_E each counts once ("trajectory", the paper's), or once per "step".
        min_anchor_group_size: A_S is 0 where fewer scored steps than this share a state.
        invalid_action_penalty: not negative.

    Raises:
        ConfigError: the arguments contradict each other.
        InvalidResultError: a score or a base reward is not finite, or an advantage would not be.
    """
    episode_weight, weight = _weights(combination, omega, step_weight)
    check_returns(gamma, default_step_reward)
    check_normalization(normalization, normalization_constant, epsilon)
    _check_statistics(episode_statistics, min_anchor_group_size, invalid_action_penalty)
    check_state_hash(state_hash)
    arrays = StepArrays.of(batch, scores, group_ids)
    penalties_S = np.where(arrays.is_valid_S, 0.0, invalid_action_penalty) if invalid_action_penalty else None
    returns_S = arrays.returns_S(gamma, default_step_reward, penalties_S)
    anchors_S = anchor_codes(batch, arrays.to_steps(arrays.groups_B), state_hash)
    scores_B = arrays.scores_B if penalties_S is None else arrays.scores_B - arrays.sums_B(penalties_S)
    weights_B = arrays.lengths_B.astype(np.float64) if episode_statistics == "step" else None
    measured = partial(
        relative, normalization=normalization, epsilon=epsilon, normalization_constant=normalization_constant
    )
    episode_S = arrays.to_steps(measured(scores_B, arrays.groups_B, weights_N=weights_B))
    step_S = measured(returns_S, anchors_S, min_group_size=min_anchor_group_size)
    with overflow_allowed():
        advantages_S = episode_weight * episode_S + weight * step_S
    check_advantages(arrays, advantages_S)
    return StepCredit(episode_S, step_S, advantages_S, returns_S, anchors_S)


ESTIMATORS: Mapping[str, Estimator] = {
    "gigpo": gigpo_credit,
    "grpo": grpo_credit,
    "rloo": rloo_credit,
    "reinforce_plus_plus": reinforce_plus_plus_credit,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_credit,
    "gae": gae_credit,
    "discounted_returns": discounted_returns_credit,
    "opo": opo_credit,
    "grpo_passk": grpo_passk_credit,
    "gpg": gpg_credit,
    "turn_level_grpo": turn_level_grpo_credit,
}


def _weights(combination: str, omega: float | None, step_weight: float | None) -> tuple[float, float]:
    """The weights of A_E and A_S. An argument that the rule does not use is refused, so that none is a silent no-op."""
    check_choice("combination", combination, get_args(Combination))
    if combination == "convex":
        if not isinstance(omega, int | float) or not 0.0 <= omega <= 1.0 or step_weight is not None:
            raise ConfigError(f"convex takes omega in [0, 1] and no step_weight; got {omega!r} and {step_weight!r}")
        return omega, 1.0 - omega
    if not isinstance(step_weight, int | float) or not math.isfinite(step_weight) or omega is not None:
        raise ConfigError(f"additive takes a finite step_weight and no omega; got {step_weight!r} and {omega!r}")
    return 1.0, step_weight


def _check_statistics(episode_statistics: str, min_anchor_group_size: int, invalid_action_penalty: float) -> None:
    check_choice("episode_statistics", episode_statistics, get_args(EpisodeStatistics))
    if not isinstance(min_anchor_group_size, int) or min_anchor_group_size < 1:
        raise ConfigError(f"min_anchor_group_size is a whole number from 1; got {min_anchor_group_size!r}")
    check_number("invalid_action_penalty", invalid_action_penalty, 0.0)
