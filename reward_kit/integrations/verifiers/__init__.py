"""verifiers (v1): episodes as traces and back, our tasks as tasksets and its tasksets as samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.integrations.verifiers.rewards import as_reward_function, write_samples
    from reward_kit.integrations.verifiers.tasksets import (
        TaskFileConfig,
        TaskFileTaskset,
        WorldTaskset,
        as_verifiers_reward,
    )
    from reward_kit.integrations.verifiers.traces import advantages_of_trace, episode_of_trace, score_of_trace, trace_of

__all__ = [
    "TaskFileConfig",
    "TaskFileTaskset",
    "WorldTaskset",
    "advantages_of_trace",
    "as_reward_function",
    "as_verifiers_reward",
    "episode_of_trace",
    "score_of_trace",
    "trace_of",
    "write_samples",
]
_MODULES = {
    "rewards": "as_reward_function write_samples",
    "tasksets": "TaskFileConfig TaskFileTaskset WorldTaskset as_verifiers_reward",
    "traces": "advantages_of_trace episode_of_trace score_of_trace trace_of",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
