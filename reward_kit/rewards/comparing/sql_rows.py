"""Whether two results of queries are the same rows, and what of a query's text decides in which order they come."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

Columns = Literal["in_order", "any_order"]
"""Whether columns must stand in the gold query's order."""

_MOST_ASSIGNMENTS = 720
_TOKEN = re.compile(
    r"""'[^']*'|"[^"]*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)|[()]|[A-Za-z_][\w$]*""",
    re.DOTALL,
)
_RANKS = {type(None): 0, int: 1, float: 1, str: 2, bytes: 3}


class Result(NamedTuple):
    """What a query returned.

    Attributes:
        width: how many columns.
        rows: in the order in which they came.
    """

    width: int
    rows: Sequence[tuple[Any, ...]]


def same_rows(golds: Sequence[Result], result: Result, is_ordered: bool, columns: Columns, tolerance: float) -> str:
    """Why a result is not the gold one; "" where it is.

    Args:
        golds: the same rows in the orders in which the gold query may return them; the first one as it does.
        result: the other one.
        is_ordered: rows must come in one of those orders. Rows that change places among them may come in any.
        columns: whether columns may stand in another order.
        tolerance: how far numbers may lie apart, relative or absolute.
    """
    gold = golds[0]
    if result.width != gold.width:
        return f"it returns {_count(result.width, 'column')}, and {gold.width} were expected"
    if len(result.rows) != len(gold.rows):
        return f"it returns {_count(len(result.rows), 'row')}, and {len(gold.rows)} were expected"
    blocks = _blocks(golds) if is_ordered else [(0, len(gold.rows))]
    for order in _assignments(gold, result) if columns == "any_order" else [range(gold.width)]:
        rows = [tuple(row[place] for place in order) for row in result.rows]
        if all(_are_same(gold.rows[start:end], rows[start:end], tolerance) for start, end in blocks):
            return ""
    if is_ordered and not same_rows([gold], result, False, columns, tolerance):
        return "it returns the expected rows in another order"
    return "it returns other rows"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _blocks(golds: Sequence[Result]) -> list[tuple[int, int]]:
    """Start and end of the shortest runs of rows that stand in the same place in all orders."""
    others = [gold.rows for gold in golds[1:] if len(gold.rows) == len(golds[0].rows)]
    blocks, start = [], 0
    balances: list[Counter[Any]] = [Counter() for _ in others]
    for place, row in enumerate(golds[0].rows):
        for balance, rows in zip(balances, others, strict=True):
            _move(balance, row, 1)
            _move(balance, rows[place], -1)
        if not any(balances):
            blocks.append((start, place + 1))
            start = place + 1
    return blocks + ([(start, len(golds[0].rows))] if start < len(golds[0].rows) else [])


def _move(balance: Counter[Any], row: tuple[Any, ...], by: int) -> None:
    key = _exact(row)
    balance[key] += by
    if not balance[key]:
        del balance[key]


def _exact(row: Sequence[Any]) -> tuple[Any, ...]:
    """A row as a key: values with the rank of their type, since 1 equals 1.0 and not "1" """
    return tuple((_RANKS[type(value)], value) for value in row)


def _are_same(gold: Sequence[Sequence[Any]], rows: Sequence[Sequence[Any]], tolerance: float) -> bool:
    """Whether two lists are the same rows in any order."""
    if Counter(map(_exact, gold)) == Counter(map(_exact, rows)):
        return True
    if not tolerance:
        return False
    pairs = zip(sorted(gold, key=_rough), sorted(rows, key=_rough), strict=True)
    return all(
        _is_close(one, other, tolerance) for left, right in pairs for one, other in zip(left, right, strict=True)
    )


def _rough(row: Sequence[Any]) -> tuple[Any, ...]:
    """A key to sort by that is the same for numbers that differ in their last digits."""
    return tuple(
        (_RANKS[type(value)], float(f"{value:.8g}") if isinstance(value, float) else value or 0)
        if not isinstance(value, str | bytes)
        else (_RANKS[type(value)], value)
        for value in row
    )


def _is_close(one: Any, other: Any, tolerance: float) -> bool:
    if _RANKS[type(one)] != _RANKS[type(other)]:
        return False
    if isinstance(one, int | float) and not (isinstance(one, int) and isinstance(other, int)):
        return one == other or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return bool(one == other)


def _assignments(gold: Result, result: Result) -> Iterator[Sequence[int]]:
    """Ways to place the result's columns so that each holds the values of its gold column, a bounded number of them."""
    wanted = [_column(gold, place) for place in range(gold.width)]
    found = [_column(result, place) for place in range(result.width)]
    tried = 0
    pending: list[tuple[int, ...]] = [()]
    while pending and tried < _MOST_ASSIGNMENTS:
        chosen = pending.pop()
        tried += 1
        if len(chosen) == gold.width:
            yield chosen
            continue
        fitting = [
            place for place in range(result.width) if place not in chosen and found[place] == wanted[len(chosen)]
        ]
        pending += [(*chosen, place) for place in reversed(fitting)]


def _column(result: Result, place: int) -> Counter[Any]:
    """The values of a column, floats without their last digits."""
    return Counter(_rough((row[place],)) for row in result.rows)


def has_order(query: str) -> bool:
    """Whether the outermost SELECT of a query has an ORDER BY."""
    return _terms(_plain(query)) is not None


def with_tie_break(query: str, expression: str) -> str:
    """The query with one more term in its outermost ORDER BY; "" where it has none."""
    text = _plain(query)
    end = _terms(text)
    return "" if end is None else f"{text[:end].rstrip()}, {expression} {text[end:]}"


def _plain(query: str) -> str:
    """A query without its comments and the semicolon at its end."""
    text = _TOKEN.sub(lambda match: " " if match[0].startswith(("--", "/*")) else match[0], query)
    return text.rstrip().rstrip(";").rstrip()


def _terms(text: str) -> int | None:
    """Where the terms of the outermost ORDER BY end; None where there is none."""
    depth, before, end = 0, "", None
    for match in _TOKEN.finditer(text):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        word = match[0].upper() if depth == 0 else ""
        if word == "BY" and before == "ORDER":
            end = len(text)
        elif word == "LIMIT" and end is not None:
            return match.start()
        before = word
    return end
