"""Which storage a finished track gets, and how two of them are joined.

The fast paths count the items' types first: one pass in C tells texts, numbers, arrays and dicts apart.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from reward_kit.episodes.storage import MixedRecords, Records, as_list, numbers_of
from reward_kit.episodes.texts import offsets_of, texts_of

_INTEGERS = int | np.integer
_NUMBERS = _INTEGERS | float | np.float16 | np.float32
_PLAIN_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
_MOST_SHAPES = 64
_MOST_FIELDS = 256


def joined(left: Any, right: Any) -> Any:
    """Both columns one after the other, stored as `left` is."""
    if isinstance(left, list):
        return left + as_list(right)
    both = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
    if both and left.dtype == right.dtype and left.shape[1:] == right.shape[1:]:
        return np.concatenate([left, right])
    return compact([*as_list(left), *as_list(right)])


def compact(items: Any, *, exact: bool = False) -> Any:
    """The most compact storage for a finished column.

    Texts become `RaggedText` or `FewTexts`; numbers, and arrays of one shape, an ndarray with a leading time axis;
    lists of numbers `RaggedNumbers`; dicts `Records` or `MixedRecords`. Anything else stays the list it is, and so do
    integers that no array holds exactly.

    Args:
        items: a list; anything else is stored already.
        exact: leave alone what would come back as another type: integers among floats, NumPy's scalars.
    """
    if not isinstance(items, list) or not items:
        return items
    kind = type(items[0])
    if [*map(type, items)].count(kind) < len(items):
        return items if exact else _mixed_numbers(items)
    if kind is str:
        return texts_of(items)
    if kind in _PLAIN_DTYPES:
        return _numbers(items, _PLAIN_DTYPES[kind])
    if kind is dict:
        return _records(items, exact)
    if kind is np.ndarray:
        return _stack(items, exact)
    if kind is list:
        return _rows(items, exact)
    if kind is tuple:
        return _tuples(items, exact)
    return np.array(items) if issubclass(kind, np.number | np.bool_) and not exact else items


def _numbers(items: list[Any], dtype: Any) -> Any:
    numbers = np.empty(len(items), dtype)
    try:
        # Twice as quick as np.array, which asks each item what it is.
        struct.pack_into(f"{len(items)}{numbers.dtype.char}", numbers.data, 0, *items)
    except struct.error:  # an integer that is too large
        return items
    return numbers


def _mixed_numbers(items: list[Any]) -> Any:
    dtype = _common_dtype(items)
    return np.asarray(items, dtype=dtype) if dtype else items


def _common_dtype(items: Sequence[Any]) -> str:
    """ "q" where all items are integers, "d" where all are numbers, "" where they are neither or would be rounded."""
    if not all(isinstance(item, _NUMBERS) and not isinstance(item, bool) for item in items):
        return ""
    integers = [item for item in items if isinstance(item, _INTEGERS)]
    whole = len(integers) == len(items)
    limit = 2**63 - 1 if whole else 2**53
    return ("q" if whole else "d") if all(-limit <= item <= limit for item in integers) else ""


def _stack(items: list[npt.NDArray[Any]], exact: bool) -> Any:
    first = items[0]
    # Arrays without an axis would come back as scalars.
    if first.dtype.hasobject or (exact and first.ndim == 0):
        return items
    if [item.shape for item in items].count(first.shape) < len(items):
        return items
    try:
        # "no": an array of another dtype is refused, not converted.
        flat = np.concatenate(items if first.ndim else [item[None] for item in items], casting="no")
    except (TypeError, ValueError):
        return items
    return flat.reshape(len(items), *first.shape) if flat.dtype == first.dtype else items


def _rows(items: list[list[Any]], exact: bool) -> Any:
    flat = list(chain.from_iterable(items))
    kinds = set(map(type, flat))
    if kinds <= {int}:
        dtype = _smallest(flat)
    elif kinds == {float}:
        dtype = "d"
    else:
        dtype = "" if exact else _common_dtype(flat)
    if not dtype:
        return items
    return numbers_of(np.array(flat, dtype=dtype), offsets_of(items, len(flat)))


def _smallest(integers: list[int]) -> str:
    highest = max(max(integers, default=0), -min(integers, default=0))
    return "i" if highest < 2**31 else "q" if highest < 2**63 else ""


def _records(items: list[dict[Any, Any]], exact: bool) -> Any:
    names = tuple(items[0])
    if _all_have(names, items):
        if not names or len(names) > _MOST_FIELDS:
            return items
        columns = {name: compact(list(map(itemgetter(name), items)), exact=exact) for name in names}
        return Records(columns, len(items))
    few = len(set(map(tuple, items))) <= min(_MOST_SHAPES, len(items) // 2)
    return _by_shape(items, exact) if few else items


def _all_have(names: tuple[Any, ...], items: list[dict[Any, Any]]) -> bool:
    """Every dict has the first one's keys in the same order.

    It does where all keys in a row repeat them: no dict has a key twice, so none is longer, and then none is shorter.
    """
    keys, width = list(chain.from_iterable(items)), len(names)
    if len(keys) != len(items) * width:
        return False
    return all(keys[i::width].count(name) == len(items) for i, name in enumerate(names))


def _by_shape(items: list[dict[Any, Any]], exact: bool) -> MixedRecords:
    blocks: dict[tuple[Any, ...], tuple[int, list[Any]]] = {}
    block_of, row_of = np.empty(len(items), np.uint8), np.empty(len(items), np.uint32)
    for i, item in enumerate(items):
        number, rows = blocks.setdefault(tuple(item), (len(blocks), []))
        block_of[i], row_of[i] = number, len(rows)
        rows.append(item)
    return MixedRecords([compact(rows, exact=exact) for _, rows in blocks.values()], block_of, row_of)


def _tuples(items: list[tuple[Any, ...]], exact: bool) -> Any:
    widths = set(map(len, items))
    if len(widths) > 1 or not 0 < len(items[0]) <= _MOST_FIELDS:
        return items
    columns = {i: compact(list(values), exact=exact) for i, values in enumerate(zip(*items, strict=True))}
    return Records(columns, len(items), True)
