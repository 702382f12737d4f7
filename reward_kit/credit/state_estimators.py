"""Estimators of step credit that use the states in which the trajectories of a group meet.

They are alternatives to the step advantages of GiGPO. `estimators` describes their common interface.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial
from typing import get_args

import numpy as np

from reward_kit.credit.options import EpisodeStatistics, Normalization, check_normalization, check_returns
from reward_kit.credit.state_hashes import StateHash, anchor_codes, check_state_hash
from reward_kit.credit.step_arrays import (
    Batch,
    StepArrays,
    discounted,
    following,
    group_sizes,
    overflow_allowed,
    relative,
    renumber_groups,
)
from reward_kit.credit.step_credit import StepCredit, check_advantages, step_credit
from reward_kit.validation import check_choice, check_integer, check_number


def hgpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    history_length: int = 2,
    alpha: float = 1.0,
    state_hash: StateHash = None,
    default_step_reward: float = 0.0,
    epsilon: float = 1e-6,
    normalization: Normalization = "std",
    normalization_constant: float | None = None,
) -> StepCredit:
    """Compute hierarchy-of-groups advantages (He et al. 2026, "Hierarchy-of-Groups Policy Optimization").

    Level k compares a step with those steps in its group that were taken in the same state after the same k states:

        A_k = (G - mean(G)) / (std(G) + epsilon)      over the steps whose last k + 1 states are equal
        A   = sum_k w_k A_k,   w_k = (k + 1)^alpha / sum_k (k + 1)^alpha      for k = 0, …, history_length

    A step has no A_k if it has no peers at level k or if it comes before step k. The weights of its other levels are
    then normalized to sum to 1. The advantage of a step without any peers is 0. With a `history_length` of 0, the
    result is the A_S of GiGPO.

    The authors' code (verl-agent, `recipe/hgpo`) differs in three details: its weights are (k + 2)^alpha, its standard
    deviation divides by n instead of n - 1, and it also omits each level whose advantage is exactly 0. Because of the
    last rule, the weights depend on the outcome of the action, which adds a bias.

    `history_length` is the maximum number of earlier states to compare, and `alpha` must be non-negative. The other
    arguments and errors are the same as for `gigpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_normalization(normalization, normalization_constant, epsilon)
    check_integer("history_length", history_length, 0)
    check_number("alpha", alpha, 0.0)
    check_state_hash(state_hash)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    returns_S, turns_S = arrays.returns_S(gamma, default_step_reward), arrays.turns_S
    anchors_S = anchor_codes(batch, arrays.to_steps(arrays.groups_B), state_hash)
    states_S = contexts_S = renumber_groups(anchors_S)
    stride = int(states_S.max(initial=0)) + 1
    sums_S, totals_S = np.zeros(len(returns_S)), np.zeros(len(returns_S))
    for level in range(min(history_length, int(turns_S.max(initial=0))) + 1):
        if level:
            contexts_S = renumber_groups(np.roll(contexts_S, 1) * stride + states_S)
        values_S = np.where(turns_S >= level, returns_S, np.nan)
        has_peer_S = ~np.isnan(values_S) & (group_sizes(values_S, contexts_S) > 1)
        level_S = relative(values_S, contexts_S, normalization, epsilon, normalization_constant=normalization_constant)
        with overflow_allowed():
            weights_S = np.where(has_peer_S, np.float64(level + 1) ** alpha, 0.0)
            sums_S += weights_S * np.where(has_peer_S, level_S, 0.0)
        totals_S += weights_S
    advantages_S = np.divide(sums_S, totals_S, out=np.zeros_like(sums_S), where=totals_S > 0)
    return step_credit(arrays, np.where(arrays.is_scored_S, advantages_S, np.nan), returns_S, anchors_S)


def gagpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    lam: float,
    state_hash: StateHash = None,
    default_step_reward: float = 0.0,
    epsilon: float = 1e-6,
    normalization: Normalization = "std",
    normalization_constant: float | None = None,
) -> StepCredit:
    """Compute generalized advantages from group values (Zhu et al. 2026, GAGPO, arXiv:2605.13217).

        V(s)    = the mean of G over the group's steps in state s
        delta_k = r_k + gamma V(s_{k+1}) - V(s_k)
        A_k     = delta_k + gamma lam A_{k+1}

    V after the last step is 0, even if the trajectory is truncated. Finally, A is normalized over all steps in a group:
    (A - mean(A)) / (std(A) + epsilon). If `lam` is 1, the unnormalized A is G - V(s), which equals the A_S of GiGPO
    with the normalization "mean". For smaller values of `lam`, the advantage of a step also depends on the returns that
    other trajectories achieved from its next state. A is then biased if the same state has different values in
    different trajectories.

    The argument `lam` is the same as for `gae_credit`. The other arguments and errors are the same as for
    `gigpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_number("lam", lam, 0.0, 1.0)
    check_normalization(normalization, normalization_constant, epsilon)
    check_state_hash(state_hash)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    returns_S, groups_S = arrays.returns_S(gamma, default_step_reward), arrays.to_steps(arrays.groups_B)
    anchors_S = anchor_codes(batch, groups_S, state_hash)
    with overflow_allowed():
        values_S = returns_S - relative(returns_S, anchors_S, "mean")
        deltas_S = arrays.earned_S(default_step_reward) + gamma * following(values_S, arrays.lengths_B) - values_S
    advantages_S = discounted(deltas_S, arrays.lengths_B, gamma * lam)
    check_advantages(arrays, advantages_S)
    normalized_S = relative(
        advantages_S, groups_S, normalization, epsilon, normalization_constant=normalization_constant
    )
    return step_credit(arrays, normalized_S, returns_S, anchors_S)


