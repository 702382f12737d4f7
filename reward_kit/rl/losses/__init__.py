"""Losses as pure functions on (B,T) tensors, padded or packed. Each returns a scalar and, beside it, its diagnostics.

What a loss is divided by is given for the whole batch (`GlobalBatch`): the losses of micro-batches then add up to that
of the whole, however it is split. Tokens whose mask is 0 are never read.
"""

from reward_kit.rl.losses.base import Aggregation, Diagnostics, GlobalBatch, Loss, merge_diagnostics
from reward_kit.rl.losses.functions import (
    AdaptiveKLCoefficient,
    ImportanceWeights,
    PenalisedRewards,
    cispo_loss,
    decoupled_ppo_loss,
    entropies_of,
    entropy_loss,
    gspo_loss,
    kl_estimate,
    kl_loss,
    logprobs_of,
    penalised_rewards,
    ppo_clip_loss,
    truncated_importance_weights,
    value_loss,
    within_cap,
)

__all__ = [
    "AdaptiveKLCoefficient",
    "Aggregation",
    "Diagnostics",
    "GlobalBatch",
    "ImportanceWeights",
    "Loss",
    "PenalisedRewards",
    "cispo_loss",
    "decoupled_ppo_loss",
    "entropies_of",
    "entropy_loss",
    "gspo_loss",
    "kl_estimate",
    "kl_loss",
    "logprobs_of",
    "merge_diagnostics",
    "penalised_rewards",
    "ppo_clip_loss",
    "truncated_importance_weights",
    "value_loss",
    "within_cap",
]
