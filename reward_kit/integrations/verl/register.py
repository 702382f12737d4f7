"""Import this module to add reward-kit's estimators, reward manager and trainers to verl's registries.

Set `VERL_USE_EXTERNAL_MODULES=reward_kit.integrations.verl.register` in all verl processes.
"""

from __future__ import annotations

import importlib.util

from reward_kit.integrations.verl.estimators import register_estimators
from reward_kit.integrations.verl.reward_loop import register_manager
from reward_kit.integrations.verl.trainers import register_trainers


def register() -> None:
    """Register the advantage estimators, the reward manager and the trainers. A second call has no effect."""
    register_estimators()
    register_manager()
    register_trainers()


if importlib.util.find_spec("verl") is not None:
    register()
