"""`run.json`: what a run was asked to do, what it came from and how far it is. Read in one place, and checked there."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pydantic

from reward_kit.errors import ConfigError, StoreError, did_you_mean
from reward_kit.runs.files import read_json, refuse_links_out
from reward_kit.validation import describe_validation_error

FILE = "run.json"
SCHEMA_VERSION = 1
_ALWAYS = {"schema_version", "versions", "status", "timing"}


def this_software() -> dict[str, str]:
    """The versions under which this process works."""
    return {"reward_kit": version("reward-kit"), "python": platform.python_version()}


class RunTiming(pydantic.BaseModel):
    """What the clock says of a run.

    Attributes:
        started_at: when it began, in UTC.
        worked_s: seconds that processes worked on it, each until it ended by itself.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    started_at: pydantic.AwareDatetime
    worked_s: float = 0.0


class RunHeader(pydantic.BaseModel):
    """What `run.json` says. A key that this release does not know is kept.

    Attributes:
        task_name: of the task, or of the file of transcripts.
        total: how many episodes the run has when it is complete.
        run_id: the name of its folder.
        task: the definition as it was resolved, without secrets.
        run_limits: those in force, where each may have been raised since the run began; null is no limit.
        digests: SHA-256 of each file that decides what its episodes and scores are.
        versions: of the software that began it.
        max_concurrency: episodes in flight when it began.
        task_path, overrides, models, policies, base_url, rollouts, limit, sample_ids, seed: the run's `Request`;
            `task_path` is None where transcripts are scored and nothing is run.
        from_python: what the run was given as Python objects, which no file names, by what each is; such a run is not
            resumed. Where it has a `task`, that was made in Python, and `task_path` is only the place of its files.
        data, reward: the transcripts and the reward that were named, where transcripts are scored.
        training: where a model is trained, what `rl/training/run_folder.py` says of it; None for every other run.
        rescored_from: where the episodes of another run were scored again, which, and by what; see `runs/rescoring.py`.
        status: "running", "complete", "interrupted" or "failed".
        timing: what the clock says.
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
    overrides: Mapping[str, Any] = {}
    models: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    base_url: str | None = None
    rollouts: int | None = None
    limit: int | None = None
    sample_ids: tuple[str, ...] = ()
    seed: int = 0
    run_limits: Mapping[str, Any] = {}
    digests: Mapping[str, str] = {}
    total: int = 0
    max_concurrency: int | None = None
    versions: Mapping[str, str] = pydantic.Field(default_factory=this_software)
    status: str = "running"
    timing: RunTiming = pydantic.Field(
        default_factory=lambda: RunTiming(started_at=datetime.datetime.now(datetime.UTC))
    )

    @classmethod
    def read(cls, run: Path) -> RunHeader:
        """The header of the run in a folder.

        Raises:
            StoreError: it is missing, is of another version, or a key of it is damaged; or a link leads out of the
                folder.
        """
        refuse_links_out(run)
        data = read_json(run / FILE)
        if data.get("schema_version") != SCHEMA_VERSION:
            told = data.get("schema_version")
            raise StoreError(f"{run / FILE} is of version {told!r}; this release reads version {SCHEMA_VERSION}")
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise StoreError(f"{run / FILE}: {'; '.join(describe_validation_error(error))}") from None

    @classmethod
    def of_folder(cls, run: Path) -> RunHeader:
        """As `read`, of a folder that a user named.

        Raises:
            ConfigError: it is not that of a run; the message names what may have been meant.
            StoreError: as `read`.
        """
        if not (run / FILE).is_file():
            raise ConfigError(f"{run} is not the folder of a run: it has no {FILE}{_what_is_meant(run)}")
        return cls.read(run)

    @property
    def pass_threshold(self) -> float:
        """A score of at least this passes."""
        told = self.task.get("pass_threshold")
        if isinstance(told, int | float) and not isinstance(told, bool) and abs(told) <= sys.float_info.max:
            return float(told)
        return 1.0

    def status_now(self, is_open: bool) -> str:
        """The status; "killed" where it says running, and no process has the run open."""
        return "killed" if self.status == "running" and not is_open else self.status

    def to_bytes(self) -> bytes:
        """As it stands in the file: ASCII JSON, without the keys that say nothing of this kind of run."""
        unset = type(self).model_fields.keys() - self.model_fields_set - _ALWAYS
        document = self.model_dump(mode="json", exclude=unset)
        return json.dumps(document, indent=2, allow_nan=False).encode("ascii") + b"\n"

    def with_(self, **changes: Any) -> RunHeader:
        """The header with other values of some keys."""
        return self.model_copy(update=changes)


def _what_is_meant(run: Path) -> str:
    """The run whose file it is, or whose name is the nearest, for the end of a message."""
    if (run.parent / FILE).is_file():
        return f"; did you mean {str(run.parent)!r}?"
    folders = {run, run.parent, Path("runs")}
    near = did_you_mean(str(run), (str(path.parent) for folder in folders for path in folder.glob(f"*/{FILE}")))
    return near if near.endswith("?") else "; `reward-kit runs list` names them"
