"""How a finished column of texts is stored: one after another with offsets, or each different one once."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import accumulate, pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_SAMPLE = 32  # rows; fewer are not worth a preparation
_MOST_CODES = 256


class RaggedText:
    """Texts of differing length in one blob with offsets; lone surrogates survive.

    The blob is itself a text where all is ASCII, and UTF-8 otherwise.
    """

    __slots__ = ("blob", "offsets")

    def __init__(self, texts: Iterable[str] = ()) -> None:
        texts = texts if isinstance(texts, list) else list(texts)
        joined = "".join(texts)
        self.blob: str | bytes = joined
        rows: list[Any] = texts
        if not joined.isascii():
            rows = [text.encode("utf-8", "surrogatepass") for text in texts]
            self.blob = b"".join(rows)
        self.offsets = offsets_of(rows, len(self.blob))

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
        index = checked_index(index, len(offsets) - 1)
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
        """The texts from `start` to `stop`."""
        return self._between(pairwise(self.offsets[start : stop + 1].tolist()))

    def items_at(self, rows: Any) -> list[str]:
        """The texts at an array of ints."""
        return self._between(zip(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist(), strict=True))

    def _between(self, bounds: Iterable[tuple[int, int]]) -> list[str]:
        blob = self.blob
        if isinstance(blob, str):
            return [blob[a:b] for a, b in bounds]
        return [blob[a:b].decode("utf-8", "surrogatepass") for a, b in bounds]

    def part(self, start: int, stop: int) -> RaggedText:
        """The rows from `start` to `stop` over the same blob."""
        return _text_of(self.blob, self.offsets[start : stop + 1])


def _text_of(blob: str | bytes, offsets: npt.NDArray[Any]) -> RaggedText:
    column = RaggedText.__new__(RaggedText)
    column.blob, column.offsets = blob, offsets
    return column


class FewTexts:
    """Texts of which many are equal, such as roles and names of tools: each different one once, and a byte a row."""

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
        return self.values[self.codes[checked_index(index, len(self.codes))]]

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the texts that are in this part.
        used = sorted(set(self.codes))
        codes = self.codes.translate(bytes(used.index(code) if code in used else 0 for code in range(_MOST_CODES)))
        return FewTexts, ([self.values[code] for code in used], codes)

    def items(self, start: int, stop: int) -> list[str]:
        """The texts from `start` to `stop`."""
        return [*map(self.values.__getitem__, self.codes[start:stop])]

    def part(self, start: int, stop: int) -> FewTexts:
        """The rows from `start` to `stop` over the same texts."""
        return FewTexts(self.values, self.codes[start:stop])


def texts_of(texts: list[str]) -> RaggedText | FewTexts:
    """The storage for a column of texts: by whether few of them differ, which a sample tells first."""
    rows = len(texts)
    if texts[-1] == texts[0] and texts.count(texts[0]) == rows:
        return FewTexts(texts[:1], bytes(rows))
    if _are_few(set(texts[:: rows // _SAMPLE + 1]), min(rows, _SAMPLE)):
        code_of = {text: code for code, text in enumerate(dict.fromkeys(texts))}
        if _are_few(code_of, rows) and len(code_of) <= _MOST_CODES:
            return FewTexts([*code_of], bytes(map(code_of.__getitem__, texts)))
    return RaggedText(texts)


def _are_few(different: Sized, rows: int) -> bool:
    return len(different) * 4 <= rows


def offsets_of(rows: list[Any], total: int) -> npt.NDArray[Any]:
    """Where each row begins and the last ends, in the smallest integers that hold `total`."""
    dtype = np.uint32 if total < 2**32 else np.int64
    if len(rows) < _SAMPLE:
        return np.fromiter(accumulate(map(len, rows), initial=0), dtype, len(rows) + 1)
    lengths: Any
    try:
        # Of a list of small ints Python makes bytes ten times as quickly as NumPy an array.
        lengths = np.frombuffer(bytearray([*map(len, rows)]), np.uint8)
    except ValueError:
        lengths = np.fromiter(map(len, rows), dtype, len(rows))
    offsets = np.zeros(len(rows) + 1, dtype)
    np.cumsum(lengths, dtype=dtype, out=offsets[1:])
    return offsets


def checked_index(index: int, length: int) -> int:
    """The position that an index means, counted from the end where it is negative.

    Raises:
        IndexError: there is none.
    """
    position = index + length if index < 0 else index
    if not 0 <= position < length:
        raise IndexError(f"row {index} is out of range: there are {length}")
    return position
