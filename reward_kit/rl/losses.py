"""Losses as pure functions of padded or packed (B,T) tensors. Only tokens whose `loss_mask` is 1 are read.

The functions share these arguments:

    logprobs_BT      log-probabilities under the policy being trained; only these have a gradient
    old_logprobs_BT  log-probabilities under the sampling policy, or under the trained policy before the update
    advantages_BT    the advantage of each token
    loss_mask_BT     1 for tokens included in the loss, else 0
    clip_low         the maximum distance of a ratio below 1; 1 means unlimited
    clip_high        the maximum distance of a ratio above 1
    weights_BT       a factor for each token, such as `truncated_importance_weights`; None means 1
    aggregation      how token losses are reduced to a single number
    global_batch     the counts over all micro-batches; None means the counts over these rows
    sequence_ids_BT  the sequence of each token, for packed rows; None means one sequence per row

Each function returns a `Loss` with diagnostics. It raises a `ConfigError` if an option is unknown or out of range, or
if shapes differ. Formulas are for a single token t, and sg stops the gradient. The axis `_N` contains the included
tokens in order, and the axis `_Q` contains the sequences with at least one included token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.rl.loss_terms import (
    Aggregation,
    Diagnostics,
    GlobalBatch,
    Loss,
    MaskedTokens,
    check_above_0,
    clamp_log_ratio,
    effective_size_statistic,
    mean_statistic,
    spread_statistics,
)
from reward_kit.validation import check_choice, check_number

__all__ = [
    "ImportanceWeights",
    "cispo_loss",
    "decoupled_ppo_loss",
    "dppo_loss",
    "entropy_loss",
    "gmpo_loss",
    "gspo_loss",
    "ppo_clip_loss",
    "sapo_loss",
    "token_entropies",
    "token_logprobs",
    "truncated_importance_weights",
    "turn_clip_loss",
    "value_loss",
    "within_cap",
]
BeyondCap = Literal["exclude", "truncate"]
Level = Literal["token", "sequence"]
Divergence = Literal["tv", "kl"]
TurnRatio = Literal["mean", "product"]


# Policy losses


class ClipRange(NamedTuple):
    """The bounds on the distance between a ratio and 1, and the factor c of the dual clip, or None for no dual clip."""

    low: float
    high: float
    dual: float | None = None

    def checked(self) -> ClipRange:
        """Return `self`, or raise a `ConfigError` if a bound is out of range."""
        check_number("clip_low", self.low, 0.0, 1.0)
        check_number("clip_high", self.high, 0.0)
        if self.dual is not None:
            check_number("dual_clip", self.dual)
            if not self.dual > 1.0:
                raise ConfigError(f"dual_clip must be above 1, got {self.dual:g}")
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
    """Return the clipped surrogate loss of PPO (Schulman et al. 2017, equation 7).

    The lower and upper clip bounds are separate, and a dual clip can be added.

        r_t = exp(logprobs_t - old_logprobs_t), the exponent clipped to ±20
        L_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high))
        L_t = min(L_t, -A_t dual_clip)   for A_t < 0 (Ye et al. 2020, equation 5)

    Args:
        dual_clip: the bound on the loss of a token with a negative advantage and a large ratio. None means no bound.

    Returns:
        The loss with these diagnostics: `clip_fraction_low` and `clip_fraction_high`, the fractions of tokens clipped
        at each bound; `clip_fraction`, the sum of the two; `clip_fraction_dual`; `ratio_min`, `ratio_max` and
        `ratio_mean`; `effective_sample_size`, which is (Σr)² / Σr²; `approx_kl`, the mean of r - 1 - log r;
        `approx_kl_k1`, the mean of -log r (Schulman 2020, "Approximating KL divergence"); and `tokens`.
    """
    clip = ClipRange(clip_low, clip_high, dual_clip).checked()
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, old_logprobs_BT, advantages_BT)
    ratio_N = clamp_log_ratio(log_ratio_N).exp()
    loss_N = tokens.weighted(_clipped_surrogate(ratio_N, advantages_N, clip), weights_BT)
    measured = _clip_fractions(ratio_N, advantages_N, clip) | _ratio_statistics(ratio_N, log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), measured)


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
    """Return the loss of group sequence policy optimization (Zheng et al. 2025, equations 7 and 14).

    Each token has its own advantage.

        s_i = exp(mean over the tokens of sequence i of logprobs - old_logprobs), the exponent clipped to ±20
        r_t = sg[s_i] exp(logprobs_t - sg[logprobs_t])     the value s_i with the gradient s_i ∇logprobs_t
        L_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high))

    If all tokens in a sequence have the same advantage and the aggregation is the default, the value and the gradient
    are the same as for the loss over whole sequences. The diagnostics are the same as for `ppo_clip_loss` without the
    dual clip, but `ratio_…` and `effective_sample_size` are computed over sequences.
    """
    clip = ClipRange(clip_low, clip_high).checked()
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, old_logprobs_BT, advantages_BT)
    log_ratio_Q = clamp_log_ratio(tokens.sequence_means(log_ratio_N.detach()))
    ratio_N = _shared_ratio(tokens.spread(log_ratio_Q), tokens.pick("logprobs", logprobs_BT))
    loss_N = tokens.weighted(_clipped_surrogate(ratio_N, advantages_N, clip), weights_BT)
    measured = _clip_fractions(ratio_N, advantages_N, clip) | _ratio_statistics(log_ratio_Q.exp(), log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), measured)


def turn_clip_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    turn_ids_BT: Tensor,
    *,
    ratio: TurnRatio = "mean",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Return the clipped surrogate loss with one ratio and one clipping decision for each turn of a conversation.

        "mean"     s_k = exp(mean over the tokens of turn k of logprobs - old_logprobs), the exponent clipped to ±20
        "product"  s_k = exp(sum over the tokens of turn k of logprobs - old_logprobs), the exponent clipped to ±20
        r_t = sg[s_k] exp(logprobs_t - sg[logprobs_t])     the value s_k with the gradient s_k ∇logprobs_t
        L_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high)), with the dual clip of `ppo_clip_loss`

    "mean" is Turn-PPO (Li et al. 2025, arXiv:2511.20718, equation 4) and the ratio of GAGPO (`gagpo_credit`). If each
    sequence has a single turn, "mean" is the same as `gspo_loss`. "product" is the ratio of the whole turn's
    probabilities. With the aggregation "seq-mean-token-sum", its gradient is the same as in PPO with turns as actions,
    whose loss is max(-A s, -A clip(s)), summed over turns and averaged over sequences. The logarithm of the product
    grows with the length of the turn, so "product" requires a wider clip range. If each turn has a single token, both
    ratios are the same as in `ppo_clip_loss`.

    Args:
        turn_ids_BT: an integer for each token. Tokens in the same sequence with the same id form a turn.
        ratio: how the token ratios in a turn are combined: "mean" for their geometric mean, or "product".
        dual_clip: the bound on the loss of a token with a negative advantage and a large ratio. None means no bound.

    Returns:
        The loss and the same diagnostics as `ppo_clip_loss`, except that `ratio_…` and `effective_sample_size` are
        computed over turns.
    """
    clip = ClipRange(clip_low, clip_high, dual_clip).checked()
    check_choice("ratio", ratio, get_args(TurnRatio))
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    turns = tokens.divided("turn_ids", turn_ids_BT)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, old_logprobs_BT, advantages_BT)
    reduce = turns.sequence_means if ratio == "mean" else turns.sequence_sums
    log_ratio_Q = clamp_log_ratio(reduce(log_ratio_N.detach()))
    ratio_N = _shared_ratio(turns.spread(log_ratio_Q), tokens.pick("logprobs", logprobs_BT))
    loss_N = tokens.weighted(_clipped_surrogate(ratio_N, advantages_N, clip), weights_BT)
    measured = _clip_fractions(ratio_N, advantages_N, clip) | _ratio_statistics(log_ratio_Q.exp(), log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), measured)


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
    """Return the loss of clipped importance sampling (MiniMax-M1 2025, equations 4 and 5).

    Weights are clipped, but no token loses its gradient.

        r_t = exp(logprobs_t - old_logprobs_t), the exponent clipped to ±20
        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logprobs_t

    By default, weights have no lower bound, as in the paper, and an upper bound of 5. Only the gradient of this loss is
    meaningful, not its value. The diagnostics are the same as for `ppo_clip_loss` without the dual clip. A
    weight is clipped regardless of the sign of the advantage, so the clip fractions depend only on the ratio.
    """
    clip = ClipRange(clip_low, clip_high).checked()
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, old_logprobs_BT, advantages_BT)
    ratio_N = clamp_log_ratio(log_ratio_N.detach()).exp()
    clipped_N = ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_N = tokens.weighted(-clipped_N * advantages_N * tokens.pick("logprobs", logprobs_BT), weights_BT)
    measured = _fractions(low_N=ratio_N < 1.0 - clip.low, high_N=ratio_N > 1.0 + clip.high)
    measured |= _ratio_statistics(ratio_N, log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), measured)


