"""A state with every supported kind of value, and an exact comparison of states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from reward_kit.episodes.allowed_ids import AllowedIds


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal in type and every bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.numpy(force=True).tobytes() == (second.numpy(force=True).tobytes())
            if first.dtype != torch.bfloat16
            else same(first.view(torch.int16), second.view(torch.int16))
        )
    if isinstance(first, np.ndarray | np.generic):
        if first.dtype == object:
            return same(list(first), list(second))
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second)


def every_kind() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    return {
        "float32": base,
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "int64": torch.arange(3) - 2**40,
        "uint8": torch.arange(7, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "a_view": base[1:3],
        "another_view": base[2:, ::2],
        "transposed": base.T,
        "the_same_memory": base.view(-1),
        "with_gradient": nn.Parameter(base).detach(),
        "nan": torch.tensor([math.nan, math.inf, -0.0, 1e-42]),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "of_no_dimension": np.array(1.5),
        "masked": np.array([True, False]),
        "numpy_number": np.float64(0.1),
        "objects": np.array([None, "x", {"a": 1}], dtype=object),
        "lists_of_one_length": np.fromiter([[1, 2], [3, 4]], dtype=object, count=2),
        "allowed": AllowedIds([1, 4], [0, 2, 3], [5, 6, 7]),
        "floats": [math.nan, math.inf, -math.inf, -0.0, 0.1],
        "keyed": {0: "zero", "$odd": 1, "none": None, (1, 2): "tuple"},
        "tuple": (1, (2, [3, True])),
        "large": 2**127,
        "text": "ä\ud800",
    }
