"""Plain numbers as exact fractions: the common case of every grader, without a parser of mathematics.

1,000 = 1{,}000 = 1e3 = 10^3, 0.5 = 1/2 = \\frac{1}{2}, 1 1/2 = 3/2, -3 = −3. Nothing is rounded: 0.333 is not 1/3.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from reward_kit.errors import ConfigError

LONGEST_NUMBER = 400
"""Characters of a number. A longer one is no answer that anybody asked for."""

LARGEST_EXPONENT = 1_000
"""Of a power of ten, either sign."""

_MINUS = str.maketrans({"−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "＋": "+", "\u00a0": " ", "\u202f": " "})
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_PLAIN = re.compile(rf"(?P<sign>[+-]?)\s*(?P<digits>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,5}}))?")
_SCIENTIFIC = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<digits>{_DECIMAL})\s*(?:\*|×|·|x|\\times|\\cdot)\s*)?"
    r"10\s*(?:\^|\*\*)\s*(?:\{\s*(?P<braced>[+-]?[0-9]{1,5})\s*\}|(?P<bare>[+-]?[0-9]{1,5}))"
)
_FRACTION = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})"
    r"|\\[dtc]?frac\s*\{\s*(?P<ltop>[+-]?[0-9]+)\s*\}\s*\{\s*(?P<lbottom>[+-]?[0-9]+)\s*\}"
    r"|\\[dtc]?frac\s*(?P<stop>[0-9])\s*(?P<sbottom>[0-9]))"
)
_MIXED = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>[0-9]+)"
    r"(?:\s+(?P<top>[0-9]+)\s*/\s*(?P<bottom>[0-9]+)|\s*\\[dtc]?frac\s*\{\s*(?P<ltop>[0-9]+)\s*\}\s*\{\s*(?P<lbottom>[0-9]+)\s*\}"
    r"|\s*\\[dtc]?frac\s*(?P<stop>[0-9])\s*(?P<sbottom>[0-9]))"
)
_SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3}(?![0-9]))")


def read_number(text: str) -> Fraction | None:
    """The number that the whole of `text` is, exactly; None where it is none.

    Accepts signs, thousands separators in groups of three, decimals, exponents, powers of ten, plain and LaTeX
    fractions of whole numbers, and mixed numbers with a proper fraction.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    text = _SEPARATOR.sub(",", text.translate(_MINUS)).strip()
    for read in (_plain, _scientific, _fraction, _mixed):
        if (number := read(text)) is not None:
            return number
    return None


def close(truth: Fraction, answer: Fraction, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Whether two numbers are equal, or no further apart than the larger of the tolerances.

    Args:
        truth: what `relative` is a share of.
        answer: the other one.
        absolute: the largest difference.
        relative: the largest difference, as a share of `truth`.
    """
    if truth == answer:
        return True
    if not absolute and not relative:
        return False
    return abs(truth - answer) <= max(exact(absolute), exact(relative) * abs(truth))


def exact(value: float) -> Fraction:
    """A tolerance as it was written: 0.1 is a tenth, and not the float next to it."""
    return Fraction(str(value))


def check_tolerances(absolute: float, relative: float) -> None:
    """Refuse tolerances that mean nothing.

    Raises:
        ConfigError: one is negative, or no finite number.
    """
    for name, value in (("absolute_tolerance", absolute), ("relative_tolerance", relative)):
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"option {name!r}: it is a number of at least 0, such as 0.001, not {value}")


def _plain(text: str) -> Fraction | None:
    match = _PLAIN.fullmatch(text)
    return _scaled(match["sign"], match["digits"], match["exponent"] or "0") if match else None


def _scientific(text: str) -> Fraction | None:
    match = _SCIENTIFIC.fullmatch(text)
    return _scaled(match["sign"], match["digits"] or "1", match["braced"] or match["bare"]) if match else None


def _fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    top = _decimal(match["top"] or match["ltop"] or match["stop"])
    bottom = _decimal(match["bottom"] or match["lbottom"] or match["sbottom"])
    return _signed(match["sign"], top / bottom) if bottom else None


def _mixed(text: str) -> Fraction | None:
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    top = int(match["top"] or match["ltop"] or match["stop"])
    bottom = int(match["bottom"] or match["lbottom"] or match["sbottom"])
    if not 0 < top < bottom:
        return None
    return _signed(match["sign"], int(match["whole"]) + Fraction(top, bottom))


def _scaled(sign: str, digits: str, exponent: str) -> Fraction | None:
    power = int(exponent)
    if abs(power) > LARGEST_EXPONENT:
        return None
    return _signed(sign, _decimal(digits) * Fraction(10) ** power)


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _signed(sign: str, number: Fraction) -> Fraction:
    return -number if sign == "-" else number