def sapo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "seq-mean-token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Return the loss of soft adaptive policy optimization (Gao et al. 2025, equation 5).

    A smooth gate replaces clipping, so a token's gradient fades as its ratio moves away from 1.

        r_t = exp(logprobs_t - old_logprobs_t), the exponent clipped to ±20
        L_t = -A_t (4 / τ) sigmoid(τ (r_t - 1)),   τ = temperature_positive if A_t > 0, else temperature_negative

    The gradient at r = 1 is the same as for `ppo_clip_loss`. A higher temperature means a narrower gate. The
    diagnostics are the same as for `ppo_clip_loss`, except that there are no clip fractions.
    """
    check_above_0("temperature_positive", temperature_positive)
    check_above_0("temperature_negative", temperature_negative)
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, old_logprobs_BT, advantages_BT)
    ratio_N = clamp_log_ratio(log_ratio_N).exp()
    temperature_N = torch.full_like(ratio_N, temperature_negative)
    temperature_N[advantages_N > 0.0] = temperature_positive
    gates_N = torch.sigmoid(temperature_N * (ratio_N - 1.0)) * (4.0 / temperature_N)
    loss_N = tokens.weighted(-advantages_N * gates_N, weights_BT)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), _ratio_statistics(ratio_N, log_ratio_N, tokens))


def gmpo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "seq-mean-token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Return the loss of geometric-mean policy optimization (Zhao et al. 2025, equation 4).

    The log-ratio of each token is clipped before the geometric mean over its sequence i is computed.

        l_t = logprobs_t - old_logprobs_t
        m_t = min(l_t, clip(l_t, -clip_low, clip_high)) if A_t ≥ 0, else the maximum of the two
        s_i = exp(mean over the tokens of sequence i of m_t), the exponent clipped to ±20
        L_t = -A_t s_i

    If all tokens in a sequence have the same advantage and the aggregation is the default, this is the loss in the
    paper. The diagnostics are the same as for `ppo_clip_loss`, without the dual clip, except that `ratio_…` and
    `effective_sample_size` are computed from s.
    """
    clip = ClipRange(clip_low, clip_high).checked()
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, old_logprobs_BT, advantages_BT)
    up_N, down_N = advantages_N >= 0.0, advantages_N < 0.0
    high_N, low_N = up_N & (log_ratio_N > clip.high), down_N & (log_ratio_N < -clip.low)
    bounded_N = torch.where(high_N, clip.high, torch.where(low_N, -clip.low, log_ratio_N)).to(log_ratio_N.dtype)
    ratio_Q = clamp_log_ratio(tokens.sequence_means(bounded_N)).exp()
    loss_N = tokens.weighted(-advantages_N * tokens.spread(ratio_Q), weights_BT)
    measured = _fractions(low_N, high_N) | _ratio_statistics(ratio_Q.detach(), log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), measured)


