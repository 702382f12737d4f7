"""`reward-kit run --engine ray`: the episodes of a run in processes of a cluster, everything else in the driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from reward_kit.agent.limits import RunBudget
from reward_kit.integrations.ray.actors import Setup
from reward_kit.integrations.ray.cluster import Connection, ray_module, workers_to_start
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.integrations.ray.rewards import RayScorer
from reward_kit.integrations.ray.rollouts import RolloutPool
from reward_kit.integrations.ray.task_workers import TaskWorkers, environment_for, most_processes, shared_rates
from reward_kit.providers.session import ProviderSession
from reward_kit.reward_agent.levels import scorer_of
from reward_kit.reward_agent.scoring import Reward, Scorer
from reward_kit.runs.plan import RunArgs, RunPlan
from reward_kit.runs.runner import RolloutWorker
from reward_kit.runs.tasks import LoadedTask


class RayEngine:
    """An `Engine` on a cluster. One serves one run.

    Args:
        task: as it was loaded.
        request: what of it is run, and by whom.
        options: the cluster, and the processes.
        traffic: of the run; it is told of trouble with an endpoint.

    Raises:
        ConfigError: a limit on rates cannot be shared, or a variable for the processes is not set.
    """

    def __init__(
        self, task: LoadedTask, request: RunArgs, options: RayOptions, traffic: ProviderSession | None = None
    ) -> None:
        ray_module()  # what is not installed is told at once
        self._task, self._request, self._options, self._traffic = task, request, options, traffic
        self._env = environment_for(task.definition, options.env)
        if options.workers is not None:
            shared_rates(task.definition, options.workers)
        self._connection = Connection(options.address, task.folder if options.ship else None)

    @asynccontextmanager
    async def workers(self, plan: RunPlan, budget: RunBudget) -> AsyncIterator[Mapping[str, RolloutWorker]]:
        """As `Engine`. The processes start meanwhile.

        Raises:
            ClusterError: there is no cluster, or no process comes in time.
            ConfigError: the processes lack something, or not one of them fits on the cluster.
        """
        async with self._connection:
            size = self._size(plan.max_concurrency)
            build = TaskWorkers.of(self._task, self._request, size, is_shipped=self._options.ship)
            setup = Setup(build, budget.limits, plan.max_concurrency, self._env)
            pool = RolloutPool(plan.definition, setup, self._options, size=size, budget=budget, traffic=self._traffic)
            async with pool.open():
                yield {named.label: pool.worker(named.label) for named in plan.policies}

    def _size(self, max_concurrency: int) -> int:
        size = workers_to_start(self._options, self._connection.is_own, "-E {}")
        if self._options.workers is not None:
            return size
        return min(size, max_concurrency, most_processes(self._task.definition))

    def scorer(self, reward: Reward, deadline_s: float | None) -> Scorer:
        """As `Engine`. In the driver, unless processes for it are asked for."""
        reference = self._task.definition.reward_function_path
        if not self._options.reward_workers or reference is None:
            return scorer_of(reward, deadline_s)
        return RayScorer(
            reward,
            reference,
            self._task.folder,
            workers=self._options.reward_workers,
            deadline_s=deadline_s,
            env=self._env,
            wait_s=self._options.worker_wait_s,
            connection=self._connection,
        )
