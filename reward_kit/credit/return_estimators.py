"""Estimators that say something of each step by itself: what it led to, or what a critic did not expect."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np

from reward_kit.credit.baselines import relative
from reward_kit.credit.options import check_choice, check_normalization, check_number, check_returns
from reward_kit.credit.step_arrays import Batch, Floats, StepArrays, discounted, overflow_allowed
from reward_kit.credit.step_credit import StepCredit, step_credit
from reward_kit.errors import ConfigError

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
    """REINFORCE (Williams 1992) with reward-to-go: A = G_k = r_k + gamma G_{k+1}.

    With `baseline` "mean", the mean of G over the scored steps of the group is taken away; it contains the step itself,
    which shrinks the gradient a little in small groups. Without one nothing is relative: equal trajectories do not give
    zeros, and groups do not matter.

    Args:
        batch: B trajectories, S steps in all.
        scores: (B,) None where unscored.
        group_ids: (B,) as in `gigpo_credit`.
        gamma: in [0, 1].
        default_step_reward: what an unset base reward counts, as in `gigpo_credit`.
        baseline: "none" or "mean".

    Raises:
        ConfigError: the arguments contradict each other.
        InvalidResultError: a score or a base reward is not finite.
    """
    check_returns(gamma, default_step_reward)
    check_choice("baseline", baseline, get_args(ReturnBaseline))
    arrays = StepArrays.of(batch, scores, group_ids)
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
    """REINFORCE++ (Hu et al. 2025): A = (G_k - mean(G)) / (std(G) + epsilon) over all scored steps of the batch.

    The baseline is the batch's, so groups see each other, and `group_ids` is only checked. Arguments and errors as in
    `discounted_returns_credit`; `epsilon` is added to the standard deviation.
    """
    check_returns(gamma, default_step_reward)
    check_normalization("std", None, epsilon)
    arrays = StepArrays.of(batch, scores, group_ids)
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
    """Generalised advantage estimation (Schulman et al. 2016, equations 11 and 16), against the policy's own critic.

        delta_k = r_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lam A_{k+1}

    V_k is the step's `policy_value_estimate`, r_k as in `gigpo_credit`. After the last step of a terminated trajectory
    nothing follows: V = 0. One that was cut off would have gone on, and V is what its last step records as
    `step_info["bootstrap_value"]`; where it records none, the last step's own V stands in, the nearest state that the
    critic saw. What is relative here is relative to the critic: equal trajectories do not give zeros, and groups do
    not matter. The advantages are not whitened, so that A + V is what the critic is trained towards.

    Args:
        batch: B trajectories, S steps in all.
        scores: (B,) None where unscored.
        group_ids: (B,) only checked.
        gamma: in [0, 1].
        lam: in [0, 1]; 0 trusts the critic after one step, 1 never.
        default_step_reward: what an unset base reward counts, as in `gigpo_credit`.

    Raises:
        ConfigError: an option is out of range, or a step of a scored trajectory has no value.
        InvalidResultError: a score or a base reward is not finite.
    """
    check_returns(gamma, default_step_reward)
    check_number("lam", lam, 0.0, 1.0)
    arrays = StepArrays.of(batch, scores, group_ids)
    values_S = _checked_values(arrays)
    has_steps_B = arrays.lengths_B > 0
    lasts_B = np.cumsum(arrays.lengths_B)[has_steps_B] - 1
    next_values_S = np.append(values_S[1:], 0.0)[: len(values_S)]
    next_values_S[lasts_B] = 0.0
    for last in lasts_B[arrays.is_truncated_B[has_steps_B]].tolist():
        next_values_S[last] = _bootstrap_value(arrays, last, float(values_S[last]))
    with overflow_allowed():
        deltas_S = arrays.earned_S(default_step_reward) + gamma * next_values_S - values_S
    advantages_S = discounted(deltas_S, arrays.lengths_B, gamma * lam)
    return step_credit(arrays, advantages_S, arrays.returns_S(gamma, default_step_reward))


def _checked_values(arrays: StepArrays) -> Floats:
    """(S,) V of every step; a scored trajectory needs it on all of its steps."""
    values_S = arrays.values_S
    bad_S = ~np.isfinite(values_S) & arrays.is_scored_S
    if bad_S.any():
        position = int(np.argmax(bad_S))
        value = arrays.steps[position].policy_value_estimate
        raise ConfigError(
            f"{arrays.name_of(position)} has the policy_value_estimate {value}; gae needs a finite one on every step: "
            "take a policy with a critic, or another estimator"
        )
    return values_S


def _bootstrap_value(arrays: StepArrays, last: int, own: float) -> float:
    """V of what would have followed the last step of a trajectory that was cut off."""
    recorded = arrays.steps[last].step_info.get("bootstrap_value")
    if recorded is None:
        return own
    if isinstance(recorded, bool) or not isinstance(recorded, int | float | np.number) or not math.isfinite(recorded):
        raise ConfigError(f"{arrays.name_of(last)}: step_info['bootstrap_value'] is a finite number; got {recorded!r}")
    return float(recorded)
