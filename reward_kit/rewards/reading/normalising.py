"""Ways to make two texts the same before they are compared, each by its name, so that none is applied unasked."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Final, Literal

from reward_kit.rewards.mathematics.numbers import read_number
from reward_kit.rewards.reading.replies import composed

Normalisation = Literal["strip", "casefold", "nfkc", "punctuation", "articles", "whitespace", "numbers"]

SQUAD: Final[tuple[Normalisation, ...]] = ("casefold", "punctuation", "articles", "whitespace")
"""As the evaluation of SQuAD 1.1 (Rajpurkar 2016) does, in its order."""

_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)


def normalised(text: str, steps: tuple[Normalisation, ...]) -> str:
    """`text` after these steps, in their order.

    "strip" drops white space around it, "whitespace" also makes one blank of each run inside; "casefold" ignores case;
    "nfkc" unites Unicode's compatible characters; "punctuation" drops every character of Unicode's classes P and S that
    is punctuation in ASCII, and all of class P; "articles" drops a, an and the; "numbers" writes a plain number in one
    way.
    """
    for step in steps:
        text = _STEPS[step](text)
    return text


def _without_punctuation(text: str) -> str:
    return "".join(char for char in text if not _is_punctuation(char))


def _is_punctuation(char: str) -> bool:
    kind = unicodedata.category(char)
    return kind[0] == "P" or (kind[0] == "S" and char.isascii())


def _one_spelling(text: str) -> str:
    number = read_number(text)
    return text if number is None else str(number)


_STEPS: Final[dict[str, Callable[[str], str]]] = {
    "strip": str.strip,
    "casefold": str.casefold,
    "nfkc": lambda text: composed(text, "NFKC"),
    "punctuation": _without_punctuation,
    "articles": lambda text: _ARTICLES.sub(" ", text),
    "whitespace": lambda text: " ".join(text.split()),
    "numbers": _one_spelling,
}
