"""Cutting cleaned mathematical text at commas, words and signs that stand in no bracket."""

from __future__ import annotations

import re
from typing import Final

_PIECE: Final = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
_OPENING: Final = frozenset({"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"})
_CLOSING: Final = frozenset({")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"})
_BEGIN, _END = "\\begin", "\\end"
_OR: Final = re.compile(
    r"\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\s&\s", re.IGNORECASE
)
_RELATION: Final = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|<=|>=|!=|==|=|<|>")
_THOUSANDS: Final = re.compile(r"[-+＄$€£¥₹]{0,2}\s*[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?(?![0-9,]).*", re.DOTALL)
_SURE_THOUSANDS: Final = re.compile(r"[^,]*,0[0-9]{2}(?![0-9]).*|[^,]*,[0-9]{3}\.[0-9].*", re.DOTALL)


def top_level(text: str) -> list[tuple[int, str]]:
    """Positions and signs of `text` that stand in no bracket and no environment."""
    found: list[tuple[int, str]] = []
    depth = environments = 0
    for match in _PIECE.finditer(text):
        piece = match[0]
        environments += (piece == _BEGIN) - (piece == _END)
        if piece in _OPENING:
            depth += 1
        elif piece in _CLOSING:
            depth = max(0, depth - 1)
        elif not depth and not environments:
            found.append((match.start(), piece))
    return found


def split_at(text: str, sign: str) -> list[str]:
    """`text` cut at each `sign` of one character on its top level, stripped."""
    cuts = [position for position, piece in top_level(text) if piece == sign]
    starts = [0, *(cut + 1 for cut in cuts)]
    return [text[start:end].strip() for start, end in zip(starts, [*cuts, len(text)], strict=True)]


def split_words(text: str) -> list[str]:
    """`text` cut at each "and" and "or" on its top level."""
    outside = {position for position, _ in top_level(text)}
    cuts = [match for match in _OR.finditer(text) if match.start() in outside]
    starts = [0, *(match.end() for match in cuts)]
    pieces = [
        text[start:end] for start, end in zip(starts, [*(match.start() for match in cuts), len(text)], strict=True)
    ]
    return [piece.strip(" ,;") for piece in pieces if piece.strip(" ,;")]


def split_commas(text: str, bracketed: bool, thousands: bool = True) -> list[str]:
    """`text` cut at its commas and semicolons, those of 1,000 left in place.

    In the open, 1,234 is one number. In brackets it is two, unless commas between values have a space behind them, or a
    group begins with 0, as no value would.
    """
    if ";" in text:
        return [piece for half in split_at(text, ";") for piece in split_commas(half, bracketed, thousands)]
    pieces = split_at(text, ",")
    if len(pieces) == 1:
        return pieces
    spaced = re.search(r",\s", text) is not None
    groups = _rejoined(text) if spaced else [text.strip()]
    found: list[str] = []
    for group in groups:
        sure = not bracketed or spaced or _SURE_THOUSANDS.fullmatch(group) is not None
        is_one = thousands and sure and _THOUSANDS.fullmatch(group) is not None and len(split_at(group, ",")) > 1
        found.extend([group] if is_one else split_at(group, ","))
    return found


def split_relations(text: str) -> tuple[list[str], list[str]]:
    """The sides of a chain of relations, and the signs between them."""
    outside = {position for position, _ in top_level(text)}
    sides, signs, start = [], [], 0
    for match in _RELATION.finditer(text):
        if match.start() in outside:
            sides.append(text[start : match.start()].strip())
            signs.append({"\\le": "<=", "\\ge": ">=", "\\ne": "!=", "==": "="}.get(match[0], match[0]))
            start = match.end()
    return [*sides, text[start:].strip()], signs


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Opening, content and closing of a text that is one bracket as a whole; None where it is not."""
    pieces = [(match.start(), match[0]) for match in _PIECE.finditer(text)]
    if len(pieces) < 2 or pieces[0][1] not in _OPENING or pieces[-1][1] not in _CLOSING:
        return None
    depth = 0
    for position, piece in pieces:
        depth += (piece in _OPENING) - (piece in _CLOSING)
        if not depth and position != pieces[-1][0]:
            return None
    opening, closing = pieces[0][1], pieces[-1][1]
    return (opening, text[len(opening) : -len(closing)].strip(), closing) if not depth else None


def _rejoined(text: str) -> list[str]:
    """`text` cut only at commas that have a space behind them."""
    cuts = [p for p, piece in top_level(text) if piece == "," and text[p + 1 : p + 2].isspace()]
    starts = [0, *(cut + 1 for cut in cuts)]
    return [text[start:end].strip() for start, end in zip(starts, [*cuts, len(text)], strict=True)]
