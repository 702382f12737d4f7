"""How a world is called: what escapes is classified, it answers in time or is given up, and it is closed in the end."""

from __future__ import annotations

import logging
from types import TracebackType

import anyio

from reward_kit.environments.base import ForkableResource
from reward_kit.errors import EnvironmentFailure, RewardKitError, boundary

CLOSE_SECONDS = 60.0
"""For the close of a world, of a session, or of a policy."""

logger = logging.getLogger("reward_kit.agent")


class environment_call:
    """A call of a resource: what escapes is an `EnvironmentFailure`, and after `seconds` it is given up.

    A scope costs as much as a quick world's step, so there is none where there is no limit, or it could do nothing.

    Args:
        what: what is called, for messages.
        seconds: None for no limit.
        world: the resource, where it is known.
        limit: what the user calls `seconds`.
    """

    __slots__ = ("_boundary", "_limit", "_scope", "_seconds")

    def __init__(
        self,
        what: str,
        seconds: float | None,
        world: ForkableResource | None = None,
        limit: str = "limits.environment_time_s",
    ) -> None:
        self._boundary, self._limit = boundary(EnvironmentFailure, what), limit
        self._seconds = None if world is not None and world.never_waits else seconds
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


async def close_quietly(world: ForkableResource) -> None:
    """Close a world, also while its task is being cancelled. A failure is worth a line, not the episode."""
    try:
        with (
            boundary(EnvironmentFailure, f"close of {type(world).__name__}"),
            anyio.fail_after(CLOSE_SECONDS, shield=True),
        ):
            await world.close()
    except RewardKitError as error:
        logger.warning("%s", error)
