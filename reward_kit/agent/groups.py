"""Grouped rollouts: G concurrent episodes of one sample, all from one start."""

from __future__ import annotations

import anyio

from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode


async def collect_group(
    worker: RLRolloutWorker, sample: Sample, size: int, *, run_seed: int = 0
) -> list[SingleAgentEpisode]:
    """Collect `size` episodes of one sample.

    Returns:
        (G,) the episodes in rollout order; a failed one carries its failure.
    """
    episodes: dict[int, SingleAgentEpisode] = {}

    async def collect(index: int) -> None:
        episodes[index] = await worker.collect_episode(group, index)

    async with worker.group(sample, run_seed) as group, anyio.create_task_group() as tasks:
        for index in range(size):
            tasks.start_soon(collect, index)
    return [episodes[index] for index in range(size)]
