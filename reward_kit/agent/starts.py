"""The start that the episodes of a group share.

A `GroupStart` sets the sample's world up once, resets it, records the key of that state, and hands each episode a
private fork of it whose key must be the same. A resource that cannot be forked gets fresh starts instead, recorded as
unverified.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import anyio

from reward_kit.agent.samples import Sample, Seeds, derive_seeds, make_group_id, make_rollout_id
from reward_kit.agent.world_calls import close_quietly, environment_call
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.config import merged_config
from reward_kit.environments.registry import resource_class
from reward_kit.errors import ConfigError, EnvironmentFailure, boundary
from reward_kit.models import TaskDefinitionModel


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """One episode's identity, seeds and private world.

    Attributes:
        rollout_id: unique in a run.
        group_id: shared by the episodes of one start.
        rollout_index: the position in the group, from 0.
        sample: what the episode is about.
        seeds: everything random derives from them.
        world: the live resource, owned by the episode; None where the task has tools only.
        fork: how the world came about: "native", "replay" or "none" (a fresh start).
        state_key: the key of the start, None without a resource.
        verified: the start is proved to be the group's; None without a resource.
    """

    rollout_id: str
    group_id: str
    rollout_index: int
    sample: Sample
    seeds: Seeds
    world: ForkableResource | None = None
    fork: str | None = None
    state_key: str | None = None
    verified: bool | None = None


class GroupStart:
    """The one start of a group. Use it as an async context manager; `episode` may be called concurrently.

    Args:
        task: what is built.
        sample: the group's.
        run_seed: the run's seed.
        policy_label: tells apart the groups of several policies on one sample.
        environment: a world that is set up already, used in place of the task's `resource_type`; it is reset and
            forked, and stays its owner's.
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
        self._given, self._given_lock = environment, environment_lock or anyio.Lock()
        self._base: ForkableResource | None = None
        self._key: str | None = None
        self._lock = anyio.Lock()

    async def __aenter__(self) -> GroupStart:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def episode(self, rollout_index: int) -> EpisodeStart:
        """The start of the `rollout_index`-th episode. The caller closes its world.

        Raises:
            ConfigError: the resource does not exist or refuses its configuration.
            EnvironmentFailure: the world cannot be made, or a fork is not in the state it was forked from.
        """
        start = self.identity(rollout_index)
        if self._given is None and self._task.resource_type is None:
            return start
        fork_kind = self._kind().fork_kind_for(self._config())
        if self._given is not None and fork_kind == "none":
            raise ConfigError(f"environment=: {_name(self._given)} cannot be forked; name it as resource_type")
        world = await (self._fresh_world(start.seeds) if fork_kind == "none" else self._fork(start.seeds))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(close_quietly, world)
            key = await self._checked_key(world)
            with self._call(f"reseed_noise of {_name(world)}"):
                await world.reseed_noise(start.seeds.noise)
            undo.pop_all()
        return replace(start, world=world, fork=fork_kind, state_key=key, verified=fork_kind != "none")

    def identity(self, rollout_index: int) -> EpisodeStart:
        """The start of the `rollout_index`-th episode before its world is made."""
        seeds = derive_seeds(self._run_seed, self._sample.id, rollout_index, self._task.noise, self._label)
        rollout_id = make_rollout_id(self.group_id, rollout_index)
        return EpisodeStart(rollout_id, self.group_id, rollout_index, self._sample, seeds)

    async def _fork(self, seeds: Seeds) -> ForkableResource:
        base = await self._opened(seeds)
        # One fork at a time: the contract does not ask a resource to be forked concurrently.
        async with self._lock:
            with self._call(f"fork of {_name(base)}"):
                return await base.fork()

    async def _checked_key(self, world: ForkableResource) -> str:
        """The key of the world's state; that of a fork must be its origin's."""
        key = await self._state_key(world)
        if self._key is not None and key != self._key:
            raise EnvironmentFailure(
                f"{_name(world)}: a fork has state key {key}, its origin {self._key}; fork() does not copy the state"
            )
        return key

    async def close(self) -> None:
        """Close the group's own world; the episodes' worlds are theirs."""
        base, self._base = self._base, None
        if base is not None:
            await close_quietly(base)

    async def _opened(self, seeds: Seeds) -> ForkableResource:
        async with self._lock:
            if self._base is None:
                given = self._given
                base = await (self._fresh_world(seeds) if given is None else self._fork_of_given(given, seeds))
                async with AsyncExitStack() as undo:
                    undo.push_async_callback(close_quietly, base)
                    self._key = await self._state_key(base)
                    undo.pop_all()
                self._base = base
            return self._base

    async def _fork_of_given(self, given: ForkableResource, seeds: Seeds) -> ForkableResource:
        """A world of the group's own, since other groups reset the given one to other starts."""
        async with self._given_lock:
            with self._call(f"reset of {_name(given)}"):
                await given.reset(seeds.environment)
            with self._call(f"fork of {_name(given)}"):
                return await given.fork()

    def _config(self) -> dict[str, Any]:
        sample = self._sample
        return merged_config(self._kind(), self._task.base_resource_config, sample.resource_config, sample.place)

    def _kind(self) -> type[ForkableResource]:
        return type(self._given) if self._given is not None else resource_class(self._task.resource_type or "")

    async def _fresh_world(self, seeds: Seeds) -> ForkableResource:
        kind = self._kind()
        with boundary(EnvironmentFailure, f"making a {kind.__name__}"):
            world = kind()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(close_quietly, world)
            with self._call(f"setup of {_name(world)}"):
                await world.setup(self._config())
            with self._call(f"reset of {_name(world)}"):
                await world.reset(seeds.environment)
            undo.pop_all()
        return world

    def _call(self, what: str) -> environment_call:
        return environment_call(what, self._task.limits.environment_time_s)

    async def _state_key(self, world: ForkableResource) -> str:
        with self._call(f"state_key of {_name(world)}"):
            return await world.state_key()


def _name(resource: ForkableResource) -> str:
    return type(resource).__name__
