"""What all episodes of a run may use together: tokens, US dollars, steps, seconds.

Every worker of a run spends from one `RunBudget`. Once it is used up no episode takes another step: those in flight
stop with `StopReason.RUN_LIMIT`, and run again when the run is resumed with a larger budget.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from reward_kit.task_parts import RunLimitsModel


class Used(NamedTuple):
    """What one action used: tokens read and written, and US dollars, None where nobody knows the price."""

    tokens: int = 0
    cost: float | None = None


class Exhausted(NamedTuple):
    """A bound that is reached: its key among the run's limits, and how far, in words."""

    key: str
    text: str


class RunBudget:
    """The account of one run.

    Args:
        limits: its bounds; by default there are none.
        seconds: how long earlier processes worked on the same run.
    """

    def __init__(self, limits: RunLimitsModel | None = None, *, seconds: float = 0.0) -> None:
        self.limits = limits or RunLimitsModel()
        self.tokens, self.cost, self.steps = 0, 0.0, 0
        self._began = time.monotonic() - seconds

    def spend(self, used: Used, steps: int = 0) -> None:
        """Book what an action used."""
        self.tokens += used.tokens
        self.cost += used.cost or 0.0
        self.steps += steps

    @property
    def seconds(self) -> float:
        """How long the run has been worked on."""
        return time.monotonic() - self._began

    def exhausted(self) -> Exhausted | None:
        """Which bound is reached; None while there is something left."""
        limits = self.limits
        if limits.cost is not None and self.cost >= limits.cost:
            return Exhausted("cost", f"{self.cost:.4f} of {limits.cost:g} US dollars")
        if limits.total_tokens is not None and self.tokens >= limits.total_tokens:
            return Exhausted("total_tokens", f"{self.tokens:,} of {limits.total_tokens:,} tokens")
        if limits.steps is not None and self.steps >= limits.steps:
            return Exhausted("steps", f"{self.steps:,} of {limits.steps:,} steps")
        seconds = self.seconds
        if limits.wall_time_s is not None and seconds >= limits.wall_time_s:
            return Exhausted("wall_time_s", f"{seconds:.0f} of {limits.wall_time_s:g} s")
        return None
