"""The schedules' published time savings, and a simulation of the same runs.

Source: the README of verl's recipe `async_reward_agent` (pull request 2854). Every published run trained on GSM8K for
15 epochs. The runs used batches of 1,024 samples, 5 rollouts per sample, and mini-batches of 256 samples. For one batch
at a time, 256 threads made calls that took 1 to 40 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from reward_kit.rl.overlap import PipelineSettings, draw_latencies, parse_latency, simulate_overlap
from reward_kit.rl.schedule import Schedule

LATENCY = parse_latency("uniform:1:40")
FITTED = PipelineSettings(
    rollout_s=65.0,
    log_probs_s=30.0,
    update_s=15.8,
    handling_s=35.8,
    batch_size=1024,
    group_size=5,
    minibatch_size=256,
    max_concurrency=256,
    steps=15,
    one_batch_at_a_time=True,
)
"""The sizes in the scripts of the recipe, and stage times fitted to three savings of the 7B model with Megatron."""


class PublishedRun(NamedTuple):
    """A published run with a stated saving. Times are in minutes.

    `is_fitted` is True if the stage times in `FITTED` were chosen to match this run.
    """

    backend: str
    model: str
    strategy: str
    schedule: Schedule
    baseline_min: int
    time_min: int
    stated_percent: float
    is_fitted: bool = False


_7B, _3B = "Qwen2-7B", "Qwen2.5-3B"
_BASELINE_MIN = 17 * 60 + 53  # Megatron with 7B
PUBLISHED = (
    PublishedRun("Megatron", _7B, "minibatch", Schedule.MINIBATCH, _BASELINE_MIN, 15 * 60 + 41, 12.30, True),
    PublishedRun("Megatron", _7B, "one_step_off", Schedule.ONE_STEP_OFF, _BASELINE_MIN, 13 * 60 + 23, 25.16, True),
    PublishedRun("Megatron", _7B, "both", Schedule.BOTH, _BASELINE_MIN, 12 * 60 + 22, 30.85, True),
    PublishedRun("Megatron", _7B, "both, decoupled loss", Schedule.BOTH, _BASELINE_MIN, 12 * 60 + 21, 30.94),
    PublishedRun("FSDP", _7B, "both", Schedule.BOTH, 18 * 60 + 24, 13 * 60 + 10, 28.44),
    PublishedRun("FSDP", _3B, "both", Schedule.BOTH, 17 * 60 + 23, 13 * 60 + 15, 23.08),
    PublishedRun("Megatron", _3B, "both", Schedule.BOTH, 17 * 60 + 7, 13 * 60 + 10, 23.08),
)
"""The seven runs whose time is compared with a baseline. The first table repeats the third run."""


class SimulatedRun(NamedTuple):
    """A published run, its simulated time per step in seconds, and its simulated saving in percent."""

    published: PublishedRun
    baseline_s: float
    step_s: float

    @property
    def saved_percent(self) -> float:
        return 100 * (1 - self.step_s / self.baseline_s)


class PublishedTable(NamedTuple):
    """The simulated runs, and the number of steps that would fit in the published hours at the simulated speed."""

    runs: tuple[SimulatedRun, ...]
    steps: float

    def __str__(self) -> str:
        lines = ["backend   model       strategy              stated  from hours  simulated"]
        for run in self.runs:
            one = run.published
            from_hours = 100 * (1 - one.time_min / one.baseline_min)
            status = "fitted" if one.is_fitted else f"predicted, off by {run.saved_percent - from_hours:+.1f}"
            lines.append(
                f"{one.backend:8}  {one.model:10}  {one.strategy:20} {one.stated_percent:6.2f}% {from_hours:10.2f}% "
                f"{run.saved_percent:9.2f}%  {status}"
            )
        return "\n".join(lines)


def simulate_published(seed: int = 0) -> PublishedTable:
    """Simulate the seven published runs in the steady state, ignoring the start and the end of each run.

    The other back ends and models differ only in the duration of the baseline. Except for the handling time, their
    stage times are the times in `FITTED` multiplied by a single factor, chosen so that the baselines have the published
    ratio.
    """
    fitted = _step_seconds(FITTED, seed)
    work_s = FITTED.rollout_s + FITTED.train_s
    runs = []
    for run in PUBLISHED:
        extra_s = fitted[Schedule.SYNC] * (run.baseline_min / _BASELINE_MIN - 1)
        factor = 1 + extra_s / work_s
        names = ("rollout_s", "log_probs_s", "update_s")
        scaled = replace(FITTED, **{name: factor * getattr(FITTED, name) for name in names})
        seconds = _step_seconds(scaled, seed)
        runs.append(SimulatedRun(run, seconds[Schedule.SYNC], seconds[run.schedule]))
    return PublishedTable(tuple(runs), _BASELINE_MIN * 60 / fitted[Schedule.SYNC])


def _step_seconds(settings: PipelineSettings, seed: int) -> dict[Schedule, float]:
    overlap = simulate_overlap(settings, draw_latencies(settings, LATENCY, seed))
    return {schedule: result.step_s for schedule, result in overlap.results.items()}
