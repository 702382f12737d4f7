"""Rewards of single steps, each in its place: on the last token of its action."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from reward_kit.errors import ConfigError
from reward_kit.rl.reward_manager.batches import Bools, Placed, RewardBatch, as_numbers


def placed_step_rewards(batch: RewardBatch, is_scored_B: Bools) -> Placed:
    """The batch's step rewards in their places; none in rows of unscored episodes, nor where one is None or NaN."""
    rows, columns, values = (_dense if "step_rewards" in batch.arrays else _listed)(batch)
    kept = is_scored_B[rows] & ~np.isnan(values)
    return Placed(rows[kept], columns[kept], values[kept])


def _dense(batch: RewardBatch) -> Placed:
    given = batch.arrays["step_rewards"]
    if given.shape != batch.actions_BT.shape:
        raise ConfigError(
            f"step_rewards is {tuple(given.shape)}, and actions are {tuple(batch.actions_BT.shape)}; give rewards on "
            "tokens, or for each row a list with one reward per action in non_tensor_batch"
        )
    rows, columns = torch.where((given != 0) & batch.valid_BT)
    values = given[rows, columns].to("cpu", torch.float64).numpy()
    return Placed(rows.cpu().numpy(), columns.cpu().numpy(), values)


def _listed(batch: RewardBatch) -> Placed:
    lists = batch.column("step_rewards")
    if lists is None:
        raise ConfigError("step_rewards=True, and the batch has no 'step_rewards', on tokens or in non_tensor_batch")
    rows, columns = batch.action_ends()
    values: list[Any] = []
    for row, (given, actions) in enumerate(zip(lists, np.bincount(rows, minlength=len(batch)).tolist(), strict=True)):
        known = [None] * actions if given is None else given
        if not hasattr(known, "__len__") or isinstance(known, str):
            raise ConfigError(
                f"non_tensor_batch['step_rewards'][{row}] is a list with one reward per action; got {given!s:.80}. "
                "One number per row, as verl-agent has it, is a discounted return"
            )
        if len(known) != actions:
            raise ConfigError(
                f"non_tensor_batch['step_rewards'][{row}] has {len(known)} rewards, and the row has {actions} actions "
                "(unbroken runs of its mask)"
            )
        values.extend(known)
    return Placed(rows, columns, as_numbers(values, "non_tensor_batch['step_rewards']"))
