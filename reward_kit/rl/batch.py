"""Moves the rows of `reward_kit.tokens` to tensors. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.tokens import PackedBatch, TokenBatch
from reward_kit.tokens.columns import Array

TensorBatch = dict[str, torch.Tensor]


def to_tensors(
    rows: TokenBatch | PackedBatch,
    keys: Collection[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    pin_memory: bool = False,
    non_blocking: bool = False,
) -> TensorBatch:
    """Arrays of `rows.batch` as tensors of the same shapes: real numbers as `dtype`, ids and masks as int64.

    Packed rows have `cu_seqlens` besides, in int32, as attention kernels take it. On the CPU a tensor that has the type
    of its array shares its memory.

    Args:
        rows: the batch, padded or packed.
        keys: which arrays; by default all.
        device: where to.
        dtype: of the real numbers.
        pin_memory: by way of page-locked memory, from which an accelerator copies by itself; with device "cpu" the
            tensors stay there.
        non_blocking: do not wait for the copies; work on the device that is asked for later waits for them. It is of
            use with `pin_memory` only.

    Raises:
        ConfigError: the batch has no array of this name, or there is no accelerator to pin memory for.
    """
    arrays = _arrays(rows)
    for key in keys or ():
        if key not in arrays:
            raise ConfigError(f"there is no {key!r} in these rows{did_you_mean(key, arrays)}")
    if pin_memory and not torch.accelerator.is_available():
        raise ConfigError("pin_memory is for an accelerator, and there is none on this machine; leave it out")
    wanted = {key: values for key, values in arrays.items() if keys is None or key in keys}
    # The type is changed before memory is pinned: a copy that also converts goes through memory that is not.
    tensors = {key: torch.from_numpy(values).to(_dtype(key, values, dtype)) for key, values in wanted.items()}
    if pin_memory:
        tensors = {key: values.pin_memory() for key, values in tensors.items()}
    return {key: values.to(device, non_blocking=non_blocking) for key, values in tensors.items()}


def _arrays(rows: TokenBatch | PackedBatch) -> Mapping[str, Array]:
    return rows.batch if isinstance(rows, TokenBatch) else {**rows.batch, "cu_seqlens": rows.cu_seqlens}


def _dtype(key: str, values: Array, real: torch.dtype) -> torch.dtype:
    if key == "cu_seqlens":
        return torch.int32
    return real if np.issubdtype(values.dtype, np.floating) else torch.int64
