"""A reward named as verl names it: `custom_reward_function.path` and `.name`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice, load_reward


def load_custom_reward(
    path: str | Path,
    name: str = "compute_score",
    *,
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
) -> LoadedReward:
    """Load a `compute_score`, a class that has one, or any other reward. `scorer_of(loaded.reward)` calls it.

    Args:
        path: the file, or a module's dotted name.
        name: of the function or class in it.
        folder: what a relative path is relative to, by default the working directory.
        choice: what the user says of its sandbox; one that asks an endpoint runs at the level `in_process` alone.
        reward_kwargs: its further keyword parameters.

    Raises:
        ConfigError: it cannot be loaded, or not at that level.

    Example:
        ```python
        loaded = load_custom_reward("reward.py", "RewardAgent", choice=SandboxChoice(level="in_process"))
        agent = AsyncRewardAgent(scorer_of(loaded.reward), max_concurrency=256)
        ```
    """
    for key, value in (("path", str(path)), ("name", name)):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"custom_reward_function.{key} is {value!r}; it names the reward's {_NAMED[key]}")
    return load_reward(f"{path}:{name}", folder, choice, reward_kwargs)


_NAMED = {"path": "file", "name": "function or class"}
