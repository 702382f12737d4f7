"""Weights as they travel: arrays without copies, which a machine's processes read from one memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class PackedTensor(NamedTuple):
    """The bytes of a tensor on the CPU; NumPy knows no bfloat16."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def packed(weights: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """The weights as Ray ships them without pickling their bytes.

    Args:
        weights: by name, on any device; they may change once this returns and what it gives is put into the store.
    """
    found = {}
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        found[name] = PackedTensor(plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))
    return found


def unpacked(weights: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """The weights again, to be read only: their memory is the object store's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: _tensor(one) for name, one in weights.items()}


def _tensor(one: PackedTensor) -> Tensor:
    if not one.data.size:  # of nothing there is no view in another type
        return torch.empty(one.shape, dtype=one.dtype)
    return torch.from_numpy(one.data).view(one.dtype).reshape(one.shape)


def bytes_of(weights: Mapping[str, PackedTensor]) -> int:
    """How much travels."""
    return sum(one.data.nbytes for one in weights.values())
