"""Advantage estimators, written as pure NumPy functions that compute in float64.

An estimator takes a batch of trajectories (lists of `StepData`), their final scores, their groups, and keyword-only
hyperparameters. It returns a `StepCredit`, which consists of flat arrays with one item for each step in the batch.
`ESTIMATORS` maps names to estimators, and `with_credit` writes a `StepCredit` to copies of the steps.

GRPO, RLOO, REINFORCE++ with a baseline, OPO, GRPO pass@k and GPG compute one advantage per trajectory by comparing its
score with the other scores in its group. Discounted returns, REINFORCE++, GAE and turn-level GRPO compute one advantage
per step. GiGPO combines both kinds. The module `state_estimators` contains further estimators that use states.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import pydantic

from reward_kit.credit.options import EpisodeStatistics, Normalization, check_normalization, check_returns
from reward_kit.credit.own_estimators import OwnEstimator
from reward_kit.credit.state_estimators import g2po_credit, gagpo_credit, graphgpo_credit, hgpo_credit
from reward_kit.credit.state_hashes import StateHash, anchor_codes, check_state_hash
from reward_kit.credit.step_arrays import (
    Batch,
    StepArrays,
    discounted,
    first_positions,
    following,
    group_sizes,
    overflow_allowed,
    relative,
    renumber_groups,
)
from reward_kit.credit.step_credit import StepCredit, check_advantages, episode_credit, step_credit
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.validation import check_choice, check_integer, check_number, describe_problem

Length = Literal["recorded", "tokens", "steps"]
Combination = Literal["convex", "additive"]
Estimator = Callable[..., StepCredit]


def grpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    normalization: Normalization = "std",
    normalization_constant: float | None = None,
    epsilon: float = 1e-6,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute group-relative advantages: A = (score - mean(score)) / (std(score) + epsilon) within each group.

    With the normalization "std", this is GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2). With "mean", which
    omits the division, it is Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training"). All four
    normalizations are defined in `step_arrays.relative`.

    Args:
        batch: B trajectories with S steps in total.
        scores: (B,) the scores; None for an unscored trajectory.
        group_ids: (B,) the group of each trajectory; see `gigpo_credit`.
        normalization: the name of the normalization.
        normalization_constant: the divisor for the normalization "constant".
        epsilon: a constant that is added to each standard deviation.
        gamma: the discount factor for G_k.
        default_step_reward: the value used in G_k for a base reward that is not set.

    Raises:
        ConfigError: If the arguments are invalid or inconsistent.
        InvalidResultError: If a score or a base reward is not finite.
    """
    check_returns(gamma, default_step_reward)
    check_normalization(normalization, normalization_constant, epsilon)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    advantages_B = relative(
        arrays.scores_B, arrays.groups_B, normalization, epsilon, normalization_constant=normalization_constant
    )
    return episode_credit(arrays, advantages_B, arrays.returns_S(gamma, default_step_reward))


