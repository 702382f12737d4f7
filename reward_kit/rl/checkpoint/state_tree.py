"""The state of a training run as two plain files: arrays in safetensors, everything else in JSON. Nothing is pickled.

A state is a tree of dicts, lists, tuples, numbers, texts, None, `torch.Tensor`s and `numpy.ndarray`s, such as the
`state_dict` of an optimizer or `random.getstate()`. It comes back as it was, bit for bit. In the JSON, an object with
one key that begins with "$" stands for what JSON has no form for:

    {"$tensor": "3"}      the tensor of this name in the safetensors file
    {"$array": "4"}       an array of NumPy
    {"$scalar": "5"}      a NumPy number
    {"$tuple": […]}
    {"$dict": [[k, v]…]}  a dict whose keys are not all texts, or one of which begins with "$"
    {"$float": "nan"}     also "inf" and "-inf"
    {"$objects": […]}     an array (B,) of any objects
    {"$allowed_ids": …}   what a constraint allowed at the tokens of a row
    {"$text": "…"}        what could not be kept, as a text (`as_text` only)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.errors import ConfigError, StoreError, boundary, kind_of
from reward_kit.runs.files import told_of

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
