"""math-verify, asked about notation that the reader here does not know: sums, integrals, determinants, set operations.

Its own time limit needs signals, which a thread has not; here the work is bounded instead, by counting calls, so that
the verdict is the same on every machine. What could be huge is not handed to it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from reward_kit.errors import RewardError, how_to_install

LONGEST: Final = 300
MOST_CALLS: Final = 3_000_000
_MATHEMATICS: Final = ("sympy.", "mpmath.", "antlr4.", "latex2sympy2_extended.", "math_verify.")
_HARMLESS_NUMBERS: Final = re.compile(r"(?:[^0-9]|(?<![0-9])[0-9]{1,6}(?![0-9]))*")
_HARMLESS_POWER: Final = re.compile(r"\^\s*(?:\{[^{}^0-9]{0,20}[0-9]{0,2}[^{}^0-9]{0,20}\}|[0-9]|[A-Za-z]|\\[a-z]+)")
_HARMFUL: Final = re.compile(r"!|\*\*|\\(?:binom|Gamma|uparrow|prod|input|include|def)(?![A-Za-z])")


class _TooMuchWork(BaseException):
    """Not an `Exception`, since the parsers below swallow those."""


def agrees(truth: str, answer: str) -> bool:
    """Whether math-verify finds two cleaned texts equal; False where it cannot tell, or it would be too much work.

    Raises:
        RewardError: math-verify is not installed.
    """
    if not (harmless(truth) and harmless(answer)):
        return False
    try:
        import math_verify  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise RewardError(f"math_answer needs math-verify for this notation; {how_to_install('math')}") from None
    config = (math_verify.LatexExtractionConfig(boxed_match_priority=-1),)
    try:
        with _bounded(MOST_CALLS), _quiet():
            texts = [
                math_verify.parse(f"${text}$", config, "no_fallback", parsing_timeout=None) for text in (truth, answer)
            ]
            return all(texts) and bool(math_verify.verify(*texts, float_rounding=12, timeout_seconds=None))
    except (_TooMuchWork, RecursionError):
        return False


def harmless(text: str) -> bool:
    """Whether no number in a text can become huge: short, without towers of powers, factorials or long numbers."""
    if len(text) > LONGEST or _HARMFUL.search(text) or not _HARMLESS_NUMBERS.fullmatch(text):
        return False
    return len(_HARMLESS_POWER.findall(text)) == text.count("^") <= 12 and text.count("{") + text.count("(") <= 40


@contextmanager
def _bounded(calls: int) -> Iterator[None]:
    """Stop what is done inside after so many calls of functions, in this thread.

    It stops where a function of the mathematics begins, and nowhere else: the standard library may hold a lock there.
    """
    left = calls

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0 and event == "call" and frame.f_globals.get("__name__", "").startswith(_MATHEMATICS):
            raise _TooMuchWork

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without its warning that its time limit is off, which is meant."""
    loggers = [logging.getLogger(name) for name in ("math_verify.parser", "math_verify.grader")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
