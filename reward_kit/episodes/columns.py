"""`InfiniteLookbackBuffer`, which stores items by time step and has RLlib's method names and index rules.

The buffer supports fills and one-hot vectors. Gymnasium is never imported: any object that has `shape` and `dtype`,
`n`, `nvec` or `spaces` is accepted as a space.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

import numpy as np

from reward_kit.episodes.storage import (
    Records,
    compact,
    concat_columns,
    is_compact,
    read_items,
    read_list,
    slice_column,
    stacked,
    stacks,
)
from reward_kit.errors import EpisodeError


def dummy(space: Any, fill: Any, *, one_hot: bool = False) -> Any:
    """Return an item of the space with every number set to `fill`, or `fill` itself if the space has no numbers.

    If `one_hot` is true, discrete parts become one-hot vectors.
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
    """Return an item or a stack of items in which every discrete part is a float32 one-hot vector.

    Raises:
        EpisodeError: the space is missing, or a number is outside the space.
    """
    if space is None:
        raise EpisodeError("one_hot_discrete=True requires the space; pass observation_space= or action_space=")
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
    parts = []
    for i, depth in enumerate(depths):
        column = columns[..., i]
        if column.size and (column.min() < 0 or column.max() >= depth):
            raise EpisodeError(f"cannot create a one-hot vector: a number is outside the space {space}")
        vectors = np.zeros((*column.shape, depth), dtype=np.float32)
        np.put_along_axis(vectors, column[..., None].astype(np.intp), 1.0, axis=-1)
        parts.append(vectors)
    return np.concatenate(parts, axis=-1)


def _depths(space: Any) -> list[int] | None:
    """Return how many values each discrete number in a space can take, or None if the space is not discrete."""
    nvec = getattr(space, "nvec", None)
    if nvec is not None:
        return [int(n) for n in np.ravel(nvec)]
    # MultiBinary also has an `n`, but its shape is not empty.
    return [int(space.n)] if hasattr(space, "n") and getattr(space, "shape", ()) == () else None


def map_leaves(function: Callable[..., Any], *structures: Any) -> Any:
    """Apply `function` to the corresponding leaves of nested dicts and tuples."""
    first = structures[0]
    if isinstance(first, dict):
        return {key: map_leaves(function, *(each[key] for each in structures)) for key in first}
    if isinstance(first, tuple):
        return tuple(map_leaves(function, *parts) for parts in zip(*structures, strict=True))
    return function(*structures)


T = TypeVar("T")
Indices = int | slice | Sequence[int] | None
_SLICED = (list, np.ndarray)


