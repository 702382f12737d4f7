"""Markdown helpers of the generated pages: inline text and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"([\\*_|<>\[\]#])")
_WORDS = re.compile(
    r"(?<![\w`./-])(--[a-z][a-z-]*[a-z]|\$?[A-Za-z][\w.]*_[\w.]*\w|[\w.]+\.(?:py|yaml|csv|jsonl?|html)(?::\w+)?"
    r"|module:\w+|package\.module(?::\w+)?)(?![\w/])"
)


def inline(text: str) -> str:
    """A plain text as Markdown that shows it: what stands in backticks is code, and so are names of options and keys.

    Args:
        text: lines that may be joined.
    """
    marked = [part if part.startswith("`") else _WORDS.sub(r"`\1`", part) for part in _CODE.split(text)]
    parts = _CODE.split("".join(marked))
    shown = [part.replace("|", r"\|") if part.startswith("`") else _SPECIAL.sub(r"\\\1", part) for part in parts]
    return " ".join("".join(shown).split())


def code(text: str) -> str:
    """Format a word as code, also in table cells; leave "" as is."""
    return f"`{text}`".replace("|", r"\|") if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table of Markdown cells; columns that are empty in every row are omitted.

    Args:
        head: the names of the columns.
        rows: as many cells each.
    """
    lines = [list(row) for row in rows]
    kept = [place for place in range(len(head)) if any(line[place] for line in lines)]
    shown = [[line[place] for place in kept] for line in (list(head), ["---"] * len(head), *lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def sentence(text: str) -> str:
    """Add a missing full stop, and capitalize unless the text starts with a name."""
    text = text.strip()
    if re.match(r"[a-z]+(?:[ ,;:']|$)", text):
        text = text[0].upper() + text[1:]
    return text if not text or text[-1] in ".!?:…" else f"{text}."
