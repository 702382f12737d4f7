"""verl's losses, estimators and corrections on requested numbers; independent of reward-kit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from request_loop import answer_all
from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig


def policy_loss(
    name: str, logprobs: Tensor, others: list[Tensor], mode: str, config: dict[str, Any], weights: Tensor | None = None
) -> dict[str, Any]:
    """Return a registered policy loss; `others` are old log-probabilities, advantages and mask."""
    leaf = logprobs.clone().requires_grad_()
    old, advantages, mask = others
    made = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, **config)
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=leaf,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=made,
        rollout_is_weights=weights,
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": leaf.grad, "metrics": metrics}


def kl_loss(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str, mode: str) -> dict[str, Any]:
    """Return the KL loss as the actor adds it: the penalty of each token, aggregated."""
    leaf = logprobs.clone().requires_grad_()
    each = core_algos.kl_penalty(leaf, reference, estimator)
    loss = core_algos.agg_loss(each, mask, mode)
    loss.backward()
    return {"each": each.detach(), "loss": loss.detach(), "gradient": leaf.grad}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float, mode: str, batch: dict[str, Any]
) -> dict[str, Any]:
    """Return the clipped loss of a critic."""
    leaf = values.clone().requires_grad_()
    loss, fraction = core_algos.compute_value_loss(leaf, returns, old_values, mask, clip, mode, **batch)
    loss.backward()
    return {"loss": loss.detach(), "gradient": leaf.grad, "fraction": fraction}


def advantages(
    name: str, rewards: Tensor, mask: Tensor, groups: list[int], config: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return the result of a registered estimator, or its error as text."""
    if name not in ("gae", "reinforce_plus_plus"):
        more["index"] = np.array(groups, dtype=object)
    if name != "gae":
        more["config"] = OmegaConf.create(config)
    try:
        found, returns = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=rewards.clone(), response_mask=mask, **more
        )
    except ValueError as error:
        return {"refused": str(error)}
    return {"advantages": found, "returns": returns}


def importance_weights(log_ratio: Tensor, mask: Tensor, level: str, cap: float) -> dict[str, Any]:
    """Return the truncated importance sampling weights of the rollout correction."""
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, level, cap)
    return {"weights": weights}


def penalized_rewards(scores: Tensor, logprobs: Tensor, reference: Tensor, coefficient: float) -> dict[str, Any]:
    """Return rewards with the KL penalty subtracted."""
    return {"rewards": core_algos.compute_rewards(scores, logprobs, reference, coefficient)}


def coefficients(coefficient: float, target: float, horizon: float, measured: list[list[float]]) -> dict[str, Any]:
    """Return the adaptive coefficient after each measurement (divergence, samples)."""
    controller = core_algos.AdaptiveKLController(coefficient, target, horizon)
    found = []
    for kl, samples in measured:
        controller.update(kl, samples)
        found.append(float(controller.value))
    return {"coefficients": found}


def entropy_loss(logits: Tensor, mask: Tensor, mode: str) -> dict[str, Any]:
    """Return the entropies of logits, and their aggregated loss."""
    leaf = logits.clone().requires_grad_()
    loss = core_algos.compute_entropy_loss(leaf, mask, mode)
    loss.backward()
    return {"each": torch_functional.entropy_from_logits(logits), "loss": loss.detach(), "gradient": leaf.grad}


def logprobs(logits: Tensor, ids: Tensor) -> dict[str, Any]:
    """Return the log-probabilities of the ids, each from the logits at its position."""
    return {"logprobs": torch_functional.logprobs_from_logits(logits, ids)}


if __name__ == "__main__":
    torch.manual_seed(0)
    named = (policy_loss, kl_loss, value_loss, advantages, importance_weights, penalized_rewards, coefficients)
    answer_all({function.__name__: function for function in (*named, entropy_loss, logprobs)})