def dppo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    divergence: Divergence = "tv",
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    cap: float = 20.0,
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Return the loss of divergence proximal policy optimization (arXiv 2602.04879, 2026, equations 13 and 14).

    A token loses its gradient if the divergence between the two policies' distributions over {this token, any other}
    exceeds a bound and the gradient would increase this divergence. p and q are the token's probabilities under the
    trained and the old policy. The ratio is r_t = p / q, computed as exp(log p - log q) with the exponent clipped to
    ±20.

        tv: D_t = |p - q|
        kl: D_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
        L_t = -A_t min(r_t, cap), or 0 if A_t > 0, p > q and D_t > clip_high, or A_t < 0, p < q and D_t > clip_low

    If a token's ratio exceeds `cap`, its gradient is the truncated ratio times the gradient of its log-probability. For
    "kl", bounds near 0.05 are usual. The diagnostics are the same as for `ppo_clip_loss` without the dual
    clip.
    """
    clip = ClipRange(clip_low, clip_high).checked()
    check_choice("divergence", divergence, get_args(Divergence))
    check_above_0("cap", cap)
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, old_logprobs_BT, advantages_BT)
    new_N, log_old_N = tokens.pick("logprobs", logprobs_BT), tokens.pick("old_logprobs", old_logprobs_BT).detach()
    apart_N = _binary_divergence(new_N.detach(), log_old_N, divergence)
    rises_N = log_ratio_N.detach() > 0.0
    high_N = (advantages_N > 0.0) & rises_N & (apart_N > clip.high)
    low_N = (advantages_N < 0.0) & ~rises_N & (apart_N > clip.low)
    ratio_N = clamp_log_ratio(log_ratio_N.detach()).exp()
    capped_N = ratio_N.clamp(max=cap) * (new_N - new_N.detach()).exp()
    loss_N = tokens.weighted(torch.where(low_N | high_N, 0.0, -advantages_N * capped_N), weights_BT)
    measured = _fractions(low_N, high_N) | _ratio_statistics(ratio_N, log_ratio_N, tokens)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), measured)


def _binary_divergence(logprobs_N: Tensor, old_logprobs_N: Tensor, divergence: Divergence) -> Tensor:
    new_N, old_N = logprobs_N.exp(), old_logprobs_N.exp()
    if divergence == "tv":
        return (new_N - old_N).abs()
    others_N = torch.log1p(-old_N.clamp(max=1.0 - 1e-7)) - torch.log1p(-new_N.clamp(max=1.0 - 1e-7))
    return old_N * (old_logprobs_N - logprobs_N) + (1.0 - old_N) * others_N


def decoupled_ppo_loss(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
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
    """Return the PPO loss for tokens that an older policy sampled (Hilton et al. 2022; AReaL 2025, equation 5).

    The trained policy is kept close to the proximal policy, and weights correct for the policy that sampled the tokens.

        w_t = exp(proximal_logprobs_t - behavior_logprobs_t), the exponent clipped to ±20
        L_t = w_t · ppo_clip with r_t = exp(logprobs_t - proximal_logprobs_t)

    A token whose weight exceeds the cap is excluded from both the sum and the divisor. If `beyond_cap` is "truncate",
    its weight is reduced to `cap` instead. If tokens are excluded, pass `GlobalBatch.of(within_cap(…))` for the whole
    batch as `global_batch`, rather than the counts of its `loss_mask`.

    Args:
        proximal_logprobs_BT: log-probabilities under a recent policy, usually the policy before the update.
        behavior_logprobs_BT: log-probabilities under the policy that sampled the tokens.
        dual_clip: see `ppo_clip_loss`.
        cap: the maximum weight.
        beyond_cap: "exclude" to exclude tokens whose weights exceed the cap, or "truncate" to truncate the weights.

    Returns:
        The loss and the same diagnostics as `ppo_clip_loss`, computed over the remaining tokens. There are also
        `weight_min`, `weight_max`, `weight_mean` and `weight_effective_sample_size` over the remaining tokens, and
        `weight_capped_fraction` over all tokens.
    """
    clip = ClipRange(clip_low, clip_high, dual_clip).checked()
    check_choice("beyond_cap", beyond_cap, get_args(BeyondCap))
    check_above_0("cap", cap)
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    within_N = _within(_proximal_weights(tokens, proximal_logprobs_BT, behavior_logprobs_BT), cap)
    if beyond_cap == "exclude":
        tokens = MaskedTokens(tokens.lay(within_N), sequence_ids_BT)
    weights_N = _proximal_weights(tokens, proximal_logprobs_BT, behavior_logprobs_BT).clamp(max=cap)
    log_ratio_N, advantages_N = _inputs(tokens, logprobs_BT, proximal_logprobs_BT, advantages_BT)
    ratio_N = clamp_log_ratio(log_ratio_N).exp()
    loss_N = weights_N * _clipped_surrogate(ratio_N, advantages_N, clip)
    measured = _clip_fractions(ratio_N, advantages_N, clip) | _ratio_statistics(ratio_N, log_ratio_N, tokens)
    measured |= _weight_statistics(weights_N) | Diagnostics({"weight_capped_fraction": mean_statistic(~within_N)})
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), measured)


def _inputs(
    tokens: MaskedTokens, logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-ratios and the advantages, both (N,)."""
    log_ratio_N = tokens.pick("logprobs", logprobs_BT) - tokens.pick("old_logprobs", old_logprobs_BT).detach()
    return log_ratio_N, tokens.pick("advantages", advantages_BT).detach()


