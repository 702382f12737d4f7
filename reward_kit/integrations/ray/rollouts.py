"""A pool of rollout workers in processes on a cluster. It has the methods of a local rollout worker.

A `RolloutActor` runs in each process. Its `RLRolloutWorker`s have a separate event loop, separate policies and separate
provider sessions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel

from reward_kit.agent.limits import ActionUsage, RunBudget
from reward_kit.agent.live_episode import LiveEpisode
from reward_kit.agent.models import StopReason
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.starts import GroupStart
from reward_kit.blocking import allow_threads
from reward_kit.environments.config import merged_config, resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.episodes.record import episode_from_record, episode_to_record, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import Failure, PolicyError, RewardKitError, boundary
from reward_kit.integrations.ray.actors import (
    ActorBudget,
    ActorPool,
    Assignment,
    CollectedLogs,
    EpisodesUsage,
    Member,
    Process,
    Reply,
    RunUsage,
    Setup,
    await_result,
    is_actor_lost,
    start_actor,
    unpickle_setup,
)
from reward_kit.integrations.ray.cluster import ClusterError, ray_module
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.session import ProviderSession
from reward_kit.reward_agent.call_scheduler import CallTurn

_CLOSE_SECONDS = 10.0
_MOST_LOSSES = 4  # An episode that kills its process would also kill every new process.
_EXCHANGE_S, _EXCHANGES_PER_S = 0.5, 200  # Fewer with many processes, as each costs the driver a call.
logger = logging.getLogger("reward_kit.integrations.ray")


class RolloutActor(Process):
    """The actor of a process that collects episodes. Its methods run concurrently on one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: Mapping[str, RLRolloutWorker] = {}
        self._groups: dict[str, GroupStart] = {}
        self._budget, self._traffic = ActorBudget(), ProviderSession()
        self._logs, self._notices = CollectedLogs(), list[str]()
        self._gave_up: str | None = None

    async def prepare(self, driver: str, packed: bytes) -> str:
        """Create the workers of a pickled `Setup`, and return the name of the machine."""
        setup: Setup = unpickle_setup(driver, packed)
        self._logs.begin()
        os.environ.update(setup.env)
        self._budget = ActorBudget(setup.limits)
        self._traffic.notice, self._traffic.gave_up = self._notices.append, self._give_up
        self._traffic.outage_time_s = setup.limits.outage_time_s
        allow_threads(setup.max_concurrency)
        await self.open(ServerPool())
        self._workers = self.context.run(setup.build, self._traffic, self._budget)
        return os.uname().nodename

    def _give_up(self, reason: str) -> None:
        self._gave_up = reason

    async def collect(self, assignment: Assignment, rest: RunUsage) -> Reply:
        self._budget.hear(rest)
        record = await CallTurn(self._collect(assignment), self.context)
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
        """Close the initial state of a group whose episodes are finished."""
        if (group := self._groups.pop(group_id, None)) is not None:
            await CallTurn(group.close(), self.context)

    async def exchange(self, rest: RunUsage) -> EpisodesUsage:
        """Update the state of the run, and return the usage of this process."""
        self._budget.hear(rest)
        return self._budget.own

    async def publish(self, version: int, weights: Any) -> None:
        """Call `publish(version, weights)` on every policy. From then on, the policies use these weights."""
        for worker in self._workers.values():
            policy: Any = worker.agent_policy
            await CallTurn(policy.publish(version, weights), self.context)

    async def close(self) -> None:
        """Close all initial states, policies and servers."""
        for group_id in list(self._groups):
            await self.close_group(group_id)
        parties = (party for worker in self._workers.values() for party in (worker.agent_policy, worker.user))
        for party in {id(party): party for party in parties if party is not None}.values():
            await CallTurn(_close(party), self.context)
        self._traffic.close()
        await super().close()


async def _close(party: Any) -> None:
    try:
        with boundary(PolicyError, f"close of {type(party).__name__}"), anyio.fail_after(_CLOSE_SECONDS):
            await party.close()
    except RewardKitError as error:
        logger.warning("%s", error)


