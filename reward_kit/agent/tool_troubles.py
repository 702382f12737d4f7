"""What went wrong with tools in a run, counted, so that its end can tell: the agent alone reads of it otherwise.

A tool that refuses on purpose is a part of an episode and is not counted. A slip in the tool's own code, and a call of
a tool that does not exist, answer the agent too and the episode goes on; but somebody ought to mend them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from reward_kit import errors
from reward_kit.display_text import counted, shown
from reward_kit.errors import RewardKitError, safe_str, user_traceback

_PACKAGE = f"{Path(errors.__file__).parent}{os.sep}"
_SLIPS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
)
"""What Python itself raises where code is wrong; not ValueError, OSError and RuntimeError, with which tools refuse."""
_MOST_KINDS = 200  # a model may invent names for ever
_MOST_NAMES, _MOST_OFFERED, _LONGEST = 3, 8, 200


class ToolTroubles:
    """Counts what went wrong, by tool, exception and place, and by the names of tools that are not there."""

    def __init__(self) -> None:
        self._raised: Counter[tuple[str, str, str]] = Counter()
        self._messages: dict[tuple[str, str, str], str] = {}
        self._missing: Counter[str] = Counter()
        self._missing_calls = 0
        self._offered: Sequence[str] = ()

    def failed(self, tool: str, error: RewardKitError) -> None:
        """Count a call that failed of `error`, where that came from a slip in the tool's own code."""
        slip = _slip_behind(error)
        if slip is None:
            return
        key = (tool, type(slip).__name__, _place_of(slip))
        if key in self._messages or len(self._messages) < _MOST_KINDS:
            self._messages.setdefault(key, safe_str(slip))
            self._raised[key] += 1

    def named_none(self, name: str, offered: Sequence[str]) -> None:
        """Count a call of a tool that is not among those that are offered."""
        self._missing_calls += 1
        self._offered = offered
        if name in self._missing or len(self._missing) < _MOST_KINDS:
            self._missing[name] += 1

    def told(self, log: Path, most: int = 3) -> list[str]:
        """A line for each of the commonest slips, and one for all tools that are not there.

        Args:
            log: where the tracebacks are.
            most: so many slips are told.
        """
        lines = []
        for key, times in self._raised.most_common(most):
            tool, kind, place = key
            message = " ".join(self._messages[key].split())
            what = f"{shown(tool, _LONGEST)} raised {kind}{f': {shown(message, _LONGEST)}' if message else ''}"
            lines.append(f"tool {what}{f' ({place})' if place else ''}, {counted(times, 'call')}; more in {log}")
        return [*lines, *([self._told_of_missing()] if self._missing_calls else [])]

    def _told_of_missing(self) -> str:
        names = [repr(shown(name, 60)) for name, _ in self._missing.most_common(_MOST_NAMES)]
        more = len(self._missing) - len(names)
        offered = ", ".join([*self._offered[:_MOST_OFFERED], *(["…"] if len(self._offered) > _MOST_OFFERED else [])])
        named = f"{', '.join(names)}{f' and {more:,} more' if more else ''}"
        there = f"there are: {offered}" if offered else "there is none"
        return f"{counted(self._missing_calls, 'call')} named a tool that is not there: {named} ({there})"


CURRENT_TROUBLES: ContextVar[ToolTroubles | None] = ContextVar("CURRENT_TROUBLES", default=None)
"""Where the episodes of this run count; None where nobody asks."""


def note_failed(tool: str, error: RewardKitError) -> None:
    """Count a failed call, where somebody asks."""
    if (troubles := CURRENT_TROUBLES.get()) is not None:
        troubles.failed(tool, error)


def note_missing(name: str, offered: Sequence[str]) -> None:
    """Count a call of a tool that is not there, where somebody asks."""
    if (troubles := CURRENT_TROUBLES.get()) is not None:
        troubles.named_none(name, offered)


def _slip_behind(error: BaseException) -> BaseException | None:
    """The error of Python that one of ours was made of; None where a tool raised ours itself, or another on purpose."""
    cause: BaseException | None = error
    while isinstance(cause, RewardKitError):
        if not _is_raised_here(cause):  # by a tool's own code, and so on purpose, whatever was behind it
            return None
        cause = cause.__cause__
    # An exception of one's own that derives from these says something on purpose.
    return cause if isinstance(cause, _SLIPS) and type(cause).__module__ == "builtins" else None


def _is_raised_here(error: BaseException) -> bool:
    """Whether the line that raised it is one of this package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _place_of(error: BaseException) -> str:
    """`file.py:31`, the innermost line of the tool's own code; "" where none is in the traceback."""
    lines = user_traceback(error, max_lines=2).splitlines()
    return Path(lines[1].strip().rpartition(" in ")[0]).name if len(lines) > 1 else ""
