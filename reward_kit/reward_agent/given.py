"""A reward as our doors to other trainers are given it: by the text that names it, or itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.custom.specs import spec_of
from reward_kit.reward_agent.in_process import warn_unconfined
from reward_kit.reward_agent.levels import SandboxChoice, load_reward
from reward_kit.reward_agent.requirements import check_installed
from reward_kit.reward_agent.scoring import Reward
from reward_kit.reward_options import fixed
from reward_kit.typed_interface import RewardSpec

logger = logging.getLogger("reward_kit.reward_agent")


def reward_given(
    given: Any,
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    choice_is: str = "choice",
) -> Reward:
    """The reward that a user gave. What there is to say of its walls is logged.

    Args:
        given: `file.py:function` or what else `load_reward` takes, which runs at the level that the command line would
            choose; or a reward function, class, `compute_score` or spec, which runs in this process.
        folder: what a file is relative to, by default the working directory.
        choice: what the user says of the sandbox of a reward that is named. Its time is for the
            caller to keep where the reward is none.
        options: keyword parameters to fix.
        choice_is: what the user knows the choice as, for the message.

    Raises:
        ConfigError: it cannot be loaded, its requirements are not met, an option does not fit, or what is said of a
            folder or sandbox has no effect.
    """
    choice = choice or SandboxChoice()
    if isinstance(given, str):
        loaded = load_reward(given, folder, choice, options)
        for note in loaded.notes:
            logger.warning("%s", note)
        return loaded.reward
    is_walled = choice != SandboxChoice(reward_time_s=choice.reward_time_s)
    for name, has_no_effect in ((choice_is, is_walled), ("folder", folder is not None)):
        if has_no_effect:
            raise ConfigError(f"{name} has no effect on a reward that is loaded already; name it: 'file.py:function'")
    spec = fixed(given if isinstance(given, RewardSpec) else spec_of(given), options or {})
    check_installed(spec.requirements, f"reward {spec.id!r}")
    warn_unconfined(spec)
    return spec