def _shared_ratio(log_ratio_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Return the exponentials of shared log-ratios, each with the gradient of its token's log-probability."""
    return (log_ratio_N + (logprobs_N - logprobs_N.detach())).exp()


def _clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip: ClipRange) -> Tensor:
    clipped_N = ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * clipped_N)
    if clip.dual is None:
        return loss_N
    return torch.where(advantages_N < 0.0, torch.minimum(loss_N, -advantages_N * clip.dual), loss_N)


def _clip_fractions(ratio_N: Tensor, advantages_N: Tensor, clip: ClipRange) -> Diagnostics:
    """Return the fractions of tokens that are clipped at each bound and therefore have no gradient."""
    up_N, down_N = advantages_N > 0.0, advantages_N < 0.0
    measured = _fractions(low_N=down_N & (ratio_N < 1.0 - clip.low), high_N=up_N & (ratio_N > 1.0 + clip.high))
    if clip.dual is not None:
        measured |= Diagnostics({"clip_fraction_dual": mean_statistic(down_N & (ratio_N > clip.dual))})
    return measured


def _fractions(low_N: Tensor, high_N: Tensor) -> Diagnostics:
    shares = {"clip_fraction": low_N | high_N, "clip_fraction_low": low_N, "clip_fraction_high": high_N}
    return Diagnostics({name: mean_statistic(values_N) for name, values_N in shares.items()})


