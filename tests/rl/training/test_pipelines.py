"""Training pipelines: overlap, policy lag and dynamic sampling."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from reward_kit.agent.models import StepData
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent import AsyncRewardAgent
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.schedule import Schedule
from reward_kit.rl.training.config import DynamicSamplingModel
from reward_kit.rl.training.figures import merge_updates
from reward_kit.rl.training.pipelines import Pipeline, PipelineOptions
from reward_kit.rl.training.rollouts import SampleStream
from reward_kit.rl.training.trainer import Trainer
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens import TokenBatch
from reward_kit.typed_interface import reward_spec
from tests.tiny_policy import TinyPolicy

TASK = TaskDefinitionModel(
    name="lake",
    resource_type="gymnasium",
    base_resource_config={"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    max_episode_steps=3,
)
SAMPLES = [Sample(name) for name in "abcdef"]
GROUP = 2


class SessionCountingPolicy(TinyPolicy):
    """A policy that counts its sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self._awaited: dict[int, anyio.Event] = {}

    async def has_opened(self, count: int) -> None:
        """Wait for the session with this number."""
        if len(self.opened) < count:
            await self._awaited.setdefault(count, anyio.Event()).wait()

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        self.opened.append(context.rollout_id)
        if event := self._awaited.get(len(self.opened)):
            event.set()
        return await super().open(context)


