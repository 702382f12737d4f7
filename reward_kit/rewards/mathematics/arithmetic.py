"""Arithmetic on values that are exact where they can be: each operation refuses to make what would be huge."""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import Any, Final

from reward_kit.errors import RewardError, how_to_install
from reward_kit.rewards.mathematics.tokens import Unreadable

MOST_BITS: Final = 65_536
"""Binary digits of the longest number that is worked out."""

DIGITS: Final = 60
AGREEING: Final = 45
_LARGEST_FACTORIAL: Final = 3_000
_LARGEST_ARGUMENT: Final = 10.0**6
_LOCAL = threading.local()

Value = Any
"""A Fraction where it is exact, else a real or complex number of mpmath."""


class Undefined(Exception):
    """The expression has no finite value there."""


def same_value(left: Value, right: Value) -> bool:
    """Whether two values are equal: exactly where both are rational, else to `AGREEING` digits."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    context = numbers_context()
    left, right = inexact(left, context), inexact(right, context)
    size = max(abs(left), abs(right), context.mpf(10) ** -12)
    return bool(abs(left - right) <= size * context.mpf(10) ** -AGREEING)


def is_real(value: Value) -> bool:
    """Whether a value has no imaginary part, to `AGREEING` digits."""
    if isinstance(value, Fraction):
        return True
    context = numbers_context()
    return bool(abs(context.im(value)) <= abs(value) * context.mpf(10) ** -AGREEING)


def numbers_context() -> Any:
    """mpmath's arithmetic at `DIGITS` digits, one for each thread: it changes its precision while it works.

    Raises:
        RewardError: mpmath is not installed.
    """
    context = getattr(_LOCAL, "context", None)
    if context is None:
        try:
            from mpmath.ctx_mp import MPContext  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise RewardError(f"math_answer needs mpmath for roots and variables; {how_to_install('math')}") from None
        context = MPContext()
        context.dps = DIGITS
        _LOCAL.context = context
    return context


def is_zero(value: Value) -> bool:
    return same_value(value, Fraction(0)) if not isinstance(value, Fraction) else value == 0


def inexact(value: Value, context: Any = None) -> Any:
    """A value as mpmath's number."""
    if not isinstance(value, Fraction):
        return value
    context = context or numbers_context()
    return context.mpf(value.numerator) / value.denominator


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def bounded(value: Value) -> Value:
    """`value`, unless it is too long, infinite or no number."""
    if isinstance(value, Fraction):
        if _bits(value) > MOST_BITS:
            raise Unreadable("a number in it is too large to work out")
        return value
    context = numbers_context()
    if not context.isfinite(value):
        raise Undefined
    if value and context.mag(value) > MOST_BITS:
        raise Unreadable("a number in it is too large to work out")
    return value


def power(base: Value, exponent: Value) -> Value:
    """`base ** exponent`, exact where the exponent is whole; not worked out where it is too long."""
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        if base in (0, 1, -1):
            return base**exponent.numerator if abs(exponent) < MOST_BITS else _unit_power(base, exponent)
        if _bits(base) * abs(exponent) > MOST_BITS:
            raise Unreadable("a power in it is too large to work out")
        return base**exponent.numerator
    context = numbers_context()
    base, exponent = inexact(base, context), inexact(exponent, context)
    if not base:
        if context.re(exponent) <= 0:
            raise Undefined
        return Fraction(0)
    if abs(exponent) * (abs(context.mag(base)) + 1) > MOST_BITS:
        raise Unreadable("a power in it is too large to work out")
    return context.power(base, exponent)


def _unit_power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise Undefined
    return base if base >= 0 else Fraction(1 if exponent.numerator % 2 == 0 else -1)


def factorial(value: Value) -> Value:
    """n! for a whole number, and the gamma function of n + 1 for any other."""
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise Undefined
        if value > _LARGEST_FACTORIAL:
            raise Unreadable("a factorial in it is too large to work out")
        return Fraction(math.factorial(int(value)))
    context = numbers_context()
    value = inexact(value, context)
    if abs(value) > _LARGEST_FACTORIAL:
        raise Unreadable("a factorial in it is too large to work out")
    return context.factorial(value)


def small(value: Value) -> Any:
    """A value as mpmath's, for a function that would take long over a large one."""
    context = numbers_context()
    value = inexact(value, context)
    if abs(value) > _LARGEST_ARGUMENT:
        raise Unreadable("the argument of a function is too large to work out")
    return value
