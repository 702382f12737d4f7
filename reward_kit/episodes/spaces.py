"""What the spaces of Gymnasium say about fills and one-hot vectors, asked by their attributes.

Gymnasium itself is never imported: whatever has `shape` and `dtype`, `n`, `nvec` or `spaces` is a space here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reward_kit.errors import EpisodeError


def dummy(space: Any, fill: Any, *, one_hot: bool = False) -> Any:
    """An item of the space with `fill` in every place; discrete ones as zero-hot vectors where `one_hot`.

    A space without numbers, such as one of texts, gives `fill` itself.
    """
    inner = getattr(space, "spaces", space)
    if isinstance(inner, Mapping):
        return {key: dummy(part, fill, one_hot=one_hot) for key, part in inner.items()}
    if isinstance(inner, tuple | list):
        return tuple(dummy(part, fill, one_hot=one_hot) for part in inner)
    if one_hot and (depths := _depths(space)) is not None:
        return np.full((sum(depths),), fill, dtype=np.float32)
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in "biufc":
        return fill
    return np.full(shape, fill, dtype=dtype)


def one_hot(value: Any, space: Any) -> Any:
    """The item, or a stack of items, with every discrete part as a one-hot vector of float32.

    Raises:
        EpisodeError: there is no space, or a number lies outside it.
    """
    if space is None:
        raise EpisodeError("one_hot_discrete=True needs the space; give observation_space= or action_space=")
    inner = getattr(space, "spaces", space)
    if isinstance(inner, Mapping):
        return {key: one_hot(value[key], part) for key, part in inner.items()}
    if isinstance(inner, tuple | list):
        return tuple(one_hot(item, part) for item, part in zip(value, inner, strict=True))
    depths = _depths(space)
    if depths is None:
        return value
    numbers = np.asarray(value) - np.asarray(getattr(space, "start", 0))
    columns = numbers[..., None] if getattr(space, "nvec", None) is None else numbers
    return np.concatenate([_vectors(columns[..., i], depth, space) for i, depth in enumerate(depths)], axis=-1)


def _depths(space: Any) -> list[int] | None:
    """How many values each of its discrete numbers has; None for a space that is not discrete."""
    nvec = getattr(space, "nvec", None)
    if nvec is not None:
        return [int(n) for n in np.ravel(nvec)]
    # MultiBinary has an `n` too, and a shape.
    return [int(space.n)] if hasattr(space, "n") and getattr(space, "shape", ()) == () else None


def _vectors(numbers: npt.NDArray[Any], depth: int, space: Any) -> npt.NDArray[np.float32]:
    if numbers.size and (numbers.min() < 0 or numbers.max() >= depth):
        raise EpisodeError(f"{space} has no one-hot vector for a number outside it")
    vectors = np.zeros((*numbers.shape, depth), dtype=np.float32)
    np.put_along_axis(vectors, numbers[..., None].astype(np.intp), 1.0, axis=-1)
    return vectors


def map_leaves(function: Callable[..., Any], *structures: Any) -> Any:
    """`function` of the leaves that stand at the same place in each of the dicts and tuples."""
    first = structures[0]
    if isinstance(first, dict):
        return {key: map_leaves(function, *(each[key] for each in structures)) for key in first}
    if isinstance(first, tuple):
        return tuple(map_leaves(function, *parts) for parts in zip(*structures, strict=True))
    return function(*structures)
