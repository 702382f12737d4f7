"""`reward-kit runs`: list the runs in a directory, and remove old runs."""

from __future__ import annotations

import datetime
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import WholeNumber, json_option, log_dir_option
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.runs.display import figure
from reward_kit.runs.files import RUN_FILE, SUMMARY_FILE, SWEEP_FILE, read_json
from reward_kit.runs.run_folder import RunHeader, current_status, is_open_elsewhere, resume_command

_LONG_AGO = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run on disk.

    Attributes:
        path: the directory of the run.
        task: the name of the task.
        status: "running", "complete", "interrupted" or "failed"; "killed" if it is marked as running but no process has
            it open; "unreadable" if its `run.json` is damaged.
        started_at: the start time in UTC.
        size: the size on disk in bytes.
        total: the number of episodes in the complete run.
        scores: the mean score of each policy, if the run has a summary.
        resume: the command that resumes the run, if it was stopped.
    """

    path: Path
    task: str
    status: str
    started_at: datetime.datetime
    size: int
    total: int
    scores: dict[str, float | None]
    resume: Sequence[str] = ()


def stored_runs(folder: Path) -> list[StoredRun]:
    """Return the runs in a directory, newest first."""
    if not folder.is_dir():
        raise ConfigError(f"directory {folder} does not exist; pass the directory of the runs with --log-dir")
    runs = [_read(path.parent) for path in folder.glob(f"*/{RUN_FILE}")]
    return sorted(runs, key=lambda run: run.started_at, reverse=True)


def remove(run: StoredRun) -> None:
    """Delete the directory of a run."""
    if is_open_elsewhere(run.path):
        raise StoreError(f"{run.path} is open in another process; wait until it has finished")
    if run.path.is_symlink():
        raise StoreError(f"{run.path} is a symbolic link; remove the link itself")
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        raise StoreError(f"cannot remove {run.path}: {error}") from error


def _read(path: Path) -> StoredRun:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    scores: dict[str, float | None] = {}
    # A missing or damaged summary, like a damaged header, does not hide the other runs.
    with suppress(StoreError), boundary(StoreError, f"{path / SUMMARY_FILE} is damaged"):
        policies = read_json(path / SUMMARY_FILE).get("policies", [])
        means = {str(policy["policy"]): (policy["score"] or {}).get("mean") for policy in policies}
        scores = {name: None if mean is None else float(mean) for name, mean in means.items()}
    try:
        header = RunHeader.read(path)
    except StoreError:
        return StoredRun(path, "?", "unreadable", _LONG_AGO, size, 0, scores)
    status = current_status(path, header)
    return StoredRun(
        path=path,
        task=header.task_name,
        status=status,
        started_at=header.timing.started_at,
        size=size,
        total=header.total,
        scores=scores,
        resume=resume_command(path, header, status),
    )


_AGE = re.compile(r"(\d+)([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_LOG_DIR = log_dir_option("Directory of the runs.")


@click.group(name="runs")
def command() -> None:
    """List and remove runs.

    \b
    Examples:
      reward-kit runs list
      reward-kit runs prune --keep 5
    """


@command.command(name="list")
@_LOG_DIR
@json_option("Print JSON on standard output.")
def list_(log_dir: Path, as_json: bool) -> None:
    """List the runs in a directory and in its sweeps, newest first, with their path, status, size and mean scores.

    \b
    Examples:
      reward-kit runs list
      reward-kit runs list --log-dir elsewhere --json
    """
    folders = [log_dir, *(path.parent for path in log_dir.glob(f"*/{SWEEP_FILE}"))]
    runs = sorted(
        (run for folder in folders for run in stored_runs(folder)), key=lambda run: run.started_at, reverse=True
    )
    if as_json:
        keys = ("task", "status", "size", "total", "scores")
        facts = [{key: getattr(run, key) for key in keys} for run in runs]
        places = [{"path": str(run.path), "started_at": run.started_at.isoformat()} for run in runs]
        echo_json([{**place, **one} for place, one in zip(places, facts, strict=True)])
        return
    for run in runs:
        scores = ", ".join(
            f"{policy} {'unscored' if score is None else figure(score)}" for policy, score in run.scores.items()
        )
        echo(f"{run.path}  {run.status:<11}  {_size(run.size):>8}  {scores}")
    if not runs:
        echo(f"No runs in {log_dir}.", err=True)
    if stopped := next((run for run in runs if run.resume), None):
        echo(f"Resume the newest stopped run with:  {shlex.join(stopped.resume)}", err=True)


@command.command(name="prune")
@_LOG_DIR
@click.option("--keep", type=WholeNumber(0), metavar="N", help="Keep the newest N runs of each task.")
@click.option(
    "--older-than", metavar="AGE", help="Remove only runs that are older than this age, such as 30d, 12h or 90m."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def prune(log_dir: Path, keep: int | None, older_than: str | None, yes: bool, dry_run: bool) -> None:
    """Remove runs by number, by age, or both. Runs that are open in a process are kept.

    \b
    Examples:
      reward-kit runs prune --keep 5
      reward-kit runs prune --older-than 30d --keep 1 --yes
    """
    if keep is None and older_than is None:
        raise click.UsageError("specify the runs to remove with --keep N, --older-than AGE, or both")
    age = None
    if older_than is not None:
        if (match := _AGE.fullmatch(older_than.strip())) is None:
            raise ConfigError(f"--older-than {older_than!r}: must be a number followed by d, h or m, such as 30d")
        age = datetime.timedelta(**{_UNITS[match[2]]: int(match[1])})
    now, seen, chosen = datetime.datetime.now(datetime.UTC), Counter[str](), []
    for run in stored_runs(log_dir):
        seen[run.task] += 1
        if (keep is None or seen[run.task] > keep) and (age is None or now - run.started_at > age):
            chosen.append(run)
    for run in chosen:
        echo(f"{run.path}  {run.status:<11}  {_size(run.size):>8}")
    freed = _size(sum(run.size for run in chosen))
    if not chosen or dry_run:
        echo(f"{len(chosen)} runs, {freed}. Nothing was removed." if chosen else "Nothing to remove.", err=True)
        return
    if not yes and not click.confirm(f"Remove these {len(chosen)} runs ({freed})?", err=True):
        echo("Nothing was removed.", err=True)
        return
    problems = []
    for run in chosen:
        try:
            remove(run)
        except StoreError as error:  # continue with the other runs
            problems.append(str(error))
    echo(f"{len(chosen) - len(problems)} runs removed.", err=True)
    if problems:
        raise StoreError("\n".join(problems))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
