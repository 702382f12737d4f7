"""Once around, through the real modules: rollout, score, credit, batch, update, publish, and rollout again, better.

Deterministic FrozenLake, a transformer of a few thousand weights that acts token by token, the environment's reward,
GiGPO and PPO. Everything is seeded; the same numbers come out every time.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from reward_kit.agent.models import episode_steps
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, collect_group
from reward_kit.agent.samples import Sample
from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message, TaskDefinitionModel
from reward_kit.reward_agent import AsyncRewardAgent
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.rl.losses import token_logprobs
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.training.trainer import Trainer
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens import build_rows
from reward_kit.typed_interface import reward_function, reward_spec
from tests.devices import DEVICE, randomize
from tests.tiny_policy import PAD, TinyPolicy

pytestmark = pytest.mark.device

TASK = TaskDefinitionModel(
    name="lake",
    resource_type="gymnasium",
    base_resource_config={"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    max_episode_steps=30,
)
LAKE = [Sample("lake")]
GROUP = 64
SEED = 1


@reward_function
def reached_the_goal(messages: list[Message], environment_return: float) -> EvaluateResult:
    return EvaluateResult(score=environment_return)


def make_policy() -> TinyPolicy:
    return TinyPolicy(SEED)


@asynccontextmanager
async def make_trainer(policy: TinyPolicy) -> AsyncIterator[Trainer]:
    credit = CreditAssigner("gigpo", step_rewards="environment", omega=0.5, gamma=0.95)
    learner = PPOLearner(policy.module, PPOConfig(epochs=4, minibatch_rows=GROUP // 2, lr=0.01), seed=SEED)
    worker = RLRolloutWorker(TASK, policy)
    async with AsyncRewardAgent(reward_spec(reached_the_goal)) as agent:
        yield Trainer(worker, agent, credit, learner, group_size=GROUP, run_seed=SEED)


async def success_rate(policy: TinyPolicy) -> float:
    """Return the success rate on episodes that no update has seen."""
    episodes = await collect_group(RLRolloutWorker(TASK, policy), LAKE[0], GROUP, run_seed=1_000)
    assert all(episode.custom_data["failure"] is None for episode in episodes)
    return float(np.mean([episode.get_return() for episode in episodes]))


async def test_training_raises_the_success_rate() -> None:
    policy = make_policy()
    assert await success_rate(policy) < 0.2
    async with make_trainer(policy) as trainer:
        diagnostics = [await trainer.train_step(LAKE) for _ in range(14)]
    assert await success_rate(policy) > 0.9
    assert policy.version == 14
    assert all(step["unscored"] == 0 for step in diagnostics)
    assert max(step["logprob_gap"] for step in diagnostics) < 1e-5


async def test_training_is_determined_by_the_seed() -> None:
    async def first_steps() -> list[dict[str, float]]:
        async with make_trainer(make_policy()) as trainer:
            return [await trainer.train_step(LAKE) for _ in range(2)]

    assert await first_steps() == await first_steps()


async def test_sampled_logprobs_equal_model_logprobs_on_the_recorded_tokens() -> None:
    policy = make_policy()
    # Weights far from the uniform start, so that a shifted or foreign token could not go unnoticed.
    randomize(policy.module.head.weight)
    await policy.publish(7)
    episodes = await collect_group(RLRolloutWorker(TASK, policy), LAKE[0], 16)
    rows = to_tensors(build_rows(episodes, pad_token_id=PAD))
    rows = {key: values.to(DEVICE) for key, values in rows.items()}
    is_action = rows["action_mask"].bool()
    with torch.no_grad():
        recomputed = token_logprobs(policy.module(rows["input_ids"], rows["attention_mask"]), rows["input_ids"])
    torch.testing.assert_close(recomputed[is_action], rows["logprobs"][is_action], rtol=0, atol=1e-5)
    assert recomputed[is_action].std() > 0.5
    assert set(rows["policy_versions"][is_action].tolist()) == {7}
    assert is_action.sum() == sum(len(episode) for episode in episodes)
    assert len(rows["input_ids"]) == 16  # the context was never rewritten: one segment each


async def test_update_moves_probabilities_in_the_direction_of_advantages() -> None:
    policy = make_policy()
    async with make_trainer(policy) as trainer:
        episodes = await trainer.collect(LAKE)
        scored = await trainer.score(episodes)
        credited = trainer.credit.assign(episodes, scored)
    rows = build_rows(episodes, credited.steps, pad_token_id=PAD)
    learner = PPOLearner(policy.module, PPOConfig(lr=0.003))
    learner.update(rows, version=0)
    takes_part = rows.batch["loss_mask"] == 1
    advantages = rows.batch["advantages"][takes_part]
    moved = (learner.logprobs(rows) - rows.batch["logprobs"])[takes_part]
    assert advantages.std() > 0
    assert (advantages * np.exp(moved)).sum() > advantages.sum()
    assert moved[advantages > 1].mean() > 0


async def test_every_policy_version_collects_episodes_with_new_ids() -> None:
    async with make_trainer(make_policy()) as trainer:
        before = {episode.id_ for episode in await trainer.collect(LAKE)}
        await trainer.train_step(LAKE)
        assert before.isdisjoint(episode.id_ for episode in await trainer.collect(LAKE))


async def test_policy_acts_with_published_weights_only() -> None:
    policy = make_policy()
    before = policy.next_logprobs([0])
    with torch.no_grad():
        policy.module.head.bias[16] += 5.0
    assert torch.equal(policy.next_logprobs([0]), before)
    await policy.publish(1)
    assert policy.next_logprobs([0])[16] > before[16]


async def test_credit_rows_have_positive_advantages_for_successful_episodes() -> None:
    async with make_trainer(make_policy()) as trainer:
        episodes = await trainer.collect(LAKE)
        credited = trainer.credit.assign(episodes, await trainer.score(episodes))
    rows = list(credited.rows())
    json.dumps(rows, allow_nan=False)
    assert len(rows) == sum(len(episode_steps(episode)) for episode in episodes)
    assert {row["group_id"] for row in rows} == {episodes[0].custom_data["group_id"]}
    starts = {row["state_key"] for row in rows if row["step"] == 0}
    assert len(starts) == 1
    won = {episode.id_ for episode in episodes if episode.get_return() == 1.0}
    assert won
    assert all((row["A_E"] > 0) == (row["rollout_id"] in won) for row in rows)


class FailsOnce(TinyPolicy):
    async def open(self, context: EpisodeContext) -> AgentPolicy:
        if context.rollout_id.endswith("-3"):
            raise RuntimeError("out of memory")
        return await super().open(context)


async def test_failed_episode_is_unscored_and_training_continues() -> None:
    async with make_trainer(FailsOnce(SEED)) as trainer:
        diagnostics = await trainer.train_step(LAKE)
    assert diagnostics["unscored"] == 1
    assert diagnostics["optimizer_steps"] == 8


async def test_environment_that_never_starts_changes_no_weights() -> None:
    policy = make_policy()
    before = policy.next_logprobs([0])
    async with make_trainer(policy) as trainer:
        config = {"base_resource_config": {"env_id": "NoSuchLake-v1"}}
        trainer.worker = RLRolloutWorker(TASK.model_copy(update=config), policy)
        diagnostics = await trainer.train_step(LAKE)
    assert diagnostics == {"tokens": 0.0, "optimizer_steps": 0.0, "unscored": float(GROUP)}
    assert torch.equal(policy.next_logprobs([0]), before)


async def test_policy_without_weights_is_rejected() -> None:
    policy = make_policy()
    async with make_trainer(policy) as trainer:
        worker = RLRolloutWorker(TASK, ScriptedPolicy([]))
        with pytest.raises(ConfigError, match="ScriptedPolicy is not a TrainablePolicy"):
            Trainer(worker, trainer.reward_agent, trainer.credit, trainer.learner, group_size=2)
