"""The directory of a `run`, `score` or `train` command: its header `run.json`, its lock and its append-only JSON lines.

A run of a task has `episodes.jsonl`, `scores.jsonl`, and final states in `states/`, where each file is named by its
SHA-256. Each line is written by one `write`. If a killed process left an incomplete last line, the line is removed when
the run is reopened. A training run has:

  metrics.jsonl   one line per update
  checkpoints/    the state for a resume: the latest and the best checkpoint
  model/          the best checkpoint's weights in the format of `transformers`, if the policy supports it
  episodes/       the episodes of some updates, if `logs.episodes_every` is set
  studies/        batches with a non-finite loss or gradient, for debugging

Each run writes `summary.json` and `report.html` when it ends, and a run of a task also writes `card.json`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pydantic

from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import compose, decompose
from reward_kit.episodes.json_codec import compact_json
from reward_kit.episodes.record import episode_from_record, episode_to_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, Failure, StoreError, boundary, did_you_mean
from reward_kit.lazy import package_version
from reward_kit.private_files import make_private_folder, private_opener
from reward_kit.processes import lock_file
from reward_kit.runs.files import (
    CREDIT_FILE,
    EPISODES_FILE,
    RUN_FILE,
    SCORES_FILE,
    STATES,
    SUMMARY_FILE,
    append_line,
    cut_torn_line,
    read_json,
    read_line,
    refuse_links_out,
    state_file,
    state_name,
    wrap_os_errors,
    write_atomically,
)
from reward_kit.runs.redaction import Redaction
from reward_kit.safe_input import complete_lines
from reward_kit.validation import describe_validation_error

CHECKPOINTS = "checkpoints"
SCHEMA_VERSION = 1
_ALWAYS = {"schema_version", "versions", "status", "timing"}


def software_versions() -> dict[str, str]:
    """Return the versions of reward-kit and Python."""
    return {"reward_kit": package_version(), "python": platform.python_version()}


class RunTiming(pydantic.BaseModel):
    """The start time of a run and its duration."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    started_at: pydantic.AwareDatetime
    worked_s: float = 0.0


Header = TypeVar("Header", bound=pydantic.BaseModel)


