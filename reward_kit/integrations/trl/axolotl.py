"""A plugin that lets Axolotl's GRPO trainer use a separate advantage for each step.

    rl: grpo
    plugins:
      - reward_kit.integrations.trl.axolotl.StepCreditPlugin
    trl:
      rollout_func: my_rollouts.rollouts   # created by as_rollout_func in your module

The plugin sets the trainer. The rollouts score the episodes, so `trl.reward_funcs` must not be set. Axolotl requires a
specific version of TRL, and the options of that version apply.
"""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.integrations.base import BasePlugin

from reward_kit.errors import ConfigError
from reward_kit.integrations.trl.trainer import StepCreditLoss

TRAINER = f"{__name__}.AxolotlStepCreditTrainer"
_ANOTHER_TRAINER = ("async_prefetch", "use_data_producer", "replay_buffer_size", "reward_num_workers")
_REWARD = "reward_kit.integrations.trl.rewards.rollout_scores"


class AxolotlStepCreditTrainer(StepCreditLoss, AxolotlGRPOTrainer):
    """Axolotl's `GRPOTrainer` with the loss of `StepCreditLoss`."""


class StepCreditPlugin(BasePlugin):
    """An Axolotl plugin that trains with `AxolotlStepCreditTrainer`."""

    def register(self, cfg: dict[str, Any]) -> None:
        """Check the configuration, and set the trainer in it.

        Raises:
            ConfigError: If a key is missing, or if a key would have no effect.
        """
        trl = cfg.get("trl") or {}
        if cfg.get("rl") != "grpo":
            raise ConfigError(f"rl: {cfg.get('rl')!r} uses a different trainer; StepCreditPlugin requires rl: grpo")
        if not trl.get("rollout_func"):
            raise ConfigError(
                "trl.rollout_func is missing; set it to the import path of the function that as_rollout_func returned, "
                "for example my_rollouts.rollouts"
            )
        if cfg.get("trainer_cls") not in (None, TRAINER):
            raise ConfigError(
                f"trainer_cls: {cfg['trainer_cls']!r} and StepCreditPlugin set different trainers; remove one of them"
            )
        if any(name != _REWARD for name in trl.get("reward_funcs") or ()):
            raise ConfigError(
                "trl.reward_funcs has no effect, because the rollouts score the "
                "episodes; pass the reward to as_rollout_func"
            )
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise ConfigError(
                "context_parallel_size splits rows, but the steps of a row have different advantages; set it to 1"
            )
        for name in _ANOTHER_TRAINER:
            if trl.get(name):
                raise ConfigError(f"trl.{name} applies only to Axolotl's asynchronous trainer; remove it")
        if trl.get("use_liger_loss"):
            raise ConfigError("trl.use_liger_loss supports only one advantage per row; remove it")
        cfg["trainer_cls"] = TRAINER
