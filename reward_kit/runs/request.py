"""What a run was asked to do, as the command line said it and as `run.json` keeps it for a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.runs.header import FILE, RunHeader
from reward_kit.runs.inputs import differences
from reward_kit.runs.plan import Plan
from reward_kit.runs.redaction import without_hidden, without_secrets
from reward_kit.runs.tasks import LoadedTask


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run; it stays the same for as long as a run is resumed."""

    task_path: Path
    overrides: Mapping[str, Any]
    models: Sequence[str]
    policies: Sequence[str]
    base_url: str | None
    rollouts: int | None
    limit: int | None
    sample_ids: Sequence[str]
    seed: int

    @classmethod
    def of_run(cls, header: RunHeader) -> Request:
        """What an earlier run was asked to do; of its overrides those that are stored."""
        given = {field.name: getattr(header, field.name) for field in fields(cls)}
        return cls(**{**given, "task_path": Path(given["task_path"]), "overrides": without_hidden(header.overrides)})

    def changed(self, overrides: Mapping[str, Any], base_url: str | None, hidden: Sequence[str]) -> Request:
        """The request with what a resume may change: limits of the run, secrets, and where the models are.

        Args:
            overrides: as given to the resume.
            base_url: the endpoint, None to keep it.
            hidden: the keys of secrets that were given to the run and are not stored.

        Raises:
            ConfigError: an override would change what is run.
        """
        for key in overrides:
            if not key.startswith("run_limits.") and key not in hidden:
                raise ConfigError(f"-T {key} cannot be changed by --resume; start a new run. run_limits.… can be")
        return replace(self, overrides={**self.overrides, **overrides}, base_url=base_url or self.base_url)


def header_to_resume(path: Path) -> RunHeader:
    """The header of a run that is to go on.

    Raises:
        ConfigError: there is no run, or none of a task.
        StoreError: its header is damaged.
    """
    if not (path / FILE).is_file():
        raise ConfigError(f"--resume: {path} is no run; name a folder with a {FILE}, or none for the latest")
    header = RunHeader.read(path)
    if header.task_path is None:
        raise ConfigError(f"{path} is no run of a task and cannot be resumed")
    if header.from_python is not None:
        told = ", ".join(f"{name} {header.from_python[name]}" for name in header.from_python)
        raise ConfigError(
            f"--resume: {path} was run from Python, with objects that no file names ({told}); run it again from there"
        )
    return header


def header_of(
    run_id: str, task: LoadedTask, plan: Plan, request: Request, objects: Mapping[str, str] | None = None
) -> RunHeader:
    """What `run.json` says of a new run.

    Args:
        run_id: the name of its folder.
        task: as it was loaded.
        plan: what is run of it.
        request: what was asked for.
        objects: what the Python objects that act are called, by what each is.
    """
    of_python = {**task.given.names, **(objects or {})}
    definition = task.definition
    asked = {
        **asdict(request),
        "task_path": str(request.task_path.resolve()),
        "overrides": without_secrets(dict(request.overrides)),
    }
    return RunHeader(
        run_id=run_id,
        task_name=definition.name,
        digests=dict(task.digests),
        task=without_secrets(definition.model_dump(mode="json", exclude_defaults=True)),
        run_limits=definition.run_limits.model_dump(),
        total=plan.total,
        max_concurrency=plan.max_concurrency,
        **({"from_python": of_python} if of_python else {}),
        **asked,
    )


def changes_since(path: Path, header: RunHeader, task: LoadedTask) -> list[str]:
    """Return a text for each file of the run that is different now."""
    return differences(path, header.digests, task.digests, task.inputs)