def rloo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute leave-one-out advantages: A = score - the mean score of the other trajectories in the group.

    This is RLOO (Ahmadian et al. 2024, "Back to Basics"). A trajectory's baseline excludes its own score, so the
    gradient estimate is unbiased. The advantage in a group of one is zero. The arguments and errors are the same as for
    `grpo_credit`.
    """
    return grpo_credit(
        batch,
        scores,
        group_ids=group_ids,
        normalization="leave_one_out",
        gamma=gamma,
        default_step_reward=default_step_reward,
    )


def reinforce_plus_plus_baseline_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    epsilon: float = 1e-6,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute REINFORCE++ advantages with a group baseline (Hu et al. 2025).

        A = (score - mean(score)) / (std + epsilon)

    The mean is taken over the trajectory's group, and std is the unbiased standard deviation of score - mean(score)
    over all scored trajectories in the batch. Each trajectory counts once, so advantages are exactly zero in a group
    with equal scores. Whitening over steps or tokens would not have this property. The arguments and errors are the
    same as for `grpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_normalization("std", None, epsilon)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    centered_B = relative(arrays.scores_B, arrays.groups_B, "mean")
    scored = centered_B[~np.isnan(centered_B)]
    # `hypot` computes the square root of the sum of squares without overflow, even if the squares would overflow.
    scale = math.hypot(*scored.tolist()) / math.sqrt(max(len(scored) - 1, 1)) + epsilon
    advantages_B = centered_B / scale if scale > 0 else centered_B
    return episode_credit(arrays, advantages_B, arrays.returns_S(gamma, default_step_reward))


def opo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    length: Length = "recorded",
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute advantages relative to a length-weighted mean score.

    This is the optimal reward baseline (Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline"):

        A = score - sum(length score) / sum(length)      over the trajectory's group

    `length` is "tokens" for the number of sampled tokens, "steps" for the number of steps, or "recorded". The value
    "recorded" means tokens in groups that record the tokens of every scored step, and steps in all other groups. If
    `length` is "tokens", a scored step without `policy_logprobs["token_ids"]` raises a ConfigError. The other arguments
    and errors are the same as for `grpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_choice("length", length, get_args(Length))
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    weights_B = arrays.lengths_B.astype(np.float64)
    if length != "steps":
        token_ids = [(step.policy_logprobs or {}).get("token_ids") for step in arrays.steps]
        tokens_S = np.array([math.nan if ids is None else float(len(ids)) for ids in token_ids], dtype=np.float64)
        is_missing_S = np.isnan(tokens_S) & arrays.is_scored_S
        if length == "tokens" and is_missing_S.any():
            where = arrays.describe_step(int(np.argmax(is_missing_S)))
            raise ConfigError(f"{where} has no policy_logprobs['token_ids']; set length to 'steps' or 'recorded'")
        tokens_B = arrays.sums_B(np.nan_to_num(tokens_S))
        is_known_G = np.bincount(arrays.groups_B, arrays.sums_B(is_missing_S.astype(np.float64))) == 0
        is_known_G &= np.bincount(arrays.groups_B, tokens_B) > 0
        weights_B = np.where(is_known_G[arrays.groups_B], tokens_B, weights_B)
    advantages_B = relative(arrays.scores_B, arrays.groups_B, "mean", weights_N=weights_B)
    return episode_credit(arrays, advantages_B, arrays.returns_S(gamma, default_step_reward))


def grpo_passk_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute advantages for pass@k, where k is the group size.

    The advantage of the best trajectory in a group is its score minus the second-best score. This difference is its
    contribution to the group's maximum score. All other advantages are zero. If multiple trajectories share the best
    score, or if the group contains only one trajectory, all advantages in the group are zero. See Tang et al. 2025,
    "Optimizing Language Models for Inference Time Objectives". The arguments and errors are the same as for
    `grpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    advantages_B = np.where(np.isnan(arrays.scores_B), np.nan, 0.0)
    scored = np.flatnonzero(~np.isnan(arrays.scores_B))
    # Sort by group, then by score. The best trajectory of a group comes last, after the second best.
    order = scored[np.lexsort((arrays.scores_B[scored], arrays.groups_B[scored]))]
    groups = arrays.groups_B[order]
    is_best = np.append(groups[1:] != groups[:-1], True)[: len(groups)]
    has_second = np.insert(groups[1:] == groups[:-1], 0, False)[: len(groups)]
    at = np.flatnonzero(is_best & has_second)
    with overflow_allowed():
        advantages_B[order[at]] = arrays.scores_B[order[at]] - arrays.scores_B[order[at - 1]]
    return episode_credit(arrays, advantages_B, arrays.returns_S(gamma, default_step_reward))


def gpg_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute GPG advantages (Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline").

        A = (score - mean(score)) B / B'

    The mean is taken over the trajectory's group. B is the number of scored trajectories in the batch, and B' is the
    number of scored trajectories in groups whose scores differ. Groups with equal scores produce no gradient, and the
    factor B / B' makes the magnitude of the gradient independent of the number of such groups. A common alternative
    defines B' as the number of trajectories with a nonzero score. This definition wrongly treats failed trajectories as
    if they produced no gradient.

    The arguments and errors are the same as for `grpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    centered_B = relative(arrays.scores_B, arrays.groups_B, "mean")
    is_scored_B = ~np.isnan(centered_B)
    differs_G = np.bincount(arrays.groups_B, is_scored_B & (centered_B != 0.0)) > 0
    counting = int(np.sum(is_scored_B & differs_G[arrays.groups_B]))
    with overflow_allowed():
        advantages_B = centered_B * (int(np.sum(is_scored_B)) / counting) if counting else centered_B
    return episode_credit(arrays, advantages_B, arrays.returns_S(gamma, default_step_reward))


ReturnBaseline = Literal["none", "mean"]


def discounted_returns_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    default_step_reward: float = 0.0,
    baseline: ReturnBaseline = "none",
) -> StepCredit:
    """Compute REINFORCE advantages (Williams 1992) with reward-to-go: A = G_k = r_k + gamma G_{k+1}.

    If `baseline` is "mean", the mean of G over the scored steps in the group is subtracted. This mean includes the step
    itself, which makes the gradient slightly smaller in small groups. If `baseline` is "none", the advantages of
    identical trajectories are not zero, and groups have no effect. The other arguments and errors are the same as for
    `gigpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_choice("baseline", baseline, get_args(ReturnBaseline))
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    returns_S = arrays.returns_S(gamma, default_step_reward)
    advantages_S = returns_S.copy()
    if baseline == "mean":
        advantages_S = relative(returns_S, arrays.to_steps(arrays.groups_B), "mean")
    return step_credit(arrays, advantages_S, returns_S)


def reinforce_plus_plus_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    default_step_reward: float = 0.0,
    epsilon: float = 1e-6,
) -> StepCredit:
    """Compute REINFORCE++ advantages (Hu et al. 2025): A = (G_k - mean(G)) / (std(G) + epsilon).

    The mean and the standard deviation are taken over all scored steps in the batch, so groups have no effect.
    `group_ids` is validated but not used. The other arguments and errors are the same as for
    `discounted_returns_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_normalization("std", None, epsilon)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    returns_S = arrays.returns_S(gamma, default_step_reward)
    one_group_S = np.zeros(len(returns_S), dtype=np.int64)
    return step_credit(arrays, relative(returns_S, one_group_S, "std", epsilon), returns_S)


