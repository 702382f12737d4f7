"""The orders in which rollouts and updates can run."""

from __future__ import annotations

from enum import StrEnum


class Schedule(StrEnum):
    """The order of rollouts and updates."""

    SYNC = "sync"
    MINIBATCH = "minibatch"
    ONE_STEP_OFF = "one_step_off"
    BOTH = "both"

    @property
    def updates_early(self) -> bool:
        """True if a mini-batch is used for training as soon as enough groups are scored."""
        return self in (Schedule.MINIBATCH, Schedule.BOTH)

    @property
    def rolls_ahead(self) -> bool:
        """True if the next batch is rolled out, with weights one version older, before training on this batch."""
        return self in (Schedule.ONE_STEP_OFF, Schedule.BOTH)
