"""Cleaned mathematical text as tokens, with the few words that plain notation writes without a backslash."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from reward_kit.errors import RewardKitError

MOST_TOKENS: Final = 400
"""Tokens of one expression. Nothing longer is read."""

Kind = Literal["number", "command", "letter", "sign", "end"]


class Unreadable(RewardKitError):
    """The text is no expression that can be read, or one that would cost too much to work out."""


class Token(NamedTuple):
    """One token; `spaced` is whether white space stands before it."""

    kind: Kind
    text: str
    spaced: bool


_FUNCTION_NAMES: Final = (
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arcsinh arccosh arctanh asin acos atan "
    "exp ln log lg sqrt cbrt abs floor ceil max min gcd lcm Re Im arg sgn sign"
)
FUNCTIONS: Final = frozenset(_FUNCTION_NAMES.split())
_WORDS: Final = (
    FUNCTIONS
    | {
        "pi",
        "infinity",
        "Infinity",
        "inf",
        "oo",
        "theta",
        "alpha",
        "beta",
        "gamma",
        "lambda",
        "degrees",
        "deg",
        "binom",
    }
    | {"phi", "omega", "sigma", "mu", "rho", "tau", "frac"}
)
_LONGEST_WORD: Final = max(map(len, _WORDS))
_TOKEN: Final = re.compile(
    r"(?P<space>\s+)|(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|\\(?P<command>[A-Za-z]+)|\\(?P<brace>[{}|])|(?P<letters>[A-Za-z]+)"
    r"|(?P<sign>[-+*/^_!()\[\]{}|,=<>'%])"
)


def tokenise(text: str) -> list[Token]:
    """The tokens of a cleaned text, closed by one of kind "end".

    Raises:
        Unreadable: a character means nothing here, or there are too many tokens.
    """
    tokens: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable(f"{text[position]!r} means nothing in an expression")
        position = match.end()
        if match["space"]:
            spaced = True
            continue
        tokens.extend(_tokens(match, spaced))
        spaced = False
        if len(tokens) > MOST_TOKENS:
            raise Unreadable(f"it has more than {MOST_TOKENS} signs")
    return [*tokens, Token("end", "", spaced)]


def _tokens(match: re.Match[str], spaced: bool) -> list[Token]:
    if match["number"]:
        return [Token("number", match["number"], spaced)]
    if match["command"]:
        return [Token("command", match["command"], spaced)]
    if match["brace"]:
        return [Token("sign", "\\" + match["brace"], spaced)]
    if match["sign"]:
        return [Token("sign", match["sign"], spaced)]
    return _letters(match["letters"], spaced)


def _letters(run: str, spaced: bool) -> list[Token]:
    """A run of letters: known words where they stand, else a variable each. "xy" is x times y, "2pi" is 2 times π."""
    found: list[Token] = []
    position = 0
    while position < len(run):
        longest = min(_LONGEST_WORD, len(run) - position)
        word = next(
            (run[position : position + n] for n in range(longest, 1, -1) if run[position : position + n] in _WORDS), ""
        )
        kind: Kind = "command" if word else "letter"
        found.append(Token(kind, word or run[position], spaced and not position))
        position += len(word) or 1
    return found