class TrainingHeader(pydantic.BaseModel):
    """The `training` block of `run.json`.

    Attributes:
        train_path: the train file.
        overrides: the overridden keys.
        config: the content of the file, with defaults filled in and secrets omitted.
        updates: the number of finished updates.
        env_steps: the number of environment steps in these updates.
        redacts: True if the task has a redaction hook. Token ids are then not decoded.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    train_path: str
    overrides: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    updates: int = 0
    env_steps: int = 0
    redacts: bool = False


class RunHeader(pydantic.BaseModel):
    """The content of `run.json`. Unknown keys are preserved.

    Attributes:
        task_name: the name of the task, or of the transcript file.
        total: the number of episodes in the complete run.
        run_id: the name of the directory.
        task: the resolved task definition, without secrets.
        run_limits: the current run limits, which may have been raised since the start; null means unlimited.
        digests: the SHA-256 of each input file.
        versions: the software versions at the start.
        max_concurrency: the maximum number of concurrent episodes at the start.
        task_path, overrides, models, policies, base_url, rollouts, limit, sample_ids, seed: the `RunArgs`;
            `task_path` is `None` if only transcripts are scored.
        policy_settings: the type and the options of each policy, by label, without secrets. Options that are not set
            have their defaults; a policy from Python has no settings.
        from_python: references to Python objects, keyed by role; a run with such objects cannot be resumed. If it has
            the key `task`, the task itself was defined in Python, and `task_path` only determines the directory of its
            files.
        data, reward: the transcript file and the reward of a run that scores transcripts.
        training: the `TrainingHeader` of a training run, otherwise None.
        rescored_from: the run and reward of a rescoring; see `runs/scoring.py`.
        imported: the logs of an imported run, and the fields without a place in an episode; see `runs/logs/`.
        status: "running", "complete", "interrupted" or "failed".
        timing: the start time and the working time.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    schema_version: int = SCHEMA_VERSION
    run_id: str | None = None
    task_name: str
    task: Mapping[str, Any] = {}
    task_path: str | None = None
    from_python: Mapping[str, Any] | None = None
    data: str | None = None
    reward: str | None = None
    training: Mapping[str, Any] | None = None
    rescored_from: Mapping[str, Any] | None = None
    imported: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = {}
    models: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    base_url: str | None = None
    policy_settings: Mapping[str, Mapping[str, Any]] = {}
    rollouts: int | None = None
    limit: int | None = None
    sample_ids: tuple[str, ...] = ()
    seed: int = 0
    run_limits: Mapping[str, Any] = {}
    digests: Mapping[str, str] = {}
    total: int = 0
    max_concurrency: int | None = None
    versions: Mapping[str, str] = pydantic.Field(default_factory=software_versions)
    status: str = "running"
    timing: RunTiming = pydantic.Field(
        default_factory=lambda: RunTiming(started_at=datetime.datetime.now(datetime.UTC))
    )

    @classmethod
    def read(cls, run: Path) -> RunHeader:
        """Read the header of a run."""
        return read_header(run / RUN_FILE, cls, SCHEMA_VERSION)

    @classmethod
    def read_folder(cls, run: Path) -> RunHeader:
        """Read the header of a directory that the user specified; give a hint if the directory is not a run."""
        if (run / RUN_FILE).is_file():
            return cls.read(run)
        folders = {run, run.parent, Path("runs")}
        near = did_you_mean(str(run), (str(path.parent) for folder in folders for path in folder.glob(f"*/{RUN_FILE}")))
        if (run.parent / RUN_FILE).is_file():
            near = f"; did you mean {str(run.parent)!r}?"
        near = near if near.endswith("?") else "; `reward-kit runs list` lists the runs"
        raise ConfigError(f"{run} is not a run directory: it has no {RUN_FILE}{near}")

    @classmethod
    def read_resumable(cls, run: Path) -> RunHeader:
        """Read the header of a run passed to `--resume`."""
        if not (run / RUN_FILE).is_file():
            raise ConfigError(
                f"--resume: {run} is not a run; pass a directory that contains {RUN_FILE}, or omit the directory to "
                "resume the latest run"
            )
        return cls.read(run)

    def require_training(self, run: Path) -> TrainingHeader:
        """Return the training block; raise an error that names the directory `run` if it is missing."""
        if self.training is None:
            raise ConfigError(f"{run} is not a run of `reward-kit train`")
        try:
            return TrainingHeader.model_validate(self.training)
        except pydantic.ValidationError as error:
            raise StoreError(f"{run / RUN_FILE}: {'; '.join(describe_validation_error(error))}") from None

    @property
    def pass_threshold(self) -> float:
        """The lowest passing score."""
        value = self.task.get("pass_threshold")
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            return float(value)
        return 1.0

    def status_now(self, is_open: bool) -> str:
        """Return the status, or "killed" if the status is "running" but no process has the run open."""
        return "killed" if self.status == "running" and not is_open else self.status

    def to_bytes(self) -> bytes:
        """Serialize the header as ASCII JSON; keys that do not apply to this kind of run are omitted."""
        unset = type(self).model_fields.keys() - self.model_fields_set - _ALWAYS
        document = self.model_dump(mode="json", exclude=unset)
        return json.dumps(document, indent=2, allow_nan=False).encode("ascii") + b"\n"

    def replace(self, **changes: Any) -> RunHeader:
        """Return a copy in which some keys are changed."""
        return self.model_copy(update=changes)


def read_header(file: Path, model: type[Header], version: int) -> Header:
    """Read the header of a directory.

    Raises:
        StoreError: If the file is invalid or has another schema version, or a link leaves the directory.
    """
    refuse_links_out(file.parent)
    data = read_json(file)
    if (found := data.get("schema_version")) != version:
        raise StoreError(f"{file} has schema version {found!r}, but this release reads only version {version}")
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise StoreError(f"{file}: {'; '.join(describe_validation_error(error))}") from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Prevent other processes from writing to a directory during the block. Raise a StoreError if one already does."""
    with wrap_os_errors("open", folder / ".lock"):
        descriptor = private_opener(folder / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            lock_file(descriptor)
        except OSError:
            raise StoreError(f"{folder} is open in another process; wait for that process to end") from None
        yield
    finally:
        os.close(descriptor)


GENERATED_NAME = re.compile(r"-\d{8}T\d{6}Z-[0-9a-f]{6}$")
"""The pattern of the end of a name created by `new_run_path`."""


def new_run_path(log_dir: Path, task_name: str) -> Path:
    """Return `<log_dir>/<task>-<utc>-<id>`. The runs of a task sort by time."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", task_name).strip("-")[:60] or "task"
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return log_dir / f"{slug}-{now}-{secrets.token_hex(3)}"


def latest_run(log_dir: Path, name: str | None = None, *, training: bool = False) -> Path:
    """Return the newest resumable run in `log_dir`, optionally only of a specific task or train file."""

    def fits(header: RunHeader) -> bool:
        is_of_task = header.task_path is not None and header.from_python is None
        return name in (None, header.task_name) and (header.training is not None if training else is_of_task)

    if runs := newest_runs(log_dir, fits):
        return runs[0]
    kind, of_name = ("training run", f" of {name!r}") if training else ("run", f" of task {name!r}")
    raise ConfigError(
        f"no {kind}{of_name if name else ''} in {log_dir}; start a run, or pass its directory with --resume RUN"
    )


