"""What kind of answer a text is: a value, words, several values, a set, a tuple, a matrix, an equation, a range.

Brackets decide: {1, 2} is a set, (1, 2) a tuple or an open interval, 1, 2 two values in any order; x > 2 is (2, ∞).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Literal

from reward_kit.rewards.mathematics.numbers import read_number
from reward_kit.rewards.mathematics.reader import Node, read_expression
from reward_kit.rewards.mathematics.splitting import (
    enclosed,
    split_at,
    split_commas,
    split_relations,
    split_words,
    top_level,
)
from reward_kit.rewards.mathematics.text import LONGEST_TEXT, clean
from reward_kit.rewards.mathematics.tokens import Unreadable, tokenise
from reward_kit.rewards.mathematics.units import Unit, scale_of, split_unit

Kind = Literal[
    "value", "words", "unread", "several", "set", "tuple", "matrix", "union", "range", "equation", "relation"
]

MOST_PARTS: Final = 100
DEEPEST: Final = 6
_WORD: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_ENVIRONMENT: Final = re.compile(
    r"\\begin\s*\{(?P<name>[pb]?matrix|smallmatrix|array)\}(?:\s*\{[lcr|\s]*\})?(?P<body>.*)\\end\s*\{(?P=name)\}",
    re.DOTALL,
)
_NAME: Final = re.compile(
    r"(?:\\[A-Za-z]+|[A-Za-z])\s*(?:_\s*(?:\{\s*\w{1,8}\s*\}|\w))?'{0,2}(?:\s*\(\s*[A-Za-z]\s*\))?"
)
_SEGMENT: Final = re.compile(r"(?:m\s*)?(?:\\(?:angle|overline|triangle)\s*\{?\s*)?[A-Z]{1,4}\s*\}?")
_FLIPPED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_SHORT_WORDS: Final = frozenset({"yes", "no", "odd", "none", "dne", "one", "two", "six", "ten"})
_NO_VALUE: Final = frozenset({"emptyset", "\\emptyset", "\\{\\}", "\\{ \\}"})


@dataclass(frozen=True, slots=True)
class Form:
    """An answer that has been read.

    Attributes:
        kind: what it is; "words" is no mathematics, "unread" is mathematics in a notation that is not known here.
        text: the cleaned text it was read from.
        parts: its values, in order; of an equation its sides.
        node: the tree of a value.
        number: the value, where it is a plain number.
        unit: what stands with a value.
        opening: the bracket before a tuple or range.
        closing: the bracket behind it.
        name: the variable that an equation or range says something about; the sign of another relation.
        why: why it could not be read.
    """

    kind: Kind
    text: str
    parts: tuple[Form, ...] = ()
    node: Node | None = None
    number: Fraction | None = None
    unit: Unit | None = None
    opening: str = ""
    closing: str = ""
    name: str = ""
    why: str = ""


INFINITY: Final = Form("value", "\\infty", node=Node("constant", name="infinity"))
MINUS_INFINITY: Final = Form("value", "-\\infty", node=Node("negate", (Node("constant", name="infinity"),)))


def read_form(text: str, thousands: bool = True) -> Form:
    """What an answer says; never raises.

    Args:
        text: an answer as it was written.
        thousands: 1,234 in the open is one number, and not two.
    """
    if len(text) > LONGEST_TEXT:
        return Form("unread", text[:LONGEST_TEXT], why=f"it is longer than {LONGEST_TEXT} characters")
    cleaned = clean(text)
    try:
        return _read(cleaned, 0, thousands)
    except Unreadable as error:
        return Form("unread", cleaned, why=str(error))
    except RecursionError:
        return Form("unread", cleaned, why="it is nested too deeply")


def quick_number(text: str) -> Fraction | None:
    """The number that an answer plainly is, without reading it as mathematics; None where it takes more."""
    number = read_number(text)
    if number is None and len(text) > 2 and text[0] == text[-1] == "$":
        number = read_number(text[1:-1])
    return number


def _read(text: str, depth: int, thousands: bool = True) -> Form:
    if depth > DEEPEST:
        raise Unreadable(f"its brackets are more than {DEEPEST} deep")
    if "".join(text.split()) in _NO_VALUE:
        return Form("set", text)
    if (number := read_number(text)) is not None and (thousands or "," not in text):
        return Form("value", text, number=number)
    if _is_words(text):
        return Form("words", text)
    pieces = [piece for part in split_words(text) for piece in split_commas(part, False, thousands)]
    if len(pieces) > 1:
        return _several(text, [piece for piece in pieces if piece], depth)
    sides, signs = split_relations(text)
    if signs:
        return _related(text, sides, signs, depth)
    if "\\cup" in text and (parts := _united(text)):
        return Form("union", text, tuple(_read(part, depth + 1) for part in parts))
    if matrix := _ENVIRONMENT.fullmatch(text):
        return _matrix(text, matrix["body"], depth)
    if bracket := enclosed(text):
        found = _bracketed(text, bracket, depth)
        if found is not None:
            return found
    return _value(text)


def _several(text: str, pieces: list[str], depth: int) -> Form:
    if len(pieces) > MOST_PARTS:
        raise Unreadable(f"it has more than {MOST_PARTS} values")
    return Form("several", text, tuple(_read(piece, depth + 1) for piece in pieces))


def _united(text: str) -> list[str]:
    cuts = [position for position, piece in top_level(text) if piece == "\\cup"]
    starts = [0, *(cut + 4 for cut in cuts)]
    return [text[start:end].strip() for start, end in zip(starts, [*cuts, len(text)], strict=True)] if cuts else []


def _matrix(text: str, body: str, depth: int) -> Form:
    rows = [row.strip() for row in body.replace("\\hline", "").split("\\\\") if row.strip()]
    cells = [[_read(cell, depth + 1) for cell in split_at(row, "&")] for row in rows]
    if not cells or len({len(row) for row in cells}) != 1 or len(cells) * len(cells[0]) > MOST_PARTS:
        raise Unreadable("its rows are not of one length, or too many")
    return _matrix_of(text, cells)


def _matrix_of(text: str, rows: list[list[Form]]) -> Form:
    return Form("matrix", text, tuple(Form("tuple", "", tuple(row), opening="[", closing="]") for row in rows))


def _bracketed(text: str, bracket: tuple[str, str, str], depth: int) -> Form | None:
    opening, inner, closing = bracket
    if opening == "\\{" and closing == "\\}":
        parts = [piece for piece in split_commas(inner, True) if piece]
        return replace(_several(text, parts, depth), kind="set")
    if opening in {"\\lfloor", "\\lceil", "{"}:
        return None
    parts = split_commas(inner, True)
    if len(parts) == 1 and opening == "[" and enclosed(parts[0]) is None:
        return (
            Form("tuple", text, (_read(inner, depth + 1),), opening=opening, closing=closing)
            if closing == "]"
            else None
        )
    if len(parts) == 1:
        inside = _read(inner, depth + 1) if opening == "(" and closing == ")" else None
        return inside if inside is not None and inside.kind != "unread" else None
    if not all(parts) or len(parts) > MOST_PARTS:
        raise Unreadable("a value is missing in it, or there are too many")
    forms = tuple(_read(part, depth + 1) for part in parts)
    rows = [list(form.parts) for form in forms if form.kind == "tuple" and form.opening == "["]
    if opening == "[" and len(rows) == len(forms) and len({len(row) for row in rows}) == 1:
        return _matrix_of(text, rows)
    return Form("tuple", text, forms, opening=opening, closing=closing)


def _related(text: str, sides: list[str], signs: list[str], depth: int) -> Form:
    if not all(sides) or len(sides) > MOST_PARTS:
        raise Unreadable("a side of it is missing")
    if signs == ["in"] or signs == ["\\in"]:
        return replace(_read(sides[1], depth + 1), name=_name(sides[0]))
    forms = [_read(side, depth + 1) for side in sides]
    if set(signs) == {"="}:
        return Form("equation", text, tuple(forms), name=_name(sides[0]) or _label(forms[0]))
    return _range(text, sides, signs, forms) or Form("relation", text, tuple(forms), name=" ".join(signs))


def _range(text: str, sides: list[str], signs: list[str], forms: list[Form]) -> Form | None:
    """An inequality that bounds one variable, as the interval it stands for."""
    if not set(signs) <= _FLIPPED.keys():
        return None
    if len(sides) == 2 and not _name(sides[0]) and _name(sides[1]):
        sides, signs, forms = sides[::-1], [_FLIPPED[signs[0]]], forms[::-1]
    if len(sides) == 2 and (name := _name(sides[0])):
        low, high = (MINUS_INFINITY, forms[1]) if signs[0][0] == "<" else (forms[1], INFINITY)
        closed = len(signs[0]) == 2
        opening = "[" if closed and high is INFINITY else "("
        return Form(
            "range", text, (low, high), opening=opening, closing="]" if closed and opening == "(" else ")", name=name
        )
    if len(sides) != 3 or not (name := _name(sides[1])) or signs[0][0] != signs[1][0]:
        return None
    if signs[0][0] == ">":
        signs, forms = [_FLIPPED[signs[1]], _FLIPPED[signs[0]]], forms[::-1]
    opening, closing = "[" if signs[0] == "<=" else "(", "]" if signs[1] == "<=" else ")"
    return Form("range", text, (forms[0], forms[2]), opening=opening, closing=closing, name=name)


def _name(side: str) -> str:
    """The variable that a side of a relation is, or the pair of them; "" where it is more."""
    if (bracket := enclosed(side)) and bracket[0] == "(":
        names = [_name(part) for part in split_at(bracket[1], ",")]
        return f"({','.join(names)})" if len(names) > 1 and all(names) else ""
    return "".join(side.split()).replace("{", "").replace("}", "") if _NAME.fullmatch(side) else ""


def _label(form: Form) -> str:
    """What an equation says its value is of, where that is no mathematics to be compared: an area, a segment AB."""
    is_label = form.kind in {"words", "unread"} or _SEGMENT.fullmatch(form.text) is not None
    return "".join(form.text.split()) if is_label else ""


def _value(text: str) -> Form:
    value, unit = split_unit(text)
    value, scale = scale_of(value)
    number = read_number(value)
    if number is not None:
        return Form("value", text, number=number * scale, unit=unit)
    try:
        node = read_expression(value)
    except Unreadable as error:
        return Form("unread", text, why=str(error))
    if "\\pm" in value or "\\mp" in value:
        both = (_chosen(node, True), _chosen(node, False))
        return Form("several", text, tuple(Form("value", text, node=tree, unit=unit) for tree in both))
    return Form("value", text, node=node, unit=unit)


def _chosen(node: Node, upper: bool) -> Node:
    """The tree with the upper, or the lower, of each ± and ∓."""
    parts = tuple(_chosen(part, upper) for part in node.parts)
    if node.kind not in {"plus_minus", "minus_plus"}:
        return replace(node, parts=parts)
    last = parts[-1] if (node.kind == "plus_minus") == upper else Node("negate", (parts[-1],))
    return Node("add", (parts[0], last)) if len(parts) == 2 else last


def _is_words(text: str) -> bool:
    """Whether an answer says something in words: a word of four letters, or text that is no letter or function."""
    inner = re.fullmatch(r"\\text\s*\{([^{}]*)\}", text)
    if inner and re.search(r"[A-Za-z]{2,}", inner[1]):
        return True
    if text.casefold() in _SHORT_WORDS:
        return True
    if not re.search(r"[A-Za-z]{4,}", text) or re.search(r"[0-9=<>]", text):
        return False
    return any(_all_letters(match[0]) for match in _WORD.finditer(text)) and not split_at_words(text)


def _all_letters(word: str) -> bool:
    return all(token.kind in {"letter", "end"} for token in tokenise(word))


def split_at_words(text: str) -> bool:
    """Whether "and" or "or" stands in it, so that it is several answers."""
    return len(split_words(text)) > 1
