"""Training schedules, and a simulation of the time that each schedule saves by overlapping work with reward calls.

The simulation is exact and uses no clock. A step rolls out a batch, sends it to the reward agent, computes
log-probabilities, updates the policy on each mini-batch, and publishes the weights. The machine performs only one of
these tasks at a time. Up to `max_concurrency` reward calls run in parallel and start in the order in which they were
submitted, as in a batch of `AsyncRewardAgent`. `docs/concepts/overlap.md` proves that, for equal latencies, `both`
takes no longer than `minibatch` and `one_step_off`, which take no longer than `sync`.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from reward_kit.errors import ConfigError, describe_read_error, did_you_mean
from reward_kit.rl.schedule import Schedule
from reward_kit.runs.files import SCORES_FILE

__all__ = [
    "Latency",
    "Overlap",
    "PipelineSettings",
    "ScheduleResult",
    "ScoredBatch",
    "TimelineInterval",
    "draw_latencies",
    "draw_timeline",
    "list_schedule",
    "lower_bound",
    "parse_latency",
    "rank_correlation",
    "read_durations",
    "simulate_overlap",
]
Floats = npt.NDArray[np.float64]
MOST_CALLS = 5_000_000
MOST_SECONDS = 1e8  # Three years. Sums of such durations cannot overflow and still resolve milliseconds.


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """The durations and sizes of a training step.

    Attributes:
        rollout_s: the seconds needed to roll out a batch.
        update_s: the seconds needed to update the policy on one mini-batch.
        log_probs_s: the seconds needed to compute the log-probabilities of a batch. This requires no rewards.
        publish_s: the seconds needed to publish the new weights.
        handling_s: the seconds from the end of a rollout to the first call for the batch, for decoding and sending.
        batch_size: the number of samples in a batch. Each sample is rolled out `group_size` times.
        group_size: the number of rollouts per sample. Each rollout requires one reward call, and a group is complete
            when all of its rollouts are scored.
        minibatch_size: the number of samples in a mini-batch.
        max_concurrency: the maximum number of concurrent reward calls.
        steps: the number of batches.
        separate_rollouts: True if rollouts run on a second machine instead of the trainer's machine.
        log_probs_while_scoring: True if `sync` computes log-probabilities before it waits for scores, as the other
            schedules always do.
        one_batch_at_a_time: True if the agent starts a batch only once the previous batch is scored. If False, the
            agent starts a call as soon as a slot is free.

    Raises:
        ConfigError: If a value is out of range, or `minibatch_size` does not divide `batch_size`.
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
                raise ConfigError(f"{item.name} must be a non-negative number of seconds, got {value:g}")
            if item.name.endswith("_s") and value > MOST_SECONDS:
                raise ConfigError(f"{item.name} must be at most {MOST_SECONDS:g} seconds, got {value:g}")
            if item.type == "int" and value < 1:
                raise ConfigError(f"{item.name} must be at least 1, got {value}")
        size, wanted = self.batch_size, self.minibatch_size
        if size % wanted:
            divisors = {d for k in range(1, math.isqrt(size) + 1) if size % k == 0 for d in (k, size // k)}
            raise ConfigError(
                f"a batch of {size} samples cannot be split into mini-batches of {wanted}; minibatch_size must divide "
                f"batch_size, for example {min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))}"
            )
        if self.rollout_s + self.update_s == 0:
            raise ConfigError(
                "rollout_s and update_s are both 0, so there is no work to overlap with the rewards; "
                "set at least one of them"
            )
        if self.calls_per_step * self.steps > MOST_CALLS:
            raise ConfigError(
                f"{self.steps} steps of {self.calls_per_step} calls exceed the limit of {MOST_CALLS:,} calls; "
                "use fewer steps"
            )

    @property
    def calls_per_step(self) -> int:
        """The number of reward calls in one step."""
        return self.batch_size * self.group_size

    @property
    def train_s(self) -> float:
        """The duration, in seconds, of a step's work after its rollouts."""
        return self.log_probs_s + self.minibatches * self.update_s + self.publish_s

    @property
    def minibatches(self) -> int:
        """The number of updates in one step."""
        return self.batch_size // self.minibatch_size


def _lognormal(generator: np.random.Generator, given: Sequence[float], size: tuple[int, ...]) -> Floats:
    mean, sigma = given
    return generator.lognormal(math.log(mean) - sigma * sigma / 2, sigma, size) if mean else np.zeros(size)


_Draw = Callable[[np.random.Generator, Sequence[float], tuple[int, ...]], Floats]
_KINDS: dict[str, tuple[tuple[str, ...], _Draw]] = {
    "constant": (("SECONDS",), lambda generator, given, size: np.full(size, given[0])),
    "uniform": (("LOW", "HIGH"), lambda generator, given, size: generator.uniform(given[0], given[1], size)),
    "exponential": (("MEAN",), lambda generator, given, size: generator.exponential(given[0], size)),
    "lognormal": (("MEAN", "SIGMA"), _lognormal),
    "empirical": ((), lambda generator, given, size: generator.choice(np.asarray(given, np.float64), size)),
}
"""The names of the parameters of each distribution, and the function that draws from it."""


@dataclass(frozen=True, slots=True)
class Latency:
    """The distribution of the duration of a reward call in seconds.

    Attributes:
        kind: "constant", "uniform", "exponential", "lognormal", or "empirical", which draws from measured calls.
        figures: the parameters of the distribution. For "constant", this is the duration; for "uniform", the minimum
            and the maximum; for "exponential", the mean; for "lognormal", the mean and the standard deviation of the
            logarithm; and for "empirical", the measured durations.

    Raises:
        ConfigError: If the kind is unknown or a parameter is out of range.
    """

    kind: str
    figures: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"unknown latency {self.kind!r}{did_you_mean(self.kind, _KINDS)}")
        names = _KINDS[self.kind][0]
        if names and len(self.figures) != len(names):
            raise ConfigError(f"latency {self.kind} needs {len(names)} numbers; write it as {_form(self.kind)}")
        if not self.figures:
            raise ConfigError("latency empirical needs at least one measured call")
        for figure in self.figures:
            if not math.isfinite(figure) or figure < 0:
                raise ConfigError(f"latency {self.kind}: {figure:g} is not a finite non-negative number")
            if figure > MOST_SECONDS:
                raise ConfigError(f"latency {self.kind}: {figure:g} is above the maximum, {MOST_SECONDS:g} seconds")
        if self.kind == "uniform" and self.figures[0] > self.figures[1]:
            low, high = self.figures
            raise ConfigError(f"latency uniform: LOW must be at most HIGH, got {low:g} and {high:g}")

    def draw(self, generator: np.random.Generator, size: tuple[int, ...]) -> Floats:
        """Draw an array of durations, in seconds, with the given shape."""
        return _KINDS[self.kind][1](generator, self.figures, size)

    def __str__(self) -> str:
        if self.kind == "empirical":
            return f"empirical, from {len(self.figures)} measured calls"
        return ":".join([self.kind, *(f"{figure:g}" for figure in self.figures)])


def _form(kind: str) -> str:
    return ":".join([kind, *_KINDS[kind][0]])


def parse_latency(text: str) -> Latency:
    """Parse a latency such as `uniform:1:40`, `constant:3`, `exponential:8`, `lognormal:8:1.0` or `file:PATH`.

    PATH is a run directory or its `scores.jsonl`.

    Raises:
        ConfigError: If the string cannot be parsed.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        path = Path(rest)
        return Latency("empirical", read_durations(path / SCORES_FILE if path.is_dir() else path))
    written = _KINDS.keys() - {"empirical"}
    if kind not in written:
        raise ConfigError(f"latency {text!r}: unknown kind {kind!r}{did_you_mean(kind, {*written, 'file'})}")
    try:
        figures = tuple(float(part) for part in rest.split(":"))
    except ValueError:
        raise ConfigError(f"latency {text!r}: {kind} needs numbers; write it as {_form(kind)}") from None
    return Latency(kind, figures)


def read_durations(path: Path) -> tuple[float, ...]:
    """Return the duration, in seconds, of each call in a run's `scores.jsonl`. An incomplete last line is skipped.

    Episodes that a batch reward scored together count as a single call.

    Raises:
        ConfigError: If the file cannot be read or has no scores, or a line has no duration.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: {describe_read_error(path, error)}") from None
    durations: list[float] = []
    groups: set[tuple[str, float]] = set()
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            continue
        try:
            record: Any = json.loads(line)
            duration = float(record["timing"]["duration_s"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}:{number} has no number at timing.duration_s; pass the scores.jsonl of a run"
            ) from None
        if not math.isfinite(duration) or duration < 0:
            raise ConfigError(f"{path}:{number}: timing.duration_s is {duration:g}, which is not a valid duration")
        if (group := record.get("scored_group")) is None or (group, duration) not in groups:
            groups.add((group or "", duration))
            durations.append(duration)
    if not durations:
        raise ConfigError(f"{path} has no scores with a duration; pass the scores.jsonl of a run")
    return tuple(durations)


def lower_bound(settings: PipelineSettings, latencies_SC: Floats) -> float:
    """Return a lower bound, in seconds, for every schedule whose rollouts use weights at most one version old.

    The bound is the maximum of two quantities. The first is the total work of the trainer's machine. The second is the
    maximum over all ranges of consecutive batches of the following sum: the work before their first call, the duration
    of their calls if the calls are spread evenly over the slots (or the duration of the longest call), and the work
    after their last call.
    """
    steps = range(settings.steps)
    rollouts = 1 if settings.separate_rollouts else settings.steps  # The trainer waits for at least the first rollout.
    work_s = settings.steps * settings.train_s + rollouts * settings.rollout_s
    heads_S = np.array([_before(settings, step) for step in steps])
    tails_S = np.array([_after(settings, settings.steps - 1 - step) for step in steps])
    loads_S = latencies_SC.sum(axis=1) / settings.max_concurrency
    up_to_S = np.cumsum(loads_S)
    bound = max(work_s, float((heads_S + latencies_SC.max(axis=1) + tails_S).max()))
    # The best first batch for each last batch is the running maximum of heads - loads before it.
    first_S = np.maximum.accumulate(heads_S - (up_to_S - loads_S))
    return max(bound, float((first_S + up_to_S + tails_S).max()))


def _before(settings: PipelineSettings, step: int) -> float:
    """Return the work before the first call in a step: all rollouts so far and all earlier updates but the last."""
    updated = max(0, step - 1)
    if not settings.separate_rollouts:
        return (step + 1) * settings.rollout_s + updated * settings.train_s + settings.handling_s
    generating = (step + 1) * settings.rollout_s + updated * settings.publish_s
    training = settings.rollout_s + updated * settings.train_s + (settings.rollout_s if step else 0.0)
    return max(generating, training) + settings.handling_s


def _after(settings: PipelineSettings, left: int) -> float:
    """Return the work after the last call in a step: one update, and the remaining work of the `left` later steps."""
    update_s = settings.minibatches * settings.update_s
    rollouts = max(0, left - 1)  # The next batch may already have its rollouts and log-probabilities.
    training = left * (update_s + settings.publish_s) + rollouts * settings.log_probs_s
    last_s = settings.update_s + settings.publish_s
    if not settings.separate_rollouts:
        return last_s + training + rollouts * settings.rollout_s
    generating = rollouts * (settings.rollout_s + settings.publish_s) + settings.log_probs_s + update_s
    return last_s + (max(training, generating) if rollouts else training)


Doing = Literal["rollout", "log_probs", "update", "publish", "waits_for_rewards", "waits_for_rollouts"]


class TimelineInterval(NamedTuple):
    """A machine's activity during an interval. Times are in seconds, and steps are counted from 0."""

    doing: Doing
    step: int
    begin_s: float
    end_s: float


class ScoredBatch(NamedTuple):
    """The reward calls for one batch. `begins_C` and `ends_C` are in rollout order.

    Mini-batch m consists of the groups `groups_MG[m]` and is ready for training at `ready_M[m]`.
    """

    submitted_s: float
    begins_C: Floats
    ends_C: Floats
    ready_M: Floats
    groups_MG: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """The simulation of one schedule.

    Attributes:
        schedule: the simulated schedule.
        makespan_s: the number of seconds until the weights of the last step are published.
        intervals: the consecutive intervals, without gaps, in which the trainer's machine works or waits.
        rollouts: the intervals of the separate rollout machine, if there is one.
        batches: the reward calls in each step.
        staleness: the maximum number of versions between the weights that sampled a batch and the weights that were
            trained on it.
        latency_bias: the rank correlation (Spearman) between the duration of a group's slowest call and the group's
            mini-batch, averaged over steps. It is 1 if slow groups always come last, and None if it is undefined.
        order_kept: the rank correlation between the mini-batch that a group would have in submission order and its
            actual mini-batch. It is 1 if groups keep their order, and None if there is only one mini-batch.
    """

    schedule: Schedule
    makespan_s: float
    intervals: tuple[TimelineInterval, ...]
    rollouts: tuple[TimelineInterval, ...]
    batches: tuple[ScoredBatch, ...]
    staleness: int
    latency_bias: float | None
    order_kept: float | None

    def seconds(self, *doing: Doing) -> float:
        """Return the time, in seconds, that the trainer's machine spent on the given activities."""
        return math.fsum(item.end_s - item.begin_s for item in self.intervals if item.doing in doing)

    @property
    def idle_s(self) -> float:
        """The time, in seconds, that the trainer's machine spent waiting."""
        return self.seconds("waits_for_rewards", "waits_for_rollouts")

    @property
    def utilization(self) -> float:
        """The fraction of the time that the trainer's machine spent working."""
        return 1.0 - self.idle_s / self.makespan_s

    @property
    def step_ends_s(self) -> list[float]:
        """The time, in seconds, at which the weights of each step were published."""
        ends = {item.step: item.end_s for item in self.intervals if item.doing in ("update", "publish")}
        return [ends[step] for step in range(len(self.batches))]

    @property
    def step_s(self) -> float:
        """The mean duration, in seconds, of a step in the steady state.

        It is measured from the end of the first step to the end of the last step. The first step is excluded because
        `one_step_off` and `both` roll out two batches during it. If there is only one step, the result is `makespan_s`.
        """
        ends = self.step_ends_s
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else self.makespan_s


@dataclass(frozen=True, slots=True)
class Overlap:
    """The results of the four schedules for the same latencies.

    Attributes:
        settings: the settings of the trainer.
        latencies_SC: the duration of each call, in seconds, with one row for each step.
        results: the result of each schedule.
        lower_bound_s: the lower bound, in seconds; see `lower_bound`.
    """

    settings: PipelineSettings
    latencies_SC: Floats
    results: Mapping[Schedule, ScheduleResult]
    lower_bound_s: float

    def cut(self, schedule: Schedule) -> float:
        """Return the fraction of the time that a schedule saves over `sync`, including the start of the run."""
        return 1.0 - self.results[schedule].makespan_s / self.results[Schedule.SYNC].makespan_s

    def steady_cut(self, schedule: Schedule) -> float:
        """Return the fraction of a step's duration that a schedule saves in the steady state of a long run."""
        return 1.0 - self.results[schedule].step_s / self.results[Schedule.SYNC].step_s


def draw_latencies(settings: PipelineSettings, latency: Latency, seed: int = 0) -> Floats:
    """Draw the duration of each call, in seconds, with one row for each step. The same seed draws the same numbers."""
    return latency.draw(np.random.default_rng(seed), (settings.steps, settings.calls_per_step))


def simulate_overlap(settings: PipelineSettings, latencies_SC: Floats) -> Overlap:
    """Simulate the four schedules with the same reward calls.

    Args:
        settings: the settings of the trainer.
        latencies_SC: the duration of each call, in seconds. Every `group_size` consecutive calls in a row form a group.

    Raises:
        ConfigError: If the latencies have the wrong shape, or a duration is invalid.
    """
    shape = (settings.steps, settings.calls_per_step)
    if latencies_SC.shape != shape:
        raise ConfigError(f"latencies must have the shape {shape} for (steps, calls), got {latencies_SC.shape}")
    if not (np.isfinite(latencies_SC) & (latencies_SC >= 0)).all():
        raise ConfigError("a latency must be a finite, non-negative number of seconds")
    results = {schedule: _Simulation(settings, schedule, latencies_SC).run() for schedule in Schedule}
    return Overlap(settings, latencies_SC, results, lower_bound(settings, latencies_SC))


def list_schedule(latencies_C: Sequence[float], slots: list[float], not_before_s: float = 0.0) -> tuple[Floats, Floats]:
    """Start calls in order, each as soon as a slot is free, and return the times at which the calls begin and end.

    Args:
        latencies_C: the duration of each call, in seconds.
        slots: a heap of the times at which slots become free. The heap is updated in place.
        not_before_s: the earliest time at which a call may start.
    """
    begins = np.empty(len(latencies_C))
    for index, seconds in enumerate(latencies_C):
        begin = slots[0] if slots[0] > not_before_s else not_before_s
        begins[index] = begin
        heapq.heapreplace(slots, begin + seconds)
    return begins, begins + np.asarray(latencies_C)


class _Simulation:
    """A simulation in progress. The machines become free at `trainer_s` and `rollouts_s`."""

    def __init__(self, settings: PipelineSettings, schedule: Schedule, latencies_SC: Floats) -> None:
        self.settings, self.schedule, self.latencies_SC = settings, schedule, latencies_SC
        # At most two batches are in flight, so more slots are never used.
        self.slots = [0.0] * min(settings.max_concurrency, 2 * settings.calls_per_step)
        self.trainer_s = self.rollouts_s = self.published_s = 0.0
        self.version = 0
        self.versions: list[int] = []
        self.intervals: list[TimelineInterval] = []
        self.rollouts: list[TimelineInterval] = []
        self.batches: list[ScoredBatch] = []

    def run(self) -> ScheduleResult:
        staleness, settings = 0, self.settings
        self._roll_out()
        for step in range(settings.steps):
            if self.schedule.rolls_ahead:
                self._roll_out()
            staleness = max(staleness, self.version - self.versions[step])
            self._train(step)
            if not self.schedule.rolls_ahead:
                self._roll_out()
        slowest_SG = self.latencies_SC.reshape(settings.steps, settings.batch_size, -1).max(axis=2)
        minibatch_G = np.repeat(np.arange(settings.minibatches), settings.minibatch_size).astype(np.float64)
        biases, kept = [], []
        for slowest_G, batch in zip(slowest_SG, self.batches, strict=True):
            given_G = np.empty(settings.batch_size)
            given_G[batch.groups_MG.ravel()] = minibatch_G
            biases.append(rank_correlation(slowest_G, given_G))
            kept.append(rank_correlation(minibatch_G, given_G))
        intervals, rollouts, batches = tuple(self.intervals), tuple(self.rollouts), tuple(self.batches)
        means = _mean(biases), _mean(kept)
        return ScheduleResult(self.schedule, self.trainer_s, intervals, rollouts, batches, staleness, *means)

    def _roll_out(self) -> None:
        """Roll out the next batch and start its calls, unless there is no next batch."""
        step, settings = len(self.batches), self.settings
        if step == settings.steps:
            return
        if settings.separate_rollouts:
            begin = max(self.rollouts_s, self.published_s)
            self.rollouts_s = begin + settings.rollout_s
            self.rollouts.append(TimelineInterval("rollout", step, begin, self.rollouts_s))
        else:
            self._do("rollout", step, settings.rollout_s)
            self.rollouts_s = self.trainer_s
        self.versions.append(self.version)
        first = self.rollouts_s + settings.handling_s
        if settings.one_batch_at_a_time:
            idle = max(self.slots)
            # If only one batch is scored at a time, a batch is handled when its turn comes. Otherwise, it is handled
            # while the previous batch is scored.
            first = max(first, idle if self.schedule.updates_early else idle + settings.handling_s)
        begins_C, ends_C = list_schedule(self.latencies_SC[step].tolist(), self.slots, first)
        ends_G = ends_C.reshape(settings.batch_size, settings.group_size).max(axis=1)
        is_early = self.schedule.updates_early
        order_G = np.argsort(ends_G, kind="stable") if is_early else np.arange(settings.batch_size)
        groups_MG = order_G.reshape(settings.minibatches, settings.minibatch_size)
        ready_M = ends_G[groups_MG].max(axis=1) if is_early else np.full(settings.minibatches, ends_G.max())
        self.batches.append(ScoredBatch(self.rollouts_s, begins_C, ends_C, ready_M, groups_MG))

    def _train(self, step: int) -> None:
        settings, batch = self.settings, self.batches[step]
        waits_first = self.schedule is Schedule.SYNC and not settings.log_probs_while_scoring
        self._wait("waits_for_rollouts", step, batch.submitted_s)
        self._wait("waits_for_rewards", step, float(batch.ready_M[-1]) if waits_first else 0.0)
        self._do("log_probs", step, settings.log_probs_s)
        for ready_s in batch.ready_M.tolist():
            self._wait("waits_for_rewards", step, ready_s)
            self._do("update", step, settings.update_s)
        # Weights are swapped between rollouts so that no rollout mixes two versions.
        self._wait("waits_for_rollouts", step, self.rollouts_s)
        self._do("publish", step, settings.publish_s)
        self.published_s = self.trainer_s
        self.version += 1

    def _do(self, doing: Doing, step: int, seconds: float) -> None:
        begin, self.trainer_s = self.trainer_s, self.trainer_s + seconds
        self.intervals.append(TimelineInterval(doing, step, begin, self.trainer_s))

    def _wait(self, doing: Doing, step: int, until_s: float) -> None:
        if until_s > self.trainer_s:
            self.intervals.append(TimelineInterval(doing, step, self.trainer_s, until_s))
            self.trainer_s = until_s


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def rank_correlation(first_N: Floats, second_N: Floats) -> float | None:
    """Return the rank correlation (Spearman), or None if one of the inputs is constant.

    Equal values are assigned the mean of their ranks.
    """
    if first_N.min() == first_N.max() or second_N.min() == second_N.max():
        return None
    return float(np.corrcoef(_ranks(first_N), _ranks(second_N))[0, 1])


def _ranks(values_N: Floats) -> Floats:
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse].astype(np.float64)


