"""Policy losses as pure functions on tensors. Each returns the loss and, beside it, its diagnostics.

Tensors are (B,T), row by token. A token whose mask is 0 is replaced before anything is computed from it, so that it has
no influence on loss or gradient, whatever stands there, NaN included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut: exp(20) is far outside any clip range and still finite in every dtype."""


class Loss(NamedTuple):
    """A scalar to minimise, and detached scalars that describe it."""

    loss: Tensor
    diagnostics: dict[str, Tensor]


def logprobs_of(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """(B,T) log p(ids[:, t] | ids[:, :t]), taken from the logits at t - 1; 0.0 at t = 0, which nothing predicts."""
    predicted = logits_BTV[:, :-1].log_softmax(dim=-1)
    chosen = predicted.gather(-1, ids_BT[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0))


def ppo_clip_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Loss:
    """The clipped surrogate of PPO (Schulman et al. 2017, equation 7) with separate clip ranges, averaged over tokens.

        ratio = exp(logprobs - old_logprobs)
        loss  = sum_t mask_t max(-A_t ratio_t, -A_t clip(ratio_t, 1 - clip_low, 1 + clip_high)) / tokens

    Args:
        logprobs_BT: of the policy being trained; the only input that gets a gradient.
        old_logprobs_BT: of the policy that sampled.
        advantages_BT: one per token.
        loss_mask_BT: 1 where a token takes part.
        clip_low: how far below 1 the ratio may be pushed.
        clip_high: how far above.

    Returns:
        The loss, 0 where no token takes part, and `clip_fraction`, `approx_kl` (E[r - 1 - log r]; Schulman 2020,
        "Approximating KL divergence", k3), `ratio_min`, `ratio_max` (1 where no
        token takes part), `tokens`.
    """
    mask = loss_mask_BT.bool()
    log_ratio = torch.where(mask, logprobs_BT - old_logprobs_BT.detach(), 0.0)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = torch.where(mask, advantages_BT.detach(), 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    tokens = mask.sum()
    total = torch.maximum(unclipped, clipped).sum()
    share = tokens.clamp(min=1)
    loss = total / share
    with torch.no_grad():
        diagnostics = {
            "clip_fraction": (clipped > unclipped).sum() / share,
            "approx_kl": (ratio - 1.0 - log_ratio).sum() / share,
            "ratio_min": torch.where(mask, ratio, torch.inf).min() if tokens else torch.ones(()),
            "ratio_max": torch.where(mask, ratio, -torch.inf).max() if tokens else torch.ones(()),
            "tokens": tokens,
        }
    return Loss(loss, diagnostics)
