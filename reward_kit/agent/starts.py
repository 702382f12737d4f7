"""`GroupStart`: the start that the episodes of a group share, and guarded calls of an environment.

A `GroupStart` sets the sample's resource up once, resets it, records the key of that state, and hands each episode a
private fork whose key must be the same. A resource that cannot be forked gets fresh starts instead, recorded as
unverified.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import anyio

from reward_kit.agent.samples import Sample, Seeds, derive_seeds, make_group_id, make_rollout_id
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.config import merged_config, resource_class
from reward_kit.errors import ConfigError, EnvironmentFailure, RewardKitError, boundary
from reward_kit.models import TaskDefinitionModel

CLOSE_SECONDS = 60.0
"""Time limit for closing a resource, a session, or a policy."""
logger = logging.getLogger("reward_kit.agent")


class environment_call:
    """A call of a resource: errors become an `EnvironmentFailure`, and after `seconds` it is cancelled.

    No cancel scope is made for a resource that never waits, since one costs as much as a step of a fast environment.
    `limit` is the user's name for `seconds`.
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
            late = TimeoutError(f"no answer within {self._seconds} s ({self._limit})")
            self._boundary.__exit__(TimeoutError, late, None)
        elif not swallowed:
            self._boundary.__exit__(kind, error, trace)
        return swallowed


async def close_quietly(resource: ForkableResource) -> None:
    """Close a resource, also during cancellation. A failure is logged and does not affect the episode."""
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


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """An episode's identity, seeds and private resource, which the episode owns; None if the task has tools only."""

    rollout_id: str
    group_id: str
    rollout_index: int
    sample: Sample
    seeds: Seeds
    resource: ForkableResource | None = None
    fork: str | None = None  # "native", "replay" or "none" (a fresh start)
    state_key: str | None = None
    verified: bool | None = None  # the start equals the group's


class GroupStart:
    """The start of a group. Use it as an async context manager; `episode` may be called concurrently.

    Args:
        task: defines the resource.
        sample: of the group.
        run_seed: of the run.
        policy_label: distinguishes the groups of several policies on one sample.
        environment: a resource that is already set up, used instead of the task's `resource_type`; it is reset and
            forked, but not closed.
        environment_lock: held while `environment` is used, by all groups that share it.
    """

    def __init__(
        self,
        task: TaskDefinitionModel,
        sample: Sample,
        run_seed: int,
        *,
        policy_label: str = "",
        environment: ForkableResource | None = None,
        environment_lock: anyio.Lock | None = None,
    ) -> None:
        self.group_id = make_group_id(run_seed, sample.id, policy_label)
        self._task, self._sample, self._run_seed, self._label = task, sample, run_seed, policy_label
        self._environment, self._environment_lock = environment, environment_lock or anyio.Lock()
        self._base: ForkableResource | None = None
        self._key: str | None = None
        self._lock = anyio.Lock()

    async def __aenter__(self) -> GroupStart:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the group's own resource; each episode closes its fork."""
        base, self._base = self._base, None
        if base is not None:
            await close_quietly(base)

    def identity(self, rollout_index: int) -> EpisodeStart:
        """Return the start of the `rollout_index`-th episode before its resource is made."""
        seeds = derive_seeds(self._run_seed, self._sample.id, rollout_index, self._task.noise, self._label)
        rollout_id = make_rollout_id(self.group_id, rollout_index)
        return EpisodeStart(rollout_id, self.group_id, rollout_index, self._sample, seeds)

    async def episode(self, rollout_index: int) -> EpisodeStart:
        """Return the start of the `rollout_index`-th episode. The caller closes its resource."""
        start, given, task, sample = self.identity(rollout_index), self._environment, self._task, self._sample
        if given is None and task.resource_type is None:
            return start
        kind = type(given) if given is not None else resource_class(task.resource_type or "")
        config = merged_config(kind, task.base_resource_config, sample.resource_config, sample.location)
        fork_kind = kind.fork_kind_for(config)
        if fork_kind == "none":
            if given is not None:
                raise ConfigError(f"environment=: {kind.__name__} cannot be forked; name it as resource_type")
            resource = await self._fresh(kind, config, start.seeds)
        else:
            # One fork at a time: resources need not support concurrent forks.
            async with self._lock:
                if self._base is None:
                    base = await (
                        self._fresh(kind, config, start.seeds) if given is None else self._fork_environment(given)
                    )
                    async with _closing_on_error(base):
                        self._key = await self._state_key(base)
                    self._base = base
                with self._call(f"fork of {kind.__name__}"):
                    resource = await self._base.fork()
        async with _closing_on_error(resource):
            key = await self._state_key(resource)
            if self._key is not None and key != self._key:
                raise EnvironmentFailure(
                    f"{type(resource).__name__}: a fork has state key {key}, its origin {self._key}; fork() does not "
                    "copy the state"
                )
            with self._call(f"reseed_noise of {type(resource).__name__}"):
                await resource.reseed_noise(start.seeds.noise)
        return replace(start, resource=resource, fork=fork_kind, state_key=key, verified=fork_kind != "none")

    async def _fork_environment(self, environment: ForkableResource) -> ForkableResource:
        """Return a fork of the shared environment, since other groups reset it."""
        name = type(environment).__name__
        async with self._environment_lock:
            with self._call(f"reset of {name}"):
                await environment.reset(self.identity(0).seeds.environment)
            with self._call(f"fork of {name}"):
                return await environment.fork()

    async def _fresh(self, kind: type[ForkableResource], config: dict[str, object], seeds: Seeds) -> ForkableResource:
        with boundary(EnvironmentFailure, f"making a {kind.__name__}"):
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