def gae_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    lam: float,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute generalized advantage estimates (Schulman et al. 2016, equations 11 and 16).

        delta_k = r_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lam A_{k+1}

    V_k is the `policy_value_estimate` of the step, and r_k is defined as in `gigpo_credit`. After the last step of a
    terminated trajectory, V is 0. After the last step of a truncated trajectory, V is `step_info["bootstrap_value"]` of
    that step. If this value is missing, the `policy_value_estimate` of the last step is used instead, because the
    critic evaluated no later state.

    Advantages are relative to the critic, so the advantages of identical trajectories are not zero, and groups have no
    effect. Advantages are not whitened, so A + V is the target for the critic.

    `lam` must be in [0, 1]. If it is 0, the advantage uses the critic's estimate after one step. If it is 1, the
    advantage sums the rewards up to the end of the trajectory. A ConfigError is raised if a step of a scored trajectory
    has no value estimate. The other arguments and errors are the same as for `gigpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_number("lam", lam, 0.0, 1.0)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    values_S = arrays.values_S
    bad_S = ~np.isfinite(values_S) & arrays.is_scored_S
    if bad_S.any():
        position = int(np.argmax(bad_S))
        value = arrays.steps[position].policy_value_estimate
        raise ConfigError(
            f"{arrays.describe_step(position)}: policy_value_estimate is {value}, but gae needs a finite estimate "
            "for every step; use a policy with a critic, or choose a different estimator"
        )
    has_steps_B = arrays.lengths_B > 0
    lasts_B = np.cumsum(arrays.lengths_B)[has_steps_B] - 1
    next_values_S = following(values_S, arrays.lengths_B)
    for last in lasts_B[arrays.is_truncated_B[has_steps_B]].tolist():
        value = arrays.steps[last].step_info.get("bootstrap_value")
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value)):
            raise ConfigError(
                f"{arrays.describe_step(last)}: step_info['bootstrap_value'] must be a finite number, got {value!r}"
            )
        next_values_S[last] = values_S[last] if value is None else value
    with overflow_allowed():
        deltas_S = arrays.earned_S(default_step_reward) + gamma * next_values_S - values_S
    advantages_S = discounted(deltas_S, arrays.lengths_B, gamma * lam)
    return step_credit(arrays, advantages_S, arrays.returns_S(gamma, default_step_reward))


def vine_credit(
    batch: Batch,
    scores: Sequence[float | None],
    step_values: Sequence[Sequence[float | None] | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute advantages from measured values (Kazemnejad et al. 2024, "VinePPO", arXiv:2410.01679).

        A_k = V_{k+1} - V_k

    V_k is the expected score of the whole trajectory before step k, measured by continuing the trajectory from there.
    It includes the rewards up to step k, so no reward is added. V after the last step is the score.

    If V_k or V_{k+1} was not measured, A_k uses the last value that was measured at or before step k and the next value
    that was measured after it. All steps between these two values have the same advantage, which keeps the gradient
    unbiased. Before the first measured value, the mean score of the group's other trajectories is used, so a trajectory
    without measured values has the same advantage as in RLOO. If there are no other trajectories, the advantage is 0.

    The gradient is unbiased if the measured values are unbiased and the choice of steps to measure does not depend on
    what happened after them. It is biased if, for example, only failed trajectories are measured.

    Args:
        batch: B trajectories with S steps in total.
        scores: (B,) the scores, in the same unit as `step_values`; None for an unscored trajectory. If `step_values`
            are pass probabilities, use 1 for a trajectory that passed and 0 for one that did not.
        step_values: (B,) for each trajectory, a list with the measured value before each step, in which None or NaN
            marks a value that was not measured. None instead of a list means that no step of the trajectory was
            measured.
        group_ids: (B,) the group of each trajectory; see `gigpo_credit`.
        gamma: the discount factor for G_k. It does not affect the advantages.
        default_step_reward: the value used in G_k for a base reward that is not set.

    Raises:
        ConfigError: If the arguments are invalid or inconsistent.
        InvalidResultError: If a score or a base reward is not finite.
    """
    check_returns(gamma, default_step_reward)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    if len(step_values) != len(batch):
        raise ConfigError(f"step_values has {len(step_values)} items, but there are {len(batch)} trajectories")
    for index, (steps, values) in enumerate(zip(batch, step_values, strict=True)):
        if values is not None and len(values) != len(steps):
            raise ConfigError(
                f"step_values[{index}] has {len(values)} values, but the trajectory has {len(steps)} steps"
            )
    measured = [
        [None] * len(steps) if values is None else values for steps, values in zip(batch, step_values, strict=True)
    ]
    values_S = np.array([*chain.from_iterable(measured)], dtype=np.float64)  # None becomes NaN
    if np.isinf(values_S).any():
        raise ConfigError(f"{arrays.describe_step(int(np.argmax(np.isinf(values_S))))} has an infinite value")
    with overflow_allowed():
        others_B = arrays.scores_B - relative(arrays.scores_B, arrays.groups_B, "leave_one_out")
    others_B[group_sizes(arrays.scores_B, arrays.groups_B) < 2] = np.nan
    # The positions of the last measured value at or before each step, and of the next one after it.
    positions_S, is_measured_S = np.arange(len(values_S)), ~np.isnan(values_S)
    starts_S, ends_S = positions_S - arrays.turns_S, arrays.to_steps(np.cumsum(arrays.lengths_B))
    last_S = np.maximum.accumulate(np.where(is_measured_S, positions_S, -1))
    next_S = np.minimum.accumulate(np.where(is_measured_S, positions_S, len(values_S))[::-1])[::-1]
    next_S = np.append(next_S[1:], len(values_S))[: len(values_S)]
    padded = np.append(values_S, np.nan)
    before_S = np.where(last_S >= starts_S, padded[last_S], arrays.to_steps(others_B))
    after_S = np.where(next_S < ends_S, padded[next_S], arrays.to_steps(arrays.scores_B))
    with overflow_allowed():
        advantages_S = np.where(np.isnan(before_S), 0.0, after_S - before_S)
    advantages_S[~arrays.is_scored_S] = np.nan
    return step_credit(arrays, advantages_S, arrays.returns_S(gamma, default_step_reward))


def turn_level_grpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Compute turn-level group-relative advantages that are not biased by the turn at which trajectories stop.

        A_k = G_k - the mean of G_k over the other trajectories in the group

    A trajectory that stopped before turn k counts as G_k = 0, which is its return from turn k onward.

    The usual form (Wei et al. 2025, MT-GRPO) subtracts the mean reward of each turn from the reward of that turn and
    sums the differences up to the end of the trajectory. The number of subtracted means then depends on when the
    trajectory stopped, which its actions determine. If the trajectory continues, the mean rewards of later turns are
    subtracted as well, so the gradient is biased towards stopping (verl issue 7244). If the mean is taken over the
    trajectories that reached turn k, including this one, the gradient of a turn becomes smaller as fewer trajectories
    reach that turn.

    Here, the baseline of turn k is a function of the other trajectories only. The other trajectories are sampled
    independently of this one, so the baseline does not depend on the action or on whether this trajectory reaches turn
    k. Therefore E[grad log pi(a_k) baseline] = E[baseline] E[grad log pi(a_k)] = 0, and the gradient is unbiased for
    every length. Advantages are zero in a group of one, and exactly zero in a group whose trajectories have equal
    returns at every turn. The arguments and errors are the same as for `gigpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    returns_S = arrays.returns_S(gamma, default_step_reward)
    turns_S, groups_S = arrays.turns_S, arrays.to_steps(arrays.groups_B)
    cells_S = groups_S * (int(turns_S.max(initial=0)) + 1) + turns_S
    is_scored_S = arrays.is_scored_S
    # From each of the N scored values, subtract the mean of the other values in its cell, which is padded with zeros to
    # the group size. As in `relative`, the first value of the cell is subtracted first, so that equal values give
    # exactly zero.
    values_N, cells_N = returns_S[is_scored_S], renumber_groups(cells_S[is_scored_S])
    sizes_N = np.bincount(arrays.groups_B, ~np.isnan(arrays.scores_B))[groups_S[is_scored_S]]
    first_N = values_N[first_positions(cells_N)][cells_N]
    present_N = np.bincount(cells_N)[cells_N]
    advantages_S = np.full(len(returns_S), np.nan)
    with overflow_allowed():
        centered_N = values_N - first_N
        sums_N = np.bincount(cells_N, centered_N)[cells_N] - (sizes_N - present_N) * first_N
        advantages_S[is_scored_S] = np.divide(
            sizes_N * centered_N - sums_N, sizes_N - 1, out=np.zeros_like(values_N), where=sizes_N > 1
        )
    return step_credit(arrays, advantages_S, returns_S)


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
    """Compute group-in-group advantages (Feng et al. 2025, "Group-in-Group Policy Optimization", equations 3 to 8).

    Means and standard deviations are taken over the scored trajectories in one group. The standard deviation is the
    unbiased estimate (n - 1).

        A_E = (score - mean(score)) / (std(score) + epsilon)                       one per trajectory
        G_k = r_k + gamma G_{k+1}                                                   one per step
        A_S = (G_k - mean(G)) / (std(G) + epsilon)    over the group's steps whose state key equals this step's
        A   = omega A_E + (1 - omega) A_S             convex
        A   = A_E + step_weight A_S                   additive, as in the paper

    r_k is the `base_reward` of the step. If any base reward of a trajectory is not set, it counts as
    `default_step_reward`, and the final score is added to the reward of the last step. Advantages are exactly zero in a
    group of one and among equal values.

    If `step_info["is_action_valid"]` is False, `invalid_action_penalty` is subtracted from r_k. The total penalty of a
    trajectory is also subtracted from its score in A_E, but not from a score that is added to the reward of the last
    step.

    Args:
        batch: B trajectories with S steps in total.
        scores: (B,) the scores; None for an unscored trajectory.
        group_ids: (B,) the group of each trajectory. If None, the recorded groups are used. If no groups are recorded,
            all trajectories form a single group.
        omega: the weight of A_E for "convex", in [0, 1]; must be None for "additive".
        gamma: the discount factor, in [0, 1].
        state_hash: the hash that determines whether two steps share a state: a name in `STATE_HASHES`, a mapping with
            such a name and its options, a function, or a function reference of the form "file.py:function". If a list
            of these is passed, two steps share a state only if all of their hashes are equal. If None,
            "state_and_results" is used for steps that record it, and "state_key" for all others. A function receives
            the conversation before the action as a shared `History` or, if the step has no messages, the step's
            `observation_data`. A function that has a parameter named `step` receives the `StepData` instead. A function
            can return any hashable value.
        default_step_reward: the value used for a base reward that is not set.
        combination: "convex" or "additive".
        step_weight: the weight of A_S for "additive"; must be None for "convex".
        epsilon: a non-negative constant that is added to each standard deviation.
        normalization: the normalization of A_E and A_S. "std" divides by the standard deviation, as above; "mean" does
            not divide; "constant" divides by `normalization_constant`; and "leave_one_out" subtracts the mean of the
            other values and does not divide.
        normalization_constant: the divisor for "constant"; must be None for the other normalizations.
        episode_statistics: the unit that counts once in the mean and standard deviation for A_E: "trajectory", as in
            the paper, or "step".
        min_anchor_group_size: the minimum number of scored steps that share a state. If there are fewer, A_S is 0.
        invalid_action_penalty: the non-negative penalty for an invalid action.

    Raises:
        ConfigError: If the arguments are inconsistent.
        InvalidResultError: If a score, a base reward or an advantage is not finite.
    """
    episode_weight, weight = _weights(combination, omega, step_weight)
    check_returns(gamma, default_step_reward)
    check_normalization(normalization, normalization_constant, epsilon)
    check_choice("episode_statistics", episode_statistics, get_args(EpisodeStatistics))
    check_integer("min_anchor_group_size", min_anchor_group_size, 1)
    check_number("invalid_action_penalty", invalid_action_penalty, 0.0)
    check_state_hash(state_hash)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
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


