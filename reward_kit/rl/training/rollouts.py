"""The collection of episode groups: sample order, concurrency, lockstep, and evaluations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio
import numpy as np
import torch

from reward_kit.agent.branches import Branch
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RolloutWorker, gather
from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.environments.base import ToolSpec
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.rl.reward_manager import RewardManager
from reward_kit.rl.training.figures import Figures, episode_figures, prefixed, score_figures
from reward_kit.runs.statistics import mean_interval
from reward_kit.tokens import build_rows


class SampleStream:
    """An endless stream of samples that are shuffled in each epoch.

    `position` is the number of samples taken so far.
    """

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        if not samples:
            raise ConfigError("the dataset has no samples to train on")
        self._samples, self._seed = list(samples), seed
        self.position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[Sample]:
        """Return the next `count` samples."""
        taken = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self._samples))
            if self._order[0] != epoch:
                generator = np.random.default_rng(derive_seed("samples", self._seed, epoch))
                self._order = (epoch, generator.permutation(len(self._samples)).tolist())
            self.position += 1
            taken.append(self._samples[self._order[1][index]])
        return taken

    @property
    def epoch(self) -> float:
        """The number of completed passes over the samples."""
        return self.position / len(self._samples)


class LockstepBarrier(AgentPolicy):
    """A trainable policy whose sessions start together. Each `open` call waits until all expected sessions are ready.

    Without the barrier, an engine that computes all open sessions together would start with the environment that is
    ready first. The engine's batches, and therefore the last bits of the results, would then depend on timing.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._expected = self._arrived = 0
        self._complete = anyio.Event()

    @property
    def module(self) -> torch.nn.Module:
        """The model that is being trained."""
        module: torch.nn.Module = self._policy.module
        return module

    @property
    def pad_token_id(self) -> int:
        """The token id for padding."""
        pad: int = self._policy.pad_token_id
        return pad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def is_free(self) -> bool:  # type: ignore[override]
        """True if actions are free of charge."""
        return bool(self._policy.is_free)

    @property
    def knows_cost(self) -> bool:
        """True if the reported usage of an action includes its cost."""
        return bool(self._policy.knows_cost)

    def expect(self, sessions: int) -> None:
        """Make the next `sessions` sessions wait for each other."""
        self._expected, self._arrived, self._complete = sessions, 0, anyio.Event()

    def give_up(self) -> None:
        """Expect one session fewer, because that session will not be opened."""
        self._expected -= 1
        self._release_if_complete()

    def _release_if_complete(self) -> None:
        if self._arrived >= self._expected:
            self._complete.set()

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Open a session as soon as all expected sessions are ready."""
        session: AgentPolicy = await self._policy.open(context)
        self._arrived += 1
        self._release_if_complete()
        try:
            await self._complete.wait()
        except BaseException:
            self._arrived -= 1  # the caller gives up this session
            with anyio.CancelScope(shield=True):
                await session.close()
            raise
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return an action outside of an episode."""
        output: PolicyOutput = await self._policy.get_action(observation, available_tools_specs)
        return output

    async def publish(self, version: int) -> None:
        """Act with the current weights of the model."""
        await self._policy.publish(version)

    async def close(self) -> None:
        await self._policy.close()


class TrainingWorker(RolloutWorker, Protocol):
    """An object that collects episodes for training, such as an `RLRolloutWorker` in this process."""

    agent_policy: Any  # the acting policy, or a publisher of weights to the acting policies
    task_definition: TaskDefinitionModel


GroupRequest = tuple[Sample, int] | Branch
"""A sample and the seed of its group, or a step of a recorded episode, from which the group continues."""
Finished = Callable[[int, list[SingleAgentEpisode]], Coroutine[Any, Any, None]]


