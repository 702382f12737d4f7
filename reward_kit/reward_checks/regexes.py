"""Texts on which a regular expression backtracks, made from the expression itself."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_SIGNS = "a1 ,.;:-_<>{}()[]\\/#*\"'\n\tAzZ9é"
_CATEGORIES = {
    codes.CATEGORY_DIGIT: "19",
    codes.CATEGORY_SPACE: " \n\t",
    codes.CATEGORY_WORD: "a1_AzZ9é",
}
_NEGATED = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
}
_EXPONENTIAL = 32
_QUADRATIC = 20_000
_NEVER = "\x01\x02"


def attacks(patterns: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """For each repeat in each pattern: the pattern, and a short and a long text that go through it and then fail.

    A pattern with a repeat inside of a repeat may take exponential time on the short one.
    """
    done = set()
    for pattern in patterns:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError):  # told where it is compiled
            continue
        for prefix, body in _loops(tree, ""):
            if body and (prefix, body) not in done:
                done.add((prefix, body))
                short, long = prefix + body * _EXPONENTIAL, prefix + body * (_QUADRATIC // len(body))
                yield pattern, short + _NEVER, long + _NEVER


def _loops(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """What leads to each unbounded repeat, and one round of it."""
    for code, argument in tree:
        if code in _REPEATS:
            _, most, body = argument
            if most is codes.MAXREPEAT or most > 8:
                yield prefix, _example(body, rounds=1)
            yield from _loops(body, prefix)
        elif code is codes.SUBPATTERN:
            yield from _loops(argument[-1], prefix)
        elif code is codes.BRANCH:
            for branch in argument[1]:
                yield from _loops(branch, prefix)
        prefix += _example([(code, argument)])


def _example(tree: Any, rounds: int = 0) -> str:
    """A text that a part of an expression matches; a repeat in one is gone through as often as it must, or `rounds`."""
    return "".join(_one(code, argument, rounds) for code, argument in tree)


def _one(code: Any, argument: Any, rounds: int) -> str:
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.NOT_LITERAL:
        return "a" if argument != ord("a") else "b"
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        return _member(argument)
    if code in _REPEATS:
        least, _, body = argument
        return _example(body, rounds) * max(int(least), rounds)
    if code is codes.SUBPATTERN:
        return _example(argument[-1], rounds)
    if code is codes.BRANCH:
        return _example(argument[1][0], rounds)
    return ""


def _member(items: Any) -> str:
    """One sign of a set of them."""
    is_negated = items[0][0] is codes.NEGATE
    return next((char for char in _SIGNS if any(_holds(char, item) for item in items) != is_negated), "a")


def _holds(char: str, item: tuple[Any, Any]) -> bool:
    code, argument = item
    if code is codes.LITERAL:
        return bool(ord(char) == argument)
    if code is codes.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    if code is codes.CATEGORY:
        signs = _CATEGORIES.get(_NEGATED.get(argument, argument), "")
        return bool((char in signs) != (argument in _NEGATED))
    return False
