"""How a finished track is stored: arrays for numbers, flat blobs for text and tokens, a column a field for dicts.

NumPy stores a text column as wide as its longest text and has no form at all for dicts whose keys vary. Here text and
token rows lie one after another with offsets, dicts fall apart into a column for each field, and dicts of several
shapes into one such set for each shape. Whatever no array holds exactly stays the list it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from reward_kit.episodes.texts import FewTexts, RaggedText, checked_index, offsets_of


class RaggedNumbers:
    """Rows of numbers of differing length in one flat array with offsets.

    `dtype` is what NumPy takes for one: "i" for token ids, "d" for log-probabilities.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, dtype: npt.DTypeLike, rows: Iterable[Iterable[float]] = ()) -> None:
        lists = [list(row) for row in rows]
        self.values: npt.NDArray[Any] = np.array(list(chain.from_iterable(lists)), dtype=dtype)
        self.offsets = offsets_of(lists, len(self.values))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> list[Any]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = checked_index(index, len(self))
        row: list[Any] = self.values[self.offsets[index] : self.offsets[index + 1]].tolist()
        return row

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedNumbers):
            return NotImplemented
        return bool(np.array_equal(self.lengths(), other.lengths()) and np.array_equal(self.flat(), other.flat()))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return numbers_of, (self.flat(), self.offsets - self.offsets[0])

    def items(self, start: int, stop: int) -> list[list[Any]]:
        """The rows from `start` to `stop`."""
        bounds = self.offsets[start : stop + 1].tolist()
        numbers = self.values[bounds[0] : bounds[-1]].tolist()
        return [numbers[a - bounds[0] : b - bounds[0]] for a, b in pairwise(bounds)]

    def part(self, start: int, stop: int) -> RaggedNumbers:
        """The rows from `start` to `stop` over the same numbers."""
        return numbers_of(self.values, self.offsets[start : stop + 1])

    def flat(self) -> npt.NDArray[Any]:
        """All rows, one after another, as one array (N,)."""
        return self.values[int(self.offsets[0]) : int(self.offsets[-1])]

    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of every row (rows,)."""
        offsets = self.offsets.astype(np.int64)
        return offsets[1:] - offsets[:-1]


def numbers_of(values: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> RaggedNumbers:
    """The rows that `offsets` cuts `values` into."""
    column = RaggedNumbers.__new__(RaggedNumbers)
    column.values, column.offsets = values, offsets
    return column


class Records:
    """Dicts, or tuples, that all have the same fields: one column for each field.

    It reads as the list of them, each made when it is read: by index, slice, iteration and equality. Of dicts a field's
    name gives that field of all of them.

    Attributes:
        columns: by field, in the items' order; the fields of tuples are numbers.
        first: where its rows begin in the columns, which a part shares with the whole.
        stacks: all that is in them is numbers, so that several can be read as one structure of arrays.
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
            return column[self.first : last] if isinstance(column, np.ndarray) else items_of(column, self.first, last)
        row = self.first + checked_index(index, self.length)
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
        columns = {name: part_of(column, self.first, last) for name, column in self.columns.items()}
        return Records, (columns, self.length, self.as_tuple)

    def items(self, start: int, stop: int) -> list[Any]:
        """The dicts or tuples from `start` to `stop`, of plain Python values."""
        start, stop = self.first + start, self.first + stop
        return self._rows(items_of(column, start, stop) for column in self.columns.values())

    def items_at(self, rows: Any) -> list[Any]:
        """The dicts or tuples at an array of ints, as `items` has them."""
        return self._rows(items_at(column, rows + self.first) for column in self.columns.values())

    def _rows(self, columns: Iterable[list[Any]]) -> list[Any]:
        rows, names = zip(*columns, strict=True), tuple(self.columns)
        if self.as_tuple:
            return list(rows)
        return [dict(zip(names, row)) for row in rows]  # noqa: B905 (as many; a check would cost)

    def part(self, start: int, stop: int) -> Records:
        """The rows from `start` to `stop` over the same columns."""
        some = Records.__new__(Records)
        some.columns, some.first = self.columns, self.first + start
        some.length, some.as_tuple, some.stacks = stop - start, self.as_tuple, self.stacks
        return some

    def stacked(self, rows: Any) -> Any:
        """The rows at a slice with both ends or an array of ints, as one dict or tuple of arrays."""
        first, part = self.first, isinstance(rows, slice)
        rows = slice(first + rows.start, first + rows.stop) if part else rows + first
        return self._shaped([stacked(column, rows) for column in self.columns.values()])

    def _shaped(self, values: list[Any]) -> Any:
        return tuple(values) if self.as_tuple else dict(zip(self.columns, values, strict=True))