def g2po_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    step_weight: float = 1.0,
    state_hash: StateHash = None,
    default_step_reward: float = 0.0,
    epsilon: float = 1e-6,
    normalization: Normalization = "std",
    normalization_constant: float | None = None,
    episode_statistics: EpisodeStatistics = "trajectory",
) -> StepCredit:
    """Compute group-graph advantages (Wang et al. 2026, "Group-Graph Policy Optimization", arXiv:2606.22995).

        V(s) = gamma times the mean of G over the group's steps in state s, and 0 after the last step
        Q_k  = r_k + V(s_{k+1})
        A_S  = norm(Q_k) among the group's steps in the same state + norm(Q_k - V(s_k)) among all steps of the group
        A    = A_E + step_weight A_S

    norm(x) is (x - mean(x)) / (std(x) + epsilon), and A_E is defined as in `gigpo_credit`. If only the last step of a
    successful trajectory is rewarded, the result agrees with the authors' code, which sets `episode_statistics` to
    "step". However, their code also subtracts a penalty for an invalid action from Q_k. The second term of A_S also
    compares steps within a trajectory, so the advantages of identical trajectories are not zero if `gamma` is less than
    1.

    The arguments and errors are the same as for `gigpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_number("step_weight", step_weight)
    check_normalization(normalization, normalization_constant, epsilon)
    check_choice("episode_statistics", episode_statistics, get_args(EpisodeStatistics))
    check_state_hash(state_hash)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    returns_S, groups_S = arrays.returns_S(gamma, default_step_reward), arrays.to_steps(arrays.groups_B)
    anchors_S = anchor_codes(batch, groups_S, state_hash)
    measured = partial(
        relative, normalization=normalization, epsilon=epsilon, normalization_constant=normalization_constant
    )
    weights_B = arrays.lengths_B.astype(np.float64) if episode_statistics == "step" else None
    episode_S = arrays.to_steps(measured(arrays.scores_B, arrays.groups_B, weights_N=weights_B))
    with overflow_allowed():
        values_S = gamma * (returns_S - relative(returns_S, anchors_S, "mean"))
        reached_S = arrays.earned_S(default_step_reward) + following(values_S, arrays.lengths_B)
        gains_S = reached_S - values_S
    check_advantages(arrays, gains_S)
    with overflow_allowed():
        step_S = measured(reached_S, anchors_S) + measured(gains_S, groups_S)
        advantages_S = episode_S + step_weight * step_S
    check_advantages(arrays, advantages_S)
    return StepCredit(episode_S, step_S, advantages_S, returns_S, anchors_S)


def graphgpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    step_weight: float = 1.0,
    distance_discount: float = 0.1,
    success_score: float = 1.0,
    state_hash: StateHash = None,
    gamma: float = 1.0,
    default_step_reward: float = 0.0,
    epsilon: float = 1e-6,
    normalization: Normalization = "std",
    normalization_constant: float | None = None,
    episode_statistics: EpisodeStatistics = "trajectory",
) -> StepCredit:
    """Compute advantages on the graph of a group's state transitions (Cheng et al. 2026, GraphGPO, arXiv:2605.26684).

        d(s) = the smallest number of steps from s to success, over the transitions of all trajectories of the group
        R_k  = distance_discount^d(s_{k+1})
        A_S  = (R_k - mean(R)) / (std(R) + epsilon)    over the group's steps in the same state
        A    = A_E + step_weight A_S

    A trajectory succeeds if its score is at least `success_score`. Its last step then leads to success, where d is 0.
    The last step of any other trajectory leads to a state from which success cannot be reached. For such states, d is
    the group's maximum d plus 1. A_E is defined as in `gigpo_credit`.

    A_S does not use the outcome of the trajectory itself. A step is credited if it leads to a state from which any
    trajectory succeeded quickly, no matter how unlikely this success was. Even in large groups, the gradient is
    therefore not the gradient of the expected score.

    The paper multiplies R_k by a constant, which has no effect if `normalization` is "std". The authors' code also has
    access to the state after the last step of a failed trajectory.

    Args:
        batch: B trajectories with S steps in total.
        scores: (B,) the scores; None for an unscored trajectory.
        group_ids: (B,) the group of each trajectory; see `gigpo_credit`.
        step_weight: the weight of A_S.
        distance_discount: the discount factor for each step of the distance to success, between 0 and 1.
        success_score: the minimum score of a trajectory that succeeds.
        state_hash: the hash that determines whether two steps share a state; see `gigpo_credit`.
        gamma: the discount factor for G_k. It does not affect the advantages.
        default_step_reward: the value used in G_k for a base reward that is not set.
        epsilon: a constant that is added to each standard deviation.
        normalization: the normalization of A_E and A_S; see `gigpo_credit`.
        normalization_constant: the divisor for "constant"; must be None for the other normalizations.
        episode_statistics: the unit that counts once in the statistics for A_E; see `gigpo_credit`.

    Raises:
        ConfigError: If the arguments are invalid or inconsistent.
        InvalidResultError: If a score, a base reward or an advantage is not finite.
    """
    check_returns(gamma, default_step_reward)
    check_number("step_weight", step_weight)
    check_number("distance_discount", distance_discount, 0.0, 1.0)
    check_number("success_score", success_score)
    check_normalization(normalization, normalization_constant, epsilon)
    check_choice("episode_statistics", episode_statistics, get_args(EpisodeStatistics))
    check_state_hash(state_hash)
    arrays = StepArrays.from_batch(batch, scores, group_ids)
    returns_S, groups_S = arrays.returns_S(gamma, default_step_reward), arrays.to_steps(arrays.groups_B)
    anchors_S = anchor_codes(batch, groups_S, state_hash)
    measured = partial(
        relative, normalization=normalization, epsilon=epsilon, normalization_constant=normalization_constant
    )
    weights_B = arrays.lengths_B.astype(np.float64) if episode_statistics == "step" else None
    episode_S = arrays.to_steps(measured(arrays.scores_B, arrays.groups_B, weights_N=weights_B))
    is_scored_S = arrays.is_scored_S
    targets_S = following(anchors_S, arrays.lengths_B)
    has_steps_B = arrays.lengths_B > 0
    is_success_B = arrays.scores_B[has_steps_B] >= success_score
    targets_S[np.cumsum(arrays.lengths_B)[has_steps_B] - 1] = np.where(is_success_B, _SUCCESS, _UNKNOWN)
    distances = _distances(anchors_S[is_scored_S].tolist(), targets_S[is_scored_S].tolist())
    distances_S = np.array([distances.get(target, math.inf) for target in targets_S.tolist()])
    # The largest distance of a group, from the states of its steps.
    largest_G = np.zeros(int(groups_S.max(initial=-1)) + 1)
    np.maximum.at(largest_G, groups_S, [distances.get(anchor, 0) for anchor in anchors_S.tolist()])
    distances_S = np.where(np.isinf(distances_S), largest_G[groups_S] + 1.0, distances_S)
    with overflow_allowed():
        step_S = measured(np.where(is_scored_S, distance_discount**distances_S, np.nan), anchors_S)
        advantages_S = episode_S + step_weight * step_S
    check_advantages(arrays, advantages_S)
    return StepCredit(episode_S, step_S, advantages_S, returns_S, anchors_S)


_SUCCESS, _UNKNOWN = -1, -2


def _distances(states: Sequence[int], targets: Sequence[int]) -> dict[int, int]:
    """Return the minimum number of transitions from each state to success. States that cannot reach it are omitted."""
    sources: dict[int, list[int]] = {}
    for state, target in zip(states, targets, strict=True):
        sources.setdefault(target, []).append(state)
    distances, queue = {_SUCCESS: 0}, deque([_SUCCESS])
    while queue:
        target = queue.popleft()
        for state in sources.pop(target, ()):
            if state not in distances:
                distances[state] = distances[target] + 1
                queue.append(state)
    return distances
