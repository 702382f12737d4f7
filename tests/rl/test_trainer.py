"""A training step: collecting, scoring and publishing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch

from reward_kit.agent.models import episode_steps
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.training.trainer import TrainablePolicy, Trainer
from reward_kit.rl_processing import CreditAssigner
from reward_kit.typed_interface import reward_function, reward_spec
from tests.tiny_policy import TinyPolicy

pytestmark = pytest.mark.device

TASK = TaskDefinitionModel(
    name="lake",
    resource_type="gymnasium",
    base_resource_config={"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    goal_description="reach G",
    max_episode_steps=4,
)
ONE, OTHER = Sample("one"), Sample("other")


class Reward:
    """A reward that scores each episode by its id, so that no group is constant, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.goals: set[str] = set()

    async def __call__(self, messages: Any, rollout_id: str, goal_description: str) -> dict[str, float]:
        self.asked.append(rollout_id)
        self.goals.add(goal_description)
        return {"score": float(rollout_id.endswith("-0"))}


class RecordingPolicy(TinyPolicy):
    """A policy that records the published versions."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.versions: list[int] = []

    async def publish(self, version: int) -> None:
        await super().publish(version)
        self.versions.append(version)


class FailingPolicy(RecordingPolicy):
    """A policy whose session fails to open in the second episode of every group."""

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        if context.rollout_id.endswith("-1"):
            raise RuntimeError("out of memory")
        return await super().open(context)


@asynccontextmanager
async def training(
    policy: AgentPolicy | None = None,
    reward: Any = None,
    *,
    group_size: int = 2,
    run_seed: int = 0,
    config: PPOConfig | None = None,
) -> AsyncIterator[Trainer]:
    acting = policy or RecordingPolicy()
    async with AsyncRewardAgent(reward_spec(reward or Reward())) as agent:
        yield Trainer(
            RLRolloutWorker(TASK, acting),
            agent,
            CreditAssigner("gigpo", omega=0.5, gamma=0.9),
            PPOLearner(getattr(acting, "module", torch.nn.Linear(1, 1)), config or PPOConfig(lr=0.01), seed=run_seed),
            group_size=group_size,
            run_seed=run_seed,
        )


def groups_of(episodes: Any) -> list[str]:
    return [episode.custom_data["group_id"] for episode in episodes]


async def test_batch_reward_receives_the_group_without_failed_episodes() -> None:
    compared: list[list[str]] = []

    @reward_function(mode="batch")
    async def reward(rollouts_messages: Any, rollout_id: Any) -> Any:
        compared.append(rollout_id)
        return [{"score": float(place)} for place in range(len(rollouts_messages))]

    async with training(FailingPolicy(), reward, group_size=3) as trainer:
        episodes = await trainer.collect([ONE, OTHER])
        scored = await trainer.score(episodes)
    assert compared == [[episodes[i].id_ for i in group] for group in ([0, 2], [3, 5])]
    assert {one.rollout_id: one.score for one in scored} == dict(
        zip([episode.id_ for episode in episodes], [0.0, None, 1.0] * 2, strict=True)
    )


class TestCollecting:
    async def test_groups_are_collected_in_sample_order(self) -> None:
        async with training(group_size=3) as trainer:
            episodes = await trainer.collect([OTHER, ONE])
        assert [episode.custom_data["sample_id"] for episode in episodes] == ["other"] * 3 + ["one"] * 3
        assert [episode.custom_data["rollout_index"] for episode in episodes] == [0, 1, 2] * 2
        assert len(set(groups_of(episodes))) == 2

    async def test_repeated_sample_forms_two_groups(self) -> None:
        async with training() as trainer:
            episodes = await trainer.collect([ONE, ONE])
            first, second = groups_of(episodes)[:2], groups_of(episodes)[2:]
            assert first[0] == first[1] != second[0] == second[1]
            assert len({episode.id_ for episode in episodes}) == 4
            assert len({episode.custom_data["seeds"]["policy"] for episode in episodes}) == 4
            diagnostics = await trainer.train_step([ONE, ONE])
        assert (diagnostics["unscored"], diagnostics["score"]) == (0.0, 0.5)

    async def test_groups_are_collected_concurrently(self) -> None:
        everybody, waiting = anyio.Event(), []

        class Meets(RecordingPolicy):
            async def open(self, context: EpisodeContext) -> AgentPolicy:
                waiting.append(context.rollout_id)
                if len(waiting) == 4:
                    everybody.set()
                await everybody.wait()
                return await super().open(context)

        async with training(Meets()) as trainer:
            with anyio.fail_after(20):
                assert len(await trainer.collect([ONE, OTHER])) == 4

    async def test_episodes_are_determined_by_seed_and_version(self) -> None:
        found = {}
        for name, seed in (("a", 0), ("again", 0), ("b", 1)):
            async with training(run_seed=seed) as trainer:
                found[name] = [(e.id_, e.get_actions(), e.get_return()) for e in await trainer.collect([ONE, OTHER])]
        assert found["a"] == found["again"]
        assert not {item[0] for item in found["a"]} & {item[0] for item in found["b"]}


class TestScoring:
    async def test_every_episode_is_scored_with_the_task_facts(self) -> None:
        reward = Reward()
        async with training(reward=reward) as trainer:
            episodes = await trainer.collect([ONE, OTHER])
            scored = await trainer.score(episodes)
        assert {result.rollout_id: result.score for result in scored} == {
            episode.id_: float(episode.id_.endswith("-0")) for episode in episodes
        }
        assert reward.goals == {"reach G"}

    async def test_failed_episode_is_not_scored_and_keeps_its_failure(self) -> None:
        reward, policy = Reward(), FailingPolicy()
        async with training(policy, reward) as trainer:
            episodes = await trainer.collect([ONE, OTHER])
            scored = {result.rollout_id: result for result in await trainer.score(episodes)}
            failed = [episode.id_ for episode in episodes if episode.custom_data["failure"]]
            assert len(failed) == 2 and not set(failed) & set(reward.asked) and len(reward.asked) == 2
            for rollout_id in failed:
                assert scored[rollout_id].score is None
                assert "out of memory" in scored[rollout_id].failure.message
            diagnostics = await trainer.train_step([ONE])
        assert diagnostics["unscored"] == 1
        assert diagnostics["score"] == 1.0, "the mean is over what was scored"

    async def test_failed_reward_leaves_only_its_episode_unscored(self) -> None:
        async def picky(messages: Any, rollout_id: str) -> dict[str, float]:
            if rollout_id.endswith("-0"):
                raise ValueError("no score")
            return {"score": float(rollout_id.endswith("-1"))}

        policy = RecordingPolicy()
        async with training(policy, picky, group_size=3) as trainer:
            diagnostics = await trainer.train_step([ONE])
        assert (diagnostics["unscored"], diagnostics["score"]) == (1.0, 0.5)
        assert diagnostics["optimizer_steps"] > 0 and policy.versions == [1]

    async def test_unscored_batch_changes_no_weights_and_reports_no_score(self) -> None:
        async def broken(messages: Any) -> None:
            raise ValueError("no score")

        policy = RecordingPolicy()
        before = {name: values.clone() for name, values in policy.module.state_dict().items()}
        async with training(policy, broken) as trainer:
            diagnostics = await trainer.train_step([ONE])
        assert diagnostics == {"tokens": 0.0, "optimizer_steps": 0.0, "unscored": 2.0}
        assert all(torch.equal(values, before[name]) for name, values in policy.module.state_dict().items())


class TestVersions:
    async def test_each_step_publishes_the_next_version(self) -> None:
        policy = RecordingPolicy()
        async with training(policy) as trainer:
            assert trainer.version == 0
            for version in (1, 2):
                await trainer.train_step([ONE])
                assert (trainer.version, policy.version) == (version, version)
                acting, trained = policy.acting.state_dict(), policy.module.state_dict()
                assert all(torch.equal(acting[name], trained[name]) for name in trained)
        assert policy.versions == [1, 2]

    async def test_episodes_record_the_policy_version(self) -> None:
        async with training() as trainer:
            before = await trainer.collect([ONE])
            await trainer.train_step([ONE])
            after = await trainer.collect([ONE])
        for version, episodes in ((0, before), (1, after)):
            steps = [step for episode in episodes for step in episode_steps(episode)]
            assert {step.policy_logprobs["policy_version"] for step in steps} == {version}
        assert not {episode.id_ for episode in before} & {episode.id_ for episode in after}

    async def test_the_minibatches_are_drawn_from_the_runs_seed(self) -> None:
        async def weights(run_seed: int) -> torch.Tensor:
            policy = RecordingPolicy()
            config = PPOConfig(epochs=2, minibatch_rows=1, lr=0.01)
            async with training(policy, group_size=4, run_seed=run_seed, config=config) as trainer:
                trainer.run_seed = 0  # the episodes are the same; what is left is the order of their rows
                await trainer.train_step([ONE])
            return policy.module.head.weight.detach()

        assert torch.equal(await weights(1), await weights(1))
        assert not torch.equal(await weights(1), await weights(2))


async def test_only_a_policy_with_weights_can_be_trained() -> None:
    assert isinstance(RecordingPolicy(), TrainablePolicy)
    with pytest.raises(
        ConfigError, match="not a TrainablePolicy, because it lacks module and pad_token_id and publish"
    ):
        async with training(ScriptedPolicy([])):
            pass


async def test_hash_that_merges_states_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    task = TaskDefinitionModel(name="t", resource_type="python_state", base_resource_config={"initial_state": {"a": 1}})
    reads = [{"type": "tool_call", "name": "get_state", "arguments": {"path": path}} for path in ("", "a", "")]
    episodes = (await RLRolloutWorker(task, ScriptedPolicy(reads)).run_group(2)).episodes
    async with training() as trainer:
        for state_hash, expected in ((None, 0), ("state_key", 1)):
            trainer.credit = CreditAssigner("gigpo", state_hash=state_hash)
            aligned = trainer.credit.align(episodes, [Scored(episode.id_) for episode in episodes])
            for _ in range(2):
                trainer.advantages(aligned)
            assert caplog.text.count("set it to state_and_results") == expected
