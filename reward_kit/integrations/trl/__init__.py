"""Rewards, rollouts, environments and advantages for TRL and Axolotl. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.integrations.trl.environments import environment_factory
    from reward_kit.integrations.trl.rewards import as_trl_reward, rollout_scores
    from reward_kit.integrations.trl.rollouts import Rollouts, as_rollout_func
    from reward_kit.integrations.trl.trainer import StepCreditTrainer
    from reward_kit.integrations.trl.trainer_loss import trl_loss

__all__ = [
    "Rollouts",
    "StepCreditTrainer",
    "as_rollout_func",
    "as_trl_reward",
    "environment_factory",
    "rollout_scores",
    "trl_loss",
]
_MODULES = {
    "environments": "environment_factory",
    "rewards": "as_trl_reward rollout_scores",
    "rollouts": "Rollouts as_rollout_func",
    "trainer": "StepCreditTrainer",
    "trainer_loss": "trl_loss",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
