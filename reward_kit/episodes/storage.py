"""Compact storage of completed tracks: arrays for numbers, flat blobs for text and tokens, one column per dict field.

NumPy makes every row of a text column as wide as the longest string, and cannot store dicts with varying keys. Here,
rows of text and tokens are concatenated and their offsets are stored, and dicts become one column per field. Dicts with
different sets of keys become multiple such groups of columns. Values that an array cannot represent exactly stay in a
list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_SAMPLE = 32  # minimum number of rows for which sampling is worthwhile
_MOST_CODES = 256


class RaggedText:
    """Strings of different lengths in one blob: a str if all are ASCII, otherwise UTF-8 that keeps lone surrogates."""

    __slots__ = ("blob", "offsets")

    def __init__(self, texts: Iterable[str] = ()) -> None:
        texts = texts if isinstance(texts, list) else list(texts)
        joined = "".join(texts)
        self.blob: str | bytes = joined
        rows: list[Any] = texts
        if not joined.isascii():
            rows = [text.encode("utf-8", "surrogatepass") for text in texts]
            self.blob = b"".join(rows)
        self.offsets = row_offsets(rows, len(self.blob))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        offsets = self.offsets
        index = normalize_index(index, len(offsets) - 1)
        part = self.blob[offsets.item(index) : offsets.item(index + 1)]
        return part if isinstance(part, str) else part.decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedText):
            return NotImplemented
        return self.items(0, len(self)) == other.items(0, len(other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        return _text_of, (self.blob[first:last], self.offsets - self.offsets[0])

    def items(self, start: int, stop: int) -> list[str]:
        """Return the strings from `start` to `stop`."""
        return self._between(pairwise(self.offsets[start : stop + 1].tolist()))

    def items_at(self, rows: Any) -> list[str]:
        """Return the strings at an array of ints."""
        return self._between(zip(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist(), strict=True))

    def _between(self, bounds: Iterable[tuple[int, int]]) -> list[str]:
        blob = self.blob
        if isinstance(blob, str):
            return [blob[a:b] for a, b in bounds]
        return [blob[a:b].decode("utf-8", "surrogatepass") for a, b in bounds]

    def part(self, start: int, stop: int) -> RaggedText:
        """Return the rows from `start` to `stop`, sharing the blob."""
        return _text_of(self.blob, self.offsets[start : stop + 1])


def _text_of(blob: str | bytes, offsets: npt.NDArray[Any]) -> RaggedText:
    column = RaggedText.__new__(RaggedText)
    column.blob, column.offsets = blob, offsets
    return column


class CategoricalText:
    """Strings that repeat often, such as roles and tool names.

    Each distinct string is stored once, and each row takes one byte.
    """

    __slots__ = ("codes", "values")

    def __init__(self, values: list[str], codes: bytes) -> None:
        self.values, self.codes = values, codes

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self.values[code] for code in self.codes[index]]
        return self.values[self.codes[normalize_index(index, len(self.codes))]]

    def __reduce__(self) -> tuple[Any, ...]:
        # Store only the strings that are used in this part.
        used = sorted(set(self.codes))
        codes = self.codes.translate(bytes(used.index(code) if code in used else 0 for code in range(_MOST_CODES)))
        return CategoricalText, ([self.values[code] for code in used], codes)

    def items(self, start: int, stop: int) -> list[str]:
        """Return the strings from `start` to `stop`."""
        return [*map(self.values.__getitem__, self.codes[start:stop])]

    def part(self, start: int, stop: int) -> CategoricalText:
        """Return the rows from `start` to `stop`, sharing the strings."""
        return CategoricalText(self.values, self.codes[start:stop])


def compact_texts(texts: list[str]) -> RaggedText | CategoricalText:
    """Return the storage for a column of strings: `CategoricalText` if a sample contains few distinct strings."""
    rows = len(texts)
    if texts[-1] == texts[0] and texts.count(texts[0]) == rows:
        return CategoricalText(texts[:1], bytes(rows))
    if len(set(texts[:: rows // _SAMPLE + 1])) * 4 <= min(rows, _SAMPLE):
        codes = {text: code for code, text in enumerate(dict.fromkeys(texts))}
        if len(codes) * 4 <= rows and len(codes) <= _MOST_CODES:
            return CategoricalText([*codes], bytes(map(codes.__getitem__, texts)))
    return RaggedText(texts)


def row_offsets(rows: list[Any], total: int) -> npt.NDArray[Any]:
    """Return the start of each row and the end of the last row, in the smallest integer type that can hold them."""
    dtype = np.uint32 if total < 2**32 else np.int64
    if len(rows) < _SAMPLE:
        return np.fromiter(accumulate(map(len, rows), initial=0), dtype, len(rows) + 1)
    lengths: Any
    try:
        # For a list of small ints, creating bytes in Python is ten times faster than creating an array in NumPy.
        lengths = np.frombuffer(bytearray([*map(len, rows)]), np.uint8)
    except ValueError:
        lengths = np.fromiter(map(len, rows), dtype, len(rows))
    offsets = np.zeros(len(rows) + 1, dtype)
    np.cumsum(lengths, dtype=dtype, out=offsets[1:])
    return offsets


def normalize_index(index: int, length: int) -> int:
    """Return the position for an index, which counts from the end if it is negative.

    Raise an IndexError if the index is out of range.
    """
    position = index + length if index < 0 else index
    if not 0 <= position < length:
        raise IndexError(f"row {index} is out of range; there are {length} rows")
    return position


class RaggedNumbers:
    """Rows of numbers with different lengths, stored as one flat array and its offsets.

    The dtype is "i" for token ids and "d" for log-probabilities.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, dtype: npt.DTypeLike, rows: Iterable[Iterable[float]] = ()) -> None:
        lists = [list(row) for row in rows]
        self.values: npt.NDArray[Any] = np.array(list(chain.from_iterable(lists)), dtype=dtype)
        self.offsets = row_offsets(lists, len(self.values))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> list[Any]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = normalize_index(index, len(self))
        row: list[Any] = self.values[self.offsets[index] : self.offsets[index + 1]].tolist()
        return row

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedNumbers):
            return NotImplemented
        return bool(np.array_equal(self.lengths(), other.lengths()) and np.array_equal(self.flat(), other.flat()))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return ragged_numbers, (self.flat(), self.offsets - self.offsets[0])

    def items(self, start: int, stop: int) -> list[list[Any]]:
        """Return the rows from `start` to `stop`."""
        bounds = self.offsets[start : stop + 1].tolist()
        numbers = self.values[bounds[0] : bounds[-1]].tolist()
        return [numbers[a - bounds[0] : b - bounds[0]] for a, b in pairwise(bounds)]

    def part(self, start: int, stop: int) -> RaggedNumbers:
        """Return the rows from `start` to `stop`, sharing the numbers."""
        return ragged_numbers(self.values, self.offsets[start : stop + 1])

    def flat(self) -> npt.NDArray[Any]:
        """Return all rows concatenated as one array (N,)."""
        return self.values[int(self.offsets[0]) : int(self.offsets[-1])]

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return (rows,) the length of every row."""
        offsets = self.offsets.astype(np.int64)
        return offsets[1:] - offsets[:-1]


def ragged_numbers(values: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> RaggedNumbers:
    """Return `values` split into rows at `offsets`."""
    column = RaggedNumbers.__new__(RaggedNumbers)
    column.values, column.offsets = values, offsets
    return column


class Records:
    """Dicts or tuples that all have the same fields, stored as one column per field.

    The object behaves like a list whose items are created on access by index, slice, iteration or comparison. For
    dicts, indexing by a field name returns the values of that field in all items.

    Attributes:
        columns: the columns, keyed by field and in the order of the items; the fields of tuples are numbers.
        first: the position of the first row in the columns, which a part shares with the whole.
        stacks: True if all fields are numbers, so multiple items can be read as one structure of arrays.
    """

    __slots__ = ("as_tuple", "columns", "first", "length", "stacks")

    def __init__(self, columns: dict[Any, Any], length: int, as_tuple: bool = False) -> None:
        self.columns, self.first, self.length, self.as_tuple = columns, 0, length, as_tuple
        self.stacks = bool(columns) and all(stacks(column) for column in columns.values())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.length)
            return self.part(start, max(start, stop)) if step == 1 else self.items(0, self.length)[index]
        if isinstance(index, str):
            column, last = self.columns[index], self.first + self.length
            return column[self.first : last] if isinstance(column, np.ndarray) else read_items(column, self.first, last)
        row = self.first + normalize_index(index, self.length)
        values = [column[row] for column in self.columns.values()]
        if not self.stacks:
            values = [value.item() if isinstance(value, np.generic) else value for value in values]
        return self._shaped(values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items(0, self.length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Records | list):
            return NotImplemented
        return self.items(0, self.length) == (other if isinstance(other, list) else other.items(0, other.length))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Records({self.items(0, self.length)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        last = self.first + self.length
        columns = {name: slice_column(column, self.first, last) for name, column in self.columns.items()}
        return Records, (columns, self.length, self.as_tuple)

    def items(self, start: int, stop: int) -> list[Any]:
        """Return the dicts or tuples from `start` to `stop` as plain Python values."""
        start, stop = self.first + start, self.first + stop
        return self._rows(read_items(column, start, stop) for column in self.columns.values())

    def items_at(self, rows: Any) -> list[Any]:
        """Return the dicts or tuples at an array of ints as plain Python values."""
        return self._rows(read_items_at(column, rows + self.first) for column in self.columns.values())

    def _rows(self, columns: Iterable[list[Any]]) -> list[Any]:
        rows, names = zip(*columns, strict=True), tuple(self.columns)
        if self.as_tuple:
            return list(rows)
        return [dict(zip(names, row)) for row in rows]  # noqa: B905 (lengths are equal; a check would cost time)

    def part(self, start: int, stop: int) -> Records:
        """Return the rows from `start` to `stop`, sharing the columns."""
        some = Records.__new__(Records)
        some.columns, some.first = self.columns, self.first + start
        some.length, some.as_tuple, some.stacks = stop - start, self.as_tuple, self.stacks
        return some

    def stacked(self, rows: Any) -> Any:
        """Return the rows at an array of ints, or at a slice with both ends, as one dict or tuple of arrays."""
        first, is_slice = self.first, isinstance(rows, slice)
        rows = slice(first + rows.start, first + rows.stop) if is_slice else rows + first
        return self._shaped([stacked(column, rows) for column in self.columns.values()])

    def _shaped(self, values: list[Any]) -> Any:
        return tuple(values) if self.as_tuple else dict(zip(self.columns, values, strict=True))


class MixedRecords:
    """Dicts with different sets of keys: one block of `Records` per set, and the block and row of each dict."""

    __slots__ = ("block_of", "blocks", "row_of")

    def __init__(self, blocks: list[Any], block_of: npt.NDArray[Any], row_of: npt.NDArray[Any]) -> None:
        self.blocks, self.block_of, self.row_of = blocks, block_of, row_of

    def __len__(self) -> int:
        return len(self.block_of)

    def __getitem__(self, index: int) -> Any:
        index = normalize_index(index, len(self))
        return read_items(self.blocks[self.block_of[index]], int(self.row_of[index]), int(self.row_of[index]) + 1)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # Store only the rows of this part so that a part does not contain the whole.
        blocks, row_of = [], self.row_of.copy()
        for number, block in enumerate(self.blocks):
            first, stop = self._stretch(number, 0, len(self))
            blocks.append(slice_column(block, first, stop))
            row_of[self.block_of == number] -= first
        return MixedRecords, (blocks, self.block_of, row_of)

    def items(self, start: int, stop: int) -> list[Any]:
        """Return the dicts from `start` to `stop`."""
        stretches = (self._stretch(number, start, stop) for number in range(len(self.blocks)))
        readers = [iter(read_items(block, *ends)) for block, ends in zip(self.blocks, stretches, strict=True)]
        return [next(readers[number]) for number in self.block_of[start:stop].tolist()]

    def _stretch(self, number: int, start: int, stop: int) -> tuple[int, int]:
        """Return the row range of one block between `start` and `stop`."""
        rows = self.row_of[start:stop][self.block_of[start:stop] == number]
        return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)

    def part(self, start: int, stop: int) -> MixedRecords:
        """Return the rows from `start` to `stop`, sharing the blocks."""
        return MixedRecords(self.blocks, self.block_of[start:stop], self.row_of[start:stop])


_COMPACT = (np.ndarray, RaggedText, CategoricalText, RaggedNumbers, Records, MixedRecords)


def is_compact(data: Any) -> bool:
    """Return True if `data` is one of the storage types of this module."""
    return isinstance(data, _COMPACT)


def stacks(data: Any) -> bool:
    """Return True if multiple items of `data` can be read as one array or one structure of arrays."""
    return isinstance(data, np.ndarray) or (isinstance(data, Records) and data.stacks)


def stacked(data: Any, rows: Any) -> Any:
    """Return the items at a slice or an array of ints, as an array or a structure of arrays."""
    return data.stacked(rows) if isinstance(data, Records) else data[rows]


def read_items(data: Any, start: int, stop: int) -> list[Any]:
    """Return the items from `start` to `stop` as a list of plain values or arrays."""
    if isinstance(data, list):
        return data[start:stop]
    if not isinstance(data, np.ndarray):
        items: list[Any] = data.items(start, stop)
        return items
    return data[start:stop].tolist() if data.ndim == 1 and data.dtype.kind in "biuf" else list(data[start:stop])


def read_items_at(data: Any, rows: npt.NDArray[np.intp]) -> list[Any]:
    """Return the items at an array of ints as a list of plain values or arrays."""
    if isinstance(data, RaggedText | Records):
        return data.items_at(rows)
    if isinstance(data, np.ndarray):
        return read_items(data[rows], 0, len(rows))
    return [*map(data.__getitem__, rows.tolist())]


def read_list(data: Any) -> list[Any]:
    """Return the whole column as a list; a column that is already a list is not copied."""
    return data if isinstance(data, list) else read_items(data, 0, len(data))


def slice_column(data: Any, start: int, stop: int) -> Any:
    """Return the items from `start` to `stop` in the same form of storage. Compact storage is shared, not copied."""
    kind = type(data)
    return data[start:stop] if kind is list or kind is np.ndarray else data.part(start, stop)


_INTEGERS = int | np.integer
_NUMBERS = _INTEGERS | float | np.float16 | np.float32
_PLAIN_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
_MOST_SHAPES = 64
_MOST_FIELDS = 256


def concat_columns(left: Any, right: Any) -> Any:
    """Return the concatenation of both columns, in the storage form of `left`."""
    if isinstance(left, list):
        return left + read_list(right)
    both = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
    if both and left.dtype == right.dtype and left.shape[1:] == right.shape[1:]:
        return np.concatenate([left, right])
    return compact([*read_list(left), *read_list(right)])


def compact(items: Any, *, exact: bool = False) -> Any:
    """Return the most compact storage for a completed column.

    Strings become `RaggedText` or `CategoricalText`. Numbers and arrays of the same shape become an ndarray with a
    leading time axis. Lists of numbers become `RaggedNumbers`, and dicts become `Records` or `MixedRecords`. Anything
    else remains a list, including integers that an array cannot represent exactly.

    Args:
        items: a list; any other value is already compact and is returned unchanged.
        exact: whether to keep the list if the type of an item would change. This is the case for integers among floats
            and for NumPy scalars.
    """
    if not isinstance(items, list) or not items:
        return items
    kind = type(items[0])
    if [*map(type, items)].count(kind) < len(items):
        dtype = "" if exact else _common_dtype(items)
        return np.asarray(items, dtype=dtype) if dtype else items
    if kind is str:
        return compact_texts(items)
    if kind in _PLAIN_DTYPES:
        numbers = np.empty(len(items), _PLAIN_DTYPES[kind])
        try:
            # This is twice as fast as `np.array`, which checks the type of each item.
            struct.pack_into(f"{len(items)}{numbers.dtype.char}", numbers.data, 0, *items)
        except struct.error:  # an integer that is too large
            return items
        return numbers
    if kind is dict:
        return _records(items, exact)
    if kind is np.ndarray:
        return _stack(items, exact)
    if kind is list:
        return _rows(items, exact)
    if kind is tuple and len(set(map(len, items))) == 1 and 0 < len(items[0]) <= _MOST_FIELDS:
        columns = {i: compact(list(values), exact=exact) for i, values in enumerate(zip(*items, strict=True))}
        return Records(columns, len(items), True)
    return np.array(items) if issubclass(kind, np.number | np.bool_) and not exact else items


def _common_dtype(items: Sequence[Any]) -> str:
    """Return "q" for integers and "d" for other numbers; return "" for other items or if a number would be rounded."""
    if not all(isinstance(item, _NUMBERS) and not isinstance(item, bool) for item in items):
        return ""
    integers = [item for item in items if isinstance(item, _INTEGERS)]
    whole = len(integers) == len(items)
    limit = 2**63 - 1 if whole else 2**53
    return ("q" if whole else "d") if all(-limit <= item <= limit for item in integers) else ""


def _stack(items: list[npt.NDArray[Any]], exact: bool) -> Any:
    first = items[0]
    # Arrays without an axis would become scalars.
    if first.dtype.hasobject or (exact and first.ndim == 0):
        return items
    if [item.shape for item in items].count(first.shape) < len(items):
        return items
    try:
        # "no" rejects an array of another dtype instead of converting it.
        flat = np.concatenate(items if first.ndim else [item[None] for item in items], casting="no")
    except (TypeError, ValueError):
        return items
    return flat.reshape(len(items), *first.shape) if flat.dtype == first.dtype else items


def _rows(items: list[list[Any]], exact: bool) -> Any:
    flat = list(chain.from_iterable(items))
    kinds = set(map(type, flat))
    if kinds <= {int}:
        highest = max(max(flat, default=0), -min(flat, default=0))
        dtype = "i" if highest < 2**31 else "q" if highest < 2**63 else ""
    elif kinds == {float}:
        dtype = "d"
    else:
        dtype = "" if exact else _common_dtype(flat)
    if not dtype:
        return items
    return ragged_numbers(np.array(flat, dtype=dtype), row_offsets(items, len(flat)))


def _records(items: list[dict[Any, Any]], exact: bool) -> Any:
    names = tuple(items[0])
    keys, width = list(chain.from_iterable(items)), len(names)
    # If the sequence of all keys repeats the first dict's keys, all dicts have these keys in this order: since a dict
    # has no duplicate key, no dict can be longer, and hence none can be shorter.
    if len(keys) == len(items) * width and all(
        keys[i::width].count(name) == len(items) for i, name in enumerate(names)
    ):
        if not names or len(names) > _MOST_FIELDS:
            return items
        columns = {name: compact(list(map(itemgetter(name), items)), exact=exact) for name in names}
        return Records(columns, len(items))
    if len(set(map(tuple, items))) > min(_MOST_SHAPES, len(items) // 2):
        return items
    blocks: dict[tuple[Any, ...], tuple[int, list[Any]]] = {}
    block_of, row_of = np.empty(len(items), np.uint8), np.empty(len(items), np.uint32)
    for i, item in enumerate(items):
        number, rows = blocks.setdefault(tuple(item), (len(blocks), []))
        block_of[i], row_of[i] = number, len(rows)
        rows.append(item)
    return MixedRecords([compact(rows, exact=exact) for _, rows in blocks.values()], block_of, row_of)
