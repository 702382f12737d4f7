"""RUN where nobody named one: the newest run of the folder for runs, told on standard error before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reward_kit.cli.echo import echo
from reward_kit.cli.log_dir import log_dir_option
from reward_kit.errors import ConfigError
from reward_kit.runs.header import RunHeader
from reward_kit.runs.store import newest_runs


def where_runs_are(what: str = "the newest run is") -> Callable[[Any], Any]:
    """The option that says in which folder to look.

    Args:
        what: what is looked for there, for the help.
    """
    return log_dir_option(f"Where {what} looked for, when no RUN is named.")


def run_or_newest(run: Path | None, log_dir: Path, *, besides: Path | None = None, with_training: bool = False) -> Path:
    """The run that was named, else the newest one of a folder.

    Args:
        run: as it was named; None where it was left out.
        log_dir: the folder.
        besides: a run that is not meant, though it is the newest.
        with_training: whether a run that trains a model will do.

    Raises:
        ConfigError: none was named, and there is none.
    """
    if run is not None:
        return run
    found = [path for path in newest_runs(log_dir, _fitting(with_training)) if path != besides]
    if not found:
        raise ConfigError(_told_of_none(log_dir))
    echo(f"the newest run: {found[0]}", err=True)
    return found[0]


def two_newest(log_dir: Path) -> tuple[Path, Path]:
    """The newest run of a folder, and before it the newest earlier one of the same task, its baseline.

    Raises:
        ConfigError: there are no two.
    """
    found = newest_runs(log_dir, _fitting(with_training=False))
    if not found:
        raise ConfigError(_told_of_none(log_dir))
    newest, name = found[0], RunHeader.read(found[0]).task_name
    earlier = [path for path in found[1:] if RunHeader.read(path).task_name == name]
    if not earlier:
        raise ConfigError(
            f"{log_dir} has one run of task {name!r}, {newest}; name the runs to compare, or that one for its policies"
        )
    echo(f"the two newest runs of task {name!r}: {earlier[0]} (the baseline) and {newest}", err=True)
    return earlier[0], newest


def _fitting(with_training: bool) -> Callable[[RunHeader], bool]:
    return lambda header: with_training or header.training is None


def _told_of_none(log_dir: Path) -> str:
    return f"no run in {log_dir}; make one with `reward-kit run`, name one, or name its folder with --log-dir"
