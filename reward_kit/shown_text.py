"""Text for people: untrusted text made harmless and short, counts with their nouns."""

from __future__ import annotations

import re

# Control characters, what turns the direction of text around, and halves of surrogate pairs, which UTF-8 cannot hold.
_UNSHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_UNSHOWN_IN_LINE = re.compile(_UNSHOWN.pattern.replace("[", r"[\t\n\u2028\u2029", 1))
_ACCENTS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
_STACKED = re.compile(rf"([{_ACCENTS}]{{4}})[{_ACCENTS}]+")  # more of them would climb over the lines above


def shown(text: object, limit: int, length: int | None = None) -> str:
    """Text of a stranger, of at most about `limit` characters, with what cannot be seen written out.

    Args:
        text: a text; anything else as Python writes it.
        limit: what is longer is cut, and the page says how long it was.
        length: of the whole, where `text` is only the beginning of it.
    """
    whole = text if isinstance(text, str) else str(text)
    length = len(whole) if length is None else length
    cut = whole[:limit]
    if not (cut.isascii() and cut.isprintable()):
        cut = _STACKED.sub(r"\1", _UNSHOWN.sub(_written_out, cut))
    return cut if length <= limit else f"{cut}… ({length:,} characters)"


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable(text: str) -> str:
    """Escape what would act on a terminal: control characters, and those that turn the direction of text around.

    Line breaks and tabs stay.
    """
    return text if text.isascii() and text.isprintable() else _UNSHOWN.sub(_written_out, text)


def one_line(text: str) -> str:
    """Escape as `printable` does, line breaks and tabs too, so that the text cannot begin a line of its own."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSHOWN_IN_LINE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def counted(count: int, what: str) -> str:
    """A number of things: "1 error", "2 errors"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
