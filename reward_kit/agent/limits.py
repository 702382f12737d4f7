"""The limits of a run (`RunBudget`) and the clock of an episode (`EpisodeClock`).

All workers of a run share one `RunBudget`. Once it is exhausted, no episode takes another step. Running episodes stop
with `StopReason.RUN_LIMIT`, and run again if the run is resumed with a larger budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import anyio

from reward_kit.task_parts import RunLimitsModel


class ActionUsage(NamedTuple):
    """The tokens read and written for one action, and the cost of the action in US dollars.

    If the price is unknown, the cost is `None`.
    """

    tokens: int = 0
    cost: float | None = None


class ReachedLimit(NamedTuple):
    """A limit that was reached: its key in the run's limits, and a description."""

    key: str
    text: str


class RunBudget:
    """The limits of one run and the usage that counts towards them.

    Args:
        limits: the limits of the run. By default, no limits apply.
        seconds: the time that earlier processes have already spent on the same run.
    """

    def __init__(self, limits: RunLimitsModel | None = None, *, seconds: float = 0.0) -> None:
        self.limits = limits or RunLimitsModel()
        self.tokens, self.cost, self.steps = 0, 0.0, 0
        self._began = time.monotonic() - seconds

    def spend(self, used: ActionUsage, steps: int = 0) -> None:
        """Add the usage of an action and the number of steps that it took."""
        self.tokens += used.tokens
        self.cost += used.cost or 0.0
        self.steps += steps

    @property
    def seconds(self) -> float:
        """The number of seconds spent on the run, including the time that earlier processes spent."""
        return time.monotonic() - self._began

    def exhausted(self) -> ReachedLimit | None:
        """Return the limit that was reached, or None if no limit was reached."""
        limits = self.limits
        if limits.cost is not None and self.cost >= limits.cost:
            return ReachedLimit("cost", f"{self.cost:.4f} of {limits.cost:g} US dollars")
        if limits.total_tokens is not None and self.tokens >= limits.total_tokens:
            return ReachedLimit("total_tokens", f"{self.tokens:,} of {limits.total_tokens:,} tokens")
        if limits.steps is not None and self.steps >= limits.steps:
            return ReachedLimit("steps", f"{self.steps:,} of {limits.steps:,} steps")
        if limits.wall_time_s is not None and (seconds := self.seconds) >= limits.wall_time_s:
            return ReachedLimit("wall_time_s", f"{seconds:.0f} of {limits.wall_time_s:g} s")
        return None


class EpisodeClock:
    """A clock that measures the time of an episode, excluding the time that its requests spend waiting in a queue.

    If that time counted, an outage that pauses the run would use up the time limit of every running episode.

    Args:
        limit_s: the time limit of the episode in seconds. If None, no limit applies.
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
        """The number of seconds that have elapsed so far, excluding pauses."""
        now = time.perf_counter() if self._paused_since is None else self._paused_since
        return now - self._began - self.waited_s

    @property
    def left_s(self) -> float | None:
        """The number of seconds that remain (at least 0), or None if no limit applies."""
        return None if self._limit_s is None else max(self._limit_s - self.seconds, 0.0)

    @contextmanager
    def deadline(self, seconds: float | None) -> Iterator[anyio.CancelScope | None]:
        """Cancel the block after `seconds` on this clock.

        If `seconds` is `None`, the block has no time limit. In this case, no cancel scope is created, because creating
        one takes time.
        """
        if seconds is None:
            yield None
            return
        with anyio.move_on_after(seconds) as scope:
            self._scopes.append(scope)
            try:
                yield scope
            finally:
                self._scopes.remove(scope)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock and all its deadlines."""
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
