"""Evaluate language-model agents, and train them with credit for every step.

The public names load on first use, so that `import reward_kit` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

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
    from reward_kit.models import EvaluateResult as EvaluateResult
    from reward_kit.models import Message as Message
    from reward_kit.models import MetricResult as MetricResult
    from reward_kit.models import StepOutput as StepOutput
    from reward_kit.models import TaskDefinitionModel as TaskDefinitionModel
    from reward_kit.models import ToolCall as ToolCall
    from reward_kit.reward_agent.agent import AsyncRewardAgent as AsyncRewardAgent
    from reward_kit.reward_calls import with_options as with_options
    from reward_kit.rl_helpers import system_apply_gigpo_to_batch_steps as system_apply_gigpo_to_batch_steps
    from reward_kit.rl_processing import RLDataAligner as RLDataAligner
    from reward_kit.runs.evaluation import Task as Task
    from reward_kit.runs.evaluation import evaluate as evaluate
    from reward_kit.runs.evaluation import evaluate_async as evaluate_async
    from reward_kit.runs.evaluation import score_transcripts as score_transcripts
    from reward_kit.runs.finished import FinishedRun as FinishedRun
    from reward_kit.typed_interface import reward_function as reward_function

_HOMES = {
    "AgentPolicy": "agent.policy_interface",
    "AsyncRewardAgent": "reward_agent.agent",
    "ConfigError": "errors",
    "EpisodeContext": "agent.policy_interface",
    "EpisodeError": "errors",
    "EvaluateResult": "models",
    "FinishedRun": "runs.finished",
    "ForkableResource": "environments.base",
    "Message": "models",
    "MetricResult": "models",
    "MultiAgentEpisode": "episodes.multi_agent_episode",
    "PolicyOutput": "agent.policy_interface",
    "RLDataAligner": "rl_processing",
    "RLRolloutWorker": "agent.rl_rollout_worker",
    "RewardKitError": "errors",
    "Sample": "agent.samples",
    "SingleAgentEpisode": "episodes.single_agent_episode",
    "StepData": "agent.models",
    "StepOutcome": "environments.base",
    "StepOutput": "models",
    "StopReason": "agent.models",
    "Task": "runs.evaluation",
    "TaskDefinitionModel": "models",
    "ToolCall": "models",
    "ToolError": "errors",
    "ToolRegistry": "environments.tools",
    "check_episode": "checks.episode",
    "collect_group": "agent.rl_rollout_worker",
    "evaluate": "runs.evaluation",
    "evaluate_async": "runs.evaluation",
    "reward_function": "typed_interface",
    "score_transcripts": "runs.evaluation",
    "system_apply_gigpo_to_batch_steps": "rl_helpers",
    "with_options": "reward_calls",
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
