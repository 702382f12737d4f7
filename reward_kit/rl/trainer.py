"""The synchronous training loop: collect, score, align, advantages, batch, update, publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import anyio
import torch

from reward_kit.agent.groups import collect_group
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.rl.batch import to_tensors
from reward_kit.rl.ppo import PPO_KEYS, PPOConfig, ppo_update
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens import build_rows


@runtime_checkable
class TrainablePolicy(Protocol):
    """What an `AgentPolicy` has besides, so that it can be trained. It acts with a copy of the weights in training."""

    module: torch.nn.Module  # the weights in training; maps (ids_BT, attention_mask_BT) to logits_BTV
    pad_token_id: int

    async def publish(self, version: int) -> None:
        """Act with the weights that `module` has now, from the next forward pass on, under the name `version`."""


class Trainer:
    """Trains a policy.

    Args:
        worker: collects the episodes; its policy is trained.
        reward_agent: scores them; open while training.
        credit: turns scores into advantages.
        optimizer: over the parameters of the policy's `module`.
        config: of each update.
        group_size: episodes per sample.
        run_seed: everything random derives from it.

    Raises:
        ConfigError: the worker's policy cannot be trained.
    """

    def __init__(
        self,
        worker: RLRolloutWorker,
        reward_agent: AsyncRewardAgent,
        credit: CreditAssigner,
        optimizer: torch.optim.Optimizer,
        config: PPOConfig,
        *,
        group_size: int,
        run_seed: int = 0,
    ) -> None:
        if not isinstance(worker.agent_policy, TrainablePolicy):
            raise ConfigError(f"{type(worker.agent_policy).__name__} is no TrainablePolicy")
        self.policy: TrainablePolicy = worker.agent_policy
        self.worker, self.reward_agent, self.credit = worker, reward_agent, credit
        self.optimizer, self.config = optimizer, config
        self.group_size, self.run_seed, self.version = group_size, run_seed, 0
        self._generator = torch.Generator().manual_seed(derive_seed("minibatches", run_seed))

    async def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Once around; the diagnostics of the update, with the mean `score` and the number of `unscored` episodes."""
        episodes = await self.collect(samples)
        scored = await self.score(episodes)
        aligned = self.credit.align(episodes, scored)
        credited = self.credit.advantages(aligned)
        rows = to_tensors(
            build_rows(episodes, credited.steps, scores=credited.scores, pad_token_id=self.policy.pad_token_id),
            PPO_KEYS,
        )
        diagnostics = ppo_update(self.policy.module, self.optimizer, rows, self.config, self._generator)
        self.version += 1
        await self.policy.publish(self.version)
        return diagnostics | credited.summary()

    async def collect(self, samples: Sequence[Sample]) -> list[SingleAgentEpisode]:
        """A group per sample, all at once, in the samples' order. Ids and draws are new for every version."""
        groups: list[list[SingleAgentEpisode]] = [[] for _ in samples]

        async def collect(index: int) -> None:
            # The position counts: a sample that stands in a batch twice is two groups.
            seed = derive_seed("collect", self.run_seed, self.version, index)
            groups[index] = await collect_group(self.worker, samples[index], self.group_size, run_seed=seed)

        async with anyio.create_task_group() as tasks:
            for index in range(len(samples)):
                tasks.start_soon(collect, index)
        return [episode for group in groups for episode in group]

    async def score(self, episodes: Sequence[SingleAgentEpisode]) -> list[Scored]:
        """A score, or a failure, per episode, in the order in which they came."""
        requests = [ScoringRequest.of(episode, self.worker.task_definition) for episode in episodes]
        ticket = await self.reward_agent.submit(requests, self.group_size)
        return (await self.reward_agent.get(len(requests), ticket=ticket)).extra_infos
