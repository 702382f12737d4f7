"""Reward managers by name."""

from __future__ import annotations

import inspect
from typing import Any

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.rl.reward_manager.base import RewardManager
from reward_kit.rl.reward_manager.episode import EpisodeRewardManager
from reward_kit.rl.reward_manager.reports import Tokenizer
from reward_kit.rl.reward_manager.single_turn import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)

REWARD_MANAGERS: dict[str, type[RewardManager]] = {
    "batch": BatchRewardManager,
    "dapo": DAPORewardManager,
    "episode": EpisodeRewardManager,
    "naive": NaiveRewardManager,
    "prime": PrimeRewardManager,
}


def load_reward_manager(name: str, tokenizer: Tokenizer, num_examine: int, **options: Any) -> RewardManager:
    """The reward manager of this name.

    Args:
        name: one of `REWARD_MANAGERS`.
        tokenizer: decodes what is shown and scored.
        num_examine: how many rows of each data source are shown of a batch, at most.
        options: the manager's own.

    Raises:
        ConfigError: the name or an option is unknown, an option is missing or wrong.
    """
    if name not in REWARD_MANAGERS:
        known = ", ".join(REWARD_MANAGERS)
        near = did_you_mean(str(name), REWARD_MANAGERS)
        raise ConfigError(f"unknown reward manager {name!r}; known: {known}{near if near.endswith('?') else ''}")
    kind = REWARD_MANAGERS[name]
    parameters = list(inspect.signature(kind).parameters.values())[2:]
    for option in options:
        if option not in (names := [parameter.name for parameter in parameters]):
            raise ConfigError(f"reward manager {name!r} has no option {option!r}{did_you_mean(option, names)}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"reward manager {name!r} needs {parameter.name}")
    return kind(tokenizer, num_examine, **options)
