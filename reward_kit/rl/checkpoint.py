"""Folders that are there as a whole or not at all: written beside their place, then renamed into it."""

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from reward_kit.agent.policies.hf.quiet import no_progress_bars
from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.errors import ConfigError, StoreError, boundary, kind_of
from reward_kit.private_files import make_private, make_private_folder
from reward_kit.runs.files import read_json, told_of
from reward_kit.tokens import TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PART, OLD = ".part", ".old"

"""How the names of folders end that are being written, or being removed; both begin with a dot."""


@contextmanager
def atomic_folder(place: Path, *, is_private: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `place` at the end of the block; what was there is replaced.

    Where `place` is a symbolic link, it is what the link leads to.

    A kill at any moment leaves the old folder or the new one, and perhaps a hidden one beside it, which `sweep`
    removes. Where the block raises, what was there stays. Everything is on the disk before the folder has its name.

    Args:
        place: where the folder is to be; folders above it are made.
        is_private: it and everything in it is its owner's alone, whatever writes it.

    Raises:
        StoreError: it cannot be written.
    """
    place = Path(os.path.realpath(place))
    with told_of("write", place):
        (make_private_folder if is_private else Path.mkdir)(place.parent, parents=True, exist_ok=True)
        part = _hidden(place, PART)
        (make_private_folder if is_private else Path.mkdir)(part)
        try:
            yield part
            if is_private:
                make_private(part)
            _flush_tree(part)
            _move_into(part, place)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def remove_folder(place: Path) -> None:
    """Remove a folder so that a kill does not leave a part of it under its name; of a symbolic link the link alone.

    Raises:
        StoreError: it cannot be removed.
    """
    with told_of("remove", place):
        if place.is_symlink():
            place.unlink()
            return
        old = _hidden(place, OLD)
        place.rename(old)
        shutil.rmtree(old)


def sweep(folder: Path) -> list[Path]:
    """Remove what kills have left in a folder that nobody else writes to; returns what was there."""
    left = [path for end in (PART, OLD) for path in folder.glob(f".*{end}")]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def _hidden(place: Path, end: str) -> Path:
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}{end}")


def _move_into(part: Path, place: Path) -> None:
    """A folder with files in it cannot be renamed over, so an old one steps aside first."""
    old = _hidden(place, OLD)
    if is_replaced := place.exists():
        place.rename(old)
    try:
        part.rename(place)
    except OSError:
        if is_replaced:
            old.rename(place)
        raise
    _flush(place.parent)
    if is_replaced:
        shutil.rmtree(old, ignore_errors=True)


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder; some systems cannot open folders, and need not."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Tensors = dict[str, torch.Tensor]


def write_tree(folder: Path, name: str, tree: Any, *, as_text: bool = False) -> None:
    """Write a tree as `name.safetensors` and `name.json`.

    Tensors are written from the CPU and without gradient; two that are one and the same, such as tied weights, are
    written once.

    Args:
        folder: where to.
        name: of the two files.
        tree: the state.
        as_text: keep what is none of the kinds above as a text, instead of refusing it.

    Raises:
        ConfigError: something in the tree is none of the kinds above; the message says where it is.
        StoreError: the files cannot be written.
    """
    tensors: Tensors = {}
    plain = _Writer(tensors, as_text).plain(tree, name)
    with told_of("write", folder / name), boundary(StoreError, f"cannot write {folder / name}"):
        (folder / f"{name}.json").write_text(json.dumps(plain, allow_nan=False), encoding="utf-8")
        save_file(tensors, folder / f"{name}.safetensors")


def read_tree(folder: Path, name: str) -> Any:
    """The tree that `write_tree` wrote, on the CPU.

    Raises:
        StoreError: a file is missing or damaged.
    """
    path = folder / f"{name}.json"
    with told_of("read", path), boundary(StoreError, f"cannot read {path} and its safetensors"):
        plain = json.loads(path.read_text(encoding="utf-8"))
        return _restored(plain, load_file(folder / f"{name}.safetensors"))


class _Writer:
    """Turns a tree into what JSON can say, and collects its arrays."""

    def __init__(self, tensors: Tensors, as_text: bool) -> None:
        self._tensors, self._as_text = tensors, as_text
        self._names: dict[tuple[Any, ...], str] = {}
        # While these live, no other tensor gets their addresses.
        self._kept: list[torch.Tensor] = []
        self._storages: set[int] = set()

    def plain(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(value)}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, place)
        if isinstance(value, Mapping):
            return self._dict(value, place)
        if type(value) is list or type(value) is tuple:
            items = [self.plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if isinstance(value, AllowedIds):
            return {"$allowed_ids": self.plain((value.places, value.which, list(value.sets)), place)}
        if self._as_text:
            return {"$text": repr(value)}
        raise ConfigError(f"{place} is {kind_of(value)}, which a checkpoint cannot hold; give numbers, texts or arrays")

    def _dict(self, value: Mapping[Any, Any], place: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.plain(item, f"{place}.{key}") for key, item in value.items()}
        return {"$dict": [[self.plain(k, place), self.plain(v, f"{place}.{k}")] for k, v in value.items()]}

    def _tensor(self, value: torch.Tensor) -> str:
        tensor = value.detach()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() and key in self._names:
            return self._names[key]
        name = self._names[key] = str(len(self._tensors))
        whole = tensor.cpu().contiguous()
        # Safetensors takes no two tensors of one memory, and none that is a part of a larger one.
        storage = whole.untyped_storage()
        if storage.data_ptr() in self._storages or storage.nbytes() != whole.numel() * whole.element_size():
            whole = whole.clone()
        self._storages.add(storage.data_ptr())
        self._kept += [tensor, whole]
        self._tensors[name] = whole
        return name

    def _array(self, value: Any, place: str) -> Any:
        if value.dtype == object:
            return {"$objects": [self.plain(item, f"{place}[{index}]") for index, item in enumerate(value)]}
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        try:
            name = self._tensor(torch.from_numpy(native))
        except TypeError:
            if self._as_text or native.dtype.kind == "U":
                return {"$objects": [self.plain(item, place) for item in native.tolist()]}
            raise ConfigError(f"{place} is an array of {value.dtype}, which a checkpoint cannot hold") from None
        return {"$array" if isinstance(value, np.ndarray) else "$scalar": name}


def _objects(items: list[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(items, dtype=object, count=len(items))


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
    "$objects": lambda items, tensors: _objects(_restored(items, tensors)),
    "$allowed_ids": lambda parts, tensors: AllowedIds.shared(*_restored(parts, tensors)),
    "$text": lambda text, tensors: text,
}

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


_STUDY_NAME = re.compile(r"study-(\d{3,})")


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
    numbers = [int(found[1]) for path in folder.glob("study-*") if (found := _STUDY_NAME.fullmatch(path.name))]
    place = folder / f"study-{max(numbers, default=-1) + 1:03d}"
    tree = {"batch": rows.batch, "others": rows.non_tensor_batch, "meta_info": rows.meta_info, "facts": dict(facts)}
    with atomic_folder(place, is_private=True) as part:
        write_tree(part, "batch", tree, as_text=True)
    return place


def load_batch_for_study(path: Path) -> StudyBatch:
    """The rows that `save_batch_for_study` kept.

    Raises:
        StoreError: they cannot be read.
    """
    tree = read_tree(path, "batch")
    return StudyBatch(TokenBatch(tree["batch"], tree["others"], tree["meta_info"]), tree["facts"])


def write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """As `save_model`, into a folder that is there and of which somebody else takes care.

    Raises:
        StoreError: it cannot be written.
    """
    with boundary(StoreError, f"cannot write the model to {folder}"), no_progress_bars():
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
