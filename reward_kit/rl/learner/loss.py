"""The loss of a micro-batch: the policy's, the divergence from the reference, the entropy bonus and the critic's."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.forward import Scores
from reward_kit.rl.learner.training_rows import CHOICE, MicroBatch
from reward_kit.rl.losses import (
    Aggregation,
    Diagnostics,
    GlobalBatch,
    Loss,
    cispo_loss,
    decoupled_ppo_loss,
    entropy_loss,
    gspo_loss,
    kl_loss,
    ppo_clip_loss,
    value_loss,
)
from reward_kit.rl.losses.diagnostics import Statistic


class StepCounts(NamedTuple):
    """What the losses of one optimizer step are divided by.

    Attributes:
        policy: of the policy's loss; "decoupled" leaves tokens out.
        tokens: of what is over all tokens.
        actions: of the critic's loss, where an action counts once.
    """

    policy: GlobalBatch
    tokens: GlobalBatch
    actions: GlobalBatch


class _Over(TypedDict):
    """Which tokens a loss is over, and how they become one number."""

    loss_mask_BT: Tensor
    aggregation: Aggregation
    global_batch: GlobalBatch
    sequence_ids_BT: Tensor


def micro_batch_loss(
    scores: Scores, part: MicroBatch, config: PPOConfig, counts: StepCounts, *, kl_coefficient: float, policy: bool
) -> Loss:
    """The share of this part in the loss of its optimizer step.

    Args:
        scores: of the module in training.
        part: its tokens, with the columns `old`, `advantages`, and what the options need.
        config: the options.
        counts: of the optimizer step.
        kl_coefficient: as it is now.
        policy: False in the critic's warm-up: the value head alone learns.
    """
    terms: dict[str, tuple[float, Loss]] = {}
    over = _over(part, config, counts.tokens)
    if policy:
        terms["policy_loss"] = (1.0, _policy_loss(scores, part, config, counts.policy))
    if policy and "reference" in part.columns:
        reference = _row(part.columns["reference"])
        terms["kl_loss"] = (
            kl_coefficient,
            kl_loss(_row(scores.logprobs_N), reference, estimator=config.kl_kind, **over),
        )
    if scores.entropies_N is not None:
        coefficient = config.entropy_coefficient if policy else 0.0
        terms["entropy_loss"] = (coefficient, entropy_loss(_row(scores.entropies_N), **over))
    if scores.values_M is not None and config.value_coefficient:
        terms["value_loss"] = (config.value_coefficient, _value_loss(scores.values_M, part, config, counts.actions))
    used = {name: (weight, term) for name, (weight, term) in terms.items() if weight}
    total = sum((weight * term.loss for weight, term in used.values()), start=scores.logprobs_N.new_zeros(()))
    found = Diagnostics({name: Statistic("total", term.loss.detach().reshape(1)) for name, (_, term) in used.items()})
    for _, term in terms.values():
        found |= term.diagnostics
    return Loss(total, found)


def _row(values_N: Tensor) -> Tensor:
    return values_N.unsqueeze(0)


def _over(part: MicroBatch, config: PPOConfig, whole: GlobalBatch) -> _Over:
    """All of the tokens at which there was a choice, in rows of their own."""
    rows, chosen = _row(part.rows_N), part.columns.get(CHOICE)
    return _Over(
        loss_mask_BT=torch.ones_like(rows) if chosen is None else _row(chosen > 0),
        aggregation=config.reduction,
        global_batch=whole,
        sequence_ids_BT=rows,
    )


def _policy_loss(scores: Scores, part: MicroBatch, config: PPOConfig, whole: GlobalBatch) -> Loss:
    over, clip = _over(part, config, whole), config.clip
    new, old, advantages = (_row(one) for one in (scores.logprobs_N, part.columns["old"], part.columns["advantages"]))
    if config.loss == "decoupled":
        return decoupled_ppo_loss(
            new,
            old,
            _row(part.columns["logprobs"]),
            advantages,
            clip_low=clip.low,
            clip_high=clip.high,
            dual_clip=clip.dual,
            cap=config.decoupled_cap,
            beyond_cap=config.beyond_cap,
            **over,
        )
    weights = _row(part.columns["weights"]) if config.importance else None
    if config.loss == "ppo":
        return ppo_clip_loss(
            new,
            old,
            advantages,
            clip_low=clip.low,
            clip_high=clip.high,
            dual_clip=clip.dual,
            weights_BT=weights,
            **over,
        )
    loss = gspo_loss if config.loss == "gspo" else cispo_loss
    return loss(new, old, advantages, clip_low=clip.low, clip_high=clip.high, weights_BT=weights, **over)


def _value_loss(values_M: Tensor, part: MicroBatch, config: PPOConfig, whole: GlobalBatch) -> Loss:
    """Over actions: each is a token of its own here, in the row of its episode."""
    rows = _row(part.rows_N.index_select(0, part.firsts_M))
    old, returns = (_row(part.columns[key].index_select(0, part.firsts_M)) for key in ("old_values", "returns"))
    return value_loss(
        _row(values_M),
        old,
        returns,
        torch.ones_like(rows),
        clip=config.value_clip,
        global_batch=whole,
        sequence_ids_BT=rows,
    )
