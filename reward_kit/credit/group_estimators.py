"""Estimators that say one thing of a whole trajectory: its score among the scores of its group.

All take `gamma` and `default_step_reward` too, for the `returns_S` that stand beside the advantages.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np

from reward_kit.agent.models import StepData
from reward_kit.credit.baselines import relative
from reward_kit.credit.options import Normalization, check_choice, check_normalization, check_returns
from reward_kit.credit.step_arrays import Batch, Floats, StepArrays, overflow_allowed
from reward_kit.credit.step_credit import StepCredit, episode_credit
from reward_kit.errors import ConfigError

Length = Literal["recorded", "tokens", "steps"]


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
    """Group-relative advantages: A = (score - mean(score)) / (std(score) + epsilon) over the trajectory's group.

    With normalization "std" it is GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2), with "mean", which divides by
    nothing, Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training"). `baselines.relative` has all four.

    Args:
        batch: B trajectories, S steps in all.
        scores: (B,) None where unscored.
        group_ids: (B,) as in `gigpo_credit`.
        normalization: what the score is measured in.
        normalization_constant: for "constant".
        epsilon: added to each standard deviation.
        gamma: the discount of G_k.
        default_step_reward: what an unset base reward counts in G_k.

    Raises:
        ConfigError: the arguments contradict each other.
        InvalidResultError: a score or a base reward is not finite.
    """
    check_returns(gamma, default_step_reward)
    check_normalization(normalization, normalization_constant, epsilon)
    arrays = StepArrays.of(batch, scores, group_ids)
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
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics"): A = score - the mean score of the others.

    The baseline does not contain the score that it is taken from, so the estimate of the gradient is unbiased. A group
    of one has no others and gives zero. Arguments and errors as in `grpo_credit`.
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
    """REINFORCE++ with a baseline (Hu et al. 2025): the group's mean taken away, then divided by the batch's scale.

        A = (score - mean(score)) / (std + epsilon)

    with std the unbiased standard deviation of score - mean(score) over all scored trajectories. Each trajectory counts
    once: their mean is then zero as it stands, and a constant group keeps its exact zeros, which it would lose if the
    batch were whitened over steps or tokens. Arguments and errors as in `grpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    check_normalization("std", None, epsilon)
    arrays = StepArrays.of(batch, scores, group_ids)
    centred_B = relative(arrays.scores_B, arrays.groups_B, "mean")
    scored = centred_B[~np.isnan(centred_B)]
    # `hypot` is the root of the sum of squares, also where no float holds a square.
    scale = math.hypot(*scored.tolist()) / math.sqrt(max(len(scored) - 1, 1)) + epsilon
    advantages_B = centred_B / scale if scale > 0 else centred_B
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
    """Optimal reward baseline (Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline"), weighted by length.

        A = score - sum(length score) / sum(length)      over the trajectory's group

    Args:
        batch: B trajectories, S steps in all.
        scores: (B,) None where unscored.
        group_ids: (B,) as in `gigpo_credit`.
        length: "tokens", the sampled tokens (`policy_logprobs["token_ids"]`); "steps"; or "recorded", tokens in the
            groups whose scored steps all record them and steps in the others.
        gamma: the discount of G_k.
        default_step_reward: what an unset base reward counts in G_k.

    Raises:
        ConfigError: the arguments contradict each other, or `length` is "tokens" and a step records none.
        InvalidResultError: a score or a base reward is not finite.
    """
    check_returns(gamma, default_step_reward)
    check_choice("length", length, get_args(Length))
    arrays = StepArrays.of(batch, scores, group_ids)
    weights_B = _lengths(arrays, length)
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
    """Pass@k (Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives"), k the size of the group.

    The best trajectory of a group gets what the group would lose without it, its score less the second best one; all
    others get zero. Where several are best nothing would be lost, and so in a group of one, which has no second:
    exact zeros. Arguments and errors as in `grpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    arrays = StepArrays.of(batch, scores, group_ids)
    advantages_B = np.where(np.isnan(arrays.scores_B), np.nan, 0.0)
    scored = np.flatnonzero(~np.isnan(arrays.scores_B))
    # By group and then by score: the best of a group comes last, the second best right before it.
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
    """Group policy gradient (Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline").

        A = (score - mean(score)) B / B'

    over the trajectory's group, with B the scored trajectories of the batch and B' those in groups whose scores
    differ. The others give no gradient, and the factor keeps its length from depending on how many they are. It is
    the one number that groups share. (A count of the scores that are not zero, which is in use too, is something else:
    it takes a failed trajectory for one without a gradient.) Arguments and errors as in `grpo_credit`.
    """
    check_returns(gamma, default_step_reward)
    arrays = StepArrays.of(batch, scores, group_ids)
    centred_B = relative(arrays.scores_B, arrays.groups_B, "mean")
    is_scored_B = ~np.isnan(centred_B)
    differs_G = np.bincount(arrays.groups_B, is_scored_B & (centred_B != 0.0)) > 0
    counting = int(np.sum(is_scored_B & differs_G[arrays.groups_B]))
    with overflow_allowed():
        advantages_B = centred_B * (int(np.sum(is_scored_B)) / counting) if counting else centred_B
    return episode_credit(arrays, advantages_B, arrays.returns_S(gamma, default_step_reward))


def _lengths(arrays: StepArrays, length: str) -> Floats:
    """(B,) how long each trajectory is, in one unit for each group."""
    steps_B = arrays.lengths_B.astype(np.float64)
    if length == "steps":
        return steps_B
    tokens_S = np.array([_sampled_tokens(step) for step in arrays.steps], dtype=np.float64)
    is_missing_S = np.isnan(tokens_S) & arrays.is_scored_S
    if length == "tokens" and is_missing_S.any():
        where = arrays.name_of(int(np.argmax(is_missing_S)))
        raise ConfigError(f"{where} records no policy_logprobs['token_ids']; give length 'steps' or 'recorded'")
    tokens_B = arrays.sums_B(np.nan_to_num(tokens_S))
    is_known_G = np.bincount(arrays.groups_B, arrays.sums_B(is_missing_S.astype(np.float64))) == 0
    is_known_G &= np.bincount(arrays.groups_B, tokens_B) > 0
    return np.where(is_known_G[arrays.groups_B], tokens_B, steps_B)


def _sampled_tokens(step: StepData) -> float | None:
    """How many tokens the policy sampled in a step; None where nobody counted."""
    token_ids = (step.policy_logprobs or {}).get("token_ids")
    return None if token_ids is None else float(len(token_ids))
