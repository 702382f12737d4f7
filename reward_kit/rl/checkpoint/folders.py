"""Checkpoints of a training run: folders that are whole or not there, without pickle.

    checkpoints/
      step-000123/
        model/             weights, configuration and tokenizer in the format of `transformers`, where a model is given
        state.safetensors  the arrays of the optimizer, the schedule and whatever else the trainer gave, …
        state.json         … and the rest of it (`rl.checkpoint.state_tree`)
        manifest.json      step, score, facts, and size and SHA-256 of every file; written last

A folder is written beside its place, put on the disk, and then renamed, so that a kill leaves the checkpoints before
it whole. One process writes to a folder of checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl.checkpoint.atomic_folders import atomic_folder, remove_folder, sweep
from reward_kit.rl.checkpoint.state_tree import read_tree, write_tree
from reward_kit.rl.model_kit.folder import write_model
from reward_kit.runs.files import read_json, told_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("reward_kit.rl")

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        path: its folder; `path / "model"` is what `load_model` takes, where a model was saved.
        step: the training step after which it was made.
        state: the tree that was saved, on the CPU.
        score: how good the policy was, where the trainer knew; more is better.
        facts: the counters and whatever else was noted.
    """

    path: Path
    step: int
    state: Any
    score: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Torn(NamedTuple):
    """A folder that is called a checkpoint and is none, and why."""

    path: Path
    reason: str


class Latest(NamedTuple):
    """The newest whole checkpoint, None where there is none, and the newer ones that are torn."""

    path: Path | None
    torn: list[Torn]


def save_checkpoint(
    folder: Path,
    step: int,
    state: Any,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    score: float | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write `folder/step-000123`; one that is there already is replaced, and what earlier kills left is removed.

    Args:
        folder: the checkpoints of one run.
        step: the training step after which it is made, from 0.
        state: what the trainer needs to go on: a tree of dicts, lists, numbers, texts, tensors and arrays
            (`rl.checkpoint.state_tree`), such as state dicts and `random_states()`.
        model: the weights, so that others can load them too; without it they belong in `state`.
        tokenizer: saved with the model.
        score: how good the policy is; more is better. `prune` keeps the best.
        facts: counters and the like; plain JSON.

    Returns:
        The new folder.

    Raises:
        ConfigError: the state holds something that is none of these kinds.
        StoreError: it cannot be written; the checkpoints before it stand.
    """
    if step < 0:
        raise ConfigError(f"step counts from 0; got {step}")
    for left in sweep(folder):
        logger.info("removed %s, which a kill has left", left)
    place = folder / f"step-{step:06d}"
    with atomic_folder(place, is_private=True) as part:
        if model is not None:
            (part / MODEL).mkdir()
            write_model(part / MODEL, model, tokenizer)
        write_tree(part, "state", state)
        _write_manifest(part, {"step": step, "score": score, "facts": dict(facts or {})})
    return place


def _write_manifest(folder: Path, said: Mapping[str, Any]) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"schema_version": SCHEMA_VERSION, **said, "files": files}
    try:
        text = json.dumps(manifest, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"score and facts of a checkpoint are plain JSON with finite numbers: {error}") from error
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_whole(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, every file of which is there and as it was written.

    Raises:
        StoreError: the manifest or a file is missing, or a file was changed; the message says which.
    """
    manifest = _manifest(path / MANIFEST)
    for name, known in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise StoreError(f"{file} is missing")
        with told_of("read", file):
            if known != {"bytes": file.stat().st_size, "sha256": _digest(file)}:
                raise StoreError(f"{file} is not as it was written; it was cut off or changed")
    return manifest


def _manifest(file: Path) -> dict[str, Any]:
    """A manifest that has all that is read of it."""
    manifest = read_json(file)
    version, files, score = manifest.get("schema_version"), manifest.get("files"), manifest.get("score")
    if version != SCHEMA_VERSION:
        raise StoreError(f"{file}: schema_version is {version}, and this release reads {SCHEMA_VERSION}")
    is_named = isinstance(files, dict) and {"state.json", "state.safetensors"} <= files.keys()
    is_scored = score is None or isinstance(score, int | float)
    if not (is_named and is_scored and {"step", "score", "facts"} <= manifest.keys()):
        raise StoreError(f"{file} is not a manifest of a checkpoint")
    return manifest


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        StoreError: it is torn.
    """
    manifest = check_whole(path)
    return Checkpoint(path, manifest["step"], read_tree(path, "state"), manifest["score"], manifest["facts"])


def latest(folder: Path) -> Latest:
    """The newest checkpoint that is whole; every newer one that is not is named, in the answer and in the log."""
    torn: list[Torn] = []
    for path in reversed(checkpoints(folder)):
        if (reason := _why_torn(path)) is None:
            return Latest(path, torn)
        torn.append(Torn(path, reason))
    return Latest(None, torn)


def checkpoints(folder: Path) -> list[Path]:
    """All folders that are called checkpoints, the oldest first; torn ones are among them."""
    found = {int(match[1]): path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def best(folder: Path) -> Path | None:
    """The whole checkpoint with the highest score, of equals the oldest; None where none has one."""
    scored = []
    for path in checkpoints(folder):
        try:
            score = _manifest(path / MANIFEST)["score"]
        except StoreError:
            continue  # `latest` names it
        scored += [] if score is None else [(score, path)]
    for _, path in sorted(scored, key=lambda found: -found[0]):  # in order of steps already, and this keeps it
        if _why_torn(path) is None:
            return path
    return None


def _why_torn(path: Path) -> str | None:
    """Why a checkpoint cannot be used; None where it is whole. It is said in the log."""
    try:
        check_whole(path)
    except StoreError as error:
        logger.warning("checkpoint %s is torn and not used: %s", path, error)
        return str(error)
    return None


def prune(folder: Path, *, keep: int) -> list[Path]:
    """Remove the oldest checkpoints, never the best one and never the newest that is whole.

    Args:
        folder: the checkpoints of one run.
        keep: how many of the newest stay, 1 or more; the best one stays besides.

    Returns:
        Those that were removed.

    Raises:
        ConfigError: `keep` is below 1.
        StoreError: one cannot be removed.
    """
    if keep < 1:
        raise ConfigError(f"keep is at least 1; got {keep}")
    kept = {*checkpoints(folder)[-keep:], best(folder), latest(folder).path}
    removed = [path for path in checkpoints(folder) if path not in kept]
    for path in removed:
        remove_folder(path)
    return removed
