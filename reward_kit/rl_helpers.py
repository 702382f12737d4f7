"""GiGPO advantages for the steps in a batch. The function has the name and signature defined in the specification.

The estimators are in `reward_kit.credit`. Arguments are never modified. A trajectory whose score is `None` is unscored,
which is not the same as a score of 0: all of its steps get the advantage `None`, and baselines ignore the trajectory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from reward_kit.agent.models import StepData
from reward_kit.credit.estimators import ESTIMATORS, Combination, gigpo_credit
from reward_kit.credit.options import EpisodeStatistics, Normalization
from reward_kit.credit.state_hashes import StateHash
from reward_kit.credit.step_arrays import Batch
from reward_kit.credit.step_credit import with_credit

__all__ = ["ESTIMATORS", "gigpo_credit", "system_apply_gigpo_to_batch_steps"]


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
    """Return copies of the steps with GiGPO advantages; see `gigpo_credit` for the formulas and further options.

    Args:
        batch_of_step_data_lists: the trajectories, each of which is a list of steps in time order.
        final_scores_for_rollouts: one score per trajectory; None if the trajectory is unscored.
        omega: the weight of A_E in the convex combination.
        gamma: the discount factor for G_k.
        state_hashing_function: a function that returns a hashable key; steps with equal keys share an anchor state. It
            receives the conversation that the policy saw before the action, as a shared `History`. For a step without
            messages, it receives the step's `observation_data` instead. If its parameter is named `step`, it receives
            the whole `StepData`. A string is the name of a built-in function (see `gigpo_credit`). If None, the
            recorded `state_and_results` or `state_key` is used.
        default_step_reward: see `gigpo_credit`, which also documents the options below.
        group_ids: one group id per trajectory. If None, `step_info["group_id"]` of the steps is used. If no step has a
            group id, all trajectories form a single group.
        combination: "convex" or "additive".
        step_weight: the weight of A_S in the additive combination.

    Returns:
        Copies of the steps with two fields set: `advantage` is A; `return_to_go` is A + V if the policy recorded a
        value V, and G_k otherwise. Both are `None` for an unscored trajectory.
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
