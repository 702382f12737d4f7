"""The folder of a training run: what was asked for, how far it is, and that no second process writes to it.

runs/<name>-<utc>-<id>/
  run.json        as every run's: name, status, versions, timing; and under `training` the train file as it counts
  metrics.jsonl   a line for each update
  checkpoints/    everything that a resume needs; the latest ones and the best
  model/          the weights of the best checkpoint, in the format of `transformers`, where the policy has such
  episodes/       the episodes of some updates, where they are asked for
  studies/        the batch on which a loss or a gradient was not finite
  summary.json    what came of it
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pydantic
from pydantic_core import to_jsonable_python

from reward_kit.errors import ConfigError, StoreError
from reward_kit.private_files import make_private_folder, private_opener
from reward_kit.processes import lock_for_this_process
from reward_kit.rl.training.plan import TrainingPlan, resolved
from reward_kit.runs.files import METRICS, refuse_links_out, told_of, write_atomically
from reward_kit.runs.redaction import Redaction, without_secrets
from reward_kit.runs.run_folder import FILE, RunHeader
from reward_kit.validation import describe_validation_error

CHECKPOINTS = "checkpoints"


class TrainingHeader(pydantic.BaseModel):
    """What `run.json` says under `training`.

    Attributes:
        train_path: the train file.
        overrides: what was laid over it.
        config: the file as it counts, without secrets.
        updates: how many are done.
        redacts: whether the task has a hook on texts, so that token ids are not made into texts again.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    train_path: str
    overrides: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    updates: int = 0
    redacts: bool = False


def header_of(run_id: str, plan: TrainingPlan) -> RunHeader:
    """What `run.json` says of a new run."""
    training = TrainingHeader(
        train_path=str(plan.path.resolve()),
        overrides=without_secrets(dict(plan.overrides)),
        config=stored_config(plan),
        redacts=plan.task.definition.redact is not None,
    )
    return RunHeader(
        run_id=run_id,
        task_name=plan.name,
        seed=plan.config.seed,
        digests=dict(plan.digests),
        training=training.model_dump(mode="json"),
    )


def stored_config(plan: TrainingPlan) -> dict[str, Any]:
    """The train file as it counts and as it may be kept: plain JSON without secrets, the same at every resume."""
    line = json.dumps(without_secrets(resolved(plan)), default=to_jsonable_python).encode("ascii")
    config: dict[str, Any] = json.loads(plan.redaction.of_line(line))
    return config


def training_of(header: RunHeader, run: Path) -> TrainingHeader:
    """The part of a header that is about training.

    Raises:
        ConfigError: the run in this folder is none of training.
        StoreError: it is damaged.
    """
    if header.training is None:
        raise ConfigError(f"{run} is no run of `reward-kit train`")
    try:
        return TrainingHeader.model_validate(header.training)
    except pydantic.ValidationError as error:
        raise StoreError(f"{run / FILE}: {'; '.join(describe_validation_error(error))}") from None


def latest_training(log_dir: Path, name: str | None = None) -> Path:
    """The newest training run in a folder, of one name where it is given.

    Raises:
        ConfigError: there is none.
    """
    found: dict[Path, RunHeader] = {}
    for path in log_dir.glob(f"*/{FILE}"):
        try:
            header = RunHeader.read(path.parent)
        except StoreError:  # one damaged run does not hide the others
            continue
        if header.training is not None and name in (None, header.task_name):
            found[path.parent] = header
    if not found:
        of_name = f" of {name!r}" if name else ""
        raise ConfigError(f"no training run{of_name} in {log_dir}; start one, or name its folder with --resume RUN")
    return max(found, key=lambda path: found[path].timing.started_at)


def remove_unused(run: Path) -> None:
    """Remove the folder of a run that has neither figures nor a checkpoint; any other stays.

    Args:
        run: its folder, open nowhere.
    """
    figures = run / METRICS
    if (figures.is_file() and figures.stat().st_size) or any((run / CHECKPOINTS).glob("*")):
        return
    shutil.rmtree(run, ignore_errors=True)


class RunFolder:
    """The folder, open for writing by this process alone. Use it as a context manager.

    Args:
        path: the folder of a run that was begun.
        redaction: keeps secrets out of what is written.
    """

    def __init__(self, path: Path, redaction: Redaction) -> None:
        self.path = path
        self._redaction = redaction

    @classmethod
    def create(cls, path: Path, header: RunHeader, redaction: Redaction) -> RunFolder:
        """Make it, with its `run.json`.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            make_private_folder(path, parents=True)
        except OSError as error:
            raise ConfigError(f"cannot make {path}: {error.strerror}; choose another --log-dir") from error
        folder = cls(path, redaction)
        folder._write(FILE, header.to_bytes())
        return folder

    @property
    def checkpoints(self) -> Path:
        """Where they are."""
        return self.path / CHECKPOINTS

    def __enter__(self) -> Self:
        refuse_links_out(self.path)
        with told_of("open", self.path / ".lock"):
            self._lock = private_opener(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            lock_for_this_process(self._lock)
        except OSError:
            os.close(self._lock)
            raise StoreError(f"{self.path} is open in another process; wait for it to end") from None
        self.header = RunHeader.read(self.path).with_(status="running")
        self._write(FILE, self.header.to_bytes())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def note(self, *, status: str, updates: int, worked_s: float, config: Mapping[str, Any] | None = None) -> None:
        """Say in `run.json` how far the run is."""
        changes: dict[str, Any] = {"updates": updates} | ({"config": dict(config)} if config is not None else {})
        training = training_of(self.header, self.path).model_copy(update=changes)
        timing = self.header.timing.model_copy(update={"worked_s": round(worked_s, 3)})
        self.header = self.header.with_(status=status, timing=timing, training=training.model_dump(mode="json"))
        self._write(FILE, self.header.to_bytes())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json`."""
        self._write("summary.json", json.dumps(summary, indent=2).encode("ascii") + b"\n")

    def _write(self, name: str, document: bytes) -> None:
        write_atomically(self.path / name, self._redaction.of_line(document))
