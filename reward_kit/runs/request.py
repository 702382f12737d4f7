"""What a run was asked to do, as the command line said it and as `run.json` keeps it for a resume."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.runs.inputs import differences
from reward_kit.runs.plan import Plan
from reward_kit.runs.redaction import without_hidden, without_secrets
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
        # A hidden secret is not stored; the policy finds it in the environment again.
        given["overrides"] = without_hidden(given["overrides"])
        return cls(task_path=Path(header["task_path"]), **given)


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
        "total": plan.total,
        "max_concurrency": plan.max_concurrency,
        "versions": {"reward_kit": version("reward-kit"), "python": platform.python_version()},
    }


def changes_since(path: Path, task: Task) -> list[str]:
    """How the files that a run came from differ now; a text for each that does."""
    before = read_json(path / "run.json")["digests"]
    return differences(path, before, task.digests, task.inputs)
