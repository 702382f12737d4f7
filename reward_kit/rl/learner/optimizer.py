"""AdamW over a module's trainable parameters in groups, and the norm of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError
from reward_kit.rl.learner.config import PPOConfig


def is_of_value_head(name: str) -> bool:
    """Whether a parameter, by its name, is the critic's."""
    return "value_head" in name.split(".")


def widen(module: nn.Module) -> None:
    """Make weights float32, in place, that are to be trained and are in half precision.

    At 0.02 the next bfloat16 is 1e-4 away, and a step of AdamW is as long as the learning rate, 1e-6 or so: nothing
    would be learned. What adapters are beside stays as it is.
    """
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad and _is_half(one)]
    if all("lora_" in name or is_of_value_head(name) for name, _ in trained):
        for _, parameter in trained:
            parameter.data = parameter.data.float()
        return
    nn.Module.float(module)


def _is_half(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)


def adamw(module: nn.Module, config: PPOConfig) -> torch.optim.AdamW:
    """AdamW with a group for each of: matrices and vectors, of the policy and of the value head.

    Raises:
        ConfigError: nothing in the module is trainable.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((is_of_value_head(name), parameter.dim() >= 2), []).append(parameter)
    if not groups:
        raise ConfigError("nothing in the module is trainable: no parameter requires a gradient")
    made: list[dict[str, Any]] = []
    for (is_value, is_matrix), parameters in groups.items():
        lr = config.value_lr if is_value and config.value_lr is not None else config.lr
        decay = config.weight_decay if is_matrix else 0.0
        made.append({"params": parameters, "lr": lr, "base_lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(made, lr=config.lr, betas=config.betas, eps=config.adam_epsilon, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """The learning rate of every group: its own times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None) -> Tensor:
    """Scale the gradients down to a 2-norm.

    Args:
        parameters: those of one optimizer.
        limit: the norm; None leaves them.

    Returns:
        The norm before, a scalar; of sharded parameters that of the whole.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
