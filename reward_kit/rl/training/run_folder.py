"""The folder of a training run: its header, its lock, and the changes that a resume finds and may accept.

runs/<name>-<utc>-<id>/
  run.json        as every run's: name, status, versions, timing; and under `training` the resolved train file
  metrics.jsonl   a line for each update
  checkpoints/    everything that a resume needs; the latest ones and the best
  model/          the weights of the best checkpoint, in the format of `transformers`, if the policy has such
  episodes/       the episodes of some updates, with `logs.episodes_every`
  studies/        the batch on which a loss or a gradient was not finite
  summary.json    the result
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pydantic
from pydantic_core import to_jsonable_python

from reward_kit.errors import ConfigError, StoreError
from reward_kit.private_files import make_private_folder, private_opener
from reward_kit.processes import lock_for_this_process
from reward_kit.rl.training.plan import TRAIN_FILE, TrainingPlan
from reward_kit.runs.files import METRICS, refuse_links_out, told_of, write_atomically
from reward_kit.runs.inputs import TASK_FILE
from reward_kit.runs.redaction import Redaction, without_secrets
from reward_kit.runs.run_folder import FILE, RunHeader
from reward_kit.validation import describe_validation_error

CHECKPOINTS = "checkpoints"
CHANGEABLE = ("updates", "checkpoints", "early_stop", "logs", "threads", "engine")
"""Keys of the train file that a resume may change: how long, where, and what is kept and logged."""


class TrainingHeader(pydantic.BaseModel):
    """The block `training` of `run.json`.

    Attributes:
        train_path: the train file.
        overrides: the keys laid over it.
        config: the file with defaults filled in, without secrets.
        updates: finished updates.
        redacts: whether the task has a redaction hook; token ids are then not decoded again.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    train_path: str
    overrides: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    updates: int = 0
    redacts: bool = False


def header_of(run_id: str, plan: TrainingPlan) -> RunHeader:
    """Make the `run.json` of a new run."""
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
    """The resolved train file as plain JSON without secrets, the same at every resume."""
    line = json.dumps(without_secrets(plan.resolved()), default=to_jsonable_python).encode("ascii")
    config: dict[str, Any] = json.loads(plan.redaction.of_line(line))
    return config


def training_of(header: RunHeader, run: Path) -> TrainingHeader:
    """Read the training block of a header.

    Raises:
        ConfigError: the run in this folder is not a training run.
        StoreError: the block is damaged.
    """
    if header.training is None:
        raise ConfigError(f"{run} is not a run of `reward-kit train`")
    try:
        return TrainingHeader.model_validate(header.training)
    except pydantic.ValidationError as error:
        raise StoreError(f"{run / FILE}: {'; '.join(describe_validation_error(error))}") from None


def latest_training(log_dir: Path, name: str | None = None) -> Path:
    """Find the newest training run in a folder, optionally of one name.

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
    """Remove a run's folder if it has neither figures nor a checkpoint; it must not be open."""
    figures = run / METRICS
    if not (figures.is_file() and figures.stat().st_size) and not any((run / CHECKPOINTS).glob("*")):
        shutil.rmtree(run, ignore_errors=True)


class RunFolder:
    """The folder of a run, open for writing by this process alone. Use it as a context manager.

    Args:
        path: an existing run.
        redaction: keeps secrets out of what is written.
    """

    def __init__(self, path: Path, redaction: Redaction) -> None:
        self.path = path
        self._redaction = redaction

    @classmethod
    def create(cls, path: Path, header: RunHeader, redaction: Redaction) -> RunFolder:
        """Make the folder with its `run.json`.

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
        """The folder of checkpoints."""
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

    def note(self, *, status: str, updates: int, worked_s: float) -> None:
        """Write the progress of the run to `run.json`."""
        training = training_of(self.header, self.path).model_copy(update={"updates": updates})
        timing = self.header.timing.model_copy(update={"worked_s": round(worked_s, 3)})
        self.header = self.header.with_(status=status, timing=timing, training=training.model_dump(mode="json"))
        self._write(FILE, self.header.to_bytes())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json`."""
        self._write("summary.json", json.dumps(summary, indent=2).encode("ascii") + b"\n")

    def _write(self, name: str, document: bytes) -> None:
        write_atomically(self.path / name, self._redaction.of_line(document))


class Changes(NamedTuple):
    """The differences between a run's files and the files now.

    Attributes:
        refused: changed inputs of the earlier updates, as texts.
        allowed: changed keys of the train file that a resume may change, as texts.
    """

    refused: list[str]
    allowed: list[str]


def changes_since(header: RunHeader, plan: TrainingPlan, run: Path) -> Changes:
    """Compare a run's inputs with the files as they are now.

    Args:
        header: of the run.
        plan: of the same train file, with the same overrides, as it is now.
        run: its folder, for messages.

    Raises:
        ConfigError: the run is not a training run.
    """
    changed = sorted(name for name, digest in plan.digests.items() if header.digests.get(name) != digest)
    if isinstance(plan.config.task, dict):  # an inline task is compared key by key, with the train file
        has_own = plan.held_out is not None and plan.held_out.is_own_task
        inline = {TASK_FILE} if has_own else {TASK_FILE, f"evaluation's {TASK_FILE}"}
        changed = [name for name in changed if name not in inline]
    if TRAIN_FILE not in changed:
        return Changes(changed, [])
    refused = [name for name in changed if name != TRAIN_FILE]
    allowed: list[str] = []
    keys: list[str] = []
    # Comments, white space and the order of keys change the digest but nothing else.
    for key, before, now in _differences(training_of(header, run).config, stored_config(plan)):
        target = allowed if key.partition(".")[0] in CHANGEABLE else keys
        target.append(f"{key} was {_short(before)}, is {_short(now)}")
    if keys:
        refused.append(f"{TRAIN_FILE} ({'; '.join(keys)})")
    return Changes(refused, allowed)


_ABSENT = object()


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key whose value differs, with both values; `_ABSENT` where the key is missing."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        if before != now:
            yield path, before, now
        return
    for key in sorted({*before, *now}, key=str):
        inner = f"{path}.{key}" if path else str(key)
        yield from _differences(before.get(key, _ABSENT), now.get(key, _ABSENT), inner)


def _short(value: Any) -> str:
    text = "absent" if value is None or value is _ABSENT else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
