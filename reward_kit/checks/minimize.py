"""Shorten text that reproduces a finding."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

_MOST_CALLS = 40
_SPLITS: tuple[Callable[[str], list[str]], ...] = (
    lambda text: text.splitlines(keepends=True),
    lambda text: re.findall(r"\s*\S+|\s+\Z", text),
    list,
)
"""Functions that split a text into the parts to remove: lines, words and characters."""


async def shorten(text: str, works: Callable[[str], Awaitable[bool]], most_calls: int = _MOST_CALLS) -> str:
    """Return a shorter text for which `works` still returns True, after at most `most_calls` calls.

    The text is shortened as in delta debugging (Zeller and Hildebrandt 2002): first half of its parts are removed, then
    a quarter, and so on down to single parts.
    """
    calls = 0
    for split in _SPLITS:
        parts = split(text)
        size = len(parts) // 2 if len(parts) > 1 else len(parts)
        while size and calls < most_calls:
            index = 0
            while index < len(parts) and calls < most_calls:
                shorter = parts[:index] + parts[index + size :]
                calls += 1
                if await works("".join(shorter)):
                    parts = shorter
                else:
                    index += size
            size //= 2
        text = "".join(parts)
    return text
