"""What losses need of a model's logits: log-probabilities of the tokens and entropies; and the entropy as a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.rl.losses.diagnostics import Diagnostics, Loss, mean_of
from reward_kit.rl.losses.participants import Aggregation, GlobalBatch, Participants


def logprobs_of(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """(B,T) log p(ids[:, t] | ids[:, :t]), taken from the logits at t - 1; 0.0 at t = 0, which nothing predicts.

    In float32 or wider: in bfloat16 a log-probability of -5 is off by as much as 0.016.

    Raises:
        ConfigError: shapes differ.
    """
    if logits_BTV.dim() != 3 or logits_BTV.shape[:2] != ids_BT.shape:
        raise ConfigError(f"logits are (B,T,V) of ids (B,T); got {tuple(logits_BTV.shape)} of {tuple(ids_BT.shape)}")
    predicted = _log_softmax(logits_BTV)
    chosen = predicted.gather(-1, ids_BT[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0))


def entropies_of(logits_BTV: Tensor) -> Tensor:
    """(B,T) entropy, in nats, of the distribution from which token t came, so on the same places as `logprobs_of`.

    A logit of -inf is a token that cannot be; it adds nothing.
    """
    logprobs = _log_softmax(logits_BTV)
    # 0 · log 0 is 0 here, and NaN in floating point.
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
    """The negative entropy, to be added with a coefficient: less loss for a policy that keeps its choices open.

    Args:
        entropies_BT: `entropies_of` the policy being trained.
        loss_mask_BT: 1 where a token takes part.
        aggregation: how the tokens' losses become one.
        global_batch: the counts of all micro-batches; None: these rows are all.
        sequence_ids_BT: which sequence a token belongs to; None: its row.

    Returns:
        The loss, and `entropy`, the mean over tokens.

    Raises:
        ConfigError: the aggregation is unknown, or shapes differ.
    """
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    entropies_N = tokens.pick("entropies", entropies_BT)
    found = Diagnostics({"entropy": mean_of(entropies_N)})
    return Loss(tokens.aggregate(-entropies_N, aggregation, global_batch), found)
