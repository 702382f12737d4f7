"""Moves the rows of `tokens.py` to tensors. Nothing is computed here."""

from __future__ import annotations

import numpy as np
import torch

from reward_kit.tokens import TokenBatch

TensorBatch = dict[str, torch.Tensor]


def to_tensors(
    rows: TokenBatch, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TensorBatch:
    """The arrays of `rows.batch` as tensors of the same shapes: real numbers as `dtype`, ids and masks as int64."""
    return {
        key: torch.from_numpy(values).to(device, dtype if np.issubdtype(values.dtype, np.floating) else torch.int64)
        for key, values in rows.batch.items()
    }
