"""Policy losses: the clipped surrogate of PPO and what was made of it. The only gradient is that of `logprobs`.

All take (B,T) tensors and read them only where `loss_mask` is 1. The arguments that they share:

    loss_mask_BT     1 where a token takes part
    clip_low         how far below 1 a ratio may be pushed; 1 is no limit
    clip_high        how far above
    weights_BT       a factor per token, such as `truncated_importance_weights`; None: 1
    aggregation      how the tokens' losses become one
    global_batch     the counts of all micro-batches; None: these rows are all
    sequence_ids_BT  which sequence a token belongs to, for packed rows; None: its row
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from reward_kit.credit.options import check_choice, check_number
from reward_kit.errors import ConfigError
from reward_kit.rl.losses.diagnostics import Diagnostics, Loss, Statistic, mean_of
from reward_kit.rl.losses.importance import (
    below,
    check_cap,
    cut,
    proximal_weights,
    ratio_statistics,
    weight_statistics,
)
from reward_kit.rl.losses.participants import Aggregation, GlobalBatch, Participants

BeyondCap = Literal["exclude", "truncate"]


class ClipRange(NamedTuple):
    """How far a ratio may be pushed from 1, and the factor c of the dual clip, or None."""

    low: float
    high: float
    dual: float | None = None

    def checked(self) -> ClipRange:
        """Itself.

        Raises:
            ConfigError: a bound is out of range.
        """
        check_number("clip_low", self.low, 0.0, 1.0)
        check_number("clip_high", self.high, 0.0)
        if self.dual is not None:
            check_number("dual_clip", self.dual)
            if not self.dual > 1.0:
                raise ConfigError(f"dual_clip is above 1; got {self.dual:g}")
        return self


def ppo_clip_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """The clipped surrogate of PPO (Schulman et al. 2017, equation 7) with separate clip ranges and a dual clip.

        r_t = exp(logprobs_t - old_logprobs_t), the exponent cut to ±20
        L_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high))
        L_t = min(L_t, -A_t dual_clip)   where A_t < 0 (Ye et al. 2020, equation 5)

    Args:
        logprobs_BT: of the policy being trained; the only input that gets a gradient.
        old_logprobs_BT: of the policy that sampled, or of the same policy before the update.
        advantages_BT: one per token.
        loss_mask_BT: for this and what follows see the module.
        dual_clip: bounds the loss of a token with a negative advantage whose ratio has grown; None: no bound.

    Returns:
        The loss, and of the tokens: `clip_fraction_low` and `clip_fraction_high`, the shares held back by either bound;
        `clip_fraction`, both; `clip_fraction_dual`; and what `importance.ratio_statistics` gives.

    Raises:
        ConfigError: a bound is out of range, or shapes differ.
    """
    clip = ClipRange(clip_low, clip_high, dual_clip).checked()
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    log_ratio_N = _log_ratio(tokens, logprobs_BT, old_logprobs_BT)
    advantages_N = tokens.pick("advantages", advantages_BT).detach()
    ratio_N = cut(log_ratio_N).exp()
    loss_N = tokens.weighted(_clipped_surrogate(ratio_N, advantages_N, clip), weights_BT)
    found = _clip_fractions(ratio_N, advantages_N, clip) | ratio_statistics(ratio_N, log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), found)


def gspo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "seq-mean-token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Group sequence policy optimisation (Zheng et al. 2025, equations 7 and 14), with an advantage per token.

        s_i = exp(mean over the tokens of sequence i of logprobs - old_logprobs), the exponent cut to ±20
        r_t = sg[s_i] exp(logprobs_t - sg[logprobs_t])     of value s_i, and with the gradient s_i ∇logprobs_t
        L_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high))

    sg stops the gradient. Where all tokens of a sequence share one advantage and the aggregation is the default, value
    and gradient are those of the loss of whole sequences.

    Args:
        logprobs_BT: of the policy being trained; the only input that gets a gradient.
        old_logprobs_BT: of the policy that sampled, or of the same policy before the update.
        advantages_BT: one per token.
        loss_mask_BT: for this and what follows see the module.

    Returns:
        The loss, and the diagnostics of `ppo_clip_loss` but the dual clip's; `ratio_…` and `effective_sample_size` are
        over sequences.

    Raises:
        ConfigError: a bound is out of range, or shapes differ.
    """
    clip = ClipRange(clip_low, clip_high).checked()
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    log_ratio_N = _log_ratio(tokens, logprobs_BT, old_logprobs_BT)
    advantages_N = tokens.pick("advantages", advantages_BT).detach()
    log_ratio_Q = cut(tokens.sequence_means(log_ratio_N.detach()))
    logprobs_N = tokens.pick("logprobs", logprobs_BT)
    ratio_N = (log_ratio_Q[tokens.sequence_N] + (logprobs_N - logprobs_N.detach())).exp()
    loss_N = tokens.weighted(_clipped_surrogate(ratio_N, advantages_N, clip), weights_BT)
    found = _clip_fractions(ratio_N, advantages_N, clip) | ratio_statistics(log_ratio_Q.exp(), log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), found)


