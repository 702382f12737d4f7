"""The loss of a critic: the squared error of its values, clipped to stay close to what they were."""

from __future__ import annotations

import torch
from torch import Tensor

from reward_kit.credit.options import check_number
from reward_kit.errors import ConfigError
from reward_kit.rl.losses.diagnostics import Diagnostics, Loss, Statistic, mean_of
from reward_kit.rl.losses.participants import Aggregation, GlobalBatch, Participants


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
    """Half the squared error of a critic, clipped as in PPO's first implementation (Dhariwal et al. 2017).

        near_t = clip(values_t, old_values_t - clip, old_values_t + clip)
        L_t    = ½ max((values_t - returns_t)², (near_t - returns_t)²)

    The ½ makes the gradient the error itself; a coefficient taken from code without it is to be doubled.

    Args:
        values_BT: of the critic being trained; the only input that gets a gradient.
        old_values_BT: of the critic before the update.
        returns_BT: what it is to expect.
        loss_mask_BT: 1 where a token takes part.
        clip: how far a value may be pushed from what it was; None: as far as it likes.
        aggregation: how the tokens' losses become one.
        global_batch: the counts of all micro-batches; None: these rows are all.
        sequence_ids_BT: which sequence a token belongs to; None: its row.

    Returns:
        The loss, and `value_clip_fraction`, the share of tokens whose gradient is held back; `value_error`, the mean of
        |values - returns|; `value_mean`, `return_mean` and `value_tokens`.

    Raises:
        ConfigError: the clip range is not above 0, or shapes differ.
    """
    if clip is not None:
        check_number("clip", clip, 0.0)
    if clip == 0.0:
        raise ConfigError("clip is above 0, or None for no limit; got 0")
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    values_N = tokens.pick("values", values_BT)
    returns_N = tokens.pick("returns", returns_BT).detach()
    old_N = tokens.pick("old_values", old_values_BT).detach()
    squares_N = near_N = (values_N - returns_N).square()
    if clip is not None:
        near_N = (values_N.clamp(old_N - clip, old_N + clip) - returns_N).square()
        squares_N = torch.maximum(squares_N, near_N)
    held_back_N = near_N > (values_N - returns_N).square()
    found: dict[str, Statistic] = {
        "value_clip_fraction": mean_of(held_back_N),
        "value_error": mean_of((values_N - returns_N).abs()),
        "value_mean": mean_of(values_N),
        "return_mean": mean_of(returns_N),
        "value_tokens": tokens.total(),
    }
    return Loss(tokens.aggregate(0.5 * squares_N, aggregation, global_batch), Diagnostics(found))
