"""Warnings that a run collects from its episodes and reports when it ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar

from reward_kit.display_text import escape_text, pluralize

_MAX_NAMES = 200  # a model may invent an unlimited number of names
_SHOWN_NAMES, _SHOWN_TOOLS = 3, 8
_MAX_NOTES, _SHOWN_CHARS = 20, 500


class RunWarnings:
    """Warnings that a run reports when it ends: calls to unknown tools, and other notes.

    The episodes continue, so without these warnings the problems would be visible only in the episodes and the log.
    """

    def __init__(self) -> None:
        self._unknown: Counter[str] = Counter()
        self._unknown_calls = 0
        self._offered: Sequence[str] = ()
        self._notes: dict[str, None] = {}

    def add_unknown_tool(self, name: str, offered: Sequence[str]) -> None:
        """Count a call to a tool that is not among those `offered`."""
        self._unknown_calls += 1
        self._offered = offered
        if name in self._unknown or len(self._unknown) < _MAX_NAMES:
            self._unknown[name] += 1

    def add(self, note: str) -> bool:
        """Add a note and return True. Return False if the run already has the note or has too many others."""
        if note in self._notes or len(self._notes) == _MAX_NOTES:
            return False
        self._notes[note] = None
        return True

    def lines(self) -> list[str]:
        """Return the notes and, if unknown tools were called, a line with the most frequent unknown names."""
        notes = [f"warning: {escape_text(note, _SHOWN_CHARS)}" for note in self._notes]
        if not self._unknown_calls:
            return notes
        names = [repr(escape_text(name, 60)) for name, _ in self._unknown.most_common(_SHOWN_NAMES)]
        more = len(self._unknown) - len(names)
        named = f"{', '.join(names)}{f' and {more:,} more' if more else ''}"
        ellipsis = ["…"] if len(self._offered) > _SHOWN_TOOLS else []
        offered = ", ".join([*self._offered[:_SHOWN_TOOLS], *ellipsis])
        there = f"known: {offered}" if offered else "the episode has no tools"
        return [*notes, f"{pluralize(self._unknown_calls, 'call')} to unknown tools: {named} ({there})"]


CURRENT_RUN_WARNINGS: ContextVar[RunWarnings | None] = ContextVar("CURRENT_RUN_WARNINGS", default=None)
"""The warnings of the current run; None outside a run."""


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning once per run, and report it when the run ends."""
    warnings = CURRENT_RUN_WARNINGS.get()
    if warnings is None or warnings.add(message):
        logger.warning("%s", message)
