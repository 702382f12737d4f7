"""`GRPOTrainer` with an advantage for each token, and with the log-probabilities that were really sampled with.

TRL's loss takes advantages of shape (B,T), and its trainer makes (B,); between the two stands `StepCreditLoss`. The
rollouts bring what each step was worth, and this puts it on the step's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from reward_kit.errors import ConfigError, kind_of
from reward_kit.integrations.trl.rewards import rollout_scores
from reward_kit.integrations.trl.rollouts import Rollouts
from reward_kit.integrations.trl.rows import ADVANTAGES

ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that are divided by the number of rows."""
_ROW_SCALE = "row_scale"
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "scale_rewards": ("group", True),
    "reward_weights": (None,),
    "multi_objective_aggregation": ("sum_then_normalize",),
}
"""Options of `GRPOConfig` that shape TRL's own advantages, with the values that ask for nothing."""


class StepCreditLoss:
    """What a `GRPOTrainer` does otherwise, as a mixin: put it before the trainer's class.

    Advantages are those of the rollouts' `credit`, one for each token of a step. The old log-probabilities are those of
    the sampler, so that a generation may be used for several optimizer steps, and may be older than the weights. Rows
    and tokens without an advantage, those of unscored episodes among them, have no part: they are neither in the loss
    nor counted in what it is divided by. (Losses that are means of rows are divided by the rows of the generation; so
    this is exact where an optimizer step takes all of them, as by default.)

    Args:
        model: what is trained; that of the rollouts' policy, or of its kind.
        reward_funcs: nothing, or `rewards.rollout_scores`: it is the rollouts that score.
        args: the `GRPOConfig`.
        rollout_func: of `as_rollout_func`, with a reward and credit.
        **options: as `GRPOTrainer`; `train_dataset=Dataset.from_list(rollouts.rows())` are the samples of the rollouts.

    Raises:
        ConfigError: the rollouts bring no advantages, or an option would have no effect.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        rollout_func: Any = None,
        **options: Any,
    ) -> None:
        rollouts = _with_credit(rollout_func)
        given = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
        if [one for one in given if one not in (None, rollout_scores)]:
            raise ConfigError(
                "reward_funcs would be logged and train nothing: advantages come from the reward of the rollouts; give "
                "it to as_rollout_func, and leave reward_funcs out"
            )
        if unused := [name for name in ("tools", "environment_factory") if options.get(name) is not None]:
            raise ConfigError(f"{unused[0]} has no effect beside a rollout_func; leave it out")
        trainer: Any = super()
        trainer.__init__(model, [rollout_scores], args, rollout_func=rollouts, **options)
        check_options(self)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        this: Any = self
        trainer: Any = super()
        inputs = [dict(row) for row in inputs]  # TRL writes into them, and one may stand there several times
        output: dict[str, Any] = trainer._generate_and_score_completions(inputs)
        advantages_BT = placed([row[ADVANTAGES] for row in inputs], output["completion_ids"])
        mask_BT = output["completion_mask"] * output["tool_mask"]
        counts_B = mask_BT.sum(dim=1)
        rows = this.accelerator.gather(torch.stack([(counts_B > 0).sum(), counts_B.new_tensor(len(counts_B))]))
        used, count = rows.view(-1, 2).sum(dim=0).tolist()
        output["advantages"] = advantages_BT
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        output[_ROW_SCALE] = advantages_BT.new_tensor(count / max(used, 1))
        self._log_credit(advantages_BT, mask_BT, used / count)
        return output

    def _log_credit(self, advantages_BT: Tensor, mask_BT: Tensor, used: float) -> None:
        """The table of completions shows what is trained on, a row's mean advantage; TRL has put its own there."""
        this: Any = self
        means_B = (advantages_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
        shown = this.accelerator.gather(means_B).tolist()
        kept = this._logs["advantages"]
        for _ in range(min(len(shown), len(kept))):
            kept.pop()
        kept.extend(shown)
        sums = torch.stack([(advantages_BT.abs() * mask_BT).sum(), mask_BT.sum().to(advantages_BT.dtype)])
        total, tokens = this.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
        metrics = this._metrics["train" if this.model.training else "eval"]
        metrics["credit/advantage_abs_mean"].append(total / max(tokens, 1.0))
        metrics["credit/rows_left_out"].append(1.0 - used)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        this: Any = self
        trainer: Any = super()
        scale = inputs[_ROW_SCALE] if this.loss_type in ROW_MEANS else inputs[_ROW_SCALE].new_ones(())
        # Every such loss is proportional to the advantages, and what is added of the divergence to beta.
        with _scaled_beta(this, float(scale)):
            loss: Tensor = trainer._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * scale})
        return loss


class StepCreditTrainer(StepCreditLoss, GRPOTrainer):
    """TRL's `GRPOTrainer` with the advantages and log-probabilities of our rollouts; see `StepCreditLoss`."""


def placed(rows: Sequence[Sequence[float]], completion_ids_BT: Tensor) -> Tensor:
    """(B,T) the numbers of each row from the left on, 0 where it is padded.

    Args:
        rows: as many as there are completions, each as long as its completion.
        completion_ids_BT: padded on the right.

    Raises:
        ConfigError: a row is longer than the completions are wide.
    """
    placed_BT = torch.zeros(completion_ids_BT.shape, dtype=torch.float32)
    for place, row in enumerate(rows):
        if len(row) > placed_BT.shape[1]:
            raise ConfigError(f"row {place} has {len(row)} advantages and a completion of {placed_BT.shape[1]} tokens")
        placed_BT[place, : len(row)] = torch.tensor(row, dtype=torch.float32)
    return placed_BT.to(completion_ids_BT.device)


def check_options(trainer: Any) -> None:
    """Refuse options of a trainer that would have no effect, or spoil what each step was worth.

    Raises:
        ConfigError: there is one; the message says which.
    """
    args = trainer.args
    for name, values in _UNUSED.items():
        if (found := getattr(args, name, values[0])) not in values:
            raise ConfigError(
                f"{name}={found!r} has no effect: advantages are those of the rollouts' credit; set it there"
            )
    if trainer.importance_sampling_level != "token":
        raise ConfigError(
            f"importance_sampling_level={trainer.importance_sampling_level!r} spreads what a step was worth over its "
            "whole row; leave it at 'token'"
        )
    if getattr(args, "use_liger_kernel", False) and hasattr(trainer, "compute_liger_loss"):
        raise ConfigError("use_liger_kernel: its fused loss takes one advantage for each row; leave it out")


def _with_credit(rollout_func: Any) -> Rollouts:
    if not isinstance(rollout_func, Rollouts):
        raise ConfigError(f"rollout_func is what as_rollout_func gives, with credit; got {kind_of(rollout_func)}")
    if rollout_func.parts.credit is None:
        raise ConfigError("the rollouts bring no advantages: give as_rollout_func credit=CreditAssigner('gigpo', …)")
    return rollout_func


@contextmanager
def _scaled_beta(trainer: Any, scale: float) -> Iterator[None]:
    beta, trainer.beta = trainer.beta, trainer.beta * scale
    try:
        yield
    finally:
        trainer.beta = beta
