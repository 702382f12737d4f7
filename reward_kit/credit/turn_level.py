"""Turn-level GRPO: each turn among the same turn of the group, without a reward for staying or for stopping."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from reward_kit.credit.baselines import first_of_each, without_gaps
from reward_kit.credit.options import check_returns
from reward_kit.credit.step_arrays import Batch, Codes, Floats, StepArrays, overflow_allowed
from reward_kit.credit.step_credit import StepCredit, step_credit


def turn_level_grpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    gamma: float,
    default_step_reward: float = 0.0,
) -> StepCredit:
    """Turn-level group-relative advantages with the bias of the stopping time removed.

        A_k = G_k - the mean over the other trajectories of the group of their G_k

    where a trajectory that has already stopped takes part with G_k = 0: nothing is what it earns from turn k on.

    The usual form (Wei et al. 2025, MT-GRPO) takes each turn's mean reward from each turn's reward and adds up to the
    trajectory's end. How many means are taken away then depends on when the trajectory stopped, which its own actions
    decided: every "go on" pays the mean reward of the turns that follow, and the gradient is biased towards stopping
    (verl issue 7244). The mean over those who reached turn k, the trajectory itself among them, is no cure: it shrinks
    the gradient of a turn the more, the fewer reach it.

    Here the baseline of turn k is a function of the other trajectories alone. They are drawn independently of this one,
    so it is independent of the action and of whether this trajectory reaches turn k, and
    E[grad log pi(a_k) baseline] = E[baseline] E[grad log pi(a_k)] = 0: the gradient is unbiased for every length. A
    group of one has no others and gives zero; one whose trajectories earn the same at every turn gives exact zeros.

    Args:
        batch: B trajectories, S steps in all.
        scores: (B,) None where unscored.
        group_ids: (B,) as in `gigpo_credit`.
        gamma: in [0, 1].
        default_step_reward: what an unset base reward counts, as in `gigpo_credit`.

    Raises:
        ConfigError: the arguments contradict each other.
        InvalidResultError: a score or a base reward is not finite.
    """
    check_returns(gamma, default_step_reward)
    arrays = StepArrays.of(batch, scores, group_ids)
    returns_S = arrays.returns_S(gamma, default_step_reward)
    starts_B = np.cumsum(arrays.lengths_B) - arrays.lengths_B
    turns_S = np.arange(len(returns_S)) - arrays.to_steps(starts_B)
    groups_S = arrays.to_steps(arrays.groups_B)
    sizes_G = np.bincount(arrays.groups_B, ~np.isnan(arrays.scores_B))
    cells_S = groups_S * (int(turns_S.max(initial=0)) + 1) + turns_S
    is_scored_S = arrays.is_scored_S
    advantages_S = np.full(len(returns_S), np.nan)
    advantages_S[is_scored_S] = _less_the_others(
        returns_S[is_scored_S], without_gaps(cells_S[is_scored_S]), sizes_G[groups_S[is_scored_S]]
    )
    return step_credit(arrays, advantages_S, returns_S)


def _less_the_others(values_N: Floats, cells_N: Codes, sizes_N: Floats) -> Floats:
    """(N,) each value less the mean of the others of its cell, filled up with zeros to the size of its group.

    Counted from the cell's first value, as in `baselines.relative`, so that equal values give exact zeros.
    """
    first_N = values_N[first_of_each(cells_N)][cells_N]
    present_N = np.bincount(cells_N)[cells_N]
    with overflow_allowed():
        centred_N = values_N - first_N
        sums_N = np.bincount(cells_N, centred_N)[cells_N] - (sizes_N - present_N) * first_N
        return np.divide(sizes_N * centred_N - sums_N, sizes_N - 1, out=np.zeros_like(values_N), where=sizes_N > 1)