LETTERS: dict[Doing, str] = {
    "rollout": "R",
    "log_probs": "L",
    "update": "U",
    "publish": "P",
    "waits_for_rewards": "·",
    "waits_for_rollouts": "-",
}
_LEVELS = " ▁▂▃▄▅▆▇█"
_STEPS = 2
_MARGIN = len("  rollouts ")
_NARROWEST = _MARGIN + 10
_DOINGS: tuple[Doing, ...] = get_args(Doing)


class TimelineRow(NamedTuple):
    """A row in a drawing: its schedule, its label ("machine", "rollouts", "step" or "calls"), and its cells."""

    schedule: Schedule
    shows: str
    cells: str


class Timeline(NamedTuple):
    """A drawing of the schedules. A cell represents `cell_s` seconds, and steps are counted from 1."""

    rows: tuple[TimelineRow, ...]
    cell_s: float
    first_step: int
    last_step: int

    def __str__(self) -> str:
        shown = f"step {self.first_step}"
        if self.first_step != self.last_step:
            shown = f"steps {self.first_step} to {self.last_step}"
        lines = [f"{shown}, {self.cell_s:.3g} s per character"]
        for row in self.rows:
            if row.shows == "machine":
                lines += ["", row.schedule.value]
            lines.append(f"  {row.shows:8} {row.cells}".rstrip())
        return "\n".join(lines)