def newest_runs(log_dir: Path, fits: Callable[[RunHeader], bool]) -> list[Path]:
    """Return the runs in `log_dir` whose headers satisfy `fits`, newest first; damaged runs are skipped."""
    started = {}
    for path in log_dir.glob(f"*/{RUN_FILE}"):
        with suppress(StoreError):
            if fits(header := RunHeader.read(path.parent)):
                started[path.parent] = header.timing.started_at
    return sorted(started, key=started.__getitem__, reverse=True)


def is_open_elsewhere(path: Path) -> bool:
    """Return True if a process has the run at `path` open for writing."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        lock_file(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def current_status(path: Path, header: RunHeader) -> str:
    """Return the status of the run at `path`, or "killed" if its process ended without updating the status."""
    return header.status_now(header.status == "running" and is_open_elsewhere(path))


def resume_command(path: Path, header: RunHeader, status: str) -> list[str]:
    """Return the command that resumes a stopped run.

    The result is [] if the run was not stopped or only scores transcripts.
    """
    if status not in ("killed", "interrupted") or (header.training is None and header.data is not None):
        return []
    return ["reward-kit", "run" if header.training is None else "train", "--resume", str(path)]


class RunFolder:
    """The directory of a run, which only this process may write to. Use it as a context manager.

    Args:
        path: the directory.
        redaction: the redaction of secrets in written files.

    Attributes:
        header: the content of `run.json`, which is read while the lock is held.
        checkpoints: the directory of a training run's checkpoints.
    """

    header: RunHeader

    def __init__(self, path: Path, redaction: Redaction | None = None) -> None:
        self.path, self.checkpoints = path, path / CHECKPOINTS
        self.redaction = redaction or Redaction()
        self._files: dict[str, int] = {}
        self._states: set[Path] = set()

    @classmethod
    def create(cls, path: Path, header: RunHeader, redaction: Redaction | None = None) -> Self:
        """Create the directory and its `run.json`."""
        try:
            make_private_folder(path, parents=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the run directory {path}: {error.strerror}; choose another --log-dir"
            ) from error
        folder = cls(path, redaction)
        folder.write_header(header)
        return folder

    def __enter__(self) -> Self:
        """Lock the directory and set the status to "running"."""
        refuse_links_out(self.path)
        with ExitStack() as opened:
            opened.enter_context(lock_folder(self.path))
            header = RunHeader.read(self.path)
            for name in (EPISODES_FILE, SCORES_FILE) if header.training is None else ():
                with wrap_os_errors("open", self.path / name):
                    cut_torn_line(self.path / name)
                self._files[name] = self._open(name, os.O_WRONLY | os.O_APPEND, opened)
            opened.callback(self._files.clear)
            self.write_header(header.replace(status="running"))
            self._opened = opened.pop_all()
        return self

    def _open(self, name: str, flags: int, opened: ExitStack) -> int:
        with wrap_os_errors("open", self.path / name):
            descriptor = private_opener(self.path / name, os.O_CREAT | flags)
        opened.callback(os.close, descriptor)
        return descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def write_header(self, header: RunHeader) -> None:
        """Replace `run.json`."""
        write_atomically(self.path / RUN_FILE, self.redaction.redact_line(header.to_bytes()))
        self.header = header

    def write_summary(self, summary: Mapping[str, Any], name: str = SUMMARY_FILE) -> None:
        """Replace `summary.json` or another JSON file of this name."""
        text = json.dumps(summary, indent=2, allow_nan=False).encode("ascii") + b"\n"
        write_atomically(self.path / name, self.redaction.redact_line(text))

    def append_episode(self, episode: SingleAgentEpisode) -> None:
        """Write the final state of an episode to `states/`, and then append the episode."""
        stored = None
        if state := episode.custom_data.get("final_state"):
            snapshot = redacted_state(state, self.redaction)
            stored = {"kind": snapshot.kind, "sha256": snapshot.digest}
            path = self.path / STATES / state_name(stored)
            if path not in self._states:  # Episodes of a group often have the same final state
                if not path.exists():
                    with wrap_os_errors("write", path):
                        make_private_folder(path.parent, exist_ok=True)
                    write_atomically(path, snapshot.payload)
                self._states.add(path)
        self._append(EPISODES_FILE, episode_to_record(episode, final_state=stored))

    def append_score(self, record: Mapping[str, Any]) -> None:
        """Append one score."""
        self._append(SCORES_FILE, {"schema_version": SCHEMA_VERSION, **record})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        text = compact_json(self.redaction.redact_record(record))
        line = self.redaction.redact_line(text.encode("ascii")) + b"\n"
        append_line(self._files[name], self.path / name, line)

    def update_status(self, *, status: str, worked_s: float, training: Mapping[str, int] | None = None) -> None:
        """Update the status, the seconds of work and the given keys of the `training` block in `run.json`."""
        changes: dict[str, Any] = {"timing": self.header.timing.model_copy(update={"worked_s": round(worked_s, 3)})}
        if training is not None:
            changes["training"] = {**(self.header.training or {}), **training}
        self.write_header(self.header.replace(status=status, **changes))


def redacted_state(state: Mapping[str, Any], redaction: Redaction) -> StateSnapshot:
    """Return a final state with redacted strings; databases are not changed."""
    snapshot = StateSnapshot(state["kind"], state["payload"])
    if snapshot.kind == "composite":
        parts = decompose(snapshot).items()
        return compose({name: redacted_state({"kind": p.kind, "payload": p.payload}, redaction) for name, p in parts})
    is_text = snapshot.kind in ("json", "files")
    return StateSnapshot(snapshot.kind, redaction.redact_bytes(snapshot.payload)) if is_text else snapshot


def read_episodes(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of `episodes.jsonl`; an incomplete last line is skipped."""
    return (record for _, record in placed_episodes(path))


