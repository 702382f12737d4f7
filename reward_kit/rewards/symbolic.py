"""Comparison of expressions by math-verify, with a limit on the computational work.

math-verify's time limit requires signals, which are not available in threads, and no time limit can interrupt the
computation of a single huge power. Therefore, expressions that could produce huge numbers are rejected first, and
function calls are counted. Counting calls gives the same result on every machine. The sandbox limits are the last
resort.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import FrameType
from typing import Any, Final

from reward_kit.errors import RewardError, install_hint
from reward_kit.rewards.quantities import FUNCTIONS, close

MOST_CALLS: Final = 3_000_000
"""The maximum number of function calls in all comparisons for one answer. That many calls take a few seconds."""
_LONGEST_EXPRESSION: Final = 300
_MATHEMATICS: Final = ("sympy.", "mpmath.", "antlr4.", "latex2sympy2_extended.", "math_verify.")
_NUMBERS: Final = re.compile(r"[0-9]+")
_HARMFUL: Final = re.compile(
    r"\*\*|!!|[^0-9a-zA-Z ]\s*!|[0-9]{3}\s*!|\\(?:Gamma|uparrow|prod|input|include|def)(?![A-Za-z])"
    r"|\\binom[^A-Za-z]*(?:[0-9]{4}|!)"
)
_ITERATED: Final = re.compile(r"\\(?:sum|int|lim)(?![A-Za-z])")
_GROWING: Final = re.compile(r"\\(?:exp|sinh|cosh)(?![A-Za-z])|(?<![A-Za-z\\])(?:exp|sinh|cosh)\b")
_GROUP: Final = re.compile(r"(?<!\^)\{([^{}]*)\}")
_POWER: Final = re.compile(
    r"(?P<base>\S)\s*\^(?:\{(?P<braced>(?:[^{}^]|\^(?:[0-9A-Za-z]|\{[0-9A-Za-z]\})){0,40})\}"
    r"|(?P<bare>-?[0-9]+|[A-Za-z]|\\[a-z]+))"
)


class BoundedComparison:
    """Compares expressions. All comparisons by one instance share a budget of `MOST_CALLS` function calls."""

    def __init__(self) -> None:
        self._calls_left = MOST_CALLS
        self._parsed: dict[str, Any] = {}

    def equal(self, truth: str, answer: str, absolute: float = 0.0, relative: float = 0.0) -> bool:
        """Return True if two cleaned expressions are equal.

        The result is False if equality cannot be decided or takes too much work.

        Raises:
            RewardError: If math-verify is not installed.
        """
        if not (is_harmless(truth) and is_harmless(answer)):
            return False
        # math-verify treats x and X as the same variable.
        expected, stated = (set(_VARIABLE.findall(text)) for text in (truth, answer))
        if expected != stated and {name.lower() for name in expected} == {name.lower() for name in stated}:
            return False
        try:
            import math_verify  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise RewardError(f"math_answer needs math-verify; {install_hint('math')}") from None
        try:
            with self._bounded(), _quiet():
                pair = self._parse(truth), self._parse(answer)
                if not all(pair):
                    return False
                if math_verify.verify(*pair, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=None):
                    return True
                if not absolute and not relative:
                    return False
                one, other = (_approximate(parsed[0]) for parsed in pair)
        except (_TooMuchWork, RecursionError):
            return False
        return one is not None and other is not None and close(one, other, absolute, relative)

    def _parse(self, text: str) -> Any:
        import math_verify
        import sympy  # type: ignore[import-untyped, unused-ignore]

        if text not in self._parsed:
            config = (math_verify.LatexExtractionConfig(boxed_match_priority=-1),)
            self._parsed[text] = []
            for expression in math_verify.parse(f"${_latex(text)}$", config, "no_fallback", parsing_timeout=None):
                # math-verify treats i as a variable.
                units = {one: sympy.I for one in getattr(expression, "free_symbols", ()) if one.name == "i"}
                self._parsed[text].append(expression.xreplace(units) if units else expression)
        return self._parsed[text]

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Stop the code in this context once the function call budget is used up.

        The code is stopped only on entry to a function from a math library, because the standard library might hold a
        lock.
        """

        def count(frame: FrameType, event: str, _argument: Any) -> None:
            self._calls_left -= 1
            if self._calls_left >= 0 or event != "call":
                return
            if frame.f_globals.get("__name__", "").startswith(_MATHEMATICS):
                raise _TooMuchWork

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)


