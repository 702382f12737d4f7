"""Whether what came back from a model's program is what was expected: compared here, on plain data, by code of ours.

What came back is JSON of the form that `inside.encode` gives, and whoever wrote it may be hostile: it is taken
apart along what is expected, and none of it becomes an object with a behaviour of its own.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from reward_kit.rewards.programs.inside import encode

Stdout = Literal["lines", "tokens", "exact"]
"""How outputs are compared: without blanks at the ends of lines and of all; word by word; or exactly as they are."""

_SEQUENCES = ("list", "tuple")
_LONGEST_NUMBER = 300


class Rules(NamedTuple):
    """What counts as equal.

    Attributes:
        tolerance: how far numbers may lie apart, absolute or relative to the expected one; 0.0 for not at all.
        unordered: lists are equal in any order, the outermost ones only.
        stdout: how outputs are compared.
    """

    tolerance: float = 0.0
    unordered: bool = False
    stdout: Stdout = "lines"


def is_same(expected: Any, got: Any, rules: Rules) -> bool:
    """Whether an answer is the expected value, read as data.

    Numbers are equal by value, 1 and 1.0 too; true is no number. A tuple is a list, since JSON has one word for both. A
    key that is an integer equals its text for the same reason. NaN equals NaN.

    Args:
        expected: data of the ground truth.
        got: an answer in the form of `encode`.
        rules: what counts as equal.
    """
    if rules.unordered and isinstance(expected, list | tuple):
        items = _content(got, *_SEQUENCES)
        if items is None or len(items) != len(expected):
            return False
        return Counter(map(_key, items)) == Counter(_key(encode(item)) for item in expected)
    return _is_same(expected, got, rules.tolerance)


def _is_same(expected: Any, got: Any, tolerance: float) -> bool:
    if expected is None or isinstance(expected, bool):
        return got is expected
    if isinstance(expected, int | float):
        number = _number(got)
        return number is not None and is_close(expected, number, tolerance)
    if isinstance(expected, list | tuple):
        items = _content(got, *_SEQUENCES)
        return _are_same(expected, items, tolerance)
    if isinstance(expected, dict):
        return _is_same_dict(expected, _content(got, "dict"), tolerance)
    return _key(encode(expected)) == _key(got)


def _are_same(expected: Sequence[Any], items: list[Any] | None, tolerance: float) -> bool:
    if items is None or len(items) != len(expected):
        return False
    return all(_is_same(one, other, tolerance) for one, other in zip(expected, items, strict=True))


def _is_same_dict(expected: dict[Any, Any], pairs: list[Any] | None, tolerance: float) -> bool:
    if pairs is None or len(pairs) != len(expected):
        return False
    wanted = {_name(encode(key)): value for key, value in expected.items()}
    seen = set()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            return False
        name = _name(pair[0])
        if name in seen or name not in wanted or not _is_same(wanted[name], pair[1], tolerance):
            return False
        seen.add(name)
    return True


def is_close(expected: float, got: float, tolerance: float) -> bool:
    """Whether two numbers are equal, or as close as the tolerance allows; an integer may be beyond any float."""
    if expected == got or (expected != expected and got != got):
        return True
    if not tolerance:
        return False
    try:
        return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False


def _number(got: Any) -> float | None:
    if isinstance(got, int | float):
        return None if isinstance(got, bool) else got
    content = got[1] if isinstance(got, list) and len(got) == 2 and isinstance(got[1], str) else ""
    try:
        if got and got[0] == "int":
            return int(content, 16)
        return float(content) if got and got[0] == "float" else None
    except (ValueError, TypeError, KeyError):
        return None


def _content(got: Any, *kinds: str) -> list[Any] | None:
    """What an answer of one of these kinds holds."""
    if isinstance(got, list) and len(got) == 2 and got[0] in kinds and isinstance(got[1], list):
        return got[1]
    return None


def _name(key: Any) -> str:
    return json.dumps(str(key)) if isinstance(key, int) and not isinstance(key, bool) else _key(key)


def _key(got: Any) -> str:
    """A text that is the same for the same data: numbers by value, sets and dicts in a fixed order."""
    if isinstance(got, bool) or got is None or isinstance(got, str):
        return json.dumps(got)
    number = _number(got)
    if number is not None:
        is_whole = isinstance(number, float) and number.is_integer()
        return hex(int(number)) if is_whole or isinstance(number, int) else repr(number)
    if (items := _content(got, *_SEQUENCES)) is not None:
        return f"[{','.join(map(_key, items))}]"
    if (items := _content(got, "set")) is not None:
        return f"{{{','.join(sorted(set(map(_key, items))))}}}"
    if (pairs := _content(got, "dict")) is not None and all(isinstance(pair, list) for pair in pairs):
        return "{:" + ",".join(sorted(":".join(map(_key, pair)) for pair in pairs)) + "}"
    return f"?{json.dumps(got, sort_keys=True)}"


def is_same_output(expected: str, got: str, rules: Rules) -> bool:
    """Whether a program printed what was expected. Line ends of Windows are line ends."""
    wanted, printed = (text.replace("\r\n", "\n") for text in (expected, got))
    if rules.stdout == "exact":
        return wanted == printed
    split = _lines if rules.stdout == "lines" else str.split
    parts, others = split(wanted), split(printed)
    if len(parts) != len(others):
        return False
    return all(one == other or _is_close_text(one, other, rules) for one, other in zip(parts, others, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _is_close_text(expected: str, got: str, rules: Rules) -> bool:
    """Whether two lines are the same words, numbers within the tolerance."""
    words, others = expected.split(), got.split()
    if not rules.tolerance or len(words) != len(others):
        return False
    return all(one == other or _are_close_words(one, other, rules) for one, other in zip(words, others, strict=True))


def _are_close_words(expected: str, got: str, rules: Rules) -> bool:
    if len(expected) > _LONGEST_NUMBER or len(got) > _LONGEST_NUMBER:
        return False
    try:
        numbers = float(expected), float(got)
    except ValueError:
        return False
    return all(map(math.isfinite, numbers)) and is_close(*numbers, rules.tolerance)


def shown(value: Any, limit: int = 120) -> str:
    """A value for a sentence, cut."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than are written
        text = f"a number of {value.bit_length():,} bits" if isinstance(value, int) else "a long value"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown_answer(got: Any) -> str:
    """An answer for a sentence."""
    kind = got[0] if isinstance(got, list) and len(got) == 2 and isinstance(got[0], str) else ""
    if kind == "other":
        return f"an object of type {str(got[1])[:60]}"
    return shown(_told(got))


def _told(got: Any, depth: int = 0) -> Any:
    """An answer with its kinds taken off, as far as a sentence shows it."""
    items = _content(got, *_SEQUENCES, "set", "dict")
    if items is None:
        number = _number(got)
        return number if number is not None else got
    if depth > 3:
        return "…"
    if got[0] == "dict":
        return {
            str(_told(pair[0], 9)): _told(pair[1], depth + 1)
            for pair in items[:8]
            if isinstance(pair, list) and len(pair) == 2
        }
    found = [_told(item, depth + 1) for item in items[:40]]
    return tuple(found) if got[0] == "tuple" else found