class Collector:
    """Collects a group of episodes for each sample. At most `max_concurrency` episodes run at a time.

    If `max_concurrency` is `None`, all episodes of a call run concurrently. With a `LockstepBarrier`, episodes are
    collected in waves that start together, so timing does not affect which episodes act at the same time. If
    `after_group` is set, it is called with the episodes in each group.
    """

    def __init__(
        self,
        group_size: int,
        max_concurrency: int | None = None,
        after_group: Callable[[list[SingleAgentEpisode]], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._group_size, self._limit, self._after_group = group_size, max_concurrency, after_group
        self._wave_lock = anyio.Lock()

    async def collect(
        self, worker: TrainingWorker, requests: Sequence[GroupRequest], finished: Finished | None = None
    ) -> list[list[SingleAgentEpisode]]:
        """Collect a group for each sample, in the order of the samples. Failures are recorded in the episodes.

        `finished` is called with each group's index and episodes as soon as the group is finished.
        """
        groups: list[list[SingleAgentEpisode]] = [[] for _ in requests]
        most = len(requests) * self._group_size
        limiter = anyio.CapacityLimiter(self._limit or max(1, most))
        barrier = worker.agent_policy if isinstance(worker.agent_policy, LockstepBarrier) else None

        async def collect_episode(start: Any, number: int) -> SingleAgentEpisode:
            async with limiter:
                episode = await worker.collect_episode(start, number)
            if barrier is not None and not episode.messages:
                barrier.give_up()
            return episode

        async def collect(index: int) -> None:
            request = requests[index]
            async with request if isinstance(request, Branch) else worker.group(*request) as start:
                groups[index] = await gather(partial(collect_episode, start), range(self._group_size))
            if self._after_group is not None:
                await self._after_group(groups[index])
            if finished is not None:
                await finished(index, groups[index])

        indices = range(len(requests))
        if barrier is None:
            await gather(collect, indices)
            return groups
        # Take whole groups (at least one), since the same episodes must be in flight together in every run.
        width = max(1, (self._limit or most) // self._group_size)
        limiter.total_tokens = width * self._group_size
        async with self._wave_lock:
            for first in range(0, len(requests), width):
                wave = indices[first : first + width]
                barrier.expect(len(wave) * self._group_size)
                await gather(collect, wave)
        return groups


@dataclass(slots=True)
class HeldOutEvaluation:
    """Evaluates the current weights on held-out samples. Every evaluation makes the same random choices."""

    worker: TrainingWorker  # a worker whose policy acts as it does in evaluations
    reward_agent: AsyncRewardAgent
    samples: Sequence[Sample]
    rollouts: int  # the number of episodes per sample
    run_seed: int
    collector: Collector  # a collector of groups of `rollouts` episodes
    examples: RewardManager | None = None  # a reward manager that shows some of the episodes
    pad_token_id: int = 0

    async def collect(self) -> tuple[list[SingleAgentEpisode], list[Scored]]:
        """Return the episodes, `rollouts` for each sample in order, and their scores."""
        seed, task = derive_seed("evaluate", self.run_seed), self.worker.task_definition
        groups = await self.collector.collect(self.worker, [(sample, seed) for sample in self.samples])
        episodes = [episode for group in groups for episode in group]
        requests = [ScoringRequest.from_episode(episode, task) for episode in episodes]
        return episodes, await self.reward_agent.score_all(requests, self.rollouts)

    async def measure(self) -> Figures:
        """Collect and score episodes, and return figures whose names have the prefix `held_out/`."""
        episodes, scored = await self.collect()
        scores, task = [one.score for one in scored], self.worker.task_definition
        if self.examples is not None:
            rows = build_rows(episodes, scores=scores, pad_token_id=self.pad_token_id)
            if len(rows):
                self.examples(rows)
        failures = [one.failure for one in scored if one.failure is not None]
        figures = score_figures(scores, failures, task.pass_threshold)
        if "mean" in figures:
            figures["score"] = figures.pop("mean")
            of_sample = [sample.id for sample in self.samples for _ in range(self.rollouts)]
            error = mean_interval(scores, of_sample).standard_error
            figures |= {"standard_error": error} if error is not None else {}
        shown = ("count", "steps_mean", "tokens_mean", "return_mean", "invalid_action_share")
        figures |= {name: value for name, value in episode_figures(episodes).items() if name in shown}
        return prefixed("held_out", figures)


def evaluation_policy(policy: Any, temperature: float | None) -> Any:
    """Return a policy that has the same weights and the given temperature.

    If `temperature` is `None`, return the policy itself.
    """
    if temperature is None:
        return policy
    sampling = getattr(policy, "sampling", None)
    if sampling is None or not hasattr(sampling, "temperature"):
        raise ConfigError(f"evaluation.temperature: {type(policy).__name__} has no sampling temperature")
    # The copy shares the engine. Sessions close what they open, and the owner of the original policy closes the engine.
    acting = copy.copy(policy)
    acting.sampling = sampling._replace(temperature=temperature)
    return acting
