"""Display of untrusted text: escaping, shortening, log records, counts, and the first difference between two values."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

# Control characters, bidirectional overrides, and lone surrogates, which UTF-8 cannot encode.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_INVISIBLE_IN_LINE = re.compile(_INVISIBLE.pattern.replace("[", r"[\t\n\u2028\u2029", 1))
_ACCENTS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
_STACKED = re.compile(rf"([{_ACCENTS}]{{4}})[{_ACCENTS}]+")  # More combining accents would overlap the lines above.


SECRET_NAME = re.compile(
    r"api[_-]?key$|access_?key|private_?key|token$|secret|password|passwd|credential|authorization", re.IGNORECASE
)
"""Names of environment variables and configuration keys whose values are secret and must not be shown."""


def hide_secrets(value: Any) -> Any:
    """Return a copy of a value, replacing the values of keys that match `SECRET_NAME` with "…"."""
    if isinstance(value, Mapping):
        return {key: "…" if SECRET_NAME.search(str(key)) else hide_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_secrets(item) for item in value]
    return value


def truncate(text: str, limit: int) -> str:
    """Return a string of at most `limit` characters that ends in "…" if it was shortened."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def escape_text(text: object, limit: int, length: int | None = None) -> str:
    """Return untrusted text of at most about `limit` characters; invisible characters are escaped.

    Args:
        text: a string, or any other value to be converted with `repr`.
        limit: the maximum number of characters. A longer string is cut, and its length is appended.
        length: the length of the full string, if `text` is only its beginning.
    """
    text = text if isinstance(text, str) else str(text)
    length = len(text) if length is None else length
    cut = text[:limit]
    if not (cut.isascii() and cut.isprintable()):
        cut = _STACKED.sub(r"\1", _INVISIBLE.sub(_escape, cut))
    return cut if length <= limit else f"{cut}… ({length:,} characters)"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable(text: str) -> str:
    """Escape characters that affect a terminal: control characters and bidirectional overrides.

    Line breaks and tabs are kept.
    """
    return text if text.isascii() and text.isprintable() else _INVISIBLE.sub(_escape, text)


def one_line(text: str) -> str:
    """Escape a string like `printable`, and also escape line breaks and tabs so that it stays on one line."""
    if text.isascii() and text.isprintable():
        return text
    return _INVISIBLE_IN_LINE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def pluralize(count: int, noun: str) -> str:
    """Return a number and its noun, such as "1 error" or "2 errors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class SafeFormatter(logging.Formatter):
    """A formatter that writes a record as one line of printable characters. A traceback is indented below the line.

    Args:
        pattern: the format string of `logging.Formatter`.
        hide: a function that removes secrets from a string. It is called on the message and the traceback, both before
            and after escaping.
    """

    def __init__(self, pattern: str | None = None, hide: Callable[[str], str] = str) -> None:
        super().__init__(pattern)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, followed by the lines of its traceback."""
        safe = {"msg": one_line(self._hide(record.getMessage())), "args": None}
        bare = {"exc_info": None, "exc_text": None, "stack_info": None}
        line = super().format(logging.makeLogRecord({**vars(record), **safe, **bare}))
        return self._hide(line + indent_traceback(self._hide(format_traceback(record))))


def format_traceback(record: logging.LogRecord) -> str:
    """Return the traceback and the logged stack of a record; "" if the record has neither."""
    parts = [record.exc_text or "", record.stack_info or ""]
    if record.exc_info and record.exc_info[0]:
        parts[0] = logging.Formatter().formatException(record.exc_info)
    return "\n".join(filter(None, parts))


def indent_traceback(traceback: str) -> str:
    """Return a traceback as indented lines for appending to the line of a record."""
    return "".join(f"\n    {one_line(line)}" for line in traceback.splitlines())


def first_difference(before: Any, now: Any, path: str = "") -> str:
    """Describe where and how two JSON values first differ, such as " at .position: 3 became 4".

    Return "" if the values are equal.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        pairs = ((f"{path}.{key}", before[key], now[key]) for key in before)
    elif isinstance(before, list | tuple) and isinstance(now, list | tuple) and len(before) == len(now):
        pairs = ((f"{path}[{index}]", before[index], now[index]) for index in range(len(before)))
    elif before == now and type(before) is type(now):
        return ""
    else:
        return f"{f' at {path}' if path else ''}: {truncate(repr(before), 120)} became {truncate(repr(now), 120)}"
    return next((difference for where, old, new in pairs if (difference := first_difference(old, new, where))), "")
