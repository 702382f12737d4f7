"""The named functions of expressions, each with a bound on what it is asked to work out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Final

from reward_kit.rewards.mathematics.arithmetic import Undefined, Value, inexact, is_real, numbers_context, power, small
from reward_kit.rewards.mathematics.tokens import Unreadable

_MPMATH: Final = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp")},
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh",
}  # fmt: skip
_LARGEST_CHOICE: Final = 3_000


def call(name: str, parts: list[Value]) -> Value:
    """The value of a function.

    Raises:
        Unreadable: its arguments are too large, or their number is wrong.
        Undefined: it has no value there.
    """
    if name.startswith("?"):
        return _opaque(name, parts)
    if name in _SEVERAL:
        return _SEVERAL[name](parts)
    if name in _TWO:
        if len(parts) != 2:
            raise Unreadable(f"{name} takes two values")
        return _TWO[name](parts[0], parts[1])
    if len(parts) != 1:
        raise Unreadable(f"{name} takes one value")
    if name in _ONE:
        return _ONE[name](parts[0])
    context = numbers_context()
    if name not in _MPMATH:
        raise Unreadable(f"{name} is not known")
    value = getattr(context, _MPMATH[name])(small(parts[0]))
    # What is 0 comes out as a rounding error, sin(pi) for one, and would be no zero for a division.
    return Fraction(0) if abs(value) < context.mpf(10) ** -50 and name in {"sin", "cos", "tan", "cot"} else value


def _opaque(name: str, parts: list[Value]) -> Value:
    """An unknown function: some smooth function of its arguments, the same for the same name."""
    context = numbers_context()
    total = context.mpf(0)
    for index, part in enumerate(parts):
        digest = hashlib.sha256(f"{name}:{index}".encode()).digest()
        total += context.cos(small(part) * (1 + context.mpf(digest[0]) / 256) + digest[1])
    return total


def _absolute(value: Value) -> Value:
    return abs(value)


def _whole(round_down: bool) -> Callable[[Value], Value]:
    def rounded(value: Value) -> Value:
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if round_down else math.ceil(value))
        context = numbers_context()
        value = context.re(small(value))
        return Fraction(int(context.floor(value) if round_down else context.ceil(value)))

    return rounded


def _logarithm(value: Value, base: Value | None = None) -> Value:
    context = numbers_context()
    if not value or (base is not None and (not base or base == 1)):
        raise Undefined
    over = context.log(inexact(value))
    return over if base is None else over / context.log(inexact(base))


def _root(value: Value, degree: Value) -> Value:
    """The real root of a negative number where the degree is odd, else the principal one; exact where it can be."""
    whole = isinstance(degree, Fraction) and degree.denominator == 1
    if not degree:
        raise Undefined
    if isinstance(value, Fraction) and whole and 2 <= degree <= 100:
        found = _exact_root(abs(value), int(degree))
        negative = value < 0
        if found is not None and (not negative or degree % 2):
            return -found if negative else found
    if whole and degree % 2 and is_real(value) and numbers_context().re(inexact(value)) < 0:
        return -power(-value, 1 / degree)
    return power(value, 1 / degree if isinstance(degree, Fraction) else 1 / inexact(degree))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    top, bottom = _whole_root(value.numerator, degree), _whole_root(value.denominator, degree)
    return Fraction(top, bottom) if top is not None and bottom is not None else None


def _whole_root(number: int, degree: int) -> int | None:
    if degree == 2:
        root = math.isqrt(number)
    else:
        low, high = 0, 1 << (number.bit_length() // degree + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
        root = low
    return root if root**degree == number else None


def _choose(top: Value, bottom: Value) -> Value:
    if not (isinstance(top, Fraction) and isinstance(bottom, Fraction) and top.denominator == bottom.denominator == 1):
        context = numbers_context()
        return context.binomial(small(top), small(bottom))
    if not bottom >= 0 or abs(top) > _LARGEST_CHOICE or bottom > _LARGEST_CHOICE:
        raise Unreadable("a binomial in it is too large to work out")
    return Fraction(math.comb(int(top), int(bottom))) if top >= 0 else Fraction(0)


def _integers(parts: list[Value]) -> list[int]:
    if not all(isinstance(part, Fraction) and part.denominator == 1 for part in parts):
        raise Undefined
    return [int(part) for part in parts]


def _largest(parts: list[Value]) -> Value:
    return max(parts, key=lambda part: inexact(part))


def _smallest(parts: list[Value]) -> Value:
    return min(parts, key=lambda part: inexact(part))


_SEVERAL: Final[dict[str, Callable[[list[Value]], Value]]] = {
    "max": _largest,
    "min": _smallest,
    "gcd": lambda parts: Fraction(math.gcd(*_integers(parts))),
    "lcm": lambda parts: Fraction(math.lcm(*_integers(parts))),
}
_TWO: Final[dict[str, Callable[[Value, Value], Value]]] = {"root": _root, "log": _logarithm, "binomial": _choose}
_ONE: Final[dict[str, Callable[[Value], Value]]] = {
    "abs": _absolute,
    "floor": _whole(True),
    "ceil": _whole(False),
    "ln": _logarithm,
    "log10": lambda value: _logarithm(value, Fraction(10)),
    "Re": lambda value: value if isinstance(value, Fraction) else numbers_context().re(value),
    "Im": lambda value: Fraction(0) if isinstance(value, Fraction) else numbers_context().im(value),
    "arg": lambda value: numbers_context().arg(inexact(value)),
    "sign": lambda value: numbers_context().sign(inexact(value)),
}
