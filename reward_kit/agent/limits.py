"""`RunBudget` and `EpisodeClock`: what a run may use, and the time of an episode.

All workers of a run spend from one `RunBudget`. Once it is used up no episode takes another step: those in flight stop
with `StopReason.RUN_LIMIT`, and run again when the run is resumed with a larger budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

import anyio

from reward_kit.task_parts import RunLimitsModel


class Used(NamedTuple):
    """The usage of one action: tokens read and written, and US dollars, None if the price is unknown."""

    tokens: int = 0
    cost: float | None = None


class Exhausted(NamedTuple):
    """A limit that is reached: its key among the run's limits, and a description."""

    key: str
    text: str


class RunBudget:
    """The account of one run.

    Args:
        limits: unlimited by default.
        seconds: time that earlier processes worked on the same run.
    """

    def __init__(self, limits: RunLimitsModel | None = None, *, seconds: float = 0.0) -> None:
        self.limits = limits or RunLimitsModel()
        self.tokens, self.cost, self.steps = 0, 0.0, 0
        self._began = time.monotonic() - seconds

    def spend(self, used: Used, steps: int = 0) -> None:
        """Add the usage of an action."""
        self.tokens += used.tokens
        self.cost += used.cost or 0.0
        self.steps += steps

    @property
    def seconds(self) -> float:
        """Time worked on the run."""
        return time.monotonic() - self._began

    def exhausted(self) -> Exhausted | None:
        """Return the limit that is reached, None if there is none."""
        limits = self.limits
        if limits.cost is not None and self.cost >= limits.cost:
            return Exhausted("cost", f"{self.cost:.4f} of {limits.cost:g} US dollars")
        if limits.total_tokens is not None and self.tokens >= limits.total_tokens:
            return Exhausted("total_tokens", f"{self.tokens:,} of {limits.total_tokens:,} tokens")
        if limits.steps is not None and self.steps >= limits.steps:
            return Exhausted("steps", f"{self.steps:,} of {limits.steps:,} steps")
        if limits.wall_time_s is not None and (seconds := self.seconds) >= limits.wall_time_s:
            return Exhausted("wall_time_s", f"{seconds:.0f} of {limits.wall_time_s:g} s")
        return None


class _Deadline:
    """A cancel scope that its clock can pause."""

    __slots__ = ("_scope", "_scopes")

    def __init__(self, scope: anyio.CancelScope, scopes: list[anyio.CancelScope]) -> None:
        self._scope, self._scopes = scope, scopes

    def __enter__(self) -> anyio.CancelScope:
        self._scopes.append(self._scope)
        return self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._scopes.remove(self._scope)
        return bool(self._scope.__exit__(kind, error, trace))


class _NoDeadline:
    """Replaces a cancel scope if there is no limit, since a scope costs every step some microseconds."""

    __slots__ = ()
    cancelled_caught: ClassVar[bool] = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> bool:
        return self.cancelled_caught


_NO_DEADLINE = _NoDeadline()


class EpisodeClock:
    """Measures an episode's own time: it stands still while the episode waits for its turn at a model's endpoint.

    Otherwise an outage, which pauses the run, would use up the time of every episode in flight.

    Args:
        limit_s: seconds that the episode has; None for no limit.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._began = time.perf_counter()
        self._paused_since: float | None = None
        self._depth = 0
        self._scopes: list[anyio.CancelScope] = []
        self.waited_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the episode has worked."""
        now = time.perf_counter() if self._paused_since is None else self._paused_since
        return now - self._began - self.waited_s

    @property
    def left_s(self) -> float | None:
        """The rest of the limit, at least 0; None without one."""
        return None if self._limit_s is None else max(self._limit_s - self.seconds, 0.0)

    def deadline(self, seconds: float | None) -> _Deadline | _NoDeadline:
        """Return `anyio.move_on_after` on this clock."""
        return _NO_DEADLINE if seconds is None else _Deadline(anyio.move_on_after(seconds), self._scopes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock and every deadline on it."""
        self._depth += 1
        if self._depth == 1:
            self._paused_since = time.perf_counter()
            left = [scope.deadline - anyio.current_time() for scope in self._scopes]
            for scope in self._scopes:
                scope.deadline = math.inf
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._paused_since is not None:
                self.waited_s += time.perf_counter() - self._paused_since
                self._paused_since = None
                for scope, seconds in zip(self._scopes, left, strict=True):
                    scope.deadline = anyio.current_time() + seconds
