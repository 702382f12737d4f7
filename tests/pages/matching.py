"""Comparison of output with a page; `…` matches within a line, and alone on a line any number of lines."""

from __future__ import annotations

import difflib
import re

_ANYTHING = "…"


def difference(expected: str, got: str) -> str | None:
    """Return the unified difference; None if the output is as expected."""
    wanted, lines = _lines(expected), _lines(got)
    if re.fullmatch("".join(_pattern(line) for line in wanted), "".join(f"{line}\n" for line in lines)):
        return None
    return "\n".join(difflib.unified_diff(wanted, lines, "the page", "the program", lineterm="", n=1000))


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


def _pattern(line: str) -> str:
    if line.strip() == _ANYTHING:
        return r"(?:.*\n)*?"
    return "[^\n]*?".join(re.escape(part) for part in line.split(_ANYTHING)) + "\n"
