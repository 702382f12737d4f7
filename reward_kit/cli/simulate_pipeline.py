"""`reward-kit simulate-pipeline`: what a trainer would gain from asynchronous rewards, before it is changed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from reward_kit.cli.echo import echo_json
from reward_kit.cli.numbers import Number, WholeNumber
from reward_kit.console import SafeConsole
from reward_kit.reward_agent.overlap.latency import Latency, parse_latency
from reward_kit.reward_agent.overlap.settings import PipelineSettings, Schedule
from reward_kit.reward_agent.overlap.simulation import Overlap, ScheduleResult, draw_latencies, simulate_overlap
from reward_kit.reward_agent.overlap.timeline import LEGEND, NARROWEST, draw_timeline

_Command = TypeVar("_Command", bound=Callable[..., Any])
_WIDE = 84  # characters that the table takes; a terminal with fewer is given lines
_WIDEST = 120  # characters that the timeline takes, at most


def _seconds(name: str, default: float, told: str) -> Callable[[_Command], _Command]:
    return click.option(name, type=Number(0), default=default, show_default=True, metavar="SECONDS", help=told)


def _count(name: str, default: int, told: str) -> Callable[[_Command], _Command]:
    return click.option(name, type=WholeNumber(1), default=default, show_default=True, metavar="N", help=told)


@click.command(name="simulate-pipeline")
@_seconds("--rollout", 60, "To roll out a batch.")
@_seconds("--update", 15, "To update the policy by one mini-batch.")
@_seconds("--log-probs", 0, "To compute the log-probabilities of a batch.")
@_seconds("--publish", 0, "To hand the new weights to whatever rolls out.")
@_seconds("--handling", 0, "From the end of a rollout to its first reward call: decoding, sending.")
@click.option(
    "--latency",
    default="lognormal:8:1",
    show_default=True,
    metavar="KIND:…",
    help="Of one reward call: constant:S, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEAN:SIGMA (SIGMA of its "
    "logarithm), or file:RUN/scores.jsonl for the calls of a run.",
)
@_count("--batch", 64, "Samples in a batch.")
@_count("--group", 8, "Rollouts of a sample, each of which is one call.")
@_count("--minibatch", 16, "Samples in a mini-batch.")
@_count("--max-concurrency", 64, "Reward calls in flight.")
@_count("--steps", 20, "Batches.")
@click.option("--separate-rollouts", is_flag=True, help="Rollouts have a machine of their own, beside the trainer's.")
@click.option("--log-probs-while-scoring", is_flag=True, help="Also for sync, as the others always do.")
@click.option("--one-batch-at-a-time", is_flag=True, help="The agent begins a batch when the one before is scored.")
@click.option("--seed", type=WholeNumber(0), default=0, show_default=True, help="Of the latencies.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="REWARD_KIT_SIMULATE_PIPELINE_JSON",
    help="Print it as JSON on standard output.",
)
def command(
    rollout: float,
    update: float,
    log_probs: float,
    publish: float,
    handling: float,
    latency: str,
    batch: int,
    group: int,
    minibatch: int,
    max_concurrency: int,
    steps: int,
    separate_rollouts: bool,
    log_probs_while_scoring: bool,
    one_batch_at_a_time: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Show what training would gain if rewards were scored while the machine works.

    Four schedules are simulated with the same latencies: sync waits for all rewards of a batch, minibatch trains on
    each mini-batch once it is scored, one_step_off rolls out the next batch meanwhile, both does both.

    \b
    Examples:
      reward-kit simulate-pipeline --rollout 60 --update 15 --latency uniform:1:40
      reward-kit simulate-pipeline --latency file:runs/RUN/scores.jsonl --batch 256 --group 5 --minibatch 64
      reward-kit simulate-pipeline --latency constant:3 --json
    """
    settings = PipelineSettings(
        rollout_s=rollout,
        update_s=update,
        log_probs_s=log_probs,
        publish_s=publish,
        handling_s=handling,
        batch_size=batch,
        group_size=group,
        minibatch_size=minibatch,
        max_concurrency=max_concurrency,
        steps=steps,
        separate_rollouts=separate_rollouts,
        log_probs_while_scoring=log_probs_while_scoring,
        one_batch_at_a_time=one_batch_at_a_time,
    )
    drawn_from = parse_latency(latency)
    overlap = simulate_overlap(settings, draw_latencies(settings, drawn_from, seed))
    if as_json:
        echo_json(_document(overlap, drawn_from, seed))
    else:
        _show(overlap, drawn_from, seed)


