"""Calls of actors: made, awaited, cancelled with their caller, and what their failures mean."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import anyio

from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.integrations.ray.actor_pool import Member
from reward_kit.integrations.ray.cluster import ray_module


async def actor_started(kind: type, setup: Any, resources: Mapping[str, Any]) -> Any:
    """A new actor that is ready to work; its handle.

    Args:
        kind: its class, with `prepare(version, packed)`.
        setup: what it is told, secrets among it. As an argument of a call it goes straight to the process; what goes
            into an actor's constructor is kept by the cluster.
        resources: what it reserves, as Ray's `options` takes it.

    Raises:
        ConfigError: it cannot work there.
        RayError: its process was lost before it was ready.
    """
    ray = ray_module()
    handle = ray.remote(kind).options(max_restarts=0, max_task_retries=0, **resources).remote()
    try:
        await handle.prepare.remote(version("reward-kit"), ray.cloudpickle.dumps(setup))
    except BaseException as error:
        ray.kill(handle)
        if isinstance(error, ray.exceptions.RayTaskError):
            raise refusal_of(error) from error
        raise
    return handle


def refusal_of(error: Any) -> ConfigError:
    """Why an actor cannot work, as it said itself."""
    cause = error.cause
    told = str(cause) if isinstance(cause, RewardKitError) else f"{type(cause).__name__}: {cause}"
    return ConfigError(f"a worker cannot be made: {told}")


async def answer_of(member: Member, reference: Any) -> Any:
    """What a call returns. Where the caller is cancelled, so is the call.

    Raises:
        RayError: the call failed; see `is_loss`.
    """
    try:
        return await reference
    except anyio.get_cancelled_exc_class():
        if not member.is_lost:
            ray_module().cancel(reference)
        raise


def is_loss(error: Exception) -> bool:
    """Whether a call failed because its process or the machine under it is gone, or its answer was lost on the way."""
    return not isinstance(error, ray_module().exceptions.RayTaskError)