def cispo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Clipped importance sampling (MiniMax-M1 2025, equations 4 and 5): weights are clipped, no gradient is lost.

        r_t = exp(logprobs_t - old_logprobs_t), the exponent cut to ±20
        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logprobs_t

    By default weights have no lower bound, as in the paper, and are at most 5. The value of this loss says little; its
    gradient is what counts.

    Args:
        logprobs_BT: of the policy being trained; the only input that gets a gradient.
        old_logprobs_BT: of the policy that sampled, or of the same policy before the update.
        advantages_BT: one per token.
        loss_mask_BT: for this and what follows see the module.

    Returns:
        The loss, and the diagnostics of `ppo_clip_loss` but the dual clip's. A weight is clipped whatever the sign of
        the advantage, so the clip fractions look at the ratio alone.

    Raises:
        ConfigError: a bound is out of range, or shapes differ.
    """
    clip = ClipRange(clip_low, clip_high).checked()
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    log_ratio_N = _log_ratio(tokens, logprobs_BT, old_logprobs_BT)
    advantages_N = tokens.pick("advantages", advantages_BT).detach()
    ratio_N = cut(log_ratio_N.detach()).exp()
    clipped_N = ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_N = tokens.weighted(-clipped_N * advantages_N * tokens.pick("logprobs", logprobs_BT), weights_BT)
    fractions = _fractions(low_N=ratio_N < 1.0 - clip.low, high_N=ratio_N > 1.0 + clip.high)
    found = Diagnostics(fractions) | ratio_statistics(ratio_N, log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), found)


def decoupled_ppo_loss(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    cap: float = 5.0,
    beyond_cap: BeyondCap = "exclude",
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """PPO that stays close to one policy on tokens sampled by another (Hilton et al. 2022; AReaL 2025, equation 5).

        w_t = exp(proximal_logprobs_t - behaviour_logprobs_t), the exponent cut to ±20
        L_t = w_t · ppo_clip with r_t = exp(logprobs_t - proximal_logprobs_t)

    A token whose weight is above the cap is left out, of the sum and of what the sum is divided by; or, with
    `beyond_cap="truncate"`, it takes part with the weight `cap`. Where some are left out, `global_batch` is
    `GlobalBatch.of(within_cap(…))` of the whole batch, not that of its `loss_mask`.

    Args:
        logprobs_BT: of the policy being trained; the only input that gets a gradient.
        proximal_logprobs_BT: of a recent policy, usually the one before the update.
        behaviour_logprobs_BT: of the policy that sampled.
        advantages_BT: one per token.
        loss_mask_BT: for this and what follows see the module.
        dual_clip: see `ppo_clip_loss`.
        cap: the greatest weight.
        beyond_cap: what becomes of a token beyond it.

    Returns:
        The loss, and the diagnostics of `ppo_clip_loss` over the tokens that are left, with `weight_min`, `weight_max`,
        `weight_mean`, `weight_effective_sample_size` and, over all tokens, `weight_capped_fraction`.

    Raises:
        ConfigError: a bound is out of range, an option unknown, or shapes differ.
    """
    clip = ClipRange(clip_low, clip_high, dual_clip).checked()
    check_choice("beyond_cap", beyond_cap, get_args(BeyondCap))
    check_cap(cap)
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    within_N = below(proximal_weights(tokens, proximal_logprobs_BT, behaviour_logprobs_BT), cap)
    capped = Diagnostics({"weight_capped_fraction": mean_of(~within_N)})
    if beyond_cap == "exclude":
        tokens = Participants(tokens.lay(within_N), sequence_ids_BT)
    weights_N = proximal_weights(tokens, proximal_logprobs_BT, behaviour_logprobs_BT).clamp(max=cap)
    log_ratio_N = _log_ratio(tokens, logprobs_BT, proximal_logprobs_BT)
    advantages_N = tokens.pick("advantages", advantages_BT).detach()
    ratio_N = cut(log_ratio_N).exp()
    loss_N = weights_N * _clipped_surrogate(ratio_N, advantages_N, clip)
    found = _clip_fractions(ratio_N, advantages_N, clip) | ratio_statistics(ratio_N, log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), found | weight_statistics(weights_N) | capped)


def _log_ratio(tokens: Participants, logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    return tokens.pick("logprobs", logprobs_BT) - tokens.pick("old_logprobs", old_logprobs_BT).detach()


def _clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip: ClipRange) -> Tensor:
    clipped_N = ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * clipped_N)
    if clip.dual is None:
        return loss_N
    return torch.where(advantages_N < 0.0, torch.minimum(loss_N, -advantages_N * clip.dual), loss_N)


def _clip_fractions(ratio_N: Tensor, advantages_N: Tensor, clip: ClipRange) -> Diagnostics:
    """Shares of the tokens whose gradient is 0 for each bound: the advantage would push the ratio further beyond it."""
    up_N, down_N = advantages_N > 0.0, advantages_N < 0.0
    found = _fractions(low_N=down_N & (ratio_N < 1.0 - clip.low), high_N=up_N & (ratio_N > 1.0 + clip.high))
    if clip.dual is not None:
        found["clip_fraction_dual"] = mean_of(down_N & (ratio_N > clip.dual))
    return Diagnostics(found)


def _fractions(low_N: Tensor, high_N: Tensor) -> dict[str, Statistic]:
    return {
        "clip_fraction": mean_of(low_N | high_N),
        "clip_fraction_low": mean_of(low_N),
        "clip_fraction_high": mean_of(high_N),
    }
