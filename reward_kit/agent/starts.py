"""`GroupStart`, the common start of all episodes in a group, and guarded calls to an environment.

A `GroupStart` sets up and resets the sample's resource once and records the state key. Each episode receives a private
fork, which must have the same state key. If the resource cannot be forked, each episode starts from a separate reset
instead, and its record says that the start was not verified.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import anyio

from reward_kit.agent.policy_interface import PastTurn
from reward_kit.agent.samples import Sample, Seeds, derive_seeds, make_group_id, make_rollout_id
from reward_kit.environments.base import ForkableResource, StateSnapshot, hash_key
from reward_kit.environments.config import merged_config, resource_class
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EnvironmentFailure, RewardKitError, boundary
from reward_kit.models import TaskDefinitionModel

CLOSE_SECONDS = 60.0
"""Time limit for closing a resource, a session, or a policy."""
logger = logging.getLogger("reward_kit.agent")


class environment_call:
    """A guarded call to a resource.

    An error becomes an `EnvironmentFailure`, and the call is cancelled after `seconds`.

    A resource that never waits gets no cancel scope, because creating a scope takes as long as a step of a fast
    environment. `limit` is the name of the setting that defines `seconds`.
    """

    __slots__ = ("_boundary", "_limit", "_scope", "_seconds")

    def __init__(
        self,
        what: str,
        seconds: float | None,
        resource: ForkableResource | None = None,
        limit: str = "limits.environment_time_s",
    ) -> None:
        self._boundary, self._limit = boundary(EnvironmentFailure, what), limit
        self._seconds = None if resource is not None and resource.never_waits else seconds
        self._scope: anyio.CancelScope | None = None

    def __enter__(self) -> None:
        if self._seconds is not None:
            self._scope = anyio.move_on_after(self._seconds)
            self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._scope is None:
            self._boundary.__exit__(kind, error, trace)
            return None
        swallowed = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            late = TimeoutError(f"no response within {self._seconds} s ({self._limit})")
            self._boundary.__exit__(TimeoutError, late, None)
        elif not swallowed:
            self._boundary.__exit__(kind, error, trace)
        return swallowed


async def close_quietly(resource: ForkableResource) -> None:
    """Close a resource, even during cancellation. A failure is only logged."""
    try:
        with (
            boundary(EnvironmentFailure, f"close of {type(resource).__name__}"),
            anyio.fail_after(CLOSE_SECONDS, shield=True),
        ):
            await resource.close()
    except RewardKitError as error:
        logger.warning("%s", error)


@asynccontextmanager
async def _closing_on_error(resource: ForkableResource) -> AsyncIterator[None]:
    async with AsyncExitStack() as on_error:
        on_error.push_async_callback(close_quietly, resource)
        yield
        on_error.pop_all()


@dataclass(slots=True)
class SharedEnvironment:
    """A resource that the caller sets up and closes. Episodes run in forks of its current state.

    If the resource cannot be forked, episodes run one at a time, and the resource is reset before each episode except
    the first.
    """

    resource: ForkableResource
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    was_used: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """The steps of a recorded episode with which a new episode begins.

    Attributes:
        episode: the recorded episode, cut off before the step from which the new episode continues.
        turns: the policy's turns in these steps.
        rollout_id: the id of the recorded episode.
        observation: the environment's first observation, or "".
        noise_seeds: the noise seeds, each with the step before which it takes effect.
    """

    episode: SingleAgentEpisode
    turns: tuple[PastTurn, ...]
    rollout_id: str
    observation: str
    noise_seeds: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """The identity of an episode, its seeds, and its private resource.

    If the task has only tools, the resource is `None`.
    """

    rollout_id: str
    group_id: str
    rollout_index: int
    sample: Sample
    seeds: Seeds
    resource: ForkableResource | None = None
    fork: str | None = None  # "native", "replay" or "none" (a fresh start)
    state_key: str | None = None
    verified: bool | None = None  # whether the start is the same as that of the group
    state: StateSnapshot | None = None  # the initial state, if the resource sets `has_cheap_state`
    past: Past | None = None  # the steps that a branch of a recorded episode begins with


class GroupStart:
    """The start of a group. Use it as an async context manager. `episode` may be called concurrently.

    Args:
        task: the task that defines the resource.
        sample: the sample of the group.
        run_seed: the seed of the run.
        policy_label: the name of the policy. It distinguishes the groups that different policies have for the same
            sample.
        environment: a resource to use instead of the task's `resource_type`.
        kind: the class of the resource. It overrides the task's `resource_type`.
        first_keys: the state key of the first episode, keyed by group id. An episode that starts in a different state
            gets a different group id, because it cannot be compared with the other episodes.
    """

    def __init__(
        self,
        task: TaskDefinitionModel,
        sample: Sample,
        run_seed: int,
        *,
        policy_label: str = "",
        environment: SharedEnvironment | None = None,
        kind: type[ForkableResource] | None = None,
        first_keys: dict[str, str] | None = None,
    ) -> None:
        self.group_id = make_group_id(run_seed, sample.id, policy_label)
        self._task, self._sample, self._run_seed, self._label = task, sample, run_seed, policy_label
        self._shared, self._kind, self._first_keys = environment, kind, first_keys
        self._base: ForkableResource | None = None
        self._key: str | None = None
        self._state: StateSnapshot | None = None
        self._lock = anyio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the group's resource. The fork of each episode is closed separately."""
        base, self._base = self._base, None
        if base is not None:
            await close_quietly(base)

    def identity(self, rollout_index: int) -> EpisodeStart:
        """Return the start of the episode with this index, without a resource."""
        seeds = derive_seeds(self._run_seed, self._sample.id, rollout_index, self._task.noise, self._label)
        rollout_id = make_rollout_id(self.group_id, rollout_index)
        return EpisodeStart(rollout_id, self.group_id, rollout_index, self._sample, seeds)

    async def episode(self, rollout_index: int) -> EpisodeStart:
        """Return the start of the episode with this index. The caller must pass it to `finish` at the end."""
        start, shared, task, sample = self.identity(rollout_index), self._shared, self._task, self._sample
        if shared is None and self._kind is None and task.resource_type is None:
            return start
        kind = type(shared.resource) if shared is not None else self._kind or resource_class(task.resource_type or "")
        config = merged_config(kind, task.base_resource_config, sample.resource_config, sample.location)
        fork_kind = kind.fork_kind_for(config)
        if fork_kind != "none":
            # Fork one at a time, since resources need not support concurrent forks.
            async with self._lock:
                if self._base is None:
                    base = await self._make_base(kind, config, start.seeds)
                    async with _closing_on_error(base):
                        if kind.has_cheap_state and self._state is None:
                            with self._call(f"final_state of {kind.__name__} at the start"):
                                self._state = await base.final_state()
                        await self._advance(base, start.seeds)
                        self._key = await self._state_key(base)
                    self._base = base
                with self._call(f"fork of {kind.__name__}"):
                    resource = await self._base.fork()
        elif shared is None:
            resource = await self._fresh(kind, config, start.seeds)
        else:
            resource = await self._take_turn(shared, start.seeds)
        start = replace(start, resource=resource, fork=fork_kind, verified=fork_kind != "none", state=self._state)
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(self.finish, start)
            if fork_kind == "none":
                await self._advance(resource, start.seeds)
            key = await self._state_key(resource)
            if self._key is not None and key != self._key:
                raise EnvironmentFailure(
                    f"{type(resource).__name__}: the state key of a fork is {key}, but the original's is "
                    f"{self._key}; fork() does not copy the state"
                )
            await self._reseed(resource, start.seeds.noise)
            on_error.pop_all()
        return replace(start, group_id=self._group_of(key), state_key=key)

    async def finish(self, start: EpisodeStart) -> None:
        """Close the resource of an episode or, if it is shared, let the next episode use it."""
        shared = self._shared
        if shared is not None and start.resource is shared.resource:
            shared.lock.release()
        elif start.resource is not None:
            await close_quietly(start.resource)

    def _group_of(self, key: str) -> str:
        """Return the group id of an episode that starts in the state with this key."""
        first = key if self._first_keys is None else self._first_keys.setdefault(self.group_id, key)
        if key == first:
            return self.group_id
        logger.warning(
            "group %s: this episode starts in state %s, but the first episode started in %s, so a new group begins; %s",
            self.group_id,
            key,
            first,
            "run_group(n) starts all episodes of a group in the same state"
            if self._shared is None
            else "the state of the resource passed as environment= has changed in the meantime",
        )
        return f"{self.group_id}-{hash_key(key)[:8]}"

    async def _make_base(
        self, kind: type[ForkableResource], config: dict[str, object], seeds: Seeds
    ) -> ForkableResource:
        """Return a resource in the state at the start of an episode. The resource is forked after `_advance`."""
        if self._shared is None:
            return await self._fresh(kind, config, seeds)
        return await self._fork_shared(self._shared)

    async def _advance(self, resource: ForkableResource, seeds: Seeds) -> None:
        """Move a resource from the start of an episode to the start of this group.

        In this class, the two are identical.
        """
        return

    async def _reseed(self, resource: ForkableResource, seed: int) -> None:
        with self._call(f"reseed_noise of {type(resource).__name__}"):
            await resource.reseed_noise(seed)

    async def _fork_shared(self, shared: SharedEnvironment) -> ForkableResource:
        async with shared.lock:
            with self._call(f"fork of {type(shared.resource).__name__}"):
                return await shared.resource.fork()

    async def _take_turn(self, shared: SharedEnvironment, seeds: Seeds) -> ForkableResource:
        """Wait until the shared resource is free, and return it. The caller holds it until `finish`."""
        await shared.lock.acquire()
        try:
            if shared.was_used:
                with self._call(f"reset of {type(shared.resource).__name__}"):
                    await shared.resource.reset(seeds.environment)
            shared.was_used = True
        except BaseException:
            shared.lock.release()
            raise
        return shared.resource

    async def _fresh(self, kind: type[ForkableResource], config: dict[str, object], seeds: Seeds) -> ForkableResource:
        with boundary(EnvironmentFailure, f"creating a {kind.__name__}"):
            resource = kind()
        async with _closing_on_error(resource):
            with self._call(f"setup of {kind.__name__}"):
                await resource.setup(config)
            with self._call(f"reset of {kind.__name__}"):
                await resource.reset(seeds.environment)
        return resource

    async def _state_key(self, resource: ForkableResource) -> str:
        with self._call(f"state_key of {type(resource).__name__}"):
            return await resource.state_key()

    def _call(self, what: str) -> environment_call:
        return environment_call(what, self._task.limits.environment_time_s)
