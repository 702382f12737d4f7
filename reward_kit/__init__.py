"""Evaluate language-model agents, and train them with credit for every step.

Public names are loaded on first use, so `import reward_kit` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reward_kit.lazy import lazy_modules, package_version

if TYPE_CHECKING:
    from reward_kit.agent.models import StepData as StepData
    from reward_kit.agent.models import StopReason as StopReason
    from reward_kit.agent.policy_interface import AgentPolicy as AgentPolicy
    from reward_kit.agent.policy_interface import EpisodeContext as EpisodeContext
    from reward_kit.agent.policy_interface import PolicyOutput as PolicyOutput
    from reward_kit.agent.rl_rollout_worker import RLRolloutWorker as RLRolloutWorker
    from reward_kit.agent.rl_rollout_worker import collect_group as collect_group
    from reward_kit.agent.samples import Sample as Sample
    from reward_kit.checks.episode import check_episode as check_episode
    from reward_kit.environments.base import ForkableResource as ForkableResource
    from reward_kit.environments.base import StepOutcome as StepOutcome
    from reward_kit.environments.tools import ToolRegistry as ToolRegistry
    from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode as MultiAgentEpisode
    from reward_kit.episodes.single_agent_episode import SingleAgentEpisode as SingleAgentEpisode
    from reward_kit.errors import ConfigError as ConfigError
    from reward_kit.errors import EpisodeError as EpisodeError
    from reward_kit.errors import RewardKitError as RewardKitError
    from reward_kit.errors import ToolError as ToolError
    from reward_kit.integrations.braintrust import reward_fn_to_scorer as reward_fn_to_scorer
    from reward_kit.integrations.braintrust import scorer_to_reward_fn as scorer_to_reward_fn
    from reward_kit.models import EvaluateResult as EvaluateResult
    from reward_kit.models import Message as Message
    from reward_kit.models import MetricResult as MetricResult
    from reward_kit.models import StepOutput as StepOutput
    from reward_kit.models import TaskDefinitionModel as TaskDefinitionModel
    from reward_kit.models import ToolCall as ToolCall
    from reward_kit.reward_agent.agent import AsyncRewardAgent as AsyncRewardAgent
    from reward_kit.reward_agent.agent import score_all as score_all
    from reward_kit.reward_calls import with_options as with_options
    from reward_kit.reward_function import RewardFunction as RewardFunction
    from reward_kit.rl.training.sweep import sweep as sweep
    from reward_kit.rl.training.train_file import train as train
    from reward_kit.rl_helpers import system_apply_gigpo_to_batch_steps as system_apply_gigpo_to_batch_steps
    from reward_kit.rl_processing import CreditAssigner as CreditAssigner
    from reward_kit.rl_processing import RLDataAligner as RLDataAligner
    from reward_kit.runs.datasets import load_jsonl as load_jsonl
    from reward_kit.runs.evaluation import Task as Task
    from reward_kit.runs.evaluation import evaluate as evaluate
    from reward_kit.runs.evaluation import evaluate_async as evaluate_async
    from reward_kit.runs.evaluation import score_transcripts as score_transcripts
    from reward_kit.runs.finished import FinishedRun as FinishedRun
    from reward_kit.typed_interface import reward_function as reward_function

_MODULES = {
    "agent.models": "StepData StopReason",
    "agent.policy_interface": "AgentPolicy EpisodeContext PolicyOutput",
    "agent.rl_rollout_worker": "RLRolloutWorker collect_group",
    "agent.samples": "Sample",
    "checks.episode": "check_episode",
    "environments.base": "ForkableResource StepOutcome",
    "environments.tools": "ToolRegistry",
    "episodes.multi_agent_episode": "MultiAgentEpisode",
    "episodes.single_agent_episode": "SingleAgentEpisode",
    "errors": "ConfigError EpisodeError RewardKitError ToolError",
    "models": "EvaluateResult Message MetricResult StepOutput TaskDefinitionModel ToolCall",
    "reward_agent.agent": "AsyncRewardAgent score_all",
    "reward_calls": "with_options",
    "reward_function": "RewardFunction",
    "rl.training.sweep": "sweep",
    "rl.training.train_file": "train",
    "rl_helpers": "system_apply_gigpo_to_batch_steps",
    "rl_processing": "CreditAssigner RLDataAligner",
    "runs.datasets": "load_jsonl",
    "runs.evaluation": "Task evaluate evaluate_async score_transcripts",
    "runs.finished": "FinishedRun",
    "typed_interface": "reward_function",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
_EARLIER = {"integrations.braintrust": "reward_fn_to_scorer scorer_to_reward_fn"}
_load, __dir__ = lazy_modules(__name__, _MODULES | _EARLIER)
_SUBMODULES = ("models", "rewards", "rl_processing", "typed_interface")
"""Modules that reward-kit 0.4 made available with `import reward_kit` alone."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return package_version()
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    try:
        return _load(name)
    except AttributeError:
        from reward_kit.removed_names import REMOVED_NAMES, RemovedName

        if name not in REMOVED_NAMES:
            raise
        return RemovedName(name)