def placed_episodes(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of `episodes.jsonl` and their byte offsets, for use with `episode_at`."""
    return read_lines(path / EPISODES_FILE)


def read_scores(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of `scores.jsonl`; an incomplete last line is skipped.

    Raises:
        StoreError: a line is damaged, or has an unknown failure class or an invalid score; the message names the line.
    """
    return (record for _, record in placed_scores(path))


def placed_scores(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of `scores.jsonl` and their byte offsets."""
    return read_lines(path / SCORES_FILE, check_score)


def check_score(record: Mapping[str, Any]) -> None:
    """Raise a StoreError unless the score is finite or null and the failure class is known."""
    score = record.get("score")
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if score is not None and not (is_number and abs(score) <= sys.float_info.max):
        raise StoreError(f"the score of {record['rollout_id']} must be a finite number or null, got {score!r:.80}")
    if (failure := record.get("failure")) is not None:
        with boundary(StoreError, "the failure cannot be read"):
            Failure.from_json(failure)


def read_credit(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of `credit.jsonl`, one per step, or nothing if no credit was assigned."""
    return (record for _, record in read_lines(path / CREDIT_FILE))


def episode_at(path: Path, offset: int) -> SingleAgentEpisode:
    """Load the episode at a byte offset of `episodes.jsonl`, including its final state."""
    with wrap_os_errors("read", path / EPISODES_FILE), (path / EPISODES_FILE).open("rb") as lines:
        lines.seek(offset)
        return load_episode(path, json.loads(lines.readline()))


def load_episode(path: Path, record: Mapping[str, Any]) -> SingleAgentEpisode:
    """Return the episode in a record of the run at `path`, including its final state.

    The record contains the digest of the file that stores the state or, in a training run, the state itself.
    """
    episode = episode_from_record(record)
    if stored := episode.custom_data["final_state"]:
        match stored:
            case {"kind": str(kind), "payload": bytes(payload)}:
                pass
            case {"kind": str(kind), "sha256": str(digest)}:
                file = state_file(path, episode.id_, stored)
                payload = file.read_bytes()
                if StateSnapshot(kind, payload).digest != digest:
                    raise StoreError(f"episode {episode.id_}: its final state {file} was changed (SHA-256 differs)")
            case _:
                problem = "final_state must have a kind and either a sha256 or a payload; was the file edited by hand?"
                raise StoreError(f"episode {episode.id_}: {problem}")
        episode.custom_data["final_state"] = {"kind": kind, "payload": payload}
    return episode


def read_lines(
    path: Path, check: Callable[[Mapping[str, Any]], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of a file and their byte offsets. An error raised by `check` names the line."""
    for number, (offset, line) in enumerate(placed_lines(path), 1):
        yield offset, line_record(path, number, line, check)


def placed_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines of a file and their byte offsets, or nothing if the file does not exist."""
    if path.exists():
        with wrap_os_errors("read", path):
            yield from complete_lines(path)


def line_record(
    path: Path, number: int, line: bytes, check: Callable[[Mapping[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Parse a line of a file in a run directory."""
    try:
        record = read_line(line.rstrip())
    except ValueError as error:
        raise StoreError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("rollout_id"), str):
        raise StoreError(f"{path}:{number}: expected an object with a string rollout_id; was the file edited by hand?")
    if not isinstance(record.get("attempt"), int | None):
        raise StoreError(f"{path}:{number}: attempt must be an integer, got {record['attempt']!r}")
    if check is not None:
        try:
            check(record)
        except StoreError as error:
            raise StoreError(f"{path}:{number}: {error}") from None
    return record