def _weights(combination: str, omega: float | None, step_weight: float | None) -> tuple[float, float]:
    """Return the weights of A_E and A_S. Raise a ConfigError if an argument has no effect or is missing."""
    check_choice("combination", combination, get_args(Combination))
    if combination == "convex":
        if not isinstance(omega, int | float) or not 0.0 <= omega <= 1.0 or step_weight is not None:
            raise ConfigError(
                f"convex needs omega in [0, 1] and no step_weight, got omega={omega!r} and step_weight={step_weight!r}"
            )
        return omega, 1.0 - omega
    if not isinstance(step_weight, int | float) or not math.isfinite(step_weight) or omega is not None:
        raise ConfigError(
            f"additive needs a finite step_weight and no omega, got step_weight={step_weight!r} and omega={omega!r}"
        )
    return 1.0, step_weight


def measured_vine_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Call `vine_credit` with the values in `step_info["measured_value"]`, which training measures with continuations.

    Raises:
        ConfigError: If no step has a measured value.
    """
    step_values = [[step.step_info.get("measured_value") for step in steps] for steps in batch]
    if any(step_values) and all(value is None for values in step_values for value in values):
        raise ConfigError(
            "vine requires measured values, but no step has one; in a train file, set rollout.continuations; in "
            "Python, call vine_credit with step_values"
        )
    return vine_credit(
        batch, scores, step_values, group_ids=group_ids, gamma=gamma, default_step_reward=default_step_reward
    )


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
    "hgpo": hgpo_credit,
    "gagpo": gagpo_credit,
    "g2po": g2po_credit,
    "graphgpo": graphgpo_credit,
    "vine": measured_vine_credit,
}
"""A mapping from names to estimators.

