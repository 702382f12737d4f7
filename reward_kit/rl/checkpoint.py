"""Checkpoints of a training run, and batches saved for debugging. Each directory is either complete or absent.

    checkpoints/step-000123/
      state.safetensors  the arrays of the state …
      state.json         … and the rest of the state
      manifest.json      the step, the score, facts, and every file's size and SHA-256; written last

Only one process may write to a checkpoint directory. A state is a tree of dicts, lists, tuples, numbers, strings, None,
tensors and NumPy arrays, such as the `state_dict` of an optimizer or `random.getstate()`. It is restored exactly. In
the JSON file, an object whose only key begins with "$" represents a value that JSON cannot express:

    {"$tensor": "3"}      the tensor with this name in the safetensors file
    {"$array": "4"}       a NumPy array
    {"$scalar": "5"}      a NumPy number
    {"$tuple": […]}       a tuple
    {"$dict": [[k, v]…]}  a dict with a key that is not a string or begins with "$"
    {"$float": "nan"}     a float that is not finite; also "inf" and "-inf"
    {"$objects": […]}     a (B,) array of objects
    {"$allowed_ids": …}   the ids that a constraint allowed for a row's tokens
    {"$text": "…"}        the `repr` of an object that cannot be stored (only with `as_text`)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.errors import ConfigError, StoreError, boundary, type_name
from reward_kit.private_files import make_private, make_private_folder
from reward_kit.runs.files import read_json, wrap_os_errors
from reward_kit.tokens import TokenBatch

__all__ = [
    "Checkpoint",
    "StudyBatch",
    "best",
    "checkpoints",
    "load_batch_for_study",
    "load_checkpoint",
    "load_latest",
    "prune",
    "random_states",
    "restore_random_states",
    "save_batch_for_study",
    "save_checkpoint",
    "verify_checkpoint",
]
logger = logging.getLogger("reward_kit.rl")
SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
PART, OLD = ".part", ".old"
"""The suffixes of the hidden directories that are used while a directory is written or removed."""
_NAME = re.compile(r"step-(\d{6,})")
_STUDY_NAME = re.compile(r"study-(\d{3,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint, as passed to `save_checkpoint`. All tensors are on the CPU."""

    path: Path
    step: int
    state: Any
    score: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    step: int,
    state: Any,
    *,
    score: float | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint `folder/step-000123`.

    An existing checkpoint with this name is replaced, and partial directories are removed.

    Args:
        folder: the directory for the run's checkpoints.
        step: the number of training steps so far.
        state: the state that the trainer needs to continue. It is a tree, as described in this module's docstring.
        score: the policy's score; higher is better. `prune` keeps the checkpoint with the highest score.
        facts: counters and similar data that can be stored as JSON.

    Raises:
        ConfigError: If the state contains an object of an unsupported type.
        StoreError: If the checkpoint cannot be written. Earlier checkpoints are kept.
    """
    if step < 0:
        raise ConfigError(f"step must be at least 0, got {step}")
    for left in [path for end in (PART, OLD) for path in folder.glob(f".*{end}")]:
        shutil.rmtree(left, ignore_errors=True)
        logger.info("removed %s, which a killed process left behind", left)
    path = folder / f"step-{step:06d}"
    with atomic_folder(path, is_private=True) as part:
        write_tree(part, "state", state)
        files = {
            file.relative_to(part).as_posix(): _fingerprint(file) for file in sorted(part.rglob("*")) if file.is_file()
        }
        known = {"step": step, "score": score, "facts": dict(facts or {})}
        try:
            text = json.dumps({"schema_version": SCHEMA_VERSION, **known, "files": files}, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"score and facts must be plain JSON with finite numbers: {error}") from error
        (part / MANIFEST).write_text(text, encoding="utf-8")
    return path


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint, or raise a `StoreError` if it is damaged."""
    manifest = verify_checkpoint(path)
    return Checkpoint(path, manifest["step"], read_tree(path, "state"), manifest["score"], manifest["facts"])


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, or raise a `StoreError` if a file is missing or was changed."""
    manifest = _manifest(path)
    for name, known in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise StoreError(f"{file} is missing")
        with wrap_os_errors("read", file):
            if known != _fingerprint(file):
                raise StoreError(f"{file} was truncated or changed after it was written")
    return manifest


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    manifest = read_json(file)
    version, files, score = manifest.get("schema_version"), manifest.get("files"), manifest.get("score")
    if version != SCHEMA_VERSION:
        raise StoreError(f"{file}: schema_version is {version}, but this release reads {SCHEMA_VERSION}")
    has_files = isinstance(files, dict) and {"state.json", "state.safetensors"} <= files.keys()
    has_score = score is None or isinstance(score, int | float)
    if not (has_files and has_score and {"step", "score", "facts"} <= manifest.keys()):
        raise StoreError(f"{file} is not a checkpoint manifest")
    return manifest


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoint directories, oldest first, including damaged ones."""
    steps = {int(match[1]): path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps)]


