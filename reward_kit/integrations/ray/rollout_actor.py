"""What runs on a worker: `RLRolloutWorker`s with their own event loop, policies and traffic, behind a few messages.

Episodes leave it as the record that `episodes.jsonl` has too, so that nothing of a user's own types crosses machines.
What was spent, logged and noticed meanwhile travels with each answer; nothing of it is written here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.starts import GroupStart
from reward_kit.environments.servers import ServerPool
from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import PolicyError, RewardKitError, boundary
from reward_kit.integrations.ray.messages import Assignment, Reply, Rest, Setup, SharedBudget, Spent
from reward_kit.integrations.ray.process import CollectedLogs, Process, unpacked
from reward_kit.providers.session import ProviderSession
from reward_kit.reward_agent.calling import Turn

_CLOSE_SECONDS = 10.0
logger = logging.getLogger("reward_kit.integrations.ray")


class RolloutActor(Process):
    """The process. Its methods are called from afar, many at a time, on its one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: Mapping[str, RLRolloutWorker] = {}
        self._groups: dict[str, GroupStart] = {}
        self._budget, self._traffic = SharedBudget(), ProviderSession()
        self._logs, self._notices = CollectedLogs(), list[str]()
        self._gave_up: str | None = None

    async def prepare(self, driver: str, packed: bytes) -> str:
        """Make the workers; the name of the machine.

        Args:
            driver: the version of this package where the run is.
            packed: a `Setup`, pickled.

        Raises:
            ConfigError: this package has another version here, or something that the task names is not here.
        """
        setup: Setup = unpacked(driver, packed)
        self._logs.begin()
        os.environ.update(setup.env)
        self._budget = SharedBudget(setup.limits)
        self._traffic.notice, self._traffic.gave_up = self._notices.append, self._give_up
        threads = anyio.to_thread.current_default_thread_limiter()
        threads.total_tokens = max(threads.total_tokens, 3 * setup.max_concurrency + 64)
        await self.open(ServerPool())
        self._workers = self.context.run(setup.build, self._traffic, self._budget)
        return os.uname().nodename

    def _give_up(self, reason: str) -> None:
        self._gave_up = reason

    async def collect(self, assignment: Assignment, rest: Rest) -> Reply:
        """Collect one episode.

        Args:
            assignment: which.
            rest: of the run.
        """
        self._budget.hear(rest)
        record = await Turn(self._collect(assignment), self.context)
        notices, self._notices[:] = list(self._notices), []
        return Reply(record, self._budget.own, self._logs.take(), notices, self._gave_up)

    async def _collect(self, assignment: Assignment) -> dict[str, Any]:
        worker, group_id = self._workers[assignment.label], assignment.group_id
        group = self._groups.get(group_id) or worker.group(assignment.sample, assignment.run_seed)
        if assignment.keeps_start:
            self._groups[group_id] = group
        try:
            return episode_to_record(await worker.collect_episode(group, assignment.rollout_index))
        finally:
            if not assignment.keeps_start:
                await group.close()

    async def close_group(self, group_id: str) -> None:
        """The last episode of a group is over."""
        if (group := self._groups.pop(group_id, None)) is not None:
            await Turn(group.close(), self.context)

    async def exchange(self, rest: Rest) -> Spent:
        """Hear of the rest of the run; what this process has spent."""
        self._budget.hear(rest)
        return self._budget.own

    async def publish(self, version: int, weights: Any) -> None:
        """Hand every policy the weights to act with from now on: its `publish(version, weights)` is called."""
        for worker in self._workers.values():
            policy: Any = worker.agent_policy
            await Turn(policy.publish(version, weights), self.context)

    async def close(self) -> None:
        """Close every start, policy and server."""
        for group_id in list(self._groups):
            await self.close_group(group_id)
        await Turn(self._close_parties(), self.context)
        self._traffic.close()
        await super().close()

    async def _close_parties(self) -> None:
        parties = (party for worker in self._workers.values() for party in (worker.agent_policy, worker.user))
        for party in {id(party): party for party in parties if party is not None}.values():
            try:
                with boundary(PolicyError, f"close of {type(party).__name__}"), anyio.fail_after(_CLOSE_SECONDS):
                    await party.close()
            except RewardKitError as error:
                logger.warning("%s", error)