class RolloutPool:
    """A pool of rollout workers on the cluster to which this program is connected. See `open`.

    The usage that the processes report is charged to `budget`, and their notices about endpoints are passed to
    `traffic`.
    """

    def __init__(
        self,
        definition: TaskDefinitionModel,
        setup: Setup,
        options: RayOptions,
        *,
        size: int,
        budget: RunBudget | None = None,
        traffic: ProviderSession | None = None,
    ) -> None:
        self.definition, self.budget, self.traffic = definition, budget or RunBudget(), traffic or ProviderSession()
        self._setup, self._options = setup, options
        self._pool = ActorPool("rollout worker", self._start, size, options.worker_wait_s, self.traffic.tell)
        self._booked: dict[Member, EpisodesUsage] = {}
        self._published: tuple[int, Any] | None = None
        self._last_tries = anyio.Lock()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Start the processes, and stop them at the end of the block."""
        limits = self.budget.limits
        async with self._pool.open(), anyio.create_task_group() as tasks:
            if any(limit is not None for limit in (limits.cost, limits.total_tokens, limits.steps)):
                tasks.start_soon(self._exchange)
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()

    def worker(self, label: str) -> RayRolloutWorker:
        """Return the worker with this label. It collects episodes in any process on the cluster."""
        return RayRolloutWorker(self, label)

    async def publish(self, version: int, weights: Any) -> None:
        """Call `publish(version, weights)` on all policies. From then on, the policies use these weights.

        The weights are put into the object store once, and each machine fetches them once.

        Args:
            version: the version of the weights.
            weights: the weights in the form that the policies accept, such as a `state_dict` on the CPU.
        """
        reference = ray_module().put(weights)
        self._published = (version, reference)  # Processes that start later also get the weights.
        async with anyio.create_task_group() as tasks:
            for member in self._pool.members:
                tasks.start_soon(_ask, member, lambda handle: handle.publish.remote(version, reference))

    async def _start(self) -> Any:
        # Allow the call that ends with the actor, and short calls, in addition to the episodes.
        calls = self._setup.max_concurrency + 8
        resources = {"num_cpus": self._options.cpus, "num_gpus": self._options.gpus, "max_concurrency": calls}
        handle = await start_actor(RolloutActor, self._setup, resources)
        sent = None
        while (newest := self._published) is not None and newest is not sent:  # Repeat until no newer weights arrive.
            await handle.publish.remote(*newest)
            sent = newest
        return handle

    async def collect(self, group: RayGroup, rollout_index: int) -> SingleAgentEpisode:
        """Collect one episode. If its process is lost, try again.

        Raises:
            ClusterError: If no process is left and no new process started in time.
        """
        for losses in range(_MOST_LOSSES):
            # It is unknown which episode killed a process. The last attempt of each suspected episode therefore runs
            # alone.
            async with self._last_tries if losses == _MOST_LOSSES - 1 else nullcontext():
                if (reply := await self._try_to_collect(group, rollout_index)) is not None:
                    return group.received(reply, losses)
        return group.given_up(rollout_index)

    async def _try_to_collect(self, group: RayGroup, rollout_index: int) -> Reply | None:
        """Return the reply of a process, or None if the process was lost."""
        async with group.lock:
            if group.member is None or group.member.is_lost or not group.keeps_start:
                group.member = await self._pool.place()
            member = group.member
        member.load += 1
        try:
            asked = member.handle.collect.remote(group.assignment(rollout_index), self._rest(member))
            reply: Reply = await await_result(member, asked)
        except ray_module().exceptions.RayError as error:
            if not is_actor_lost(error):
                raise ClusterError(f"episode {group.id}-{rollout_index}: {error}") from error
            member.lose()
            return None
        finally:
            member.load -= 1
        self._book(member, reply.spent)
        for level, name, text in reply.logs:
            logging.getLogger(name).log(level, "worker %d: %s", member.number, text)
        for notice in reply.notices:
            self.traffic.tell(f"worker {member.number}: {notice}")
        if reply.gave_up is not None:
            self.traffic.give_up(reply.gave_up)
            await anyio.lowlevel.checkpoint()  # If the run ends here, the episode does not count.
        return reply

    async def close_group(self, group: RayGroup) -> None:
        """Release the initial state of a group after its last episode. The method does not wait for the release."""
        member, group.member = group.member, None
        if group.keeps_start and member is not None and not member.is_lost:
            member.handle.close_group.remote(group.id)

    def _book(self, member: Member, spent: EpisodesUsage) -> None:
        news = spent.since(self._booked.get(member, EpisodesUsage()))
        if news.steps > 0 or news.tokens > 0:  # Responses may arrive out of order.
            self._booked[member] = spent
            self.budget.spend(ActionUsage(news.tokens, news.cost), news.steps)

    def _rest(self, member: Member) -> RunUsage:
        """Return the usage of the run outside this process."""
        total = EpisodesUsage(self.budget.tokens, self.budget.cost, self.budget.steps)
        return RunUsage(total.since(self._booked.get(member, EpisodesUsage())), self.budget.seconds)

    async def _exchange(self) -> None:
        """Regularly send each process the other processes' usage.

        As a result, all processes stop soon after a limit is reached.
        """

        async def exchange_with(member: Member) -> None:
            spent = await _ask(member, lambda handle: handle.exchange.remote(self._rest(member)))
            if spent is not None:
                self._book(member, spent)

        while True:
            await anyio.sleep(max(_EXCHANGE_S, self._pool.size / _EXCHANGES_PER_S))
            async with anyio.create_task_group() as tasks:
                for member in self._pool.members:
                    tasks.start_soon(exchange_with, member)


async def _ask(member: Member, call: Callable[[Any], Any]) -> Any:
    """Return the result of a call, or None if its process was lost."""
    try:
        return await await_result(member, call(member.handle))
    except ray_module().exceptions.RayError as error:
        if not is_actor_lost(error):
            raise
        member.lose()
    return None


class RayRolloutWorker:
    """A worker that collects episodes in any process on the cluster. It has the interface of `RLRolloutWorker`.

    Args:
        pool: the pool of processes.
        label: the label of the policy.
    """

    def __init__(self, pool: RolloutPool, label: str) -> None:
        self._pool, self.policy_label = pool, label

    def group(self, sample: Sample, run_seed: int = 0) -> RayGroup:
        """Return the initial state that the episodes of `sample` share."""
        return RayGroup(self._pool, sample, run_seed, self.policy_label)

    async def collect_episode(self, group: RayGroup, rollout_index: int = 0) -> SingleAgentEpisode:
        """Collect one episode. Errors are recorded in the episode.

        Raises:
            ClusterError: If no process is left and no new process started in time.
        """
        return await self._pool.collect(group, rollout_index)


@dataclass(eq=False)
class RayGroup:
    """The initial state of a group in a process on the cluster. It has the interface of `GroupStart`."""

    pool: RolloutPool
    sample: Sample
    run_seed: int
    label: str
    worker: str = ""
    member: Member | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    _key: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        definition = self.pool.definition
        self._start = GroupStart(definition, self.sample, self.run_seed, policy_label=self.label)
        self.id = self._start.group_id
        self.keeps_start = False
        if definition.resource_type is not None:  # The episodes of the group begin in forks of one resource.
            kind = resource_class(definition.resource_type)
            base, sample = definition.base_resource_config, self.sample
            config = merged_config(kind, base, sample.resource_config, sample.location)
            self.keeps_start = kind.fork_kind_for(config) != "none"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the initial state. Episodes that are still running are not affected."""
        await self.pool.close_group(self)

    def assignment(self, rollout_index: int) -> Assignment:
        """Return the request to collect one of the group's episodes."""
        worker = self.worker or self.label
        return Assignment(worker, self.sample, self.run_seed, self.id, rollout_index, self.keeps_start)

    def received(self, reply: Reply, losses: int) -> SingleAgentEpisode:
        """Return the episode in a reply.

        If the group moved to a different process, its initial state was created again. The state counts as verified if
        its state key has not changed.
        """
        episode = episode_from_record(reply.record)
        facts = get_facts(episode)
        facts["attempt"] = losses
        if (start := facts.get("start")) and start["verified"]:
            self._key = self._key or start["state_key"]
            start["verified"] = start["state_key"] == self._key
        return episode

    def given_up(self, rollout_index: int) -> SingleAgentEpisode:
        """Return the failed episode that is recorded if every process that tried to collect the episode was lost."""
        start = self._start.identity(rollout_index)
        live = LiveEpisode(start, SingleAgentEpisode(start.rollout_id))
        error = ClusterError(f"its process was lost {_MOST_LOSSES} times; the call may be the cause")
        live.stop(StopReason.ERROR, Failure.from_exception(error))
        live.record_facts(self.label)
        get_facts(live.episode)["attempt"] = _MOST_LOSSES - 1
        return live.episode