def load_latest(folder: Path) -> Checkpoint | None:
    """Load the newest complete checkpoint, or return None if absent. Newer, damaged checkpoints are logged."""
    for path in reversed(checkpoints(folder)):
        try:
            return load_checkpoint(path)
        except StoreError as error:
            _log_damage(path, error)
    return None


def best(folder: Path) -> Path | None:
    """Find the complete checkpoint with the highest score. If multiple checkpoints share it, return the oldest."""
    scores = {}
    for path in checkpoints(folder):
        with suppress(StoreError):  # `load_latest` reports it
            if (score := _manifest(path)["score"]) is not None:
                scores[path] = score
    in_order = sorted(scores, key=lambda path: -scores[path])  # A stable sort keeps equal scores in the order of steps.
    return next((path for path in in_order if not _is_damaged(path)), None)


def _is_damaged(path: Path) -> bool:
    """Return True, and log the reason, if a checkpoint is unusable."""
    try:
        verify_checkpoint(path)
    except StoreError as error:
        _log_damage(path, error)
        return True
    return False


def _log_damage(path: Path, error: StoreError) -> None:
    logger.warning("checkpoint %s is damaged and will not be used: %s", path, error)


def prune(written: Path, *, keep: int) -> list[Path]:
    """Remove old checkpoints and return their paths.

    The newest `keep` checkpoints, the best checkpoint and the one that was just written are kept. The latter may be
    older than damaged ones.
    """
    folder = written.parent
    if keep < 1:
        raise ConfigError(f"keep must be at least 1, got {keep}")
    kept = {*checkpoints(folder)[-keep:], best(folder), written}
    removed = [path for path in checkpoints(folder) if path not in kept]
    for path in removed:
        with wrap_os_errors("remove", path):
            if path.is_symlink():
                path.unlink()
                continue
            # Rename the directory first so that a kill cannot leave a partial directory with this name.
            old = _hidden(path, OLD)
            path.rename(old)
            shutil.rmtree(old)
    return removed


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators in torch (all devices), NumPy and Python for a checkpoint."""
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states of the global random generators, as returned by `random_states`."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    # A run may be resumed on a machine with fewer GPUs.
    for device, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


class StudyBatch(NamedTuple):
    """The rows on which training failed, and facts about the failure."""

    rows: TokenBatch
    facts: dict[str, Any]


def save_batch_for_study(folder: Path, rows: TokenBatch, facts: Mapping[str, Any]) -> Path:
    """Save rows with a non-finite loss or gradient to a new directory: `study-000`, `study-001`, and so on.

    Objects other than numbers, strings and arrays are saved as their `repr`. `facts` may contain the step, the loss and
    the names of parameters with non-finite gradients. Numbers in `facts` need not be finite.

    Raises:
        StoreError: If the files cannot be written.
    """
    numbers = [int(match[1]) for path in folder.glob("study-*") if (match := _STUDY_NAME.fullmatch(path.name))]
    path = folder / f"study-{max(numbers, default=-1) + 1:03d}"
    tree = {"batch": rows.batch, "others": rows.non_tensor_batch, "meta_info": rows.meta_info, "facts": dict(facts)}
    with atomic_folder(path, is_private=True) as part:
        write_tree(part, "batch", tree, as_text=True)
    return path


def load_batch_for_study(path: Path) -> StudyBatch:
    """Load rows saved by `save_batch_for_study`, or raise a `StoreError` if they cannot be read."""
    tree = read_tree(path, "batch")
    return StudyBatch(TokenBatch(tree["batch"], tree["others"], tree["meta_info"]), tree["facts"])


@contextmanager
def atomic_folder(path: Path, *, is_private: bool = False) -> Iterator[Path]:
    """Yield a new directory that replaces `path` at the end of the block. If the block fails, `path` is unchanged.

    If `path` is a symbolic link, its target is replaced. If the process is killed, either the old or the new directory
    exists, possibly with a hidden directory next to it. All files are flushed to disk before the directory is renamed.
    A private directory can be read only by its owner.
    """
    path = Path(os.path.realpath(path))
    make = make_private_folder if is_private else Path.mkdir
    with wrap_os_errors("write", path):
        make(path.parent, parents=True, exist_ok=True)
        part = _hidden(path, PART)
        make(part)
        try:
            yield part
            if is_private:
                make_private(part)
            _flush(*sorted(part.rglob("*")), part)
            # A rename cannot replace a non-empty directory, so the old one is moved aside first.
            old = _hidden(path, OLD)
            if is_replaced := path.exists():
                path.rename(old)
            try:
                part.rename(path)
            except OSError:
                if is_replaced:
                    old.rename(path)
                raise
            _flush(path.parent)
            if is_replaced:
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _hidden(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{end}")


def _flush(*paths: Path) -> None:
    for path in paths:
        if path.is_dir() and os.name == "nt":  # Directories cannot be opened on Windows, and need not be synced
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


Tensors = dict[str, torch.Tensor]


def write_tree(folder: Path, name: str, tree: Any, *, as_text: bool = False) -> None:
    """Write a tree as `name.safetensors` and `name.json`. A tensor that occurs multiple times is written once.

    If `as_text` is true, an object of any other type is stored as text.

    Raises:
        ConfigError: If the tree contains an object of an unsupported type. The message contains its position.
    """
    tensors: Tensors = {}
    plain = _Writer(tensors, as_text).plain(tree, name)
    with wrap_os_errors("write", folder / name), boundary(StoreError, f"cannot write {folder / name}"):
        (folder / f"{name}.json").write_text(json.dumps(plain, allow_nan=False), encoding="utf-8")
        save_file(tensors, folder / f"{name}.safetensors")


def read_tree(folder: Path, name: str) -> Any:
    """Load a tree written by `write_tree`. All tensors are on the CPU.

    Raises:
        StoreError: If a file is missing or damaged.
    """
    path = folder / f"{name}.json"
    with wrap_os_errors("read", path), boundary(StoreError, f"cannot read {path} and its safetensors file"):
        plain = json.loads(path.read_text(encoding="utf-8"))
        return _restored(plain, load_file(folder / f"{name}.safetensors"))


class _Writer:
    """Converts a tree to JSON and collects its arrays."""

    def __init__(self, tensors: Tensors, as_text: bool) -> None:
        self._tensors, self._as_text = tensors, as_text
        self._names: dict[tuple[Any, ...], str] = {}
        # Keep the tensors alive so that no other tensor gets the same address.
        self._kept: list[torch.Tensor] = []
        self._storages: set[int] = set()

    def plain(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(value)}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.plain(item, f"{where}.{key}") for key, item in value.items()}
            return {"$dict": [[self.plain(k, where), self.plain(v, f"{where}.{k}")] for k, v in value.items()]}
        if type(value) is list or type(value) is tuple:
            items = [self.plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if isinstance(value, AllowedIds):
            return {"$allowed_ids": self.plain((value.places, value.which, list(value.sets)), where)}
        if self._as_text:
            return {"$text": repr(value)}
        raise ConfigError(
            f"{where} is {type_name(value)}, which cannot be stored in a checkpoint; use numbers, strings or arrays"
        )

    def _tensor(self, value: torch.Tensor) -> str:
        tensor = value.detach()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() and key in self._names:
            return self._names[key]
        name = self._names[key] = str(len(self._tensors))
        dense = tensor.cpu().contiguous()
        # Safetensors rejects tensors that share memory, and views of larger tensors.
        storage = dense.untyped_storage()
        if storage.data_ptr() in self._storages or storage.nbytes() != dense.numel() * dense.element_size():
            dense = dense.clone()
        self._storages.add(storage.data_ptr())
        self._kept += [tensor, dense]
        self._tensors[name] = dense
        return name

    def _array(self, value: Any, where: str) -> Any:
        if value.dtype == object:
            return {"$objects": [self.plain(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        try:
            name = self._tensor(torch.from_numpy(native))
        except TypeError:
            if self._as_text or native.dtype.kind == "U":
                return {"$objects": [self.plain(item, where) for item in native.tolist()]}
            raise ConfigError(f"{where} is an array of {value.dtype}, which cannot be stored in a checkpoint") from None
        return {"$array" if isinstance(value, np.ndarray) else "$scalar": name}


def _restored(plain: Any, tensors: Tensors) -> Any:
    if isinstance(plain, list):
        return [_restored(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag = next(iter(plain), "")
    if len(plain) == 1 and tag in _READERS:
        return _READERS[tag](plain[tag], tensors)
    return {key: _restored(item, tensors) for key, item in plain.items()}


_READERS: dict[str, Callable[[Any, Tensors], Any]] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$array": lambda name, tensors: tensors[name].numpy(),
    "$scalar": lambda name, tensors: tensors[name].numpy()[()],
    "$tuple": lambda items, tensors: tuple(_restored(items, tensors)),
    "$dict": lambda pairs, tensors: {_restored(k, tensors): _restored(v, tensors) for k, v in pairs},
    "$float": lambda text, tensors: float(text),
    "$objects": lambda items, tensors: np.fromiter(_restored(items, tensors), dtype=object, count=len(items)),
    "$allowed_ids": lambda parts, tensors: AllowedIds.shared(*_restored(parts, tensors)),
    "$text": lambda text, tensors: text,
}