def _document(overlap: Overlap, latency: Latency, seed: int) -> dict[str, Any]:
    steps = overlap.settings.steps
    return {
        "settings": dataclasses.asdict(overlap.settings),
        "latency": {"drawn_from": str(latency), "seed": seed, **_facts(overlap)},
        "lower_bound_s": overlap.lower_bound_s,
        "schedules": {
            schedule.value: {
                "makespan_s": result.makespan_s,
                "step_s": result.makespan_s / steps,
                "cut": overlap.cut(schedule),
                "idle_s": result.idle_s,
                "waits_for_rewards_s": result.seconds("waits_for_rewards"),
                "waits_for_rollouts_s": result.seconds("waits_for_rollouts"),
                "utilisation": result.utilisation,
                "staleness": result.staleness,
                "latency_bias": result.latency_bias,
                "order_kept": result.order_kept,
                "step_ends_s": result.step_ends_s,
            }
            for schedule, result in overlap.results.items()
        },
    }


def _facts(overlap: Overlap) -> dict[str, float]:
    """What the latencies that were drawn are like."""
    drawn = overlap.latencies_SC
    p50, p95 = np.percentile(drawn, [50, 95]).tolist()
    return {"mean_s": float(drawn.mean()), "p50_s": p50, "p95_s": p95, "max_s": float(drawn.max())}


def _show(overlap: Overlap, latency: Latency, seed: int) -> None:
    console = SafeConsole(width=None if sys.stdout.isatty() else 120)
    settings, facts = overlap.settings, _facts(overlap)
    asked = f"{settings.calls_per_step:,} calls a step, {settings.max_concurrency:,} in flight, {latency} (seed {seed})"
    took = ", ".join(f"{name.removesuffix('_s')} {value:.1f} s" for name, value in facts.items())
    console.print(Text(f"{asked}: {took}"))
    if console.width < _WIDE:
        for schedule, result in overlap.results.items():
            console.print(Text(f"{schedule}: {_told(overlap, result)}"))
    else:
        console.print(_table(overlap))
    best = overlap.lower_bound_s / settings.steps
    console.print(Text(f"Best possible with weights at most one version old: no less than {best:.1f} s a step"))
    drawing = Text(f"\n{draw_timeline(overlap, min(max(console.width, NARROWEST), _WIDEST))}")
    for cells, style in (("R+", "blue"), ("L+", "cyan"), ("U+", "green"), ("P+", "magenta"), ("·+", "red")):
        drawing.highlight_regex(cells, style)
    console.print(drawing, soft_wrap=True)
    console.print(Text(f"\n{LEGEND}"))


def _table(overlap: Overlap) -> Table:
    steps = overlap.settings.steps
    table = Table(box=box.SIMPLE_HEAVY)
    table.add_column("schedule", no_wrap=True)
    heads = ["s a step", "cut", "idle", "waits for\nrewards", "weights'\nage", "slow groups\nlast"]
    if overlap.settings.separate_rollouts:  # else the trainer's machine rolls out itself
        heads.insert(4, "waits for\nrollouts")
    for head in heads:
        table.add_column(head, justify="right")
    for schedule, result in overlap.results.items():
        cells = [
            f"{result.makespan_s / steps:.1f}",
            _cut(overlap, schedule),
            f"{1 - result.utilisation:.1%}",
            f"{result.seconds('waits_for_rewards') / steps:.1f} s",
            str(result.staleness),
            "–" if result.latency_bias is None else f"{round(result.latency_bias, 2) + 0.0:.2f}",  # and no -0.00
        ]
        if overlap.settings.separate_rollouts:
            cells.insert(4, f"{result.seconds('waits_for_rollouts') / steps:.1f} s")
        table.add_row(schedule.value, *cells)
    return table


def _cut(overlap: Overlap, schedule: Schedule) -> str:
    return "" if schedule is Schedule.SYNC else f"{overlap.cut(schedule):.1%}"


def _told(overlap: Overlap, result: ScheduleResult) -> str:
    """A row of the table as a line, for a narrow terminal."""
    cut = _cut(overlap, result.schedule)
    parts = [
        f"{result.makespan_s / overlap.settings.steps:.1f} s a step",
        *([f"{cut} less than sync"] if cut else []),
        f"idle {1 - result.utilisation:.1%}",
        f"weights' age {result.staleness}",
    ]
    return ", ".join(parts)
