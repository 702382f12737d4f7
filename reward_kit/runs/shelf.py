"""The runs of a folder: what each is, and removing the ones nobody needs any more."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.runs.files import read_json
from reward_kit.runs.header import FILE, RunHeader
from reward_kit.runs.store import is_open_elsewhere

_LONG_AGO = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run on disk.

    Attributes:
        path: its folder.
        task: the task's name.
        status: "running", "complete", "interrupted" or "failed"; "killed" where it says running and no process has it
            open; "unreadable" where its `run.json` is damaged.
        started_at: when it began, in UTC.
        size: bytes on disk.
        total: how many episodes it has when it is complete.
        scores: the mean score of each policy, where it has a summary.
    """

    path: Path
    task: str
    status: str
    started_at: datetime.datetime
    size: int
    total: int
    scores: dict[str, float | None]


def stored_runs(folder: Path) -> list[StoredRun]:
    """The runs in a folder, the newest first. What is no run is left out.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name the folder of the runs with --log-dir")
    runs = [_read(path.parent) for path in folder.glob(f"*/{FILE}")]
    return sorted(runs, key=lambda run: run.started_at, reverse=True)


def to_remove(runs: Sequence[StoredRun], keep: int | None, older_than: datetime.timedelta | None) -> list[StoredRun]:
    """The runs that a rule does not keep.

    Args:
        runs: as `stored_runs` gives them.
        keep: the newest so many of each task stay; None keeps by age alone.
        older_than: younger runs stay; None keeps by number alone.
    """
    now = datetime.datetime.now(datetime.UTC)
    seen: dict[str, int] = {}
    chosen = []
    for run in runs:
        seen[run.task] = seen.get(run.task, 0) + 1
        is_beyond = keep is None or seen[run.task] > keep
        is_old = older_than is None or now - run.started_at > older_than
        if is_beyond and is_old:
            chosen.append(run)
    return chosen


def remove(run: StoredRun) -> None:
    """Delete a run's folder.

    Raises:
        StoreError: another process has it open, it is a symbolic link, or it cannot be deleted.
    """
    if is_open_elsewhere(run.path):
        raise StoreError(f"{run.path} is open in another process; wait for it to end")
    if run.path.is_symlink():
        raise StoreError(f"{run.path} is a symbolic link, and what it leads to stays; remove the link itself")
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        raise StoreError(f"cannot remove {run.path}: {error}") from error


def _read(path: Path) -> StoredRun:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        header = RunHeader.read(path)
    except StoreError:
        return StoredRun(path, "?", "unreadable", _LONG_AGO, size, 0, _scores(path))
    is_open = header.status == "running" and is_open_elsewhere(path)
    return StoredRun(
        path=path,
        task=header.task_name,
        status=header.status_now(is_open),
        started_at=header.timing.started_at,
        size=size,
        total=header.total,
        scores=_scores(path),
    )


def _scores(path: Path) -> dict[str, float | None]:
    """As the summary says; none where there is no summary, or it is damaged: one such run does not hide the others."""
    if not (path / "summary.json").is_file():
        return {}
    try:
        with boundary(StoreError, f"{path / 'summary.json'} is damaged"):
            policies = read_json(path / "summary.json").get("policies", [])
            return {str(policy["policy"]): _mean(policy["score"]) for policy in policies}
    except StoreError:
        return {}


def _mean(score: Mapping[str, Any] | None) -> float | None:
    told = (score or {}).get("mean")
    return None if told is None else float(told)
