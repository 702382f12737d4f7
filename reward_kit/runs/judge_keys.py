"""The key of a judge that a task file configures by `reward_options`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.providers.keys import NO_KEY
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, key_variable_for
from reward_kit.reward_agent.scoring import Reward
from reward_kit.rewards.judge_client import JudgeClients, client_options
from reward_kit.runs.overrides import keys_of_user
from reward_kit.typed_interface import RewardSpec


def judges_key(reward_options: Mapping[str, Any], of_user: Collection[str]) -> str | None:
    """The variable of a judge's key, as `key_variable_for` allows it.

    Args:
        reward_options: of the task.
        of_user: the dotted keys of the task that the user gave, and no file.

    Raises:
        ConfigError: the file names a variable that is not configured for that origin.
    """
    client = reward_options.get("client")
    named = client.get("api_key_env") if isinstance(client, Mapping) else None
    typed = keys_of_user("reward_options", ["base_url"], of_user)
    typed |= keys_of_user("reward_options.client", ["api_key_env"], of_user)
    block = {"base_url": reward_options.get("base_url"), "api_key_env": named}
    try:
        variable: str | None = key_variable_for(CURRENT_PROVIDER_SESSION.get(), block, typed)
    except ConfigError as error:
        raise ConfigError(f"client.api_key_env: {error}") from error
    return variable


def with_judges_key(reward: Reward, variable: str | None) -> Reward:
    """The reward; a judge sends no key where the file must not lead it."""
    if variable != NO_KEY or not isinstance(reward, RewardSpec) or JudgeClients not in reward.resources.values():
        return reward
    client = client_options(reward.options.get("client")).model_copy(update={"api_key_env": NO_KEY})
    return replace(reward, options={**reward.options, "client": client})
