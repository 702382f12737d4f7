"""Conversion to and from verifiers (v1): episodes and traces, task files and tasksets, tasksets and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules
from reward_kit.runs.logs.verifiers_traces import episode_to_trace, trace_advantages, trace_score, trace_to_episode

if TYPE_CHECKING:
    from reward_kit.integrations.verifiers.rewards import as_reward_function, write_samples
    from reward_kit.integrations.verifiers.tasksets import (
        ResourceTaskset,
        TaskFileConfig,
        TaskFileTaskset,
        as_verifiers_reward,
    )

__all__ = [
    "ResourceTaskset",
    "TaskFileConfig",
    "TaskFileTaskset",
    "as_reward_function",
    "as_verifiers_reward",
    "episode_to_trace",
    "trace_advantages",
    "trace_score",
    "trace_to_episode",
    "write_samples",
]
_MODULES = {
    "rewards": "as_reward_function write_samples",
    "tasksets": "TaskFileConfig TaskFileTaskset ResourceTaskset as_verifiers_reward",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
