"""Checkpoints of a training run, and batches kept for study: folders that are whole or not there, without pickle.

    checkpoints/
      step-000123/
        model/             weights, configuration and tokenizer in the format of `transformers`, where a model is given
        state.safetensors  the arrays of the optimizer, the schedule and whatever else the trainer gave, …
        state.json         … and the rest of it (`rl.state_tree`)
        manifest.json      step, score, facts, and size and SHA-256 of every file; written last

A folder is written beside its place, put on the disk, and then renamed, so that a kill leaves the checkpoints before
it whole. One process writes to a folder of checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl.atomic_folders import atomic_folder, remove_folder, sweep
from reward_kit.rl.model_kit.folder import write_model
from reward_kit.rl.state_tree import read_tree, write_tree
from reward_kit.runs.files import read_json, told_of
from reward_kit.tokens import TokenBatch

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
            (`rl.state_tree`), such as state dicts and `random_states()`.
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
    with atomic_folder(place) as part:
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
    manifest = read_json(path / MANIFEST)
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise StoreError(f"{path / MANIFEST}: schema_version is {manifest.get('schema_version')}; this is another form")
    for name, known in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise StoreError(f"{file} is missing")
        with told_of("read", file):
            if file.stat().st_size != known["bytes"] or _digest(file) != known["sha256"]:
                raise StoreError(f"{file} is not as it was written; it was cut off or changed")
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
    """The whole checkpoint with the highest score, of equals the newest; None where none has one."""
    scored = []
    for path in checkpoints(folder):
        try:
            score = read_json(path / MANIFEST).get("score")
        except StoreError:
            continue  # `latest` names it
        scored += [] if score is None else [(score, path)]
    for _, path in sorted(scored, reverse=True):
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


def random_states() -> dict[str, Any]:
    """The states of the generators that torch (every device), NumPy and Python have for everybody, for a checkpoint."""
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators to what `random_states` found."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


class StudyBatch(NamedTuple):
    """Rows on which training stopped, and what was known then."""

    rows: TokenBatch
    facts: dict[str, Any]


def save_batch_for_study(folder: Path, rows: TokenBatch, facts: Mapping[str, Any]) -> Path:
    """Keep the rows on which a loss or a gradient was not finite.

    Args:
        folder: where studies are kept; each is a folder of its own in it.
        rows: the rows. What belongs to them and is neither a number, a text nor an array is kept as a text.
        facts: what is known: step, loss, the names of parameters without finite gradients, …. Numbers need not be
            finite.

    Returns:
        The new folder, `study-000`, `study-001`, ….

    Raises:
        StoreError: it cannot be written.
    """
    numbers = [int(path.name.removeprefix("study-")) for path in folder.glob("study-[0-9][0-9][0-9]*")]
    place = folder / f"study-{max(numbers, default=-1) + 1:03d}"
    tree = {"batch": rows.batch, "others": rows.non_tensor_batch, "meta_info": rows.meta_info, "facts": dict(facts)}
    with atomic_folder(place) as part:
        write_tree(part, "batch", tree, as_text=True)
    return place


def load_batch_for_study(path: Path) -> StudyBatch:
    """The rows that `save_batch_for_study` kept.

    Raises:
        StoreError: they cannot be read.
    """
    tree = read_tree(path, "batch")
    return StudyBatch(TokenBatch(tree["batch"], tree["others"], tree["meta_info"]), tree["facts"])
