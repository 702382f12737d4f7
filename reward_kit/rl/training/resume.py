"""The header of a training run, and the input changes that prevent a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python

from reward_kit.rl.training.plan import TRAIN_FILE, TrainingPlan
from reward_kit.runs.inputs import TASK_FILE
from reward_kit.runs.redaction import without_secrets
from reward_kit.runs.run_folder import RunHeader, TrainingHeader

CHANGEABLE = ("updates", "max_env_steps", "checkpoints", "early_stop", "logs", "threads", "engine")
"""The keys of the train file that may change when a run is resumed."""


def new_run_header(run_id: str, plan: TrainingPlan) -> RunHeader:
    """Return the content of `run.json` for a new run."""
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


def resumed_run_header(header: RunHeader, plan: TrainingPlan, run: Path) -> RunHeader:
    """Return the content of `run.json` for a resumed run. Only the keys that may change are updated."""
    training, config = header.require_training(run), stored_config(plan)
    changes = {
        "overrides": {**training.overrides, **without_secrets(dict(plan.overrides))},
        "config": {**training.config, **{key: config[key] for key in CHANGEABLE}},
    }
    return header.replace(training={**(header.training or {}), **to_jsonable_python(changes)})


def stored_config(plan: TrainingPlan) -> dict[str, Any]:
    """Return the resolved train file as plain JSON without secrets. Every resume produces the same result."""
    line = json.dumps(without_secrets(plan.resolved()), default=to_jsonable_python).encode("ascii")
    config: dict[str, Any] = json.loads(plan.redaction.redact_line(line))
    return config


class Changes(NamedTuple):
    """The differences between the stored inputs of a run and the current inputs.

    Attributes:
        refused: descriptions of changed inputs that affected earlier updates and therefore prevent a resume.
        allowed: descriptions of changed keys that are allowed to differ when a run is resumed.
    """

    refused: list[str]
    allowed: list[str]


def changes_since(header: RunHeader, plan: TrainingPlan, run: Path) -> Changes:
    """Compare the inputs stored in a run directory with the current files, using the same overrides."""
    changed = sorted(name for name, digest in plan.digests.items() if header.digests.get(name) != digest)
    if isinstance(plan.config.task, dict):  # An inline task is compared key by key, as part of the train file.
        has_own = plan.held_out is not None and plan.held_out.is_own_task
        inline = {TASK_FILE} if has_own else {TASK_FILE, f"evaluation's {TASK_FILE}"}
        changed = [name for name in changed if name not in inline]
    if TRAIN_FILE not in changed:
        return Changes(changed, [])
    refused = [name for name in changed if name != TRAIN_FILE]
    allowed: list[str] = []
    keys: list[str] = []
    # Comments, white space and the order of keys change the digest but nothing else.
    for one in value_differences(header.require_training(run).config, stored_config(plan)):
        (allowed if one.key.partition(".")[0] in CHANGEABLE else keys).append(one.text)
    if keys:
        refused.append(f"{TRAIN_FILE} ({'; '.join(keys)})")
    return Changes(refused, allowed)


class ValueDifference(NamedTuple):
    """A key whose value differs, and both values as short texts."""

    key: str
    before: str
    now: str

    @property
    def text(self) -> str:
        """A description of a change."""
        return f"{self.key} was {self.before}, is {self.now}"


def value_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[ValueDifference]:
    """Return each key, dotted if nested, whose value differs."""
    return [ValueDifference(key, _short(one), _short(other)) for key, one, other in _differences(before, now)]


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose value differs, and both values. A missing key has the value None, the usual default."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        if before != now:
            yield path, before, now
        return
    for key in sorted({*before, *now}, key=str):
        inner = f"{path}.{key}" if path else str(key)
        yield from _differences(before.get(key), now.get(key), inner)


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
