"""Atomic writes and checked reads of the files of a run."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pydantic_core

from reward_kit.errors import StoreError
from reward_kit.private_files import private_opener

logger = logging.getLogger("reward_kit.runs")
RUN_FILE: Final = "run.json"
"""The header of a run. A directory that contains this file is a run."""
EPISODES_FILE: Final = "episodes.jsonl"
SCORES_FILE: Final = "scores.jsonl"
CREDIT_FILE: Final = "credit.jsonl"
COUNTERFACTUALS_FILE: Final = "counterfactual.jsonl"
LABELS_FILE: Final = "labels.jsonl"
METRICS_FILE: Final = "metrics.jsonl"
"""The metrics of a training run, one line per update."""
SUMMARY_FILE: Final = "summary.json"
CARD_FILE: Final = "card.json"
REPORT_FILE: Final = "report.html"
LOG_FILE: Final = "run.log"
SWEEP_FILE: Final = "sweep.json"
"""The header of a sweep, in the directory that contains the directories of its runs."""
STATES = "states"
LOG_COPIES = "imported"
"""The directory of a run for the copies of imported logs."""
_STATE_NAME = re.compile(r"[0-9a-f]{64}\.[A-Za-z0-9_-]{1,64}")


@contextmanager
def wrap_os_errors(verb: str, path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a StoreError that names the path of the file."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {verb} {path}: {error.strerror or error}") from error


@contextmanager
def report_store_errors() -> Iterator[None]:
    """Log a StoreError in the block instead of raising it, so that it does not hide an earlier error."""
    try:
        yield
    except StoreError as error:
        logger.warning("%s", error)


def refuse_links_out(run: Path) -> None:
    """Raise if an untrusted run directory contains a symbolic link to a target outside the directory.

    Links within the directory are allowed. Final states are not checked here, since their digests are verified when
    they are read.
    """
    root = os.path.realpath(run)
    for entry in _entries(root):
        if not (entry.is_symlink() or entry.is_file() or entry.is_dir()):
            raise StoreError(f"{run / entry.name} is neither a file nor a directory; remove it")
        is_folder = entry.is_dir(follow_symlinks=False) and entry.name != STATES
        for item in (entry, *(_entries(entry.path) if is_folder else ())):
            if item.is_symlink() and not os.path.realpath(item.path).startswith(f"{root}{os.sep}"):
                path = run / os.path.relpath(item.path, root)
                raise StoreError(
                    f"{path} is a symbolic link to a target outside the run's directory and is not followed; replace "
                    "the link with its target, or remove it"
                )


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, or none if it cannot be read; its reader reports the error."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def state_name(stored: Mapping[str, Any]) -> str:
    """Return the name of a final state in `states/`."""
    name = f"{stored.get('sha256')}.{stored.get('kind')}"
    if not _STATE_NAME.fullmatch(name):
        raise StoreError(f"a final state must be named by its SHA-256 and kind, got {name!r:.100}")
    return name


def state_file(run: Path, rollout_id: str, stored: Mapping[str, Any]) -> Path:
    """Return the path of a final state in the run's directory."""
    try:
        file = run / STATES / state_name(stored)
    except StoreError as error:
        raise StoreError(f"episode {rollout_id}: {error}; was the file edited by hand?") from None
    if file.is_symlink() or not file.is_file():
        raise StoreError(f"episode {rollout_id}: its final state {file} is missing")
    return file


def copied_log(run: Path, copy: Any) -> Path:
    """Return the path of the copy of an imported log.

    Raises:
        StoreError: the copy is missing, or its path is not in the run's directory of copies.
    """
    if not isinstance(copy, str) or not re.fullmatch(rf"{LOG_COPIES}/[A-Za-z0-9_-][A-Za-z0-9._-]*", copy):
        raise StoreError(f"{run}: the copy of a log must be in {LOG_COPIES}/, got {copy!r:.100}; was the file edited?")
    path = run / copy
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"{path}: the copy of the imported log is missing; import the log again")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains a JSON object."""
    try:
        with wrap_os_errors("read", path):
            data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise StoreError(f"{path} is not a JSON object")
    return data


def read_line(line: bytes) -> Any:
    """Parse a line of JSON in half the time that `json.loads` takes. The result is the same."""
    try:
        return pydantic_core.from_json(line)
    except ValueError:  # such as lone surrogates, which `json` accepts
        return json.loads(line)


def append_line(descriptor: int, path: Path, line: bytes) -> None:
    """Append a line, including its newline, to an open file. If the write fails, remove the part that was written.

    Raises:
        StoreError: the file was deleted, or the line cannot be written.
    """
    facts = os.fstat(descriptor)
    if not facts.st_nlink:  # A write would succeed, but to a deleted file
        raise StoreError(f"{path} was deleted during the run, so its content is lost")
    with wrap_os_errors("write", path):
        try:
            rest = memoryview(line)
            while rest:  # On a full disk, a write first succeeds partially, and the next one raises
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, facts.st_size)
            raise


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line that was left by a killed process."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65_536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def open_part(part: Path, path: Path, *, is_private: bool) -> IO[bytes]:
    """Open a new file for writing. The file will replace `path`."""
    file = open(part, "xb", opener=private_opener if is_private else None)  # noqa: SIM115 - takes an opener
    with ExitStack() as undo:
        undo.callback(file.close)
        if is_private and path.is_file() and not path.is_symlink():
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        undo.pop_all()
    return file


@contextmanager
def replacing(path: Path, *, is_private: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` at the end of the block, unless the block raises an exception."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with wrap_os_errors("write", path):
        try:
            with open_part(part, path, is_private=is_private) as file:
                yield file
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, is_private: bool = True) -> None:
    """Replace a file atomically: even if the process is killed, the file has its old or its new content."""
    with replacing(path, is_private=is_private) as file:
        file.writelines([data] if isinstance(data, bytes) else data)


HELD_OUT_SCORE: Final = "held_out/score"
"""The main metric of an evaluation: the mean score on the held-out samples."""
KEPT_EPISODES: Final = "episodes"
"""The directory of kept episodes, one file per update."""
TRAINING: Final = "training"
"""The key in the line of a kept episode under which the results of its update are stored."""


def episodes_file(run: Path, update: int) -> Path:
    """Return the path of the file that stores the episodes of an update."""
    return run / KEPT_EPISODES / f"update-{update:06d}.jsonl"


def episodes_files(run: Path) -> dict[int, Path]:
    """Return the files of stored episodes, keyed by update number and in ascending order."""
    named = {file.stem.removeprefix("update-"): file for file in (run / KEPT_EPISODES).glob("update-*.jsonl")}
    return dict(sorted((int(number), file) for number, file in named.items() if number.isdecimal()))