class MixedRecords:
    """Dicts of several shapes: a `Records` for each shape, and where each row lies."""

    __slots__ = ("block_of", "blocks", "row_of")

    def __init__(self, blocks: list[Any], block_of: npt.NDArray[Any], row_of: npt.NDArray[Any]) -> None:
        self.blocks, self.block_of, self.row_of = blocks, block_of, row_of

    def __len__(self) -> int:
        return len(self.block_of)

    def __getitem__(self, index: int) -> Any:
        index = checked_index(index, len(self))
        return items_of(self.blocks[self.block_of[index]], int(self.row_of[index]), int(self.row_of[index]) + 1)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # Of each block only the rows that are in this part, so that a part does not carry the whole.
        blocks, row_of = [], self.row_of.copy()
        for number, block in enumerate(self.blocks):
            first, stop = self._stretch(number, 0, len(self))
            blocks.append(part_of(block, first, stop))
            row_of[self.block_of == number] -= first
        return MixedRecords, (blocks, self.block_of, row_of)

    def items(self, start: int, stop: int) -> list[Any]:
        """The dicts from `start` to `stop`."""
        stretches = (self._stretch(number, start, stop) for number in range(len(self.blocks)))
        readers = [iter(items_of(block, *ends)) for block, ends in zip(self.blocks, stretches, strict=True)]
        return [next(readers[number]) for number in self.block_of[start:stop].tolist()]

    def _stretch(self, number: int, start: int, stop: int) -> tuple[int, int]:
        """The rows of one block that lie between `start` and `stop`."""
        rows = self.row_of[start:stop][self.block_of[start:stop] == number]
        return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)

    def part(self, start: int, stop: int) -> MixedRecords:
        """The rows from `start` to `stop` over the same blocks."""
        return MixedRecords(self.blocks, self.block_of[start:stop], self.row_of[start:stop])


_COMPACT = (np.ndarray, RaggedText, FewTexts, RaggedNumbers, Records, MixedRecords)


def is_compact(data: Any) -> bool:
    """It is one of the storages here, and neither a list nor anything else."""
    return isinstance(data, _COMPACT)


def stacks(data: Any) -> bool:
    """Several items of it can be read as one array, or one structure of arrays."""
    return isinstance(data, np.ndarray) or (isinstance(data, Records) and data.stacks)


def stacked(data: Any, rows: Any) -> Any:
    """The items at a slice or an array of ints, as an array or a structure of arrays."""
    return data.stacked(rows) if isinstance(data, Records) else data[rows]


def items_of(data: Any, start: int, stop: int) -> list[Any]:
    """The items from `start` to `stop` as a list of plain values, and of arrays where an item is one."""
    if isinstance(data, list):
        return data[start:stop]
    if not isinstance(data, np.ndarray):
        items: list[Any] = data.items(start, stop)
        return items
    return data[start:stop].tolist() if data.ndim == 1 and data.dtype.kind in "biuf" else list(data[start:stop])


def items_at(data: Any, rows: npt.NDArray[np.intp]) -> list[Any]:
    """The items at an array of ints, as `items_of` has them."""
    if isinstance(data, RaggedText | Records):
        return data.items_at(rows)
    if isinstance(data, np.ndarray):
        return items_of(data[rows], 0, len(rows))
    return [*map(data.__getitem__, rows.tolist())]


def as_list(data: Any) -> list[Any]:
    """The whole column as a list: the one it is, or a new one."""
    return data if isinstance(data, list) else items_of(data, 0, len(data))


def part_of(data: Any, start: int, stop: int) -> Any:
    """The items from `start` to `stop` stored as before; compact storage is shared and not copied."""
    kind = type(data)
    return data[start:stop] if kind is list or kind is np.ndarray else data.part(start, stop)