def _ratio_statistics(ratio: Tensor, log_ratio_N: Tensor, tokens: MaskedTokens) -> Diagnostics:
    """Return diagnostics of token ratios (N,) or sequence ratios (Q,); see `ppo_clip_loss`."""
    log_ratio_N = clamp_log_ratio(log_ratio_N.detach())
    return Diagnostics(
        {
            **spread_statistics("ratio", ratio),
            "effective_sample_size": effective_size_statistic(ratio),
            "approx_kl": mean_statistic(log_ratio_N.expm1() - log_ratio_N),
            "approx_kl_k1": mean_statistic(-log_ratio_N),
            "tokens": tokens.total(log_ratio_N),
        }
    )


# Importance weights


class ImportanceWeights(NamedTuple):
    """A weight without a gradient for each token, and diagnostics of the weights."""

    weights_BT: Tensor
    diagnostics: Diagnostics


def truncated_importance_weights(
    logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    level: Level = "token",
    cap: float = 2.0,
    sequence_ids_BT: Tensor | None = None,
) -> ImportanceWeights:
    """Return weights for tokens that a different policy sampled (truncated importance sampling, Ionides 2008).

        token:    w_t = min(exp(logprobs_t - sampler_logprobs_t), cap)
        sequence: w_t = min(exp(sum over the sequence of the same differences), cap)

    The weights correct for a sampler that uses different kernels or older weights than the trainer to compute
    log-probabilities. Pass them to a policy loss as `weights_BT`.

    Args:
        logprobs_BT: the loss's old log-probabilities, computed by the trainer.
        sampler_logprobs_BT: the log-probabilities recorded by the sampler.
        loss_mask_BT: 1 for tokens included in the loss. The weights of other tokens are 0.
        level: "token" to use the ratio of each token, or "sequence" to use the ratio of its sequence.
        cap: the maximum weight.

    Returns:
        The weights and these diagnostics over tokens or sequences: `weight_min`, `weight_max`, `weight_mean`,
        `weight_effective_sample_size` and `weight_capped_fraction`.
    """
    check_choice("level", level, get_args(Level))
    check_above_0("cap", cap)
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    with torch.no_grad():
        log_ratio = tokens.pick("logprobs", logprobs_BT) - tokens.pick("sampler_logprobs", sampler_logprobs_BT)
        if level == "sequence":
            log_ratio = tokens.sequence_sums(log_ratio)
        ratio = log_ratio.exp()
        weights = ratio.clamp(max=cap)  # including infinite ratios
        weights_N = tokens.spread(weights) if level == "sequence" else weights
        measured = _weight_statistics(weights) | Diagnostics({"weight_capped_fraction": mean_statistic(ratio > cap)})
        return ImportanceWeights(tokens.lay(weights_N), measured)


def within_cap(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, loss_mask_BT: Tensor, cap: float = 5.0
) -> Tensor:
    """Return a (B,T) mask of the included tokens whose weight in `decoupled_ppo_loss` is at most `cap`."""
    check_above_0("cap", cap)
    tokens = MaskedTokens(loss_mask_BT)
    return tokens.lay(_within(_proximal_weights(tokens, proximal_logprobs_BT, behavior_logprobs_BT), cap))


def _proximal_weights(tokens: MaskedTokens, proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor) -> Tensor:
    proximal_N = tokens.pick("proximal_logprobs", proximal_logprobs_BT).detach()
    return clamp_log_ratio(proximal_N - tokens.pick("behavior_logprobs", behavior_logprobs_BT).detach()).exp()


