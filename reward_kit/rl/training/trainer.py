"""A training update, in reading order: collect, score, align, advantages, batch, update and publish.

The pipelines in `rl.training.pipelines` make the same calls in different orders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import isawaitable
from itertools import islice
from typing import Annotated, Any, Protocol, runtime_checkable

import anyio
import anyio.to_thread
import numpy as np
import pydantic
import torch

from reward_kit.agent.branches import Branch, new_part
from reward_kit.agent.models import StepData
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.credit.diagnostics import merged_states_warning
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.loading import calling
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.rl.reward_manager import RewardManager
from reward_kit.rl.training.branching import Branching
from reward_kit.rl.training.figures import SCORING, WAIT, Meter, UpdateRecorder
from reward_kit.rl.training.rollouts import Collector, GroupRequest, TrainingWorker
from reward_kit.rl_processing import CreditAssigner, CreditBatch
from reward_kit.tokens import TokenBatch, build_rows

logger = logging.getLogger("reward_kit.rl")
_FIGURES = pydantic.TypeAdapter(dict[str, Annotated[float, pydantic.Field(allow_inf_nan=False)]])


@runtime_checkable
class TrainablePolicy(Protocol):
    """An `AgentPolicy` that can be trained. It acts with a copy of the weights being trained."""

    module: torch.nn.Module  # the weights in training: a causal LM, or (ids_BT, attention_mask_BT) -> logits_BTV
    pad_token_id: int

    async def publish(self, version: int) -> None:
        """Act with the current weights of `module`, as the given version, from the next forward pass onward."""


class Learner(Protocol):
    """An object that updates the weights, such as `rl.ppo.PPOLearner`."""

    def update(self, rows: TokenBatch, *, version: int, progress: float) -> dict[str, float]:
        """Learn from rows that were collected for this policy version, and return diagnostics.

        `progress` is the share of training before this update, from 0 to 1, or 0 if only the number of updates limits
        training.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later updates depend, including the weights."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Trainer:
    """Trains a policy.

    Args:
        worker: the worker that collects episodes with the policy to be trained.
        reward_agent: the reward agent that scores the episodes. It must be open.
        credit: the object that computes advantages from scores.
        learner: the learner for the policy's `module`.
        group_size: the number of episodes per sample.
        run_seed: the seed for all random choices.
        reward_manager: a reward manager that changes scores before advantages are computed, for example to normalize
            them. If None, scores are unchanged.
        max_concurrency: the maximum number of concurrent episodes. If None, all episodes of a batch run concurrently.
        after_collect: a function that is called with each group's episodes before they are scored. It may be async, may
            add to the episodes' `custom_data`, and may return figures.
        branching: the choice of steps from which additional groups continue an update's episodes. If None, there are no
            additional groups.
        continuations: the number of continuations used to measure the value of the state before each step, for the
            estimator vine. If 0, values are not measured.

    Attributes:
        version: the version of the current weights, which each update increments.
        progress: the share of training so far, from 0 to 1, which is passed to the learner.
        meter: the object that collects the figures for the current update.
        kept: the object that collects records of the episodes in this update, or None if records are not kept.

    Raises:
        ConfigError: If the worker's policy cannot be trained.
    """

    def __init__(
        self,
        worker: TrainingWorker,
        reward_agent: AsyncRewardAgent,
        credit: CreditAssigner,
        learner: Learner,
        *,
        group_size: int,
        run_seed: int = 0,
        reward_manager: RewardManager | None = None,
        max_concurrency: int | None = None,
        after_collect: Callable[..., Any] | None = None,
        branching: Branching | None = None,
        continuations: int = 0,
    ) -> None:
        if (branching or continuations) and not isinstance(worker, RLRolloutWorker):
            raise ConfigError("branching and continuations require an RLRolloutWorker in this process")
        if continuations and (branching or reward_manager):
            raise ConfigError("continuations cannot be combined with branching or with a reward_manager")
        self.policy = trainable(worker.agent_policy)
        self.worker, self.reward_agent, self.credit, self.learner = worker, reward_agent, credit, learner
        self.group_size, self.run_seed, self.reward_manager = group_size, run_seed, reward_manager
        self.collector = Collector(group_size, max_concurrency, self._call_hook if after_collect is not None else None)
        self.after_collect, self.max_concurrency = after_collect, max_concurrency
        self.branching, self.continuations = branching, continuations
        self.version, self.collected, self.meter = 0, 0, Meter(worker.task_definition.pass_threshold)
        self.progress = 0.0
        self.kept: UpdateRecorder | None = None
        self._has_warned = False

    async def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Perform one update.

        The result contains the diagnostics of the update, the mean `score` and the number of `unscored` episodes.
        """
        episodes = await self.collect(samples)
        scored = await self.score(episodes)
        episodes = [new_part(episode) for episode in episodes]
        aligned = self.align(episodes, scored)
        if self.continuations:
            await self.measure(samples, episodes, aligned)
        credited = self.advantages(aligned)
        rows = self.batch(episodes, credited)
        diagnostics = await self.update(rows)
        await self.publish()
        return diagnostics | credited.summary()

    async def collect(self, samples: Sequence[Sample]) -> list[SingleAgentEpisode]:
        """Collect the groups for all samples concurrently, and return the episodes in sample order.

        Every group gets new ids and seeds. The groups that continue episodes follow at the end. Their episodes include
        the repeated steps, which the reward needs and `train_step` removes before it computes credit.
        """
        with self.meter.time("collect"):
            groups = await self.collector.collect(self.worker, self.requests(samples))
            if self.branching is not None:
                groups += await self.collector.collect(self.worker, self._branches(samples, groups))
        episodes = [episode for group in groups for episode in group]
        self.meter.add_collected([new_part(episode) for episode in episodes])
        return episodes

    async def _call_hook(self, episodes: list[SingleAgentEpisode]) -> None:
        assert self.after_collect is not None
        what = f"hook after_collect {getattr(self.after_collect, '__name__', '')!r}"
        with calling(what):
            returned = self.after_collect(episodes)
            returned = await returned if isawaitable(returned) else returned
        try:
            self.meter.add_hook(_FIGURES.validate_python({} if returned is None else returned))
        except pydantic.ValidationError:
            raise ConfigError(f"{what} must return None or a dict of finite numbers, got {returned!r:.80}") from None

    def _branches(self, samples: Sequence[Sample], groups: Sequence[Sequence[SingleAgentEpisode]]) -> list[Branch]:
        """Return the steps from which additional groups continue the episodes of this update."""
        assert self.branching is not None and isinstance(self.worker, RLRolloutWorker)
        seed = derive_seed("branch", self.run_seed, self.collected)
        return [
            self.worker.branch(groups[point.group][point.episode], point.step, seed=seed, sample=samples[point.group])
            for point in self.branching.choose(groups, seed)
        ]

    def requests(self, samples: Sequence[Sample]) -> list[GroupRequest]:
        """Return a request for each of the next groups. A request consists of the group's sample and seed."""
        # Seeds count groups, since a sample that occurs twice in a batch forms two groups.
        first, self.collected = self.collected, self.collected + len(samples)
        return [(one, derive_seed("collect", self.run_seed, first + index)) for index, one in enumerate(samples)]

    async def score(self, episodes: Sequence[SingleAgentEpisode]) -> list[Scored]:
        """Score the episodes and return the results in the same order.

        The result of an unscored episode contains the failure.
        """
        with self.meter.time(SCORING), self.meter.time(WAIT):
            requests = [ScoringRequest.from_episode(episode, self.worker.task_definition) for episode in episodes]
            return await self.reward_agent.score_all(requests, self.group_size)

    def align(self, episodes: Sequence[SingleAgentEpisode], scored: Sequence[Scored]) -> CreditBatch:
        """Combine steps, rewards and scores, and apply the reward manager to the scores."""
        with self.meter.time("credit"):
            aligned = self.credit.align(episodes, scored)
        return self.manage(episodes, aligned)

    def manage(self, episodes: Sequence[SingleAgentEpisode], aligned: CreditBatch) -> CreditBatch:
        """Record the scores, and return the batch with those of the reward manager."""
        with self.meter.time("credit"):
            self.meter.add_scored(episodes, aligned)
            if self.reward_manager is None:
                return aligned
            rows = build_rows(episodes, aligned.steps, scores=aligned.scores, pad_token_id=self.policy.pad_token_id)
            if not len(rows):
                return aligned
            rewards = self.reward_manager(rows, return_dict=True)["reward_extra_info"]["score"].tolist()
            ids = rows.non_tensor_batch["rollout_id"].tolist()
            placed = {rollout_id: one for rollout_id, one in zip(ids, rewards, strict=True) if one == one}
            # An episode without sampled tokens has no token for a reward. It keeps its score, since the other episodes
            # of its group are compared with it, although it has no row to train on.
            scores = [
                placed.get(rollout_id, score) if score is not None else None
                for rollout_id, score in zip(aligned.rollout_ids, aligned.scores, strict=True)
            ]
            return replace(aligned, scores=scores)

    async def measure(
        self, samples: Sequence[Sample], episodes: Sequence[SingleAgentEpisode], aligned: CreditBatch
    ) -> None:
        """Measure the value of the state before each step, and store it in `step_info["measured_value"]`.

        The value is the mean score of `continuations` episodes that continue from this state, or None if none of these
        episodes is scored. The first step has no value, because all episodes in its group start in the same state.
        """
        assert isinstance(self.worker, RLRolloutWorker)
        seed = derive_seed("measure", self.run_seed, self.collected)
        branches: list[Branch] = []
        measured: list[StepData] = []
        for index, (episode, steps) in enumerate(zip(episodes, aligned.steps, strict=True)):
            if aligned.scores[index] is not None:
                sample = samples[index // self.group_size]
                branches += [self.worker.branch(episode, t, seed=seed, sample=sample) for t in range(1, len(episode))]
                measured += steps[1:]
        with self.meter.time("collect"):
            collector = Collector(self.continuations, self.max_concurrency)
            groups = await collector.collect(self.worker, branches)
        self.meter.totals["env_steps"] += sum(len(new_part(one)) for group in groups for one in group)
        requests = [ScoringRequest.from_episode(one, self.worker.task_definition) for group in groups for one in group]
        with self.meter.time(SCORING), self.meter.time(WAIT):
            scored = iter(await self.reward_agent.score_all(requests, self.continuations))
        for step in measured:
            scores = [one.score for one in islice(scored, self.continuations) if one.score is not None]
            step.step_info["measured_value"] = float(np.mean(scores)) if scores else None

    def advantages(self, aligned: CreditBatch) -> CreditBatch:
        """Compute the advantage of each step."""
        with self.meter.time("credit"):
            credited = self.credit.advantages(aligned)
        if credited.credit is not None and not self._has_warned:
            if warning := merged_states_warning(credited.steps, credited.credit.anchors_S):
                logger.warning("%s", warning)
            self._has_warned = warning is not None
        return credited

    def batch(self, episodes: Sequence[SingleAgentEpisode], credited: CreditBatch) -> TokenBatch:
        """Build the token rows, including advantages."""
        with self.meter.time("batch"):
            self.meter.add_credit(credited)
            if self.kept is not None:
                self.kept.add_credit(credited)
            return build_rows(episodes, credited.steps, scores=credited.scores, pad_token_id=self.policy.pad_token_id)

    async def update(self, rows: TokenBatch) -> dict[str, float]:
        """Learn from the rows in a thread while sessions continue to use the published weights."""
        with self.meter.time("update"):
            version, progress = self.version, self.progress
            diagnostics = await anyio.to_thread.run_sync(
                lambda: self.learner.update(rows, version=version, progress=progress)
            )
        if (kept := self.kept) is not None:
            await anyio.to_thread.run_sync(lambda: kept.add_update(rows, self.learner))
        return diagnostics

    async def publish(self) -> None:
        """Switch to the new weights, which become the next version."""
        with self.meter.time("publish"):
            self.version += 1
            await self.policy.publish(self.version)


def trainable(policy: object) -> TrainablePolicy:
    """Return the policy if it can be trained.

    Raises:
        ConfigError: If the policy cannot be trained. The message contains the reason.
    """
    if not isinstance(policy, TrainablePolicy):
        missing = [name for name in ("module", "pad_token_id", "publish") if not hasattr(policy, name)]
        raise ConfigError(f"{type(policy).__name__} is not a TrainablePolicy, because it lacks {' and '.join(missing)}")
    if reason := getattr(policy, "untrainable_reason", None):
        raise ConfigError(f"{type(policy).__name__} cannot be trained with its sampling: {reason}")
    return policy
