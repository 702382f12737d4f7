"""The log output of the package on standard error.

It is enabled by `-v` or by an environment variable such as `REWARD_KIT_LOG=info:providers=debug`. With
`REWARD_KIT_LOG_FORMAT=json`, each record is a JSON object. Secrets are redacted in the same way as in the files of a
run.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.display_text import SafeFormatter, format_traceback, indent_traceback, one_line
from reward_kit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from reward_kit.runs.redaction import Redaction

VARIABLE, FORMAT_VARIABLE = "REWARD_KIT_LOG", "REWARD_KIT_LOG_FORMAT"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 10,
}
ROOT, EVENTS = "reward_kit", "reward_kit.events"
FORMATS = ("text", "json")
# These are the attributes of every record. All other attributes were passed as `extra`.
_STANDARD_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The minimum level of the records to show, and separate levels for individual loggers and their children."""

    base: int
    named: Mapping[str, int] = field(default_factory=dict)

    def level_of(self, name: str) -> int:
        """Return a logger's minimum level, which may be inherited from the nearest parent that has one."""
        while name:
            if name in self.named:
                return self.named[name]
            name = name.rpartition(".")[0]
        return self.base


def parsed(text: str) -> LogFilter:
    """Parse a level and, optionally, levels for parts of the package, as in `warning:providers=debug,runs=info`."""
    base, _, rest = text.partition(":")
    named = {}
    for part in filter(None, rest.split(",")):
        name, separator, level = part.partition("=")
        if not separator:
            raise ConfigError(f"{VARIABLE}={text}: {part!r} must be PART=LEVEL, such as providers=debug")
        bare = name.strip().removeprefix(f"{ROOT}.")
        parts = [path.stem for path in Path(__file__).parents[1].iterdir() if not path.name.startswith(("_", "."))]
        known = sorted({*parts, "events"})
        if bare.partition(".")[0] not in known:
            near = did_you_mean(bare, known)
            raise ConfigError(f"{VARIABLE}={text}: {name.strip()!r} is not a part of the package{near}")
        named[f"{ROOT}.{bare}"] = _level(level, text)
    return LogFilter(_level(base, text), named)


def _level(text: str, whole: str) -> int:
    name = text.strip().lower()
    if name not in LEVELS:
        known = ", ".join(LEVELS)
        raise ConfigError(f"{VARIABLE}={whole}: unknown level {name!r}; known: {known}{did_you_mean(name, LEVELS)}")
    return LEVELS[name]


class OperatorHandler(logging.StreamHandler[Any]):
    """A handler that writes each enabled record to standard error, as a line of text or as JSON."""

    def __init__(self, wanted: LogFilter, form: str, redaction: Redaction) -> None:
        super().__init__(sys.stderr)
        self._wanted, self._form = wanted, form
        self._redactions = [redaction]

    def add_redaction(self, redaction: Redaction) -> None:
        """Add a redaction, such as a redaction of a task's secrets."""
        self._redactions.append(redaction)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is enabled."""
        return record.levelno >= self._wanted.level_of(record.name)

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line. A traceback, if any, is indented below the line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        at = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        level, trace = record.levelname.lower(), format_traceback(record)
        extras = {key: one for key, one in vars(record).items() if key not in _STANDARD_FIELDS and one is not None}
        if self._form == "text":
            pairs = "".join(f" {key}={value}" for key, value in extras.items())
            message = one_line(self._hidden(f"{record.getMessage()}{pairs}"))
            return self._hidden(f"{at} {level:7} {record.name}  {message}{indent_traceback(self._hidden(trace))}")
        document: dict[str, Any] = {"at": at, "level": level, "logger": record.name, "message": record.getMessage()}
        document |= {"pid": record.process, **extras, **({"traceback": trace} if trace else {})}
        line = self._hidden(json.dumps(document, default=repr))
        for redaction in self._redactions:  # the trace may contain a secret in escaped form
            line = redaction.redact_line(line.encode("ascii")).decode("ascii")
        return line

    def _hidden(self, text: str) -> str:
        for redaction in self._redactions:
            text = redaction.redact_text(text)
        return text


class _FirstWarnings(logging.Handler):
    """A handler that shows the first warning of each kind. Warnings with the same template are of one kind.

    The template "%s" has a kind for each text and for each type of exception.
    """

    def __init__(self, say: Callable[[str], None], redaction: Redaction) -> None:
        super().__init__(logging.WARNING)
        self._say, self._redaction = say, redaction
        self._kinds: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        kind = (record.name, str(record.msg))
        if record.msg == "%s" and isinstance(record.args, tuple):
            (subject,) = record.args
            kind = (record.name, type(subject).__name__ if isinstance(subject, Exception) else str(subject))
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._say(f"warning: {one_line(self._redaction.redact_text(record.getMessage()))}")


@contextmanager
def first_warnings(say: Callable[[str], None], redaction: Redaction) -> Iterator[None]:
    """Show the first warning of each kind that the package logs during the block, unless the log is enabled."""
    if is_on():
        yield
        return
    handler, root = _FirstWarnings(say, redaction), logging.getLogger(ROOT)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


_shown: OperatorHandler | None = None


def is_on() -> bool:
    """Return True if the log is enabled."""
    return _shown is not None


def begin(verbose: int) -> None:
    """Enable the log output that the environment or `-v` requests. `-v` means info, and `-vv` means debug.

    A later call can lower the minimum level but not raise it.
    """
    global _shown
    if (
        logging.lastResort is not None
    ):  # prints the warnings of loggers without a handler, including those of other packages
        logging.lastResort.setFormatter(SafeFormatter())
    logging.getLogger(EVENTS).setLevel(LEVELS["off"])
    asked = os.environ.get(VARIABLE, "").strip()
    form = os.environ.get(FORMAT_VARIABLE, "").strip().lower() or "text"
    if form not in FORMATS:
        raise ConfigError(f"{FORMAT_VARIABLE}={form}: expected {' or '.join(FORMATS)}{did_you_mean(form, FORMATS)}")
    if not asked and not verbose:
        return
    wanted = parsed(asked or "off")
    if verbose:
        level = logging.DEBUG if verbose > 1 else logging.INFO
        wanted = LogFilter(min(wanted.base, level), wanted.named)
    from reward_kit.runs.redaction import Redaction, known_secrets

    root = logging.getLogger(ROOT)
    if _shown is not None:
        root.removeHandler(_shown)
    _shown = OperatorHandler(wanted, form, Redaction(known_secrets()))
    root.addHandler(_shown)
    root.propagate = False
    # The loggers emit the enabled levels. The log of a run still gets all records of level info and above.
    root.setLevel(min(wanted.base, logging.INFO))
    for name, level in wanted.named.items():
        logging.getLogger(name).setLevel(min(level, logging.INFO))
    logging.getLogger(EVENTS).setLevel(wanted.level_of(EVENTS))


def add_redaction(redaction: Redaction) -> None:
    """Add a redaction to the log if it is enabled."""
    if _shown is not None:
        _shown.add_redaction(redaction)
