"""How a trainer works, as the overlap simulator is told: its schedule, its stage times and its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from reward_kit.errors import ConfigError

MOST_CALLS = 5_000_000
MOST_SECONDS = 1e8
"""Three years. With sums of such numbers the clock of a simulation still tells milliseconds, and cannot overflow."""


class Schedule(StrEnum):
    """When the machine rolls out, and what it waits for before it updates."""

    SYNC = "sync"
    MINIBATCH = "minibatch"
    ONE_STEP_OFF = "one_step_off"
    BOTH = "both"

    @property
    def updates_early(self) -> bool:
        """A mini-batch is trained on as soon as enough groups are scored."""
        return self in (Schedule.MINIBATCH, Schedule.BOTH)

    @property
    def rolls_ahead(self) -> bool:
        """The next batch is rolled out before this one is trained on, with weights one version older."""
        return self in (Schedule.ONE_STEP_OFF, Schedule.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How a trainer works, in seconds and numbers.

    Attributes:
        rollout_s: to roll out a batch.
        update_s: to update the policy by one mini-batch.
        log_probs_s: to compute the log-probabilities of a batch, which need no rewards.
        publish_s: to hand the new weights to whatever rolls out.
        handling_s: from the end of a rollout to the first call the batch may make: decoding, sending.
        batch_size: samples in a batch; each is rolled out `group_size` times.
        group_size: rollouts of a sample; each is one reward call, and a group is complete when all of them are scored.
        minibatch_size: samples in a mini-batch.
        max_concurrency: reward calls in flight.
        steps: batches.
        separate_rollouts: rollouts have a machine of their own, beside the trainer's.
        log_probs_while_scoring: `sync` computes log-probabilities before it waits, not after; the others always do.
        one_batch_at_a_time: the agent begins a batch when the one before is scored, and not when a slot is free.

    Raises:
        ConfigError: a value is impossible.
    """

    rollout_s: float
    update_s: float
    log_probs_s: float = 0.0
    publish_s: float = 0.0
    handling_s: float = 0.0
    batch_size: int = 64
    group_size: int = 8
    minibatch_size: int = 16
    max_concurrency: int = 16
    steps: int = 20
    separate_rollouts: bool = False
    log_probs_while_scoring: bool = False
    one_batch_at_a_time: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_s") and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{item.name} is a number of seconds from 0 on, not {value:g}")
            if item.name.endswith("_s") and value > MOST_SECONDS:
                raise ConfigError(f"{item.name} is at most {MOST_SECONDS:g} seconds, not {value:g}")
            if item.type == "int" and value < 1:
                raise ConfigError(f"{item.name} is at least 1, not {value}")
        if self.batch_size % self.minibatch_size:
            raise ConfigError(
                f"a batch of {self.batch_size} samples cannot be cut into mini-batches of {self.minibatch_size}; "
                f"minibatch_size divides batch_size, as {_nearest_divisor(self.batch_size, self.minibatch_size)} does"
            )
        if self.rollout_s + self.update_s == 0:
            raise ConfigError("rollout_s and update_s are both 0: nothing would be waiting for the rewards")
        if self.calls_per_step * self.steps > MOST_CALLS:
            raise ConfigError(
                f"{self.steps} steps of {self.calls_per_step} calls are more than {MOST_CALLS:,}; give fewer steps"
            )

    @property
    def calls_per_step(self) -> int:
        """Reward calls of one batch."""
        return self.batch_size * self.group_size

    @property
    def train_s(self) -> float:
        """The work of one step once its batch is rolled out."""
        return self.log_probs_s + self.minibatches * self.update_s + self.publish_s

    @property
    def minibatches(self) -> int:
        """Updates of one step."""
        return self.batch_size // self.minibatch_size


def _nearest_divisor(number: int, wanted: int) -> int:
    candidates = {d for k in range(1, math.isqrt(number) + 1) if number % k == 0 for d in (k, number // k)}
    return min(candidates, key=lambda divisor: (abs(divisor - wanted), divisor))
