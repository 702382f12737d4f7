"""Log records as text: one line each and an indented traceback, so that no message can forge a record."""

from __future__ import annotations

import logging
from collections.abc import Callable

from reward_kit.shown_text import one_line


class SafeFormatter(logging.Formatter):
    """Format a record as one line of printable characters, with its traceback indented below.

    Args:
        pattern: as `logging.Formatter` takes it.
        hide: removes secrets from a text; it sees the message and the traceback before and after they are escaped.
    """

    def __init__(self, pattern: str | None = None, hide: Callable[[str], str] = str) -> None:
        super().__init__(pattern)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of the traceback."""
        said = {"msg": one_line(self._hide(record.getMessage())), "args": None}
        bare = {"exc_info": None, "exc_text": None, "stack_info": None}
        line = super().format(logging.makeLogRecord({**vars(record), **said, **bare}))
        return self._hide(line + indented(self._hide(traceback_of(record))))


def traceback_of(record: logging.LogRecord) -> str:
    """Return the traceback of a record and the stack that was logged with it; empty if there is none."""
    parts = [record.exc_text or "", record.stack_info or ""]
    if record.exc_info and record.exc_info[0]:
        parts[0] = logging.Formatter().formatException(record.exc_info)
    return "\n".join(filter(None, parts))


def indented(traceback: str) -> str:
    """Return a traceback as lines to append to a record's line."""
    return "".join(f"\n    {one_line(line)}" for line in traceback.splitlines())