class RecordingLearner(PPOLearner):
    """A learner that records the groups and versions of each update."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, PPOConfig(lr=0.01))
        self.groups: list[set[str]] = []
        self.sampled_by: list[set[int]] = []
        self.versions: list[int] = []
        self.has_learned = threading.Event()

    def update(self, rows: TokenBatch, *, version: int, progress: float = 0.0) -> dict[str, float]:
        takes_part = rows.batch["action_mask"] == 1
        self.groups.append({str(group) for group in rows.non_tensor_batch["group_id"]})
        self.sampled_by.append(set(rows.batch["policy_versions"][takes_part].tolist()))
        self.versions.append(version)
        found = super().update(rows, version=version, progress=progress)
        self.has_learned.set()
        return found


class Parts:
    """The parts that a test inspects."""

    def __init__(self, pipeline: Pipeline, policy: SessionCountingPolicy, learner: RecordingLearner) -> None:
        self.pipeline, self.policy, self.learner = pipeline, policy, learner

    async def train(self, updates: int) -> list[dict[str, float]]:
        figures = []
        for update in range(updates):
            figures.append(await self.pipeline.step(more=update + 1 < updates))
            figures[-1] |= self.pipeline.trainer.meter.take()
        return figures


@asynccontextmanager
async def pipeline_of(
    schedule: str,
    make_reward: Callable[[SessionCountingPolicy, list[RecordingLearner]], Any] | None = None,
    *,
    samples: int = 2,
    dynamic: DynamicSamplingModel | None = None,
) -> AsyncIterator[Parts]:
    policy, learners = SessionCountingPolicy(), list[RecordingLearner]()
    learners.append(RecordingLearner(policy.module))
    reward = make_reward(policy, learners) if make_reward else by_place
    options = PipelineOptions(
        schedule=Schedule(schedule), samples_per_update=samples, samples_per_minibatch=1, dynamic_sampling=dynamic
    )
    async with AsyncRewardAgent(reward_spec(reward)) as agent:
        trainer = Trainer(
            RLRolloutWorker(TASK, policy), agent, CreditAssigner("gigpo"), learners[0], group_size=GROUP, run_seed=3
        )
        async with Pipeline(trainer, SampleStream(SAMPLES, 3), options) as pipeline:
            with anyio.fail_after(60):
                yield Parts(pipeline, policy, learners[0])


async def by_place(messages: Any, rollout_id: str) -> dict[str, float]:
    return {"score": float(rollout_id.endswith("-0"))}


@pytest.mark.parametrize(("schedule", "lag"), [("sync", 0), ("minibatch", 0), ("one_step_off", 1), ("both", 1)])
async def test_each_schedule_has_its_policy_lag_and_wastes_no_batch(schedule: str, lag: int) -> None:
    async with pipeline_of(schedule) as parts:
        figures = await parts.train(3)
    assert len(parts.policy.opened) == len(set(parts.policy.opened)) == 3 * 2 * GROUP
    learned = [group for groups in parts.learner.groups for group in groups]
    assert len(learned) == len(set(learned)) == 3 * 2, "every group that was rolled out is learned from, once"
    per_batch = 2 if schedule in ("minibatch", "both") else 1
    assert parts.learner.versions == [version for version in (0, 1, 2) for _ in range(per_batch)]
    for version, sampled_by in zip(parts.learner.versions, parts.learner.sampled_by, strict=True):
        assert sampled_by == {max(0, version - lag)}
    assert [line["lag_max"] for line in figures] == [0, lag, lag]
    assert all(line["score/mean"] == 0.5 and line["episode/count"] == 4 for line in figures)
    assert parts.policy.version == parts.pipeline.trainer.version == 3


@pytest.mark.parametrize("schedule", ["one_step_off", "both"])
async def test_next_batch_is_collected_while_scores_are_pending(schedule: str) -> None:
    def make(policy: SessionCountingPolicy, learners: list[RecordingLearner]) -> Any:
        async def reward(messages: Any, rollout_id: str) -> dict[str, float]:
            # Nobody of the first batch is scored before the second has begun. In `sync` this would never end.
            await policy.has_opened(2 * GROUP + 1)
            return {"score": float(rollout_id.endswith("-0"))}

        return reward

    async with pipeline_of(schedule, make) as parts:
        await parts.train(2)
    assert parts.learner.sampled_by[-1] == {0}


async def test_first_scored_groups_are_trained_on_before_the_others_are_scored() -> None:
    def make(policy: SessionCountingPolicy, learners: list[RecordingLearner]) -> Any:
        async def reward(messages: Any, rollout_id: str) -> dict[str, float]:
            # All groups but the last are slow: they have no score until something was learned.
            await policy.has_opened(3 * GROUP)
            if rollout_id.rpartition("-")[0] != policy.opened[-1].rpartition("-")[0]:
                await anyio.to_thread.run_sync(learners[0].has_learned.wait, 30)
            return {"score": float(rollout_id.endswith("-0"))}

        return reward

    async with pipeline_of("minibatch", make, samples=3) as parts:
        await parts.train(1)
    assert [len(groups) for groups in parts.learner.groups] == [1, 1, 1]
    assert parts.learner.groups[0] == {parts.policy.opened[-1].rpartition("-")[0]}


def test_extremes_of_parts_are_kept() -> None:
    first = {"tokens": 1.0, "logprob_gap": 0.5, "ratio_max": 2.0, "alarm/effective_share": 0.2, "alarm/kl": 0.1}
    second = {"tokens": 3.0, "logprob_gap": 0.1, "ratio_max": 3.0, "alarm/effective_share": 0.1, "alarm/kl": 0.4}
    expected = {"tokens": 4.0, "logprob_gap": 0.5, "ratio_max": 3.0, "alarm/effective_share": 0.1, "alarm/kl": 0.4}
    assert merge_updates([first, second]) == expected


async def test_minibatch_diagnostics_are_merged() -> None:
    async with pipeline_of("minibatch", samples=3) as parts:
        (figures,) = await parts.train(1)
    assert figures["optimizer_steps"] == 3
    assert figures["tokens"] == figures["episode/tokens_mean"] * figures["episode/count"]
    assert figures["credit/groups"] == 3 and figures["credit/trajectories"] == 6


class TestDynamicSampling:
    def scores(self, tied: int) -> Callable[[SessionCountingPolicy, list[RecordingLearner]], Any]:
        """Give equal scores to the first groups, and different ones to the others."""

        def make(policy: SessionCountingPolicy, learners: list[RecordingLearner]) -> Any:
            async def reward(messages: Any, rollout_id: str) -> dict[str, float]:
                group = rollout_id.rpartition("-")[0]
                seen = list(dict.fromkeys(one.rpartition("-")[0] for one in policy.opened))
                return {"score": float(rollout_id.endswith("-0") and seen.index(group) >= tied)}

            return reward

        return make

    @pytest.mark.parametrize("schedule", ["sync", "minibatch", "one_step_off", "both"])
    async def test_groups_without_a_signal_are_replaced(self, schedule: str) -> None:
        annotated: Counter[tuple[str, int]] = Counter()

        def annotate(step: StepData, episode: SingleAgentEpisode) -> dict[str, float]:
            annotated[episode.id_, step.system_step_index] += 1
            return {}

        async with pipeline_of(schedule, self.scores(1), dynamic=DynamicSamplingModel()) as parts:
            parts.pipeline.trainer.credit.annotate_step = annotate
            (figures,) = await parts.train(1)
        assert set(annotated.values()) == {1}, "an episode is aligned once"
        assert sum(len(groups) for groups in parts.learner.groups) == 2
        assert parts.policy.opened[0].rpartition("-")[0] not in set().union(*parts.learner.groups)
        wanted = {"kept": 2, "missing": 0, "collections": 2, "dropped/tied": 1}
        assert {name: figures[f"groups/{name}"] for name in wanted} == wanted
        assert figures["episode/count"] == 3 * GROUP, "what is dropped is measured all the same"

    async def test_batch_is_smaller_after_the_maximum_number_of_collections(self) -> None:
        asked = DynamicSamplingModel(max_collections=2)
        async with pipeline_of("sync", self.scores(3), dynamic=asked) as parts:
            (figures,) = await parts.train(1)
        assert (figures["groups/kept"], figures["groups/missing"]) == (1, 1)
        assert [len(groups) for groups in parts.learner.groups] == [1]

    async def test_a_batch_without_any_signal_makes_no_step(self) -> None:
        asked = DynamicSamplingModel(max_collections=1)
        async with pipeline_of("sync", self.scores(99), dynamic=asked) as parts:
            (figures,) = await parts.train(1)
        assert parts.learner.groups == [] and figures["groups/kept"] == 0 and figures["score/mean"] == 0

    @pytest.mark.parametrize("keep", [True, False])
    async def test_tied_group_with_step_signal_is_kept_on_request(self, keep: bool) -> None:
        def make(policy: SessionCountingPolicy, learners: list[RecordingLearner]) -> Any:
            async def reward(messages: Any, rollout_id: str) -> dict[str, Any]:
                first = {"step_index": 0, "base_reward": float(rollout_id.endswith("-0"))}
                return {"score": 0.5, "step_outputs": [first]}

            return reward

        asked = DynamicSamplingModel(keep_step_signal=keep, max_collections=1)
        async with pipeline_of("sync", make, dynamic=asked) as parts:
            (figures,) = await parts.train(1)
        assert figures["groups/kept"] == (2 if keep else 0)


async def test_samples_are_reshuffled_each_epoch() -> None:
    stream = SampleStream(SAMPLES, 5)
    rounds = [[sample.id for sample in stream.take(len(SAMPLES))] for _ in range(2)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == list("abcdef") and rounds[0] != rounds[1]
    again = SampleStream(SAMPLES, 5)
    again.position = 4
    assert [sample.id for sample in again.take(4)] == [*rounds[0][4:], *rounds[1][:2]]
    assert stream.epoch == 2.0
