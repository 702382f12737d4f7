"""Agents and rollouts: policies, the worker that runs them in episodes, and simulated users.

Modules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.agent.limits import RunBudget as RunBudget
    from reward_kit.agent.models import History as History
    from reward_kit.agent.models import StepData as StepData
    from reward_kit.agent.models import StopReason as StopReason
    from reward_kit.agent.models import episode_steps as episode_steps
    from reward_kit.agent.policies import make_policy as make_policy
    from reward_kit.agent.policies.hf.model import PolicyWithValue as PolicyWithValue
    from reward_kit.agent.policies.hf.model import merged_state_dict as merged_state_dict
    from reward_kit.agent.policies.hf.model import remember as remember
    from reward_kit.agent.policies.hf_policy import HFAgentPolicy as HFAgentPolicy
    from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy as OpenAIAgentPolicy
    from reward_kit.agent.policies.own_agent_policy import AgentTask as AgentTask
    from reward_kit.agent.policies.own_agent_policy import OwnAgentPolicy as OwnAgentPolicy
    from reward_kit.agent.policies.replay_policy import ReplayPolicy as ReplayPolicy
    from reward_kit.agent.policies.simple_policies import ExpertPolicy as ExpertPolicy
    from reward_kit.agent.policies.simple_policies import HumanPolicy as HumanPolicy
    from reward_kit.agent.policies.simple_policies import RandomPolicy as RandomPolicy
    from reward_kit.agent.policies.simple_policies import ScriptedPolicy as ScriptedPolicy
    from reward_kit.agent.policy_interface import AgentPolicy as AgentPolicy
    from reward_kit.agent.policy_interface import EpisodeContext as EpisodeContext
    from reward_kit.agent.policy_interface import PolicyOutput as PolicyOutput
    from reward_kit.agent.rl_rollout_worker import EpisodeGroup as EpisodeGroup
    from reward_kit.agent.rl_rollout_worker import FirstRequest as FirstRequest
    from reward_kit.agent.rl_rollout_worker import RLRolloutWorker as RLRolloutWorker
    from reward_kit.agent.rl_rollout_worker import collect_group as collect_group
    from reward_kit.agent.samples import Sample as Sample
    from reward_kit.agent.samples import derive_seed as derive_seed
    from reward_kit.agent.simulated_user import ScriptedUser as ScriptedUser
    from reward_kit.agent.simulated_user import SimulatedUser as SimulatedUser
    from reward_kit.agent.simulated_user import build_dialogue as build_dialogue

_HOMES = {
    "AgentPolicy": "policy_interface",
    "AgentTask": "policies.own_agent_policy",
    "EpisodeContext": "policy_interface",
    "EpisodeGroup": "rl_rollout_worker",
    "ExpertPolicy": "policies.simple_policies",
    "FirstRequest": "rl_rollout_worker",
    "HFAgentPolicy": "policies.hf_policy",
    "History": "models",
    "HumanPolicy": "policies.simple_policies",
    "OpenAIAgentPolicy": "policies.openai_policy",
    "OwnAgentPolicy": "policies.own_agent_policy",
    "PolicyOutput": "policy_interface",
    "PolicyWithValue": "policies.hf.model",
    "RLRolloutWorker": "rl_rollout_worker",
    "RandomPolicy": "policies.simple_policies",
    "ReplayPolicy": "policies.replay_policy",
    "RunBudget": "limits",
    "Sample": "samples",
    "ScriptedPolicy": "policies.simple_policies",
    "ScriptedUser": "simulated_user",
    "SimulatedUser": "simulated_user",
    "StepData": "models",
    "StopReason": "models",
    "collect_group": "rl_rollout_worker",
    "derive_seed": "samples",
    "build_dialogue": "simulated_user",
    "make_policy": "policies",
    "merged_state_dict": "policies.hf.model",
    "remember": "policies.hf.model",
    "episode_steps": "models",
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
