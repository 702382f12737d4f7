"""A `GRPOTrainer` that uses an advantage for each token and the log-probabilities of the sampler.

TRL's loss accepts advantages of shape (B, T), but its trainer computes them with shape (B,). `StepCreditLoss` passes
the advantages of reward-kit's rollouts to the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from reward_kit.errors import ConfigError, type_name
from reward_kit.integrations.trl.rewards import rollout_scores
from reward_kit.integrations.trl.rollouts import Rollouts
from reward_kit.integrations.trl.rows import ADVANTAGES

ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")
"""The losses that are divided by the number of rows."""
_ROW_SCALE = "row_scale"
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "scale_rewards": ("group", True),
    "reward_weights": (None,),
    "multi_objective_aggregation": ("sum_then_normalize",),
}
"""Options of `GRPOConfig` that control TRL's own advantages, and the default values, which have no effect."""


class StepCreditLoss:
    """A mixin for a `GRPOTrainer`. List the mixin before the trainer class.

    The advantages are those that the rollouts' `credit` assigns. All tokens of a step have the same advantage. The old
    log-probabilities are the sampler's. A generation can therefore be used for multiple optimizer steps and can be
    older than the weights. Rows and tokens without an advantage, such as those of unscored episodes, are excluded from
    the loss and from its divisor. A loss that is a mean over rows is divided by the number of rows in the generation.
    This is exact if an optimizer step uses all of these rows, as it does by default.

    Args:
        model: the model to train. It is the model of the rollouts' policy or an identical model.
        reward_funcs: None or `rewards.rollout_scores`, because the rollouts compute the scores.
        args: the `GRPOConfig`.
        rollout_func: the result of `as_rollout_func` with a reward and credit.
        **options: additional options of `GRPOTrainer`. `train_dataset=Dataset.from_list(rollouts.rows())` contains the
            samples of the rollouts.

    Raises:
        ConfigError: If the rollouts have no advantages, or if an option would have no effect.
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
        if not isinstance(rollout_func, Rollouts):
            raise ConfigError(
                f"rollout_func must be a result of as_rollout_func with credit, got {type_name(rollout_func)}"
            )
        if rollout_func.credit is None:
            raise ConfigError(
                "the rollouts have no advantages; pass credit=CreditAssigner('gigpo', …) to as_rollout_func"
            )
        given = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
        if [one for one in given if one not in (None, rollout_scores)]:
            raise ConfigError(
                "reward_funcs would be logged but have no effect, because advantages come from the rollouts' "
                "reward; pass the reward to as_rollout_func, and remove reward_funcs"
            )
        if unused := [name for name in ("tools", "environment_factory") if options.get(name) is not None]:
            raise ConfigError(f"{unused[0]} has no effect with a rollout_func; remove it")
        trainer: Any = super()
        trainer.__init__(model, [rollout_scores], args, rollout_func=rollout_func, **options)
        _check_options(self)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        this: Any = self
        trainer: Any = super()
        inputs = [dict(row) for row in inputs]  # TRL modifies the rows and may pass a row multiple times.
        output: dict[str, Any] = trainer._generate_and_score_completions(inputs)
        advantages_BT = _padded([row[ADVANTAGES] for row in inputs], output["completion_ids"])
        mask_BT = output["completion_mask"] * output["tool_mask"]
        counts_B = mask_BT.sum(dim=1)
        rows = this.accelerator.gather(torch.stack([(counts_B > 0).sum(), counts_B.new_tensor(len(counts_B))]))
        used, count = rows.view(-1, 2).sum(dim=0).tolist()
        output["advantages"] = advantages_BT
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        output[_ROW_SCALE] = advantages_BT.new_tensor(count / max(used, 1))
        # TRL's table of completions shows TRL's own advantages. Replace them with the means of the advantages in the
        # loss.
        means_B = (advantages_BT * mask_BT).sum(dim=1) / counts_B.clamp(min=1)
        shown = this.accelerator.gather(means_B).tolist()
        logged = this._logs["advantages"]
        for _ in range(min(len(shown), len(logged))):
            logged.pop()
        logged.extend(shown)
        sums = torch.stack([(advantages_BT.abs() * mask_BT).sum(), mask_BT.sum().to(advantages_BT.dtype)])
        total, tokens = this.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
        metrics = this._metrics["train" if this.model.training else "eval"]
        metrics["credit/advantage_abs_mean"].append(total / max(tokens, 1.0))
        metrics["credit/rows_left_out"].append(1.0 - used / count)
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        this: Any = self
        trainer: Any = super()
        scale = inputs[_ROW_SCALE] if this.loss_type in ROW_MEANS else inputs[_ROW_SCALE].new_ones(())
        # Every such loss is proportional to the advantages, and its divergence term to beta.
        beta, this.beta = this.beta, this.beta * float(scale)
        try:
            loss: Tensor = trainer._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * scale})
        finally:
            this.beta = beta
        return loss


class StepCreditTrainer(StepCreditLoss, GRPOTrainer):
    """TRL's `GRPOTrainer` with the loss of `StepCreditLoss`."""


def _padded(rows: Sequence[Sequence[float]], completion_ids_BT: Tensor) -> Tensor:
    """Return the rows as a (B, T) tensor. Like the completions, the rows are padded on the right, with 0."""
    padded_BT = torch.zeros(completion_ids_BT.shape, dtype=torch.float32)
    for index, row in enumerate(rows):
        if len(row) > padded_BT.shape[1]:
            raise ConfigError(
                f"row {index} has {len(row)} advantages, but its completion has {padded_BT.shape[1]} tokens"
            )
        padded_BT[index, : len(row)] = torch.tensor(row, dtype=torch.float32)
    return padded_BT.to(completion_ids_BT.device)


def _check_options(trainer: Any) -> None:
    """Reject options that would have no effect or would distort the advantages."""
    args = trainer.args
    for name, values in _UNUSED.items():
        if (value := getattr(args, name, values[0])) not in values:
            raise ConfigError(
                f"{name}={value!r} has no effect, because the rollouts' credit determines the advantages; set it there"
            )
    if trainer.importance_sampling_level != "token":
        raise ConfigError(
            f"importance_sampling_level={trainer.importance_sampling_level!r} spreads the credit of "
            "a step over its whole row; set it to 'token'"
        )
    if getattr(args, "use_liger_kernel", False) and hasattr(trainer, "compute_liger_loss"):
        raise ConfigError("use_liger_kernel: the fused loss of Liger supports only one advantage per row; remove it")
