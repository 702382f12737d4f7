"""Which rows go through the model together, so that none of the parts holds more tokens than fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reward_kit.errors import ConfigError
from reward_kit.tokens.columns import Array, Ints


def micro_batches(
    lengths: Sequence[int] | Array, max_tokens: int, *, padded: bool = False, multiple_of: int = 1
) -> list[Ints]:
    """Parts of at most `max_tokens` tokens; every row is in exactly one. The same lengths give the same parts.

    First-fit decreasing decides how many parts there are: at most 11/9 of the fewest possible, + 1. For packed rows
    they are then evened out, the longest row left to the lightest part, where that keeps all within the budget.

    Args:
        lengths: (B,) the tokens of each row, as `TokenBatch.lengths` has them.
        max_tokens: the budget of a part.
        padded: rows are padded to the longest of their part, and the padding counts; else they are packed.
        multiple_of: make the number of parts a multiple of this, as workers in step need.

    Returns:
        The rows of each part, ascending; `restored_order` undoes the order.

    Raises:
        ConfigError: `lengths` are none, a row alone is longer than the budget, or there are fewer rows than parts.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and (sizes.dtype.kind not in "iu" or sizes.min() < 0)):
        raise ConfigError(f"lengths are the tokens of each row, whole numbers (B,); got {lengths!r:.80}")
    sizes = sizes.astype(np.int64)
    if len(sizes) and sizes.max() > max_tokens:
        row = int(sizes.argmax())
        raise ConfigError(f"row {row} has {sizes[row]} tokens, more than max_tokens={max_tokens}; raise max_tokens")
    if multiple_of < 1:
        raise ConfigError(f"multiple_of is at least 1; got {multiple_of}")
    parts = _first_fit(sizes, max_tokens, padded)
    wanted = -(-len(parts) // multiple_of) * multiple_of
    if wanted > len(sizes):
        raise ConfigError(
            f"{len(sizes)} rows cannot make {wanted} parts, the next multiple of multiple_of={multiple_of}"
        )
    if not padded:
        even = _lightest_first(sizes, wanted)
        if all(sizes[part].sum() <= max_tokens for part in even):
            parts = even
    while len(parts) < wanted:
        parts = _halved(parts)
    return [np.sort(part) for part in parts]


def _descending(sizes: Ints) -> Ints:
    return np.argsort(-sizes, kind="stable")


def _first_fit(sizes: Ints, max_tokens: int, padded: bool) -> list[Ints]:
    """Each row, the longest first, into the first part that has room."""
    room = np.full(len(sizes), max_tokens, dtype=np.int64)
    longest = np.zeros(len(sizes), dtype=np.int64)
    parts: list[list[int]] = []
    for row in _descending(sizes).tolist():
        open_parts = slice(0, len(parts) + 1)
        # A part's first row is its longest, and in a padded part all others take as much.
        takes = np.maximum(longest[open_parts], sizes[row]) if padded else sizes[row]
        part = int(np.argmax(room[open_parts] >= takes))
        if part == len(parts):
            parts.append([])
            longest[part] = sizes[row]
        parts[part].append(row)
        room[part] -= max(longest[part], sizes[row]) if padded else sizes[row]
    return [np.array(part, dtype=np.int64) for part in parts]


def _lightest_first(sizes: Ints, count: int) -> list[Ints]:
    """Each row, the longest first, into the part that holds the least; of equals the one with fewer rows."""
    load, rows = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    parts: list[list[int]] = [[] for _ in range(count)]
    for row in _descending(sizes).tolist():
        part = int(np.lexsort((rows, load))[0])
        parts[part].append(row)
        load[part] += sizes[row]
        rows[part] += 1
    return [np.array(part, dtype=np.int64) for part in parts]


def _halved(parts: list[Ints]) -> list[Ints]:
    """One part more: the one with the most rows becomes two."""
    most = int(np.argmax([len(part) for part in parts]))
    half = len(parts[most]) // 2
    return [*parts[:most], parts[most][:half], parts[most][half:], *parts[most + 1 :]]


def restored_order(parts: Sequence[Ints]) -> Ints:
    """What to index the parts' results with, put one after another, so that they stand in the rows' own order."""
    return np.argsort(np.concatenate([np.zeros(0, dtype=np.int64), *parts]), kind="stable")
