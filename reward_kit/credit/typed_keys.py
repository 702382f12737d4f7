"""`typed_key`: any plain value as a dictionary key that keeps type and shape apart."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

from reward_kit.errors import ConfigError, kind_of


def typed_key(value: Any) -> Hashable:
    """`value` as a dictionary key that keeps type and shape apart: 1, 1.0, True and "1" are four keys.

    Raises:
        ConfigError: it holds something that is neither plain data, an array, a tensor nor a model, or it holds itself.
    """
    if type(value) is str:
        return value
    try:
        return _key(value)
    except RecursionError as error:
        raise ConfigError(f"a state hash gave {kind_of(value)} nested too deeply to be a key") from error


def _key(value: Any) -> Hashable:
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    if isinstance(value, np.ndarray):
        content = _key(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return kind, value.dtype.str, value.shape, content
    if isinstance(value, np.generic):
        # By its bytes, since NaN and NaT do not equal themselves.
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return kind, value.hex()
    if value is None or isinstance(value, str | int | bytes):
        return kind, value
    if isinstance(value, bytearray):
        return kind, bytes(value)
    if isinstance(value, BaseModel):
        return kind, _key(value.model_dump())
    if kind.__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _tensor_key(value)
    return _container_key(value)


def _container_key(value: Any) -> Hashable:
    kind = type(value)
    if isinstance(value, list | tuple):
        return kind, tuple(map(_key, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(_key, value))
    if isinstance(value, Mapping):
        return kind, frozenset((_key(key), _key(item)) for key, item in value.items())
    raise ConfigError(f"a state hash gave {kind_of(value)}; give text, plain data, an array, a tensor or a model")


def _tensor_key(tensor: Any) -> Hashable:
    """By dtype, shape and content. PyTorch is not imported here, and the device does not matter."""
    here = tensor.detach().cpu()
    if getattr(here, "is_sparse", False):
        here = here.to_dense()
    if str(here.dtype) == "torch.bfloat16":  # NumPy has none; float32 holds each of its values
        here = here.float()
    return type(tensor), str(tensor.dtype), tuple(tensor.shape), here.numpy().tobytes()


def stable_text(key: Hashable) -> str:
    """A typed key as text that is the same in every process, which `hash` and the order of a set are not."""
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(map(stable_text, key)))}}}"
    if isinstance(key, tuple):
        return f"({','.join(map(stable_text, key))})"
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return repr(key)
