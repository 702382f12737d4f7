"""FrozenLake episodes of an expert, and a small model that knows its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from reward_kit.agent.policies.simple_policies import ExpertPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.environments.base import ToolSpec
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.models import TaskDefinitionModel
from reward_kit.rl.model_kit.models import build_tokenizer
from reward_kit.rl.model_kit.sft import episode_texts

TASK = TaskDefinitionModel(
    name="lake",
    resource_type="gymnasium",
    base_resource_config={"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    max_episode_steps=20,
    messages=[{"role": "system", "content": "Walk."}, {"role": "user", "content": "{{ observation }}"}],
)
TOOLS: list[ToolSpec] = [
    {
        "type": "function",
        "function": {
            "name": "act",
            "description": "Take one action.",
            "parameters": {
                "type": "object",
                "properties": {"action": {"type": "string", "enum": ["left", "down", "right", "up"]}},
                "required": ["action"],
                "additionalProperties": False,
            },
        },
    }
]


async def walks(count: int = 1, policy: AgentPolicy | None = None) -> list[SingleAgentEpisode]:
    """Return episodes of the expert, or of another policy."""
    worker = RLRolloutWorker(TASK, policy or ExpertPolicy())
    return [await worker.collect_episode(seed=seed) for seed in range(count)]


def tokenizer_of(episodes: Sequence[SingleAgentEpisode], action_format: str = "bare") -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows all words of these episodes."""
    return build_tokenizer(
        episode_texts(episodes, action_format=action_format, tools=TOOLS), words=["left up"], context=512
    )
