"""The tracks an episode is made of: values by time step with a lookback, and compact ragged text and tokens.

Index grammar, one for every track and both states of an episode (after RLlib's `InfiniteLookbackBuffer`, without its
two different behaviours): index 0 is the first item after the lookback. A negative index counts from the end and may
reach into the lookback; with `neg_index_as_lookback=True`, -1 is instead the item just before index 0. An index out of
range raises IndexError unless `fill` is given. A slice is clipped as a list's is, or padded with `fill`.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Indices = int | slice | Sequence[int] | None
_INTEGERS = int | np.integer
_NUMBERS = _INTEGERS | float | np.float16 | np.float32


class Column(Generic[T]):
    """Items by time step; the first `lookback` of them lie before index 0."""

    __slots__ = ("data", "lookback")

    def __init__(self, data: Any = (), lookback: int = 0) -> None:
        self.data: Any = list(data) if isinstance(data, tuple) else data
        self.lookback = min(lookback, len(self.data))

    def __len__(self) -> int:
        return len(self.data) - self.lookback

    def __iter__(self) -> Iterator[T]:
        return (self.data[i] for i in range(self.lookback, len(self.data)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column):
            return NotImplemented
        return self.lookback == other.lookback and _same_items(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]

    def append(self, item: T) -> None:
        """Add one item at the end."""
        self.data.append(item)

    def get(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """The item at an int, or the list of items at a slice or a sequence of ints; all after the lookback for None.

        Raises:
            IndexError: an index is out of range and there is no `fill`.
            TypeError: `indices` is none of these.
        """
        if indices is None:
            return [self.data[i] for i in range(self.lookback, len(self.data))]
        if isinstance(indices, slice):
            return [self._item(i, fill) for i in self._slice_positions(indices, neg_index_as_lookback, fill)]
        if isinstance(indices, Sequence | np.ndarray) and not isinstance(indices, str | bytes):
            return [self._item(self._position(i, neg_index_as_lookback, fill), fill) for i in indices]
        return self._item(self._position(indices, neg_index_as_lookback, fill), fill)

    def _item(self, position: int, fill: Any) -> Any:
        return self.data[position] if 0 <= position < len(self.data) else fill

    def _position(self, index: Any, neg_index_as_lookback: bool, fill: Any) -> int:
        if isinstance(index, bool):
            raise TypeError("an index is an int, a slice or a sequence of ints, not a bool")
        index = operator.index(index)
        start = self.lookback if index >= 0 or neg_index_as_lookback else len(self.data)
        position: int = start + index
        if not 0 <= position < len(self.data) and fill is None:
            raise IndexError(
                f"index {index} is out of range: {len(self)} items and a lookback of {self.lookback}; "
                "give fill= for a default"
            )
        return position

    def _slice_positions(self, indices: slice, neg_index_as_lookback: bool, fill: Any) -> range:
        step = 1 if indices.step is None else operator.index(indices.step)
        if step == 0:
            raise ValueError("a slice's step cannot be 0")

        def bound(index: int | None, default: int) -> int:
            if index is None:
                return default
            at_start = index >= 0 or neg_index_as_lookback
            return (self.lookback if at_start else len(self.data)) + operator.index(index)

        ends = (self.lookback, len(self.data)) if step > 0 else (len(self.data) - 1, self.lookback - 1)
        start, stop = bound(indices.start, ends[0]), bound(indices.stop, ends[1])
        if fill is None:
            lowest, highest = (0, len(self.data)) if step > 0 else (-1, len(self.data) - 1)
            start, stop = min(max(start, lowest), highest), min(max(stop, lowest), highest)
        return range(start, stop, step)


def same_value(left: Any, right: Any) -> bool:
    """Equal as records are: at every depth, arrays by their items, and NaN equal to NaN."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _same_array(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return isinstance(left, list) == isinstance(right, list) and _same_items(left, right)
    return bool(left == right or (left != left and right != right))


def _same_array(left: Any, right: Any) -> bool:
    both = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
    return both and bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc" and right.dtype.kind in "fc"))


def _same_items(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(same_value(left[i], right[i]) for i in range(len(left)))


class RaggedNumbers:
    """Rows of numbers of differing length in one flat array with offsets.

    `typecode` is that of the `array` module: "i" for token ids, "d" for log-probabilities.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, typecode: str, rows: Iterable[Iterable[float]] = ()) -> None:
        self.values: array[Any] = array(typecode)
        self.offsets: array[int] = array("q", [0])
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> list[Any]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = _checked_index(index, len(self))
        return self.values[self.offsets[index] : self.offsets[index + 1]].tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedNumbers):
            return NotImplemented
        return self.offsets == other.offsets and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def append(self, row: Iterable[float]) -> None:
        """Add one row, or none of it where a value does not fit."""
        self.values.extend(array(self.values.typecode, row))
        self.offsets.append(len(self.values))

    def flat(self) -> npt.NDArray[Any]:
        """All rows, one after another, as one array (N,); a view, while which lives `append` raises BufferError."""
        return (
            np.frombuffer(self.values, dtype=self.values.typecode) if self.values else np.empty(0, self.values.typecode)
        )

    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of every row (rows,)."""
        offsets = np.frombuffer(self.offsets, dtype=np.int64)
        return offsets[1:] - offsets[:-1]


class RaggedText:
    """Texts of differing length in one UTF-8 blob with offsets; lone surrogates survive."""

    __slots__ = ("blob", "offsets")

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.blob = bytearray()
        self.offsets: array[int] = array("q", [0])
        for text in texts:
            self.append(text)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = _checked_index(index, len(self))
        return self.blob[self.offsets[index] : self.offsets[index + 1]].decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedText):
            return NotImplemented
        return self.offsets == other.offsets and self.blob == other.blob

    __hash__ = None  # type: ignore[assignment]

    def append(self, text: str) -> None:
        """Add one text."""
        self.blob += text.encode("utf-8", "surrogatepass")
        self.offsets.append(len(self.blob))


def _checked_index(index: int, length: int) -> int:
    position = index + length if index < 0 else index
    if not 0 <= position < length:
        raise IndexError(f"row {index} is out of range: there are {length}")
    return position


def compact(items: Sequence[Any]) -> Any:
    """The most compact storage for a finished column.

    Texts become `RaggedText`; numbers, and arrays of one shape, an ndarray with a leading time axis; lists of numbers
    `RaggedNumbers`; anything else, such as tool calls whose keys vary, stays the list it is, and so do integers that
    no array holds exactly.
    """
    if not items or isinstance(items, RaggedText | RaggedNumbers | np.ndarray):
        return items
    if all(isinstance(item, str) for item in items):
        return RaggedText(items)
    if all(isinstance(item, np.ndarray) and item.ndim for item in items):
        return np.stack(items) if len({(item.shape, item.dtype) for item in items}) == 1 else items
    if all(isinstance(item, list) for item in items):
        typecode = _typecode([number for item in items for number in item])
        return RaggedNumbers(typecode, items) if typecode else items
    typecode = _typecode(items)
    return np.asarray(items, dtype=typecode) if typecode else items


def _typecode(items: Sequence[Any]) -> str:
    """ "q" where all items are integers, "d" where all are numbers, "" where they are neither or would be rounded."""
    if not all(isinstance(item, _NUMBERS) and not isinstance(item, bool) for item in items):
        return ""
    integers = [item for item in items if isinstance(item, _INTEGERS)]
    whole = len(integers) == len(items)
    limit = 2**63 - 1 if whole else 2**53
    return ("q" if whole else "d") if all(-limit <= item <= limit for item in integers) else ""
