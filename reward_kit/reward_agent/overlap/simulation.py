"""What a trainer gains when rewards arrive while the machine works: an exact simulation of four schedules.

No clock runs. A step rolls out a batch, hands it to the reward agent, computes log-probabilities, updates the policy by
each mini-batch, and publishes the weights. The machine does one of these at a time; at most `max_concurrency` reward
calls run beside it, begun in the order in which they were submitted. `AsyncRewardAgent` does so within a batch; batches
that wait for slots at the same time take turns there.

For equal latencies `both` takes no longer than `minibatch` and `one_step_off`, and neither of them longer than `sync`:
calls without precedence, begun in a fixed order, end no later when the slots come free earlier, and each schedule needs
the rewards no earlier than the one it is compared with. `docs/concepts/overlap.md` gives the argument.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.overlap.bounds import lower_bound
from reward_kit.reward_agent.overlap.latency import Floats, Latency
from reward_kit.reward_agent.overlap.settings import PipelineSettings, Schedule

Doing = Literal["rollout", "log_probs", "update", "publish", "waits_for_rewards", "waits_for_rollouts"]


class Interval(NamedTuple):
    """What a machine does from one second to another, for the batch of which step (from 0)."""

    doing: Doing
    step: int
    begin_s: float
    end_s: float


class ScoredBatch(NamedTuple):
    """The reward calls of one batch, `begins_C` and `ends_C` in the order of its rollouts, and when it can be used.

    `ready_M` says when each mini-batch may be trained on, `groups_MG` which groups are in it.
    """

    submitted_s: float
    begins_C: Floats
    ends_C: Floats
    ready_M: Floats
    groups_MG: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """One schedule, simulated.

    Attributes:
        schedule: which.
        makespan_s: until the weights of the last step are published.
        intervals: what the trainer's machine did and what it waited for, without a gap.
        rollouts: what the machine for rollouts did, where that is another one.
        batches: the reward calls of each step.
        staleness: by how many versions the weights that a batch was rolled out with were older than those it updated,
            at most.
        latency_bias: Spearman's rank correlation of the slowest call of a group with the mini-batch the group is in,
            the mean over steps: 1 where slow groups always come last. None where that is undefined.
        order_kept: of the mini-batch that a group would be in by order of submission with the one it is in: 1 where
            completion does not reorder groups. None where there is one mini-batch.
    """

    schedule: Schedule
    makespan_s: float
    intervals: tuple[Interval, ...]
    rollouts: tuple[Interval, ...]
    batches: tuple[ScoredBatch, ...]
    staleness: int
    latency_bias: float | None
    order_kept: float | None

    def seconds(self, *doing: Doing) -> float:
        """How long the trainer's machine did these things."""
        return math.fsum(item.end_s - item.begin_s for item in self.intervals if item.doing in doing)

    @property
    def idle_s(self) -> float:
        """How long the trainer's machine waited."""
        return self.seconds("waits_for_rewards", "waits_for_rollouts")

    @property
    def utilisation(self) -> float:
        """The share of the time in which the trainer's machine worked."""
        return 1.0 - self.idle_s / self.makespan_s

    @property
    def step_ends_s(self) -> list[float]:
        """When each step was over: its weights published."""
        ends: dict[int, float] = {}
        for item in self.intervals:
            if item.doing in ("update", "publish"):
                ends[item.step] = item.end_s
        return [ends[step] for step in range(len(self.batches))]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The four schedules side by side, with equal latencies.

    Attributes:
        settings: of the trainer.
        latencies_SC: seconds of each call, by step.
        results: of each schedule.
        lower_bound_s: no schedule in which weights are at most one version old can be over sooner.
    """

    settings: PipelineSettings
    latencies_SC: Floats
    results: Mapping[Schedule, ScheduleResult]
    lower_bound_s: float

    def cut(self, schedule: Schedule) -> float:
        """The share of the time of `sync` that a schedule saves."""
        return 1.0 - self.results[schedule].makespan_s / self.results[Schedule.SYNC].makespan_s


def draw_latencies(settings: PipelineSettings, latency: Latency, seed: int = 0) -> Floats:
    """The seconds of every call, a row for each step; equal seeds draw equal numbers."""
    return latency.draw(np.random.default_rng(seed), (settings.steps, settings.calls_per_step))


def simulate_overlap(settings: PipelineSettings, latencies_SC: Floats) -> Overlap:
    """Simulate the four schedules with the same calls.

    Args:
        settings: of the trainer.
        latencies_SC: seconds of each call; consecutive `group_size` calls of a row are a group.

    Raises:
        ConfigError: the latencies are not steps × calls, or one of them is no duration.
    """
    shape = (settings.steps, settings.calls_per_step)
    if latencies_SC.shape != shape:
        raise ConfigError(f"latencies for {shape[0]} steps of {shape[1]} calls are needed, not {latencies_SC.shape}")
    if not (np.isfinite(latencies_SC) & (latencies_SC >= 0)).all():
        raise ConfigError("a latency is a finite number of seconds from 0 on")
    results = {schedule: _Simulation(settings, schedule, latencies_SC).run() for schedule in Schedule}
    return Overlap(settings, latencies_SC, results, lower_bound(settings, latencies_SC))


def list_schedule(latencies_C: Sequence[float], slots: list[float], not_before_s: float = 0.0) -> tuple[Floats, Floats]:
    """Begin calls in their order, each as soon as a slot is free: when they begin and end.

    Args:
        latencies_C: seconds of each call.
        slots: when each slot comes free, a heap; it is brought up to date.
        not_before_s: when the first may begin.
    """
    begins = np.empty(len(latencies_C))
    for place, seconds in enumerate(latencies_C):
        begin = slots[0] if slots[0] > not_before_s else not_before_s
        begins[place] = begin
        heapq.heapreplace(slots, begin + seconds)
    return begins, begins + np.asarray(latencies_C)


@dataclass(slots=True)
class _Simulation:
    """One schedule while it is simulated. `trainer_s` and `rollouts_s` are when each machine is free."""

    settings: PipelineSettings
    schedule: Schedule
    latencies_SC: Floats
    slots: list[float] = field(init=False)
    trainer_s: float = 0.0
    rollouts_s: float = 0.0
    published_s: float = 0.0
    version: int = 0
    versions: list[int] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    rollouts: list[Interval] = field(default_factory=list)
    batches: list[ScoredBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Two batches at most are in flight, so more slots than calls in them are never taken.
        self.slots = [0.0] * min(self.settings.max_concurrency, 2 * self.settings.calls_per_step)

    def run(self) -> ScheduleResult:
        """Simulate every step."""
        staleness = 0
        self._roll_out()
        for step in range(self.settings.steps):
            if self.schedule.rolls_ahead:
                self._roll_out()
            staleness = max(staleness, self.version - self.versions[step])
            self._train(step)
            if not self.schedule.rolls_ahead:
                self._roll_out()
        bias, kept = _order(self.settings, self.batches, self.latencies_SC)
        return ScheduleResult(
            self.schedule,
            self.trainer_s,
            tuple(self.intervals),
            tuple(self.rollouts),
            tuple(self.batches),
            staleness,
            bias,
            kept,
        )

    def _roll_out(self) -> None:
        """Roll out the next batch, unless it was the last, and submit it."""
        step, settings = len(self.batches), self.settings
        if step == settings.steps:
            return
        if settings.separate_rollouts:
            begin = max(self.rollouts_s, self.published_s)
            self.rollouts_s = begin + settings.rollout_s
            self.rollouts.append(Interval("rollout", step, begin, self.rollouts_s))
        else:
            self._do("rollout", step, settings.rollout_s)
            self.rollouts_s = self.trainer_s
        self.versions.append(self.version)
        self.batches.append(self._score(step, self.rollouts_s))

    def _score(self, step: int, submitted_s: float) -> ScoredBatch:
        """Make the calls of a batch."""
        settings = self.settings
        first = submitted_s + settings.handling_s
        if settings.one_batch_at_a_time:
            idle = max(self.slots)
            # Handed over whole, a batch is handled when its turn comes; else while the one before is being scored.
            first = max(first, idle if self.schedule.updates_early else idle + settings.handling_s)
        begins_C, ends_C = list_schedule(self.latencies_SC[step].tolist(), self.slots, first)
        ends_G = ends_C.reshape(settings.batch_size, settings.group_size).max(axis=1)
        order_G = np.arange(settings.batch_size)
        if self.schedule.updates_early:
            order_G = np.argsort(ends_G, kind="stable")
        groups_MG = order_G.reshape(settings.minibatches, settings.minibatch_size)
        ready_M = ends_G[groups_MG].max(axis=1)
        if not self.schedule.updates_early:
            ready_M = np.full(settings.minibatches, ends_G.max())
        return ScoredBatch(submitted_s, begins_C, ends_C, ready_M, groups_MG)

    def _train(self, step: int) -> None:
        """Log-probabilities, the updates, and the new weights of one step."""
        settings, batch = self.settings, self.batches[step]
        waits_first = self.schedule is Schedule.SYNC and not settings.log_probs_while_scoring
        self._wait("waits_for_rollouts", step, batch.submitted_s)
        self._wait("waits_for_rewards", step, float(batch.ready_M[-1]) if waits_first else 0.0)
        self._do("log_probs", step, settings.log_probs_s)
        for ready_s in batch.ready_M.tolist():
            self._wait("waits_for_rewards", step, ready_s)
            self._do("update", step, settings.update_s)
        # Weights are swapped between rollouts, so that none is made by a mixture of two versions.
        self._wait("waits_for_rollouts", step, self.rollouts_s)
        self._do("publish", step, settings.publish_s)
        self.published_s = self.trainer_s
        self.version += 1

    def _do(self, doing: Doing, step: int, seconds: float) -> None:
        begin, self.trainer_s = self.trainer_s, self.trainer_s + seconds
        self.intervals.append(Interval(doing, step, begin, self.trainer_s))

    def _wait(self, doing: Doing, step: int, until_s: float) -> None:
        if until_s > self.trainer_s:
            self.intervals.append(Interval(doing, step, self.trainer_s, until_s))
            self.trainer_s = until_s


def _order(
    settings: PipelineSettings, batches: Sequence[ScoredBatch], latencies_SC: Floats
) -> tuple[float | None, float | None]:
    """`latency_bias` and `order_kept`, the means over steps."""
    shape = (settings.steps, settings.batch_size, settings.group_size)
    slowest_SG = latencies_SC.reshape(shape).max(axis=2)
    minibatch_G = np.repeat(np.arange(settings.minibatches), settings.minibatch_size)
    biases, kept = [], []
    for slowest_G, batch in zip(slowest_SG, batches, strict=True):
        given_G = np.empty(settings.batch_size)
        given_G[batch.groups_MG.ravel()] = minibatch_G
        biases.append(rank_correlation(slowest_G, given_G))
        kept.append(rank_correlation(minibatch_G.astype(np.float64), given_G))
    return _mean(biases), _mean(kept)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def rank_correlation(first_N: Floats, second_N: Floats) -> float | None:
    """Spearman's rank correlation, equal values sharing the mean of their ranks; None where one side is constant."""
    if first_N.min() == first_N.max() or second_N.min() == second_N.max():
        return None
    return float(np.corrcoef(_ranks(first_N), _ranks(second_N))[0, 1])


def _ranks(values_N: Floats) -> Floats:
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse].astype(np.float64)
