"""What a run was asked to do, as the command line said it and as `run.json` keeps it for a resume."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.runs.inputs import differences
from reward_kit.runs.plan import Plan
from reward_kit.runs.redaction import HIDDEN, without_hidden, without_secrets
from reward_kit.runs.store import read_json
from reward_kit.runs.tasks import Task


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
    def of_run(cls, path: Path) -> Request:
        """What an earlier run was asked to do.

        Raises:
            ConfigError: there is no run, or none of a task.
        """
        if not (path / "run.json").is_file():
            raise ConfigError(f"--resume: {path} is no run; name a folder with a run.json, or none for the latest")
        header = read_json(path / "run.json")
        if "task_path" not in header:
            raise ConfigError(f"{path} is no run of a task and cannot be resumed")
        given = {field.name: header[field.name] for field in fields(cls) if field.name != "task_path"}
        given["overrides"] = without_hidden(given["overrides"])
        return cls(task_path=Path(header["task_path"]), **given)

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


def hidden_overrides(path: Path) -> list[str]:
    """The dotted keys of overrides that a run was given and that are secrets, which are not stored."""
    return list(_hidden(read_json(path / "run.json").get("overrides", {})))


def _hidden(value: Any, key: str = "") -> Iterator[str]:
    if value == HIDDEN:
        yield key
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from _hidden(item, f"{key}.{name}" if key else str(name))


def kept_run_limits(path: Path) -> dict[str, Any]:
    """The limits under which an earlier process left a run, from the command line too."""
    return dict(read_json(path / "run.json").get("run_limits") or {})


def header_of(run_id: str, plan: Plan, request: Request) -> dict[str, Any]:
    """What `run.json` says of a new run."""
    definition = plan.task.definition
    return {
        "run_id": run_id,
        "task_name": definition.name,
        "digests": dict(plan.task.digests),
        "task": without_secrets(definition.model_dump(mode="json", exclude_defaults=True)),
        **asdict(request),
        "task_path": str(request.task_path.resolve()),
        "overrides": without_secrets(dict(request.overrides)),
        "run_limits": definition.run_limits.model_dump(exclude_none=True),
        "total": plan.total,
        "max_concurrency": plan.max_concurrency,
        "versions": {"reward_kit": version("reward-kit"), "python": platform.python_version()},
    }


def changes_since(path: Path, task: Task) -> list[str]:
    """How the files that a run came from differ now; a text for each that does."""
    before = read_json(path / "run.json")["digests"]
    return differences(path, before, task.digests, task.inputs)
