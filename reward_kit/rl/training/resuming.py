"""What changed between a run's beginning and its resume, key by key, and what of it may."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.rl.training.plan import TRAIN_FILE, TrainingPlan
from reward_kit.rl.training.run_folder import stored_config, training_of
from reward_kit.runs.inputs import TASK_FILE
from reward_kit.runs.run_folder import RunHeader

CHANGEABLE = ("updates", "checkpoints", "early_stop", "logs", "threads", "engine")
"""Keys of the train file that may change: they say how long, where, and what is kept and told of it."""
_NOTHING = object()


class Change(NamedTuple):
    """A key of the train file that counts otherwise than it did; None where it was, or is, left out."""

    key: str
    before: Any
    now: Any

    @property
    def is_allowed(self) -> bool:
        """Whether a run may go on with it."""
        return self.key.partition(".")[0] in CHANGEABLE

    def __str__(self) -> str:
        return f"{self.key} was {_short(self.before)}, is {_short(self.now)}"


class Changes(NamedTuple):
    """What changed.

    Attributes:
        refused: what the earlier updates were made with, in words.
        allowed: keys of the train file that may change.
    """

    refused: list[str]
    allowed: list[Change]


def changes_since(header: RunHeader, plan: TrainingPlan, run: Path) -> Changes:
    """What of a run's files is not as it was when the run began.

    Args:
        header: of the run.
        plan: of the same train file, with the same overrides, as it is now.
        run: its folder, for messages.

    Raises:
        ConfigError: the run is none of training.
    """
    changed = sorted(name for name, digest in plan.digests.items() if header.digests.get(name) != digest)
    changed = [name for name in changed if name not in _within(plan)]
    if TRAIN_FILE not in changed:
        return Changes(changed, [])
    keys = [Change(*found) for found in _differences(training_of(header, run).config, stored_config(plan))]
    refused = [name for name in changed if name != TRAIN_FILE]
    if told := [str(key) for key in keys if not key.is_allowed]:
        refused.append(f"{TRAIN_FILE} ({'; '.join(told)})")
    # Comments, white space and the order of keys change a file, and nothing that is done.
    return Changes(refused, [key for key in keys if key.is_allowed])


def _within(plan: TrainingPlan) -> set[str]:
    """The files that are parts of the train file, whose keys are compared with its own."""
    if not isinstance(plan.config.task, dict):
        return set()
    has_own = plan.held_out is not None and plan.held_out.is_own_task
    return {TASK_FILE} if has_own else {TASK_FILE, f"evaluation's {TASK_FILE}"}


def _differences(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        if before != now:
            yield place, None if before is _NOTHING else before, None if now is _NOTHING else now
        return
    for key in sorted({*before, *now}, key=str):
        inner = f"{place}.{key}" if place else str(key)
        yield from _differences(before.get(key, _NOTHING), now.get(key, _NOTHING), inner)


def _short(value: Any) -> str:
    text = "not there" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
