"""What expressions are worth: exactly where they are rational, to 60 digits where they are not.

Every operation is checked before it is done: no number here is longer than `MOST_BITS`. Two expressions with variables
are equal where they agree, to 45 digits, at each of a fixed set of points (Schwartz 1980 and Zippel 1979).
Unlike a simplifier this cannot hang; it differs from one only on expressions that agree to 45 digits and are not equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Final

from reward_kit.rewards.mathematics.arithmetic import (
    MOST_BITS,
    Undefined,
    Value,
    bounded,
    factorial,
    inexact,
    is_real,
    is_zero,
    numbers_context,
    power,
    same_value,
)
from reward_kit.rewards.mathematics.functions import call
from reward_kit.rewards.mathematics.reader import Node
from reward_kit.rewards.mathematics.tokens import Unreadable

_POINTS: Final = 12
_FEWEST_POINTS: Final = 3


def constant(tree: Node) -> Value:
    """The value of an expression without variables.

    Raises:
        Unreadable: it is too large to work out.
        Undefined: it has none.
    """
    return _evaluate(tree, {})


def symbols(tree: Node) -> frozenset[str]:
    """The variables of an expression."""
    if tree.kind == "symbol":
        return frozenset({tree.name})
    return frozenset().union(*(symbols(part) for part in tree.parts))


def has_infinity(tree: Node) -> bool:
    """Whether infinity stands anywhere in it."""
    return (tree.kind == "constant" and tree.name == "infinity") or any(has_infinity(part) for part in tree.parts)


def equal(truth: Node, answer: Node, close: Callable[[Value, Value], bool] | None = None) -> bool:
    """Whether two expressions are the same value, or the same function of their variables.

    Args:
        close: decides about two values without variables that are real; by default they are equal.

    Raises:
        Unreadable: one is too large to work out.
    """
    names = sorted(symbols(truth) | symbols(answer))
    if not names:
        try:
            left, right = constant(truth), constant(answer)
        except Undefined:
            return False
        return same_value(left, right) or (close is not None and close(left, right))
    pairs = _pairs(truth, answer, names)
    return len(pairs) >= _FEWEST_POINTS and all(same_value(left, right) for left, right in pairs)


def proportional(truth: Node, answer: Node) -> bool:
    """Whether one expression is the other times a constant that is not 0: the same equation, if each equals 0."""
    names = sorted(symbols(truth) | symbols(answer))
    context = numbers_context()
    pairs = [(left, right) for left, right in _pairs(truth, answer, names, real=False)]
    if len(pairs) < _FEWEST_POINTS or any(is_zero(left) != is_zero(right) for left, right in pairs):
        return False
    ratios = [inexact(left, context) / inexact(right, context) for left, right in pairs if not is_zero(right)]
    return bool(ratios) and all(same_value(ratio, ratios[0]) for ratio in ratios)


def as_fraction(value: Value) -> Fraction | None:
    """A real value as a fraction, to 60 digits; None where it is complex."""
    if isinstance(value, Fraction):
        return value
    context = numbers_context()
    if not is_real(value):
        return None
    sign, mantissa, exponent, _ = context.re(value)._mpf_
    if abs(exponent) > MOST_BITS:
        return None
    size = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    return -size if sign else size


def _pairs(truth: Node, answer: Node, names: Sequence[str], real: bool = True) -> list[tuple[Value, Value]]:
    """Both expressions' values at the points where the truth has one: the real ones, where there are enough of them.

    An answer without a value where the truth has one is paired with a value that it is not.
    """
    found: list[tuple[Value, Value]] = []
    for index in range(_POINTS):
        point = {name: _coordinate(name, index) for name in names}
        try:
            left = _evaluate(truth, point)
        except Undefined:
            continue
        try:
            right = _evaluate(answer, point)
        except Undefined:
            right = inexact(left, numbers_context()) + 1
        found.append((left, right))
    on_the_line = [pair for pair in found if is_real(pair[0])]
    return on_the_line if real and len(on_the_line) >= _FEWEST_POINTS else found


def _coordinate(name: str, index: int) -> Fraction:
    """A fixed point for each variable: positive ones first, then of either sign, and larger ones at the end."""
    digest = hashlib.sha256(f"{name}:{index}".encode()).digest()
    size = Fraction(3 + digest[0], 97) if index < _POINTS - 3 else Fraction(1_000 + digest[0], 97)
    negative = index >= _POINTS // 2 and digest[1] % 2
    return -size if negative else size


def _evaluate(tree: Node, point: Mapping[str, Fraction]) -> Value:
    if tree.kind == "number":
        return bounded(tree.value)
    if tree.kind == "symbol":
        return point[tree.name]
    if tree.kind == "constant":
        return _constant(tree.name)
    parts = [_evaluate(part, point) for part in tree.parts]
    try:
        return bounded(_operation(tree, parts))
    except (ZeroDivisionError, ValueError, OverflowError, TypeError, NotImplementedError, RecursionError):
        raise Undefined from None


def _constant(name: str) -> Value:
    context = numbers_context()
    if name == "infinity":
        raise Undefined
    return {"pi": context.pi, "e": context.e, "i": context.mpc(0, 1)}[name] * 1


def _operation(tree: Node, parts: list[Value]) -> Value:
    if tree.kind == "add":
        return _folded(parts, lambda a, b: a + b)
    if tree.kind == "multiply":
        return _folded(parts, lambda a, b: a * b)
    if tree.kind == "divide":
        return _folded([parts[0], power(parts[1], Fraction(-1))], lambda a, b: a * b)
    if tree.kind == "negate":
        return -parts[0]
    if tree.kind == "power":
        return power(parts[0], parts[1])
    if tree.kind == "factorial":
        return factorial(parts[0])
    if tree.kind == "call":
        return call(tree.name, parts)
    raise Unreadable("± stands inside of it")


def _folded(parts: list[Value], operation: Callable[[Value, Value], Value]) -> Value:
    total = parts[0]
    context = None
    for part in parts[1:]:
        if isinstance(total, Fraction) != isinstance(part, Fraction):
            context = context or numbers_context()
            total, part = inexact(total, context), inexact(part, context)
        total = bounded(operation(total, part))
    return total
