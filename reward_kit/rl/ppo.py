"""The PPO update: epochs of mini-batches over the rows of one batch of episodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.batch import TensorBatch
from reward_kit.rl.losses import Diagnostics, logprobs_of, ppo_clip_loss

PPO_KEYS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "advantages")
"""What an update reads of a batch."""


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """The hyper-parameters of one update.

    Attributes:
        epochs: passes over the batch.
        minibatch_rows: rows per optimizer step; None takes all.
        clip_low: how far below 1 the probability ratio may be pushed.
        clip_high: how far above.
        max_grad_norm: the gradient is scaled down to this 2-norm; None leaves it.

    Raises:
        ConfigError: a value is out of range.
    """

    epochs: int = 1
    minibatch_rows: int | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or (self.minibatch_rows is not None and self.minibatch_rows < 1):
            raise ConfigError(f"epochs and minibatch_rows are at least 1; got {self.epochs} and {self.minibatch_rows}")
        if not (0.0 < self.clip_low < 1.0 and self.clip_high > 0.0):
            raise ConfigError(f"clip_low is in (0, 1), clip_high above 0; got {self.clip_low} and {self.clip_high}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise ConfigError(f"max_grad_norm is above 0; got {self.max_grad_norm}")


def ppo_update(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: TensorBatch,
    config: PPOConfig,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Update `module` on one batch, in place.

    Args:
        module: maps (ids_BT, attention_mask_BT) to logits_BTV; the logits at t - 1 predict token t.
        optimizer: over the module's parameters.
        rows: `rl.batch.to_tensors` of `tokens.build_rows`, of which `PPO_KEYS` are read.
        config: the hyper-parameters.
        generator: orders the mini-batches; on the CPU.

    Returns:
        Averages over the optimizer steps of `loss`, `clip_fraction`, `approx_kl`, `grad_norm`; `ratio_min` and
        `ratio_max` over all; `tokens` that take part; `optimizer_steps`; and `logprob_gap`, the largest difference
        between the sampler's log-probabilities and the module's own before its first change. All but the counts are
        left out where no token takes part.

    Raises:
        TrainingError: a log-probability that takes part is unknown, or a loss or gradient is not finite. The step in
            question is not made.
    """
    mask = rows["loss_mask"].bool()
    if not torch.isfinite(rows["logprobs"][mask]).all():
        raise TrainingError("a sampled token has no log-probability; PPO needs a policy that records `logprobs`")
    # Rows without a token that takes part would cost a forward pass and change nothing.
    used = mask.any(dim=1).nonzero().squeeze(1)
    steps = []
    for indices in _minibatches(used, config, generator):
        minibatch = {key: rows[key][indices] for key in PPO_KEYS}
        steps.append(_optimizer_step(module, optimizer, minibatch, config))
    return _summary(steps) | {"tokens": float(mask.sum()), "optimizer_steps": float(len(steps))}


def _minibatches(used: torch.Tensor, config: PPOConfig, generator: torch.Generator | None) -> Iterator[torch.Tensor]:
    size = config.minibatch_rows or max(len(used), 1)
    for _ in range(config.epochs):
        order = torch.randperm(len(used), generator=generator).to(used.device)
        # Splitting nothing gives one empty part.
        yield from (part for part in torch.split(used[order], size) if len(part))


def _optimizer_step(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, minibatch: TensorBatch, config: PPOConfig
) -> dict[str, float]:
    ids_BT, old_BT, mask_BT = minibatch["input_ids"], minibatch["logprobs"], minibatch["loss_mask"]
    logprobs_BT = logprobs_of(module(ids_BT, minibatch["attention_mask"]), ids_BT)
    loss, diagnostics = ppo_clip_loss(
        logprobs_BT, old_BT, minibatch["advantages"], mask_BT, clip_low=config.clip_low, clip_high=config.clip_high
    )
    if not torch.isfinite(loss):
        raise TrainingError(f"the loss is {loss.item()}; ratios {_range(diagnostics)}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    limit = config.max_grad_norm if config.max_grad_norm is not None else math.inf
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
    if not torch.isfinite(norm):
        raise TrainingError(f"the gradient's norm is {norm.item()} at a loss of {loss.item()}")
    optimizer.step()
    gap = (logprobs_BT.detach() - old_BT)[mask_BT.bool()].abs().max()
    found = {"loss": loss.detach(), "grad_norm": norm, "logprob_gap": gap}
    return diagnostics.floats() | {key: float(value) for key, value in found.items()}


def _range(diagnostics: Diagnostics) -> str:
    return f"from {diagnostics['ratio_min'].item():g} to {diagnostics['ratio_max'].item():g}"


def _summary(steps: list[dict[str, float]]) -> dict[str, float]:
    if not steps:
        return {}
    means = {
        key: sum(step[key] for step in steps) / len(steps)
        for key in ("loss", "clip_fraction", "approx_kl", "grad_norm")
    }
    return means | {
        "ratio_min": min(step["ratio_min"] for step in steps),
        "ratio_max": max(step["ratio_max"] for step in steps),
        "logprob_gap": steps[0]["logprob_gap"],
    }