def _within(weights_N: Tensor, cap: float) -> Tensor:
    return ~(weights_N > cap)  # NaN counts as within the cap, so that an unknown log-probability makes the loss NaN


def _weight_statistics(weights: Tensor) -> Diagnostics:
    return Diagnostics(
        {**spread_statistics("weight", weights), "weight_effective_sample_size": effective_size_statistic(weights)}
    )


# Entropy and log-probabilities


def token_logprobs(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return log p(ids[:, t] | ids[:, :t]) as (B,T), computed from the logits at t - 1. The result is 0.0 at t = 0.

    The result is computed in float32 or wider, because the error of a log-probability of -5 in bfloat16 is up to 0.016.
    """
    if logits_BTV.dim() != 3 or logits_BTV.shape[:2] != ids_BT.shape:
        raise ConfigError(
            f"logits must have the shape (B,T,V) and ids (B,T), got {tuple(logits_BTV.shape)} and {tuple(ids_BT.shape)}"
        )
    chosen = _log_softmax(logits_BTV).gather(-1, ids_BT[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0))


def token_entropies(logits_BTV: Tensor) -> Tensor:
    """Return the entropy of each token's distribution (B,T), in nats, aligned with `token_logprobs`.

    A logit of -inf marks an impossible token, which contributes nothing.
    """
    logprobs = _log_softmax(logits_BTV)
    # 0 · log 0 must count as 0, but is NaN in floating point.
    finite = torch.where(logprobs == -torch.inf, 0.0, logprobs)
    return torch.nn.functional.pad(-(logprobs.exp() * finite).sum(dim=-1), (1, 0))


def _log_softmax(logits_BTV: Tensor) -> Tensor:
    return logits_BTV[:, :-1].log_softmax(dim=-1, dtype=torch.promote_types(logits_BTV.dtype, torch.float32))


def entropy_loss(
    entropies_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Return the negative entropy of the policy as a loss. Multiply it by a coefficient, and add it to the policy loss.

    The diagnostic `entropy` is the mean over tokens.
    """
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    entropies_N = tokens.pick("entropies", entropies_BT)
    measured = Diagnostics({"entropy": mean_statistic(entropies_N)})
    return Loss(tokens.aggregate(-entropies_N, aggregation, global_batch), measured)


# Critic


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip: float | None = 0.5,
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Return half the squared error of a critic, clipped as in the original PPO implementation (Dhariwal et al. 2017).

        near_t = clip(values_t, old_values_t - clip, old_values_t + clip)
        L_t    = ½ max((values_t - returns_t)², (near_t - returns_t)²)

    Because of the factor ½, the gradient is the error itself. If you take a coefficient from code without this factor,
    double it.

    Args:
        values_BT: the values from the critic being trained; only these have a gradient.
        old_values_BT: the critic's values before the update.
        returns_BT: the targets.
        clip: the maximum distance between a value and its old value. None means no limit.

    Returns:
        The loss with these diagnostics: `value_clip_fraction`, the fraction of tokens whose gradient is clipped;
        `value_error`, the mean of |values - returns|; `value_mean`; `return_mean`; and `value_tokens`.
    """
    if clip is not None:
        check_number("clip", clip, 0.0)
    if clip == 0.0:
        raise ConfigError("clip must be above 0, or None for no limit, got 0")
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    values_N = tokens.pick("values", values_BT)
    returns_N = tokens.pick("returns", returns_BT).detach()
    old_N = tokens.pick("old_values", old_values_BT).detach()
    squares_N = (values_N - returns_N).square()
    is_clipped_N = torch.zeros_like(values_N, dtype=torch.bool)
    if clip is not None:
        near_N = values_N.clamp(old_N - clip, old_N + clip)
        # The return is closer to the value than to its bound. Squares of large returns would be equal after rounding.
        past_N = (values_N - near_N).detach()
        is_clipped_N = past_N * (returns_N - (near_N + past_N / 2)).sign() > 0
        squares_N = torch.where(is_clipped_N, (near_N - returns_N).square(), squares_N)
    measured = {
        "value_clip_fraction": mean_statistic(is_clipped_N),
        "value_error": mean_statistic((values_N - returns_N).abs()),
        "value_mean": mean_statistic(values_N),
        "return_mean": mean_statistic(returns_N),
        "value_tokens": tokens.total(values_N),
    }
    return Loss(tokens.aggregate(0.5 * squares_N, aggregation, global_batch), Diagnostics(measured))
