"""Rollouts, rewards and the reward agent as Ray actors. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.integrations.ray.options import RayOptions
    from reward_kit.integrations.ray.reward_agent import RayAsyncRewardAgent
    from reward_kit.integrations.ray.rewards import RayScorer
    from reward_kit.integrations.ray.rollouts import RayRolloutWorker
    from reward_kit.integrations.ray.training import train_loop

__all__ = [
    "RayAsyncRewardAgent",
    "RayOptions",
    "RayRolloutWorker",
    "RayScorer",
    "train_loop",
]
_MODULES = {
    "options": "RayOptions",
    "reward_agent": "RayAsyncRewardAgent",
    "rewards": "RayScorer",
    "rollouts": "RayRolloutWorker",
    "training": "train_loop",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
