"""JSON that others wrote: read within bounds, compared by value, and the first difference told."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from reward_kit.rewards.reading.texts import shown
from reward_kit.safe_input import Pairs, strict_decoder

DEEPEST: Final = 50
"""Levels of a value. What is deeper was not meant, and comparing it would end in Python's own limit."""

LONGEST: Final = 1_000_000
"""Characters of a text that is read as JSON."""


class Comparing(NamedTuple):
    """How two values are compared.

    Attributes:
        tolerance: how far two numbers may lie apart, relative or absolute.
        any_order: the order of an array's items does not count.
        subset: an object may have more fields than are expected.
    """

    tolerance: float = 0.0
    any_order: bool = False
    subset: bool = False


def read_json(text: str) -> Any:
    """The value of a JSON text (RFC 8259).

    Raises:
        ValueError: it is none, names a field of one object twice, has a number beyond every float, or is too long or
            too deep; the message says so.
    """
    if len(text) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST:,} characters")
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise ValueError(f"it nests deeper than {DEEPEST} levels") from None
    return as_json(value)


def as_json(value: Any) -> Any:
    """The value itself.

    Raises:
        ValueError: it is not made of what JSON is made of, or too deep.
    """
    level = [value]
    for _ in range(DEEPEST):
        level = [item for outer in level for item in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"it nests deeper than {DEEPEST} levels")


def difference(expected: Any, found: Any, how: Comparing, path: str = "") -> str:
    """Where and how two values first differ, such as " at .a[0]: expected 3, found 4"; "" where they are the same.

    1 and 1.0 are the same number; true is none. Fields of an object have no order.
    """
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return _field_difference(expected, found, how, path)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return _item_difference(expected, found, how, path)
    if _same_scalar(expected, found, how.tolerance):
        return ""
    return f"{_place(path)}expected {in_short(expected)}, found {in_short(found)}"


def key_of(value: Any, any_order: bool = False) -> Hashable:
    """A value as a key: equal for values between which `difference` without tolerance finds none."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, key_of(item, any_order)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return array_key([key_of(item, any_order) for item in value], any_order)
    if is_number(value):
        return "number", value
    return type(value).__name__, value


def array_key(items: Sequence[Hashable], any_order: bool) -> Hashable:
    """The key of an array whose items have these keys."""
    return "array", frozenset(Counter(items).items()) if any_order else tuple(items)


def leaves(value: Any) -> int:
    """How many fields and items a value has that hold no others; an empty object or array counts as one."""
    inner = list(_inside(value))
    return sum(map(leaves, inner)) if inner else 1


def common_leaves(expected: Any, found: Any, how: Comparing) -> int:
    """How many of the leaves of two values stand in the same place with the same value."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping) and (expected or found):
        return sum(common_leaves(item, found[name], how) for name, item in expected.items() if name in found)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple) and (expected or found):
        if how.any_order:
            shared = Counter(key_of(item, True) for item in expected) & Counter(key_of(item, True) for item in found)
            sizes = {key_of(item, True): leaves(item) for item in expected}
            return sum(sizes[key] * count for key, count in shared.items())
        return sum(common_leaves(one, other, how) for one, other in zip(expected, found, strict=False))
    return int(not difference(expected, found, how))


def is_number(value: Any) -> bool:
    """Whether a value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_short(value: Any) -> str:
    """A value in a few words, for a reason."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, Mapping):
        return f"an object of {_count(len(value), 'field')}"
    if isinstance(value, list | tuple):
        return f"an array of {_count(len(value), 'item')}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return json.dumps(value)


def _field_difference(expected: Mapping[str, Any], found: Mapping[str, Any], how: Comparing, path: str) -> str:
    for name, item in expected.items():
        if name not in found:
            return f"{_place(_field(path, name))}expected {in_short(item)}, and it is missing"
        if differs := difference(item, found[name], how, _field(path, name)):
            return differs
    extra = next((name for name in found if name not in expected), None)
    if extra is None or how.subset:
        return ""
    return f"{_place(_field(path, extra))}{in_short(found[extra])} is not expected"


def _item_difference(expected: Sequence[Any], found: Sequence[Any], how: Comparing, path: str) -> str:
    if len(expected) != len(found):
        return f"{_place(path)}expected {in_short(expected)}, found {in_short(found)}"
    if not how.any_order:
        pairs = enumerate(zip(expected, found, strict=True))
        differences = (difference(one, other, how, f"{path}[{index}]") for index, (one, other) in pairs)
        return next((differs for differs in differences if differs), "")
    left = Counter(key_of(item, True) for item in found)
    for item in expected:
        key = key_of(item, True)
        if not left[key]:
            return f"{_place(path)}no item is {in_short(item)} as expected"
        left[key] -= 1
    return ""


def _same_scalar(expected: Any, found: Any, tolerance: float) -> bool:
    if is_number(expected) and is_number(found):
        return bool(expected == found) or (tolerance > 0 and _is_close(expected, found, tolerance))
    return type(expected) is type(found) and bool(expected == found)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # a whole number beyond every float
        return False


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError("the names of an object's fields are texts")
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no JSON")
    elif value is not None and not isinstance(value, str | int):
        raise ValueError(f"{type(value).__name__} is no JSON")


def _field(path: str, name: str) -> str:
    return f"{path}.{name}" if name.isidentifier() and len(name) <= 60 else f"{path}[{shown(name)}]"


def _place(path: str) -> str:
    return f" at {path}: " if path else ": "


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _without_twins(pairs: Pairs) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twin = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it names the field {shown(twin)} twice")
    return fields


decoder: Final = strict_decoder(_without_twins)
"""Reads strictly, and refuses a field that stands twice with a ValueError."""
