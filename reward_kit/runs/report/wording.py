"""Figures and links as the page shows them: numbers made readable, names that a link can hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from urllib.parse import quote

from reward_kit.runs.display import figure

DASH = "–"
_HALVES = re.compile(r"[\ud800-\udfff]")  # of surrogate pairs, which no URL can hold
_MARKED = "json:"
_UNRESERVED = "!'()*-._~"  # what encodeURIComponent leaves


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