def draw_timeline(overlap: Overlap, width: int = 80) -> Timeline:
    """Draw two steps of each schedule, starting with the second step or, if there are fewer than four steps, the first.

    The letters are R for a rollout, L for log-probabilities, U for an update and P for publishing weights. A dot means
    waiting for rewards, and a hyphen means waiting for rollouts. The row `step` shows the last digit of the step
    number. The row `calls` shows the number of concurrent reward calls; █ means that all slots are in use.

    Raises:
        ConfigError: If the width is too small.
    """
    if width < _NARROWEST:
        raise ConfigError(f"the width of a timeline must be at least {_NARROWEST} characters, got {width}")
    steps, slots = overlap.settings.steps, min(overlap.settings.max_concurrency, overlap.settings.calls_per_step)
    first = 1 if steps >= _STEPS + 2 else 0
    last = min(first + _STEPS, steps) - 1
    ends = {schedule: result.step_ends_s for schedule, result in overlap.results.items()}
    spans = {schedule: (one[first - 1] if first else 0.0, one[last]) for schedule, one in ends.items()}
    cell_s = max(end - begin for begin, end in spans.values()) / (width - _MARGIN)
    rows: list[TimelineRow] = []
    for schedule, (begin, end) in spans.items():
        result = overlap.results[schedule]
        edges = np.array([begin + cell_s * n for n in range(max(1, round((end - begin) / cell_s)) + 1)])
        parts = {"machine": _letters(result.intervals, edges)}
        if result.rollouts:
            parts["rollouts"] = _letters(result.rollouts, edges)
        numbers = range(max(item.step for item in result.intervals) + 1)
        shown = _shares(result.intervals, edges, numbers, "step")
        parts["step"] = "".join(" " if step is None else str((step + 1) % 10) for step in shown)
        parts["calls"] = _calls(result, edges, slots)
        rows += [TimelineRow(schedule, shows, cells) for shows, cells in parts.items()]
    return Timeline(tuple(rows), cell_s, first + 1, last + 1)


