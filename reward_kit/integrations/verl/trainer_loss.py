"""verl's advantage estimators and policy losses, wrapped as a loss for `check_trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.workers.config import ActorConfig


def verl_loss(
    estimator: str = "grpo",
    policy_loss: str = "vanilla",
    aggregation: str = "token-mean",
    *,
    algorithm: Mapping[str, Any] | None = None,
    actor: Mapping[str, Any] | None = None,
    per_micro_batch: bool = False,
) -> Callable[[dict[str, Any]], Tensor]:
    """Return the loss of verl's actor, for `check_trainer`.

    Args:
        estimator: the name of a registered advantage estimator, as in `algorithm.adv_estimator`.
        policy_loss: the name of a registered policy loss, as in `actor.policy_loss.loss_mode`.
        aggregation: the aggregation of the loss, as in `actor.loss_agg_mode`.
        algorithm: options of verl's `AlgoConfig`, such as `norm_adv_by_std_in_grpo`.
        actor: options of verl's `ActorConfig`.
        per_micro_batch: whether to average the losses of the micro-batches, each of which is normalized by its own
            tokens. verl did so before its engines passed the size of the whole batch.
    """
    options = AlgoConfig(**dict(algorithm or {}))
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=aggregation, **dict(actor or {})
    )
    compute_loss = get_policy_loss_fn(policy_loss)

    def loss(batch: dict[str, Any]) -> Tensor:
        names = ("token_level_rewards", "response_mask", "old_log_probs")
        rows = DataProto.from_dict(
            tensors={name: batch[name].clone() for name in names},
            non_tensors={"uid": batch["uid"], "traj_uid": batch["traj_uid"]},
        )
        rows = compute_advantage(
            rows,
            estimator,
            gamma=options.gamma,
            lam=options.lam,
            norm_adv_by_std_in_grpo=options.norm_adv_by_std_in_grpo,
            config=options,
        )
        mask_BT, parts = batch["response_mask"].bool(), batch["micro_batches"]
        whole = {"dp_size": 1, "batch_num_tokens": int(mask_BT.sum()), "global_batch_size": len(mask_BT)}
        config.global_batch_info.clear()
        config.global_batch_info.update({} if per_micro_batch else whole)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            result, _ = compute_loss(
                old_log_prob=batch["old_log_probs"][part],
                log_prob=batch["log_probs"][part],
                advantages=rows.batch["advantages"][part],
                response_mask=mask_BT[part],
                loss_agg_mode=aggregation,
                config=config,
            )
            total = total + (result / len(parts) if per_micro_batch else result)
        return total

    return loss
