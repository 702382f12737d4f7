"""`reward-kit runs`: what is there, and removing what nobody needs any more."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

import click

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.log_dir import log_dir_option
from reward_kit.cli.numbers import WholeNumber
from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.shelf import StoredRun, remove, stored_runs, to_remove
from reward_kit.runs.tables import figure

_AGE = re.compile(r"(\d+)([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_LOG_DIR = log_dir_option("The folder of the runs.")


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
@click.option(
    "--json", "as_json", is_flag=True, envvar="REWARD_KIT_RUNS_LIST_JSON", help="Print JSON on standard output."
)
def list_(log_dir: Path, as_json: bool) -> None:
    """The runs of a folder, the newest first: where each is, how it ended, its size and its mean scores.

    \b
    Examples:
      reward-kit runs list
      reward-kit runs list --log-dir elsewhere --json
    """
    runs = stored_runs(log_dir)
    if as_json:
        echo_json([_as_json(run) for run in runs])
        return
    for run in runs:
        scores = ", ".join(
            f"{policy} {'unscored' if score is None else figure(score)}" for policy, score in run.scores.items()
        )
        echo(f"{run.path}  {run.status:<11}  {_size(run.size):>8}  {scores}")
    if not runs:
        echo(f"No run in {log_dir}.", err=True)


@command.command(name="prune")
@_LOG_DIR
@click.option("--keep", type=WholeNumber(0), metavar="N", help="Keep the newest N runs of each task.")
@click.option("--older-than", metavar="AGE", help="Remove only what is older, such as 30d, 12h or 90m.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
def prune(log_dir: Path, keep: int | None, older_than: str | None, yes: bool, dry_run: bool) -> None:
    """Remove runs by number, by age, or where both hold. A run that is open in a process stays.

    \b
    Examples:
      reward-kit runs prune --keep 5
      reward-kit runs prune --older-than 30d --keep 1 --yes
    """
    if keep is None and older_than is None:
        raise click.UsageError("say what to keep: --keep N, --older-than AGE, or both")
    chosen = to_remove(stored_runs(log_dir), keep, _age(older_than))
    for run in chosen:
        echo(f"{run.path}  {run.status:<11}  {_size(run.size):>8}")
    freed = _size(sum(run.size for run in chosen))
    if not chosen or dry_run:
        echo(f"{len(chosen)} runs, {freed}. Nothing was removed." if chosen else "Nothing to remove.", err=True)
        return
    if yes or click.confirm(f"Remove these {len(chosen)} runs ({freed})?", err=True):
        _remove_all(chosen)
    else:
        echo("Nothing was removed.", err=True)


def _remove_all(chosen: Sequence[StoredRun]) -> None:
    """Remove each; one that cannot be removed does not keep the others."""
    problems = []
    for run in chosen:
        try:
            remove(run)
        except StoreError as error:
            problems.append(str(error))
    echo(f"{len(chosen) - len(problems)} runs removed.", err=True)
    if problems:
        raise StoreError("\n".join(problems))


def _age(text: str | None) -> datetime.timedelta | None:
    if text is None:
        return None
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--older-than {text!r}: write a number and d, h or m, such as 30d")
    return datetime.timedelta(**{_UNITS[match[2]]: int(match[1])})


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _as_json(run: StoredRun) -> dict[str, object]:
    facts = {key: getattr(run, key) for key in ("task", "status", "size", "total", "scores")}
    return {"path": str(run.path), "started_at": run.started_at.isoformat(), **facts}