def _shares(
    intervals: Sequence[TimelineInterval], edges: Floats, kinds: Sequence[object], field: str
) -> list[int | None]:
    """Return, for each cell, the index in `kinds` of the value that fills most of it, or None if it is empty."""
    filled = np.zeros((len(kinds), len(edges) - 1))
    indices = {kind: index for index, kind in enumerate(kinds)}
    for item in intervals:
        inside = np.minimum(edges[1:], item.end_s) - np.maximum(edges[:-1], item.begin_s)
        filled[indices[getattr(item, field)]] += np.maximum(inside, 0.0)
    return [int(cell.argmax()) if cell.any() else None for cell in filled.T]


def _letters(intervals: Sequence[TimelineInterval], edges: Floats) -> str:
    shares = _shares(intervals, edges, _DOINGS, "doing")
    return "".join(" " if index is None else LETTERS[_DOINGS[index]] for index in shares)


def _calls(result: ScheduleResult, edges: Floats, slots: int) -> str:
    """Return the mean number of concurrent calls in each cell. A cell with any calls has at least the lowest level."""
    done = np.zeros(len(edges))
    for batch in result.batches:
        if batch.submitted_s < edges[-1] and batch.ends_C.max() > edges[0]:
            lengths = batch.ends_C - batch.begins_C
            done += [np.clip(edge - batch.begins_C, 0.0, lengths).sum() for edge in edges]
    shares = np.diff(done) / (np.diff(edges) * slots)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, max(round(share * top), int(share > 1e-9)))] for share in shares.tolist())