class _TooMuchWork(BaseException):
    """Raised when the function call limit is reached.

    It derives from `BaseException` because the parsers that it interrupts suppress every `Exception`.
    """


def is_harmless(text: str) -> bool:
    """Return True if evaluating a cleaned expression cannot produce a huge number.

    Factorials and towers of powers, for example, can produce huge numbers.
    """
    if len(text) > _LONGEST_EXPRESSION or _HARMFUL.search(text) or text.count("{") + text.count("(") > 40:
        return False
    text = text.replace("^ ", "^")
    for _ in range(10):
        text = _GROUP.sub(r"(\1)", text)  # Keep only the braces around exponents.
    numbers = _NUMBERS.findall(text)
    is_iterated, grows = _ITERATED.search(text) is not None, len(_GROWING.findall(text))
    longest = 2 if grows else 6 if is_iterated else 15
    if grows > 1 or max(map(len, numbers), default=0) > longest:
        return False
    powers = list(_POWER.finditer(text))
    if not sum(match[0].count("^") for match in powers) == text.count("^") <= 12:
        return False
    largest_plain = power_product = 1
    for match in powers:
        exponent = match["braced"] or match["bare"]
        digits = _NUMBERS.findall(exponent)
        largest = max(map(int, digits), default=99 if is_iterated else 1)
        if "^" in exponent and (is_iterated or exponent.count("^") > 1 or len(digits) > 3 or largest > 3):
            return False
        is_plain = match["base"].isdigit() and exponent.strip("-+ ").isdigit()
        if "!" in exponent or len("".join(digits)) > (4 if is_plain else 2) or (grows and largest > 2):
            return False
        if is_plain:
            largest_plain = max(largest_plain, largest)
        if match["base"] in ")]|!":
            power_product *= largest or 1
            if largest > 20 and len(set(_VARIABLE.findall(text))) > 2:
                return False
    return power_product <= 10_000 and power_product * largest_plain <= 100_000


def _approximate(expression: Any) -> Fraction | None:
    """Return the value of a real constant to 30 digits, or None for any other expression."""
    if not getattr(expression, "is_number", False):
        return None
    try:
        return Fraction(str(expression.evalf(30)))
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence math-verify's warning that its time limit is disabled. This is intended."""
    loggers = [logging.getLogger(name) for name in ("math_verify.parser", "math_verify.grader")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


_FUNCTION: Final = re.compile(rf"(?<![\\A-Za-z])(?:{FUNCTIONS})(?![A-Za-z])")
_DECIMAL: Final = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]+)")
_IMPLICIT: Final = re.compile(r"(?<=[0-9])\s*(?=\()")
_ROOT: Final = re.compile(r"\\sqrt\s*\(")
_ODD_ROOT: Final = re.compile(r"\\sqrt\s*\[\s*([0-9]*[13579])\s*\]\s*\{\s*-\s*([0-9.]+)\s*\}")
_SIMPLE_FRACTION: Final = re.compile(r"(?<![\w.}])([0-9]+)\s*/\s*([0-9]+)(?=\s*[A-Za-z\\(])")
_BARE_POWER: Final = re.compile(r"\^\s*(-?[0-9]+)")
_VARIABLE: Final = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")


def _latex(text: str) -> str:
    """Convert a cleaned string to LaTeX for math-verify.

    Decimals become fractions, 2(3) becomes a product, and function names become commands.
    """
    text = re.sub(r"(\\(?:begin|end)) \{", r"\1{", _FUNCTION.sub(lambda match: f"\\{match[0]} ", text))
    while match := _ROOT.search(text):
        end = _closing(text, match.end())
        text = f"{text[: match.start()]}\\sqrt{{{text[match.end() : end]}}}{text[end + 1 :]}"
    text = _BARE_POWER.sub(r"^{\1}", _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", text))
    text = _SIMPLE_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _DECIMAL.sub(lambda match: rf"\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}", text)
    return _IMPLICIT.sub(r" \\cdot ", text)


def _closing(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one before `start`, or the end of the text."""
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if not depth:
            return position
    return len(text)


def _fill_caches() -> None:
    """Fill the caches of SymPy and the parser before forking, so that child processes inherit them."""
    comparison = BoundedComparison()
    comparison._calls_left = 100 * MOST_CALLS
    comparison.equal(r"x^{2}-4", "(x-2)(x+2)")
    comparison.equal(r"\sin^2 x+\cos^2 x", "1")
    comparison.equal(r"\frac{1}{\sqrt{2}}", r"1\le x<2")


if importlib.util.find_spec("math_verify") is not None:
    _fill_caches()
