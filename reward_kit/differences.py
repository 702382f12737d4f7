"""Where two JSON values differ first, for messages about something that should have been the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def first_difference(before: Any, now: Any, path: str = "") -> str:
    """Where and how two JSON values first differ, such as " at .position: 3 became 4"; "" where they are equal."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        pairs = ((f"{path}.{key}", before[key], now[key]) for key in before)
    elif isinstance(before, list | tuple) and isinstance(now, list | tuple) and len(before) == len(now):
        pairs = ((f"{path}[{index}]", before[index], now[index]) for index in range(len(before)))
    elif before == now and type(before) is type(now):
        return ""
    else:
        return f"{f' at {path}' if path else ''}: {_cut(before)} became {_cut(now)}"
    return next((found for where, old, new in pairs if (found := first_difference(old, new, where))), "")


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:119]}…"
