"""A TRL trainer's advantages and loss, wrapped as a loss for `check_trainer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict


def trl_loss(trainer: GRPOTrainer) -> Callable[[dict[str, Any]], Tensor]:
    """Return the training step of a `GRPOTrainer` or of a subclass, for `check_trainer`.

    The code of the trainer computes the advantages and the loss. The enumerated batches replace the trainer's rollouts,
    rewards and log-probabilities, so the trainer cannot be used for training afterwards.

    Args:
        trainer: a trainer on the CPU, with its options and any model. It needs an optimizer, for example from
            `create_optimizer_and_scheduler`.
    """
    current: dict[str, Any] = {}

    def rollouts(prompts: list[Any], _trainer: Any) -> dict[str, Any]:
        attended_BT, mask_BT = current["attention_mask"].bool(), current["response_mask"].long()
        end = trainer.eos_token_ids[0]
        masks = [mask_T[attended_T].tolist() for mask_T, attended_T in zip(mask_BT, attended_BT, strict=True)]
        ids = [[end] * len(mask) for mask in masks]
        return {"prompt_ids": [[end]] * len(ids), "completion_ids": ids, "logprobs": None, "env_mask": masks}

    def scores(**_columns: Any) -> list[float | None]:
        return [None if score != score else score for score in current["episode_rewards"].tolist()]

    def logprobs(_model: Any, _ids: Tensor, _mask: Tensor, _width: int, *_: Any, **__: Any) -> tuple[Any, ...]:
        own_BT = current["log_probs"][current["rows"]]
        return own_BT, torch.zeros_like(own_BT), None

    trainer.rollout_func, trainer.reward_funcs = rollouts, [scores]
    trainer._get_per_token_logps_and_entropies = logprobs
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.model.train()

    def loss(batch: dict[str, Any]) -> Tensor:
        groups, parts = batch["uid"].tolist(), batch["micro_batches"]
        sizes = {groups.count(group) for group in groups}
        if len(sizes) > 1 or len(set(batch["traj_uid"])) < len(groups) or sorted(groups) != groups:
            raise NotImplementedError(
                "in TRL, groups are consecutive rows and have the same size, and there is one row per episode"
            )
        (trainer.num_generations,) = sizes
        trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = len(parts)
        trainer.current_gradient_accumulation_steps = len(parts)
        current.update(batch, rows=torch.arange(len(groups)))
        made = trainer._generate_and_score_completions([{"prompt": "1"} for _ in groups])
        for rows, part in zip(parts, split_tensor_dict(made, len(parts)), strict=True):
            current["rows"] = rows
            trainer.training_step(trainer.model, part, None)
        gradient: Tensor = batch["log_probs"].grad
        return gradient

    return loss
