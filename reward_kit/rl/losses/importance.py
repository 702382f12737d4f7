"""Importance ratios between policies: cut before they overflow, and weights for tokens that another policy sampled."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from reward_kit.credit.options import check_choice, check_number
from reward_kit.errors import ConfigError
from reward_kit.rl.losses.diagnostics import Diagnostics, effective_size_of, mean_of, spread_of
from reward_kit.rl.losses.participants import Participants

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut: exp(20) is far outside any clip range, and its square is finite in float32."""

Level = Literal["token", "sequence"]


class ImportanceWeights(NamedTuple):
    """A weight per token, without a gradient, and what describes them."""

    weights_BT: Tensor
    diagnostics: Diagnostics


def cut(log_ratio: Tensor) -> Tensor:
    """The log-ratio in ±`MAX_LOG_RATIO`; without a gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated_importance_weights(
    logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    level: Level = "token",
    cap: float = 2.0,
    sequence_ids_BT: Tensor | None = None,
) -> ImportanceWeights:
    """Weights for what a policy other than the one assumed has sampled (truncated importance sampling, Ionides 2008).

        token:    w_t = min(exp(logprobs_t - sampler_logprobs_t), cap)
        sequence: w_t = min(exp(sum over the sequence of the same differences), cap)

    They make up for a sampler that computes its log-probabilities with other kernels or older weights than the trainer.
    Give them to a policy loss as `weights_BT`.

    Args:
        logprobs_BT: of the policy that the loss takes as the old one, as the trainer computes it.
        sampler_logprobs_BT: as the sampler recorded them.
        loss_mask_BT: 1 where a token takes part; weights elsewhere are 0.
        level: the ratio of each token, or that of its sequence.
        cap: the greatest weight.
        sequence_ids_BT: which sequence a token belongs to; None: its row.

    Returns:
        The weights, and `weight_min`, `weight_max`, `weight_mean`, `weight_effective_sample_size` and
        `weight_capped_fraction`, over tokens or over sequences.

    Raises:
        ConfigError: the level is unknown, the cap is not above 0, or shapes differ.
    """
    check_choice("level", level, get_args(Level))
    check_cap(cap)
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    with torch.no_grad():
        log_ratio = tokens.pick("logprobs", logprobs_BT) - tokens.pick("sampler_logprobs", sampler_logprobs_BT)
        if level == "sequence":
            log_ratio = tokens.sequence_sums(log_ratio)
        ratio = log_ratio.exp()
        weights = ratio.clamp(max=cap)  # and with it what overflowed
        weights_N = weights[tokens.sequence_N] if level == "sequence" else weights
        found = weight_statistics(weights) | Diagnostics({"weight_capped_fraction": mean_of(ratio > cap)})
        return ImportanceWeights(tokens.lay(weights_N), found)


def within_cap(
    proximal_logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, loss_mask_BT: Tensor, cap: float = 5.0
) -> Tensor:
    """(B,T) bool: the tokens that take part and whose weight exp(proximal - behaviour) is at most the cap.

    Args:
        proximal_logprobs_BT: of the policy that a decoupled loss stays close to.
        behaviour_logprobs_BT: of the policy that sampled.
        loss_mask_BT: 1 where a token takes part.
        cap: the greatest weight.

    Raises:
        ConfigError: the cap is not above 0, or shapes differ.
    """
    check_cap(cap)
    tokens = Participants(loss_mask_BT)
    weights_N = proximal_weights(tokens, proximal_logprobs_BT, behaviour_logprobs_BT)
    return tokens.lay(below(weights_N, cap))


def proximal_weights(tokens: Participants, proximal_logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor) -> Tensor:
    """(N,) exp(proximal - behaviour), without a gradient."""
    proximal_N = tokens.pick("proximal_logprobs", proximal_logprobs_BT).detach()
    return cut(proximal_N - tokens.pick("behaviour_logprobs", behaviour_logprobs_BT).detach()).exp()


def below(weights_N: Tensor, cap: float) -> Tensor:
    """(N,) whether a weight is at most the cap. NaN is: an unknown log-probability is to be seen in the loss."""
    return ~(weights_N > cap)


def check_cap(cap: float) -> None:
    """Refuses a cap that would leave nothing.

    Raises:
        ConfigError: it is not a finite number above 0.
    """
    check_number("cap", cap, 0.0)
    if cap == 0.0:
        raise ConfigError("cap is the greatest weight and above 0; got 0")


def weight_statistics(weights: Tensor) -> Diagnostics:
    """`weight_min`, `weight_max`, `weight_mean`, `weight_effective_sample_size`."""
    return Diagnostics(
        {**spread_of("weight", weights), "weight_effective_sample_size": effective_size_of(weights)},
    )


def ratio_statistics(ratio: Tensor, log_ratio_N: Tensor, tokens: Participants) -> Diagnostics:
    """What every policy loss says of its ratios.

    Args:
        ratio: of tokens (N,) or of sequences (Q,).
        log_ratio_N: log(new / old) of each token.
        tokens: those that take part.

    Returns:
        `ratio_min`, `ratio_max`, `ratio_mean`, `effective_sample_size` (Σr)² / Σr² of `ratio`; `approx_kl`, mean of
        r - 1 - log r, and `approx_kl_k1`, mean of -log r, over tokens (Schulman 2020, "Approximating KL divergence");
        `tokens`.
    """
    log_ratio_N = cut(log_ratio_N.detach())
    return Diagnostics(
        {
            **spread_of("ratio", ratio),
            "effective_sample_size": effective_size_of(ratio),
            "approx_kl": mean_of(log_ratio_N.exp() - 1.0 - log_ratio_N),
            "approx_kl_k1": mean_of(-log_ratio_N),
            "tokens": tokens.total(),
        }
    )
