"""The implementation of `reward-kit sweep`: planning, resuming, dry runs, progress and the final tables."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import click
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import LATEST
from reward_kit.cli.outcome import (
    allow_many_connections,
    display_kind,
    note_console,
    noting_resume,
    resume_line,
    stop_after_updates,
)
from reward_kit.cli.trust import require_trust_in_sweep
from reward_kit.console import SafeConsole
from reward_kit.display_text import pluralize
from reward_kit.rl.training.description import describe_limit
from reward_kit.rl.training.sweep_file import START, SweepFile
from reward_kit.rl.training.sweep_results import ONE_SEED, sweep_tables, temperature_text
from reward_kit.rl.training.sweep_session import (
    SweepHeader,
    SweepPlan,
    changed_inputs,
    create_sweep,
    differences,
    latest_sweep,
    load_sweep,
    sweep_into,
)
from reward_kit.runs.display import DisplayKind, FigureTable, figure
from reward_kit.runs.inputs import refuse_changes
from reward_kit.runs.plan import INTERRUPTED


@dataclass(frozen=True, slots=True)
class SweepArgs:
    """The options of `sweep`."""

    config: Path | None
    processes: int | None
    log_dir: Path
    resume: str | None
    display: str | None
    as_json: bool
    dry_run: bool


def run_sweep(args: SweepArgs) -> None:
    """Run or resume a sweep, print its tables, and exit."""
    # Output of the user's code must not mix with the tables on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        header, folder = None, None
        if args.resume is not None:
            folder = latest_sweep(args.log_dir) if args.resume == LATEST else Path(args.resume)
            header = SweepHeader.read(folder)
        elif args.config is None:
            raise click.UsageError("pass a sweep file, or --resume")
        plan = _load(args, args.config or Path(header.sweep_path if header else ""))
        if header is not None and folder is not None:
            refuse_changes(folder, changed_inputs(header, plan, folder))
    if args.dry_run:
        _describe(plan, args.as_json)
        return
    allow_many_connections()
    path = folder or create_sweep(plan, args.log_dir)
    display = _SweepDisplay(display_kind(args.display), plan)
    resume = ["reward-kit", "sweep", "--resume", str(path)]

    with noting_resume(resume, path), contextlib.redirect_stdout(sys.stderr), display:
        outcome = sweep_into(path, plan, display.report, stop_after_updates(display.say))
    if args.as_json:
        echo_json({"sweep": str(path), **outcome.summary}, allow_nan=False)
    else:
        _show(outcome.summary)
    echo(f"Written to {path}", err=True)
    if outcome.status != "complete":
        echo(resume_line(resume), err=True)
    sys.exit({"complete": 0, INTERRUPTED: 130}.get(outcome.status, 1))


def _load(args: SweepArgs, path: Path) -> SweepPlan:
    file = SweepFile.read(path)
    require_trust_in_sweep(path, file.train_path, [file.overrides(arm) for arm in file.config.arms])
    if args.processes is not None:
        file = replace(file, config=file.config.model_copy(update={"processes": args.processes}))
    plan = load_sweep(file)
    for note in dict.fromkeys(note for one in plan.arms.values() for note in one.task.notes):
        echo(note, err=True)
    return plan


def _describe(plan: SweepPlan, as_json: bool) -> None:
    """Print the arms, the seeds, the number of runs, and the differences between the arms."""
    changes, file = differences(plan), plan.file
    count = len(plan.arms) * len(file.seeds)
    if as_json:
        described = {"runs": count, "arms": [*plan.arms], "seeds": file.seeds, "differences": changes}
        echo_json({"dry_run": True, "sweep": file.config.name, **described})
    else:
        seeds = ", ".join(map(str, file.seeds))
        echo(
            f"{pluralize(len(plan.arms), 'arm')}, seeds {seeds}: {pluralize(count, 'run')}, {plan.processes} at a time"
        )
        limit = describe_limit(plan.arms[file.baseline].config)
        echo(f"{file.baseline} (baseline): {file.config.train}, {limit}")
        for key, value in file.overrides(file.baseline).items():
            echo(f"  {key}: {json.dumps(value)}")
        for arm, texts in changes.items():
            echo("\n  ".join([f"{arm}:", *(texts or ["the same settings as the baseline"])]))
        labels = ", ".join(map(temperature_text, plan.temperatures))
        held_out = file.config.evaluation.dataset_path or f"the held-out samples of {file.config.train}"
        rollouts = pluralize(file.config.evaluation.rollouts, "episode")
        echo(f"evaluation on {held_out} ({pluralize(plan.samples, 'sample')}, {rollouts} each): {labels}")
        if len(file.seeds) == 1:
            echo(ONE_SEED)
    echo("Nothing was written.", err=True)


def _show(summary: Mapping[str, Any]) -> None:
    is_terminal = sys.stdout.isatty()
    console = SafeConsole() if is_terminal else SafeConsole(width=10_000, no_color=True)
    for table in sweep_tables(summary):
        lines = [(row[0], list(row[1:])) for row in table.rows]
        console.print(FigureTable(table.columns[1:], lines, title=table.title, is_plain=not is_terminal))
        console.print()
    for note in summary["notes"]:
        note_console().print(note)


class _SweepDisplay:
    """Shows the progress of a sweep on standard error. Use it as a context manager.

    "plain" prints a line for each finished run and evaluation, "rich" also shows a line for each running process, and
    "none" prints nothing.
    """

    def __init__(self, kind: DisplayKind, plan: SweepPlan) -> None:
        self._kind, self._names = kind, {START, *plan.arms}
        self._console = SafeConsole(stderr=True, soft_wrap=True)
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=True) if kind == "rich" else None
        self._progress: dict[str, Mapping[str, Any]] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def say(self, note: str) -> None:
        """Show a note."""
        if self._kind != "none":
            self._console.print(note, style="yellow")

    def report(self, name: str, report: Mapping[str, Any]) -> None:
        """Show a report of the process of a run."""
        if "started" in report:
            self._progress[name] = {}
        if "progress" in report:
            self._progress[name] = report["progress"]
        if "status" in report or "error" in report:
            self._progress.pop(name, None)
        if (text := self._line(name, report)) and self._kind != "none":
            self._console.print(f"{name}  {text}")

    def _line(self, name: str, report: Mapping[str, Any]) -> str:
        if (evaluation := report.get("evaluation")) is not None:
            score = "unscored" if evaluation["score"] is None else figure(evaluation["score"])
            return f"{temperature_text(evaluation['temperature'])} {score}".replace("score ", "held-out score ")
        if (status := report.get("trained")) is not None:
            return f"{status} after {self._position(name)}" if self._progress.get(name) else f"{status} before"
        return f"failed: {report['error']}" if "error" in report else str(report.get("note", ""))

    def _position(self, name: str) -> str:
        if not (progress := self._progress[name]):
            return "starting"
        return f"{pluralize(progress['updates'], 'update')}, {progress['env_steps']:,} steps"

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, progress in [*self._progress.items()]:
            score = progress.get("score")
            cells = (name, self._position(name), "" if score is None else f"score {figure(score)}")
            grid.add_row(*map(Text, cells))
        return grid
