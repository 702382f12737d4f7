"""Public names of reward-kit 0.4 that have no equivalent in this version.

They can still be imported, but they raise an error when they are used.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from reward_kit.errors import ConfigError

REMOVED_NAMES = {
    "make": "name the environment in the task file",
    "rollout": "use RLRolloutWorker or evaluate",
    "test_mcp": "use a resource of type mcp and reward-kit check",
    "MCPVectorEnv": "use RLRolloutWorker",
    "FireworksPolicy": "use an AgentPolicy",
    "PlaybackPolicyBase": "use --record and --replay",
    "create_llm_resource": "use llm_judge, or resources= of reward_function",
    "auth": "provider keys are read from the environment",
    "config": "use task files",
    "mcp": "use a resource of type mcp",
}


@functools.cache
class RemovedName:
    """A placeholder for a removed function, class or module.

    Calling it or reading an attribute raises a ConfigError.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"reward_kit.{self._name} was removed: {REMOVED_NAMES[self._name]}; see docs/migrating/reward_kit.md"
        )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # used by inspection tools
            raise AttributeError(name)
        self._refuse()
