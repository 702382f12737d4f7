"""Texts and figures as the page shows them: strangers' text made harmless and short, numbers made readable."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from urllib.parse import quote

from reward_kit.runs.tables import figure

DASH = "–"
# Control characters, what turns the direction of text around, and halves of surrogate pairs, which UTF-8 cannot hold.
_UNSHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_ACCENTS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
_STACKED = re.compile(rf"([{_ACCENTS}]{{4}})[{_ACCENTS}]+")  # more of them would climb over the lines above

_HALVES = re.compile(r"[\ud800-\udfff]")  # of surrogate pairs, which no URL can hold
_MARKED = "json:"
_UNRESERVED = "!'()*-._~"  # what encodeURIComponent leaves


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


def href(view: str, name: str) -> str:
    """The link to an episode or a group, by its name as it is stored; `RK.href` of the page's script makes the same."""
    is_plain = not name.startswith(_MARKED) and not _HALVES.search(name)
    return f"#/{view}/{quote(name if is_plain else _MARKED + json.dumps(name), safe=_UNRESERVED)}"


def number(value: float | None) -> str:
    """A score, or a dash where there is none."""
    return DASH if value is None else figure(value)


def share(value: float | None) -> str:
    """A share in per cent, or a dash."""
    return DASH if value is None else f"{value:.1%}"


def dollars(value: float | None) -> str:
    """An amount of money, "unknown" where no price is known."""
    if value is None:
        return "unknown"
    return f"${value:,.2f}" if value >= 100 else f"${value:.4f}"


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it, or a dash."""
    if value is None:
        return DASH
    if value < 0.0005:
        return "0 s" if value == 0 else "<1 ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 99.95:
        return f"{value:.3g} s"
    if value < 3600:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(value / 60), 60)
    return f"{hours:,} h {rest} min" if rest else f"{hours:,} h"


def counted(counts: Mapping[str, int]) -> int:
    """How many these are together."""
    return sum(counts.values())