They differ in their keyword-only options, but all of them return a `StepCredit`.
"""
USUAL_OPTIONS: Mapping[str, float] = {"omega": 0.5, "gamma": 0.95, "lam": 0.95}
"""Default values for options that an estimator requires. `omega` applies only if the combination uses it."""


def get_estimator(estimator: str | Callable[..., Any]) -> Estimator:
    """Return a built-in estimator, or an `OwnEstimator` for a function or a reference such as "file.py:function".

    Raises:
        ConfigError: If the name is unknown, or if the function cannot be used as an estimator.
    """
    if callable(estimator) or ":" in estimator:
        return OwnEstimator.from_function(estimator)
    if estimator not in ESTIMATORS:
        near = did_you_mean(estimator, ESTIMATORS)
        hint = "" if near.endswith("?") else "; to use your own function, write file.py:function"
        raise ConfigError(f"unknown estimator {estimator!r}{near}{hint}")
    return ESTIMATORS[estimator]


def option_parameters(estimator: str, own: OwnEstimator | None = None) -> dict[str, inspect.Parameter]:
    """Return the options of an estimator, keyed by name."""
    parameters = own.parameters if own else inspect.signature(ESTIMATORS[estimator], eval_str=True).parameters
    return {p.name: p for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != "group_ids"}


def resolve_options(estimator: str, options: Mapping[str, Any], own: OwnEstimator | None = None) -> dict[str, Any]:
    """Validate an estimator's options, and return all of its options, including defaults, keyed by name.

    The required options of a built-in estimator have default values here; those of a user's function do not.
    """
    known = option_parameters(estimator, own)
    for name in options:
        if name not in known:
            raise ConfigError(f"{estimator} has no option {name!r}{did_you_mean(name, known)}")
    resolved = {name: p.default for name, p in known.items() if p.default is not p.empty} | dict(options)
    for name in known.keys() - resolved.keys() & (set() if own else USUAL_OPTIONS.keys()):
        is_unused = name == "omega" and resolved.get("combination") == "additive"
        resolved[name] = None if is_unused else USUAL_OPTIONS[name]
    if missing := [name for name in known if name not in resolved]:
        raise ConfigError(f"{estimator} needs the option {missing[0]!r}")
    for name, value in options.items():  # Validate strictly, because a task file may contain "0.9" instead of 0.9.
        expected_type: Any = Any if known[name].annotation is inspect.Parameter.empty else known[name].annotation
        config = pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True)
        try:
            pydantic.TypeAdapter(expected_type, config=config).validate_python(value)
        except pydantic.ValidationError as error:
            expected = " or ".join(dict.fromkeys(map(describe_problem, error.errors())))
            raise ConfigError(f"{estimator}, option {name!r}: {expected} (got {value!r:.80})") from None
    return {name: resolved[name] for name in known}
