"""Axolotl: a plugin with which its GRPO trainer takes our advantages for each step.

    rl: grpo
    plugins:
      - reward_kit.integrations.trl.axolotl.StepCreditPlugin
    trl:
      rollout_func: my_rollouts.rollouts   # made by as_rollout_func, in a module of yours

The plugin names the trainer. The rollouts score, so leave out `trl.reward_funcs`. Axolotl pins TRL: its options are
those of that version.
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
    """Axolotl's `GRPOTrainer` with the advantages and log-probabilities of our rollouts; see `StepCreditLoss`."""


class StepCreditPlugin(BasePlugin):
    """Makes Axolotl train with `AxolotlStepCreditTrainer`."""

    def register(self, cfg: dict[str, Any]) -> None:
        """Check the configuration, and name the trainer in it.

        Raises:
            ConfigError: a key is missing, or one would have no effect.
        """
        trl = cfg.get("trl") or {}
        if cfg.get("rl") != "grpo":
            raise ConfigError(f"rl: {cfg.get('rl')!r} has other trainers; StepCreditPlugin is for rl: grpo")
        if not trl.get("rollout_func"):
            raise ConfigError(
                "trl.rollout_func is missing: name what as_rollout_func gives, such as my_rollouts.rollouts"
            )
        if cfg.get("trainer_cls") not in (None, TRAINER):
            raise ConfigError(f"trainer_cls: {cfg['trainer_cls']!r} and StepCreditPlugin name two trainers; keep one")
        if any(name != _REWARD for name in trl.get("reward_funcs") or ()):
            raise ConfigError(
                "trl.reward_funcs would train nothing: the rollouts score; give as_rollout_func the reward"
            )
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise ConfigError("context_parallel_size cuts rows of which each step has its own advantage; leave it at 1")
        for name in _ANOTHER_TRAINER:
            if trl.get(name):
                raise ConfigError(
                    f"trl.{name} is of Axolotl's asynchronous trainer, and has no effect here; leave it out"
                )
        if trl.get("use_liger_loss"):
            raise ConfigError("trl.use_liger_loss takes one advantage for each row; leave it out")
        cfg["trainer_cls"] = TRAINER