class InfiniteLookbackBuffer(Generic[T]):
    """A buffer of items by time step, whose first `lookback` items precede index 0. The interface is that of RLlib.

    Args:
        data: a list of items, which is not copied, or a column of arrays; None for no items.
        lookback: the number of items before index 0.
        space: the space of the items, which is needed for fills and one-hot vectors.
        store: a function that is called with the new storage whenever `data` is replaced.
    """

    __slots__ = ("data", "lookback", "space", "store")

    def __init__(
        self, data: Any = None, lookback: int = 0, space: Any = None, store: Callable[[Any], None] | None = None
    ) -> None:
        self.data: Any = [] if data is None else list(data) if isinstance(data, tuple) else data
        self.lookback = min(lookback, len(self.data))
        self.space, self.store = space, store

    def __len__(self) -> int:
        return len(self.data) - self.lookback

    def len_incl_lookback(self) -> int:
        """Return the number of items, including the lookback."""
        return len(self.data)

    @property
    def finalized(self) -> bool:
        """True if the items are stored compactly instead of in a list."""
        return not isinstance(self.data, list)

    def __iter__(self) -> Iterator[T]:
        return (self.data[i] for i in range(self.lookback, len(self.data)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InfiniteLookbackBuffer):
            return NotImplemented
        return self.lookback == other.lookback and _same_items(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        before, items = (read_list(self.data)[part] for part in (slice(self.lookback), slice(self.lookback, None)))
        return f"InfiniteLookbackBuffer({before!r} <- lookback({self.lookback}) | {items!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exclude `store`, which belongs to an episode.
        return InfiniteLookbackBuffer, (self.data, self.lookback, self.space)

    def __getitem__(self, indices: Indices) -> Any:
        return self.get(indices)

    def __setitem__(self, indices: Indices, new_data: Any) -> None:
        self.set(new_data, at_indices=indices)

    def append(self, item: T) -> None:
        """Add one item at the end."""
        if type(self.data) is list:
            self.data.append(item)
        else:
            self.extend([item])

    def extend(self, items: Iterable[T]) -> None:
        """Append items. Compact storage is rewritten."""
        items = read_list(items) if is_compact(items) else list(items)
        if isinstance(self.data, list):
            self.data.extend(items)
        else:
            self._replace(concat_columns(self.data, compact(items)))

    def pop(self, index: int = -1) -> T:
        """Remove and return the item at `index`, counted from the start of the lookback."""
        items = read_list(self.data)
        item: T = items.pop(index)
        if not isinstance(self.data, list):
            self._replace(compact(items))
        return item

    def concat(self, other: InfiniteLookbackBuffer[T]) -> None:
        """Append the items of another buffer, excluding its lookback."""
        self.extend(slice_column(other.data, other.lookback, len(other.data)))

    def __add__(self, other: InfiniteLookbackBuffer[T] | list[T] | complex) -> InfiniteLookbackBuffer[T]:
        """Return a new buffer with the items of a list or buffer appended, or with a number added to each item."""
        buffer: InfiniteLookbackBuffer[Any] = InfiniteLookbackBuffer(read_list(self.data)[:], self.lookback, self.space)
        if isinstance(other, InfiniteLookbackBuffer):
            buffer.concat(other)
        elif isinstance(other, list):
            buffer.extend(other)
        else:
            buffer.data = [item + other if isinstance(item, int | float | complex) else item for item in buffer.data]
        return buffer

    def finalize(self) -> None:
        """Store the items compactly, in place. Numbers, and dicts and tuples of numbers, become arrays."""
        self._replace(compact(self.data))

    def get_state(self) -> dict[str, Any]:
        """Return a state for `from_state`. The items themselves are shared, not copied."""
        data = self.data[:] if isinstance(self.data, list) else self.data
        return {"data": data, "lookback": self.lookback, "finalized": self.finalized, "space": self.space}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the buffer for a state from `get_state`."""
        return cls(state["data"], state["lookback"], state["space"])

    def _replace(self, data: Any) -> None:
        self.data = data
        if self.store is not None:
            self.store(data)

    def get(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return the item at an int, or the items at a slice or a sequence of ints.

        None selects all items after the lookback.

        Raises:
            EpisodeError: one-hot vectors were requested, but the space is unknown.
            IndexError: an index is out of range and there is no `fill`.
            TypeError: `indices` has an unsupported type.
        """
        return read(self.data, self.lookback, indices, neg_index_as_lookback, fill, self.space, one_hot_discrete)

    def set(self, new_data: Any, *, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Replace the items at an int, a slice or a sequence of ints; None replaces all items.

        Raises:
            IndexError: an index is out of range, or the number of new items differs from the number of indices.
            TypeError: `at_indices` has an unsupported type.
        """
        self._replace(write(self.data, self.lookback, new_data, at_indices, neg_index_as_lookback))


def read(
    data: Any,
    lookback: int,
    indices: Indices = None,
    neg_index_as_lookback: bool = False,
    fill: Any = None,
    space: Any = None,
    as_one_hot: bool = False,
) -> Any:
    """Return the item or items at `indices`; see `InfiniteLookbackBuffer.get`."""
    kind = type(indices)
    # Fast paths for the reads that environment runners and learners do in every step.
    if kind is int and not as_one_hot:
        position = indices + (lookback if indices >= 0 or neg_index_as_lookback else len(data))  # type: ignore[operator]
        if 0 <= position < len(data):
            return data[position]
    elif indices is None and not as_one_hot:
        return _stretch(data, lookback, len(data))
    if kind is slice and fill is None and not as_one_hot:
        start, stop = indices.start or 0, indices.stop  # type: ignore[union-attr]
        if type(start) is int is type(stop) and start >= 0 <= stop and indices.step is None:  # type: ignore[union-attr]
            if isinstance(data, _SLICED):
                return data[lookback + start : lookback + stop]
            size = len(data)
            return _stretch(data, min(lookback + start, size), min(lookback + stop, size))
    positions = resolve_positions(len(data), lookback, indices, neg_index_as_lookback, fill is not None)
    if isinstance(positions, int):
        if not 0 <= positions < len(data):
            return _filler(fill, space, as_one_hot)
        return one_hot(data[positions], space) if as_one_hot else data[positions]
    if isinstance(positions, range) and positions.step == 1 and not as_one_hot:
        if positions.start >= 0 and positions.stop <= len(data):
            return _stretch(data, positions.start, positions.stop)
        if isinstance(data, np.ndarray):
            return _padded(data, positions, _filler(fill, space, False))
    return _several(data, positions, fill, space, as_one_hot)


def _several(data: Any, positions: Sequence[int], fill: Any, space: Any, as_one_hot: bool) -> Any:
    # This is not part of `read`, because variables of `read` would become closure cells, which slow down every read.
    if stacks(data):
        return _stack_at(data, np.asarray(positions, dtype=np.intp), fill, space, as_one_hot)
    if fill is None and not as_one_hot:
        if isinstance(data, Records):
            return data.items_at(np.asarray(positions, dtype=np.intp))
        return list(map(data.__getitem__, positions))
    filler = None if fill is None else _filler(fill, space, as_one_hot)
    inside = range(len(data))
    if not as_one_hot:
        return [data[p] if p in inside else filler for p in positions]
    return [one_hot(data[p], space) if p in inside else filler for p in positions]


def resolve_positions(
    size: int, lookback: int, indices: Any, neg_index_as_lookback: bool, filled: bool = False
) -> int | Sequence[int]:
    """Return the positions of `indices` among `size` items: an int if `indices` is an int, otherwise a sequence.

    If `filled` is true, positions may be beyond either end.

    Raises:
        IndexError: an index is out of range and `filled` is false.
        TypeError: `indices` has an unsupported type.
    """
    if indices is None:
        return range(lookback, size)
    if type(indices) is int:
        return _position(size, lookback, indices, neg_index_as_lookback, filled)
    if isinstance(indices, slice):
        return _slice_positions(size, lookback, indices, neg_index_as_lookback, filled)
    if isinstance(indices, list) and set(map(type, indices)) == {int}:
        start = lookback if neg_index_as_lookback else size
        positions = [index + (lookback if index >= 0 else start) for index in indices]
        if filled or (min(positions) >= 0 and max(positions) < size):
            return positions
    if isinstance(indices, Sequence | np.ndarray) and not isinstance(indices, str | bytes):
        return [_position(size, lookback, index, neg_index_as_lookback, filled) for index in indices]
    return _position(size, lookback, indices, neg_index_as_lookback, filled)


def _stretch(data: Any, start: int, stop: int) -> Any:
    stop = max(start, stop)
    if isinstance(data, _SLICED):
        return data[start:stop]
    if isinstance(data, Records):
        return data.stacked(slice(start, stop)) if data.stacks else data.part(start, stop)
    return read_items(data, start, stop)


def _filler(fill: Any, space: Any, as_one_hot: bool) -> Any:
    return fill if space is None else dummy(space, fill, one_hot=as_one_hot)


def _padded(data: Any, positions: range, filler: Any) -> Any:
    """Return a range of an array. Parts of the range beyond the ends of the array are filled with `filler`."""
    inside = data[max(positions.start, 0) : max(positions.stop, 0)]
    is_alike = data.dtype.char == "d" and type(filler) is float  # rewards; `np.result_type` is slow
    out = np.empty((len(positions), *data.shape[1:]), data.dtype if is_alike else np.result_type(data, filler))
    left = min(max(-positions.start, 0), len(out))
    out[:left] = filler
    if left < len(out):
        out[left : left + len(inside)], out[left + len(inside) :] = inside, filler
    return out


def _stack_at(data: Any, positions: Any, fill: Any, space: Any, as_one_hot: bool) -> Any:
    inside = (positions >= 0) & (positions < len(data))
    stack = stacked(data, positions[inside])
    if as_one_hot:
        stack = one_hot(stack, space)
    if inside.all():
        return stack

    def padded(items: Any, filler: Any) -> Any:
        out = np.empty((len(positions), *items.shape[1:]), dtype=np.result_type(items, filler))
        out[inside], out[~inside] = items, filler
        return out

    filler = map_leaves(lambda _: fill, stack) if space is None else dummy(space, fill, one_hot=as_one_hot)
    return map_leaves(padded, stack, filler)


def _position(size: int, lookback: int, index: Any, neg_index_as_lookback: bool, filled: bool) -> int:
    if isinstance(index, bool):
        raise TypeError("an index must be an int, a slice or a sequence of ints, got a bool")
    index = operator.index(index)
    start = lookback if index >= 0 or neg_index_as_lookback else size
    position: int = start + index
    if not (filled or 0 <= position < size):
        raise IndexError(
            f"index {index} is out of range: {size - lookback} items and a lookback of {lookback}; "
            "pass fill= to get a default value instead"
        )
    return position


def _slice_positions(size: int, lookback: int, indices: slice, neg_index_as_lookback: bool, filled: bool) -> range:
    step = 1 if indices.step is None else operator.index(indices.step)
    if step == 0:
        raise ValueError("the step of a slice must not be 0")

    def bound(index: int | None, default: int) -> int:
        if index is None:
            return default
        return (lookback if index >= 0 or neg_index_as_lookback else size) + operator.index(index)

    ends = (lookback, size) if step > 0 else (size - 1, lookback - 1)
    start, stop = bound(indices.start, ends[0]), bound(indices.stop, ends[1])
    if not filled:
        lowest, highest = (0, size) if step > 0 else (-1, size - 1)
        start, stop = min(max(start, lowest), highest), min(max(stop, lowest), highest)
    return range(start, stop, step)


def write(data: Any, lookback: int, new_data: Any, at_indices: Indices, neg_index_as_lookback: bool) -> Any:
    """Return the storage with new items at `at_indices`. A list is changed in place; compact storage is copied.

    Raises:
        IndexError: an index is out of range, or the number of new items differs from the number of indices.
        TypeError: `at_indices` has an unsupported type.
    """
    positions = resolve_positions(len(data), lookback, at_indices, neg_index_as_lookback)
    if isinstance(positions, int):
        positions, new_data = [positions], [new_data]
    if isinstance(data, np.ndarray):
        with suppress(ValueError):  # items of different shapes
            new = np.asarray(new_data)
            is_alike = np.can_cast(new.dtype, data.dtype, "same_kind")
            if is_alike and new.shape == (len(positions), *data.shape[1:]):
                changed = data.copy()  # slices of an episode share its arrays
                changed[np.asarray(positions, dtype=np.intp)] = new
                return changed
    if isinstance(new_data, dict) or (isinstance(new_data, tuple) and all(map(is_compact, new_data))):
        columns: list[Any] = []
        map_leaves(columns.append, new_data)
        new_items = [map_leaves(lambda column, i=i: column[i], new_data) for i in range(len(columns[0]))]
    else:
        new_items = list(new_data)
    if len(new_items) != len(positions):
        raise IndexError(f"got {len(new_items)} new items for the {len(positions)} positions in {at_indices!r}")
    items = read_list(data)
    for position, item in zip(positions, new_items, strict=True):
        items[position] = item
    return data if isinstance(data, list) else compact(items)


def same_value(left: Any, right: Any) -> bool:
    """Compare two records recursively. Arrays are compared item by item, and NaN equals NaN."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _same_array(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return isinstance(left, list) == isinstance(right, list) and _same_items(left, right)
    return bool(left == right or (left != left and right != right))


def _same_array(left: Any, right: Any) -> bool:
    if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)) or left.shape != right.shape:
        return False
    if left.dtype.hasobject or right.dtype.hasobject:
        return all(map(same_value, left.flat, right.flat))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc" and right.dtype.kind in "fc"))


def _same_items(left: Any, right: Any) -> bool:
    if len(left) != len(right):
        return False
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return _same_array(left, right)
    lists = (read_list(side) if is_compact(side) else side for side in (left, right))
    return all(map(same_value, *lists))
