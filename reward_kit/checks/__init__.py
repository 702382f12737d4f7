"""Checks for rewards, resources, episodes, training rows, runs and trainers.

The submodules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.checks.episode import check_episode, check_group
    from reward_kit.checks.findings import Finding, Report
    from reward_kit.checks.resource import check_resource
    from reward_kit.checks.reward import check_reward
    from reward_kit.checks.rows import check_rows, check_trl_rollout, check_verifiers_trace
    from reward_kit.checks.run import check_run
    from reward_kit.checks.trainer import check_trainer

__all__ = [
    "Finding",
    "Report",
    "check_episode",
    "check_group",
    "check_resource",
    "check_reward",
    "check_rows",
    "check_run",
    "check_trainer",
    "check_trl_rollout",
    "check_verifiers_trace",
]
_MODULES = {
    "episode": "check_episode check_group",
    "findings": "Finding Report",
    "resource": "check_resource",
    "reward": "check_reward",
    "rows": "check_rows check_trl_rollout check_verifiers_trace",
    "run": "check_run",
    "trainer": "check_trainer",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
