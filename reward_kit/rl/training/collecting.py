"""Groups of episodes, many at once: no more than may be in flight, and in lockstep in waves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import anyio

from reward_kit.agent.samples import Sample
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import TaskDefinitionModel
from reward_kit.rl.training.start_together import StartTogether
from reward_kit.runs.runner import RolloutWorker


class TrainingWorker(RolloutWorker, Protocol):
    """Collects the episodes that are trained on; `RLRolloutWorker` is the one in this process.

    Attributes:
        agent_policy: who acts, or who publishes weights to those who do.
        task_definition: the task.
    """

    agent_policy: Any
    task_definition: TaskDefinitionModel


Asked = tuple[Sample, int]
"""A sample, and the seed of its group."""
Finished = Callable[[int, list[SingleAgentEpisode]], Coroutine[Any, Any, None]]


class Collector:
    """Collects groups. Where the policy is a `StartTogether`, they come in waves, and those of a wave begin together.

    Which episodes act at the same time then depends on no clock.

    Args:
        group_size: episodes per sample.
        max_concurrency: episodes in flight; None is all that are asked for.
    """

    def __init__(self, group_size: int, max_concurrency: int | None = None) -> None:
        self._group_size, self._limit = group_size, max_concurrency
        self._wave_lock = anyio.Lock()

    async def collect(
        self, worker: TrainingWorker, asked: Sequence[Asked], finished: Finished | None = None
    ) -> list[list[SingleAgentEpisode]]:
        """A group for each sample, in their order; a failed episode carries its failure.

        Args:
            worker: collects the episodes.
            asked: the samples.
            finished: told of each group, by its place, as soon as its episodes are over.
        """
        groups: list[list[SingleAgentEpisode]] = [[] for _ in asked]
        limiter = anyio.CapacityLimiter(self._limit or max(1, len(asked) * self._group_size))

        async def collect(place: int) -> None:
            groups[place] = await self._group(worker, *asked[place], limiter)
            if finished is not None:
                await finished(place, groups[place])

        places = range(len(asked))
        gate = worker.agent_policy
        if not isinstance(gate, StartTogether):
            await _all_at_once(collect, places)
            return groups
        # Whole groups, and at least one: what is in flight at a time is part of what lockstep repeats.
        width = max(1, (self._limit or len(asked) * self._group_size) // self._group_size)
        limiter.total_tokens = width * self._group_size
        async with self._wave_lock:
            for first in range(0, len(asked), width):
                wave = places[first : first + width]
                gate.expect(len(wave) * self._group_size)
                await _all_at_once(collect, wave)
        return groups

    async def _group(
        self, worker: TrainingWorker, sample: Sample, seed: int, limiter: anyio.CapacityLimiter
    ) -> list[SingleAgentEpisode]:
        episodes: dict[int, SingleAgentEpisode] = {}

        async def collect(index: int) -> None:
            async with limiter:
                episodes[index] = await worker.collect_episode(start, index)
            if isinstance(worker.agent_policy, StartTogether) and not episodes[index].messages:
                worker.agent_policy.give_up()

        async with worker.group(sample, seed) as start:
            await _all_at_once(collect, range(self._group_size))
        return [episodes[index] for index in range(self._group_size)]


async def _all_at_once(call: Callable[[int], Coroutine[Any, Any, None]], numbers: Sequence[int]) -> None:
    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(call, number)
