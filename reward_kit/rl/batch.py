"""Moves the rows of `reward_kit.tokens` to tensors. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.tokens import PackedBatch, TokenBatch

TensorBatch = dict[str, torch.Tensor]


def to_tensors(
    rows: TokenBatch | PackedBatch,
    keys: Collection[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TensorBatch:
    """Arrays of `rows.batch` as tensors of the same shapes: real numbers as `dtype`, ids and masks as int64.

    Args:
        rows: the batch, padded or packed.
        keys: which arrays; by default all.
        device: where to.
        dtype: of the real numbers.

    Raises:
        ConfigError: the batch has no array of this name.
    """
    for key in keys or ():
        if key not in rows.batch:
            raise ConfigError(f"there is no {key!r} in these rows{did_you_mean(key, rows.batch)}")
    return {
        key: torch.from_numpy(values).to(device, dtype if np.issubdtype(values.dtype, np.floating) else torch.int64)
        for key, values in rows.batch.items()
        if keys is None or key in keys
    }
