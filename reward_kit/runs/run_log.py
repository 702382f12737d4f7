"""`run.log`: what the package logs while a run goes on, full tracebacks among it, without secrets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from reward_kit.display_text import SafeFormatter
from reward_kit.private_files import private_opener
from reward_kit.runs import events
from reward_kit.runs.redaction import Redaction


class _LogFile(logging.FileHandler):
    """A log that never breaks what it is a log of: the store says it where the disk takes no more."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the file is opened with the first record
            super().emit(record)

    def _open(self) -> TextIOWrapper:
        arguments = {"encoding": self.encoding, "errors": self.errors, "opener": private_opener}
        return open(self.baseFilename, self.mode, **arguments)  # type: ignore[call-overload, no-any-return] # noqa: PTH123

    def handleError(self, record: logging.LogRecord) -> None:
        return


def log_handler(path: Path, redaction: Redaction) -> logging.Handler:
    """What writes the log of a run.

    Args:
        path: the file; it is made with the first record.
        redaction: keeps secrets out of it.
    """
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", redaction.of_text))
    handler.addFilter(lambda record: record.name != events.NAME)  # the run's own files say it already
    return handler


class _PassedOn(logging.Handler):
    """Gives a record to the program's own handlers, as if nobody else were listening."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger().callHandlers(record)


@contextlib.contextmanager
def logged_to(path: Path, redaction: Redaction) -> Iterator[None]:
    """Write the log of a run for as long as the block lasts. What the program itself logs of us stays as it is.

    Args:
        path: the file.
        redaction: keeps secrets out of it.
    """
    package = logging.getLogger("reward_kit")
    level, propagates, before = package.level, package.propagate, package.getEffectiveLevel()
    added = [log_handler(path, redaction), *([_PassedOn(before)] if propagates else [])]
    for handler in added:
        package.addHandler(handler)
    package.propagate = False
    package.setLevel(min(before, logging.INFO))
    try:
        yield
    finally:
        for handler in added:
            package.removeHandler(handler)
            handler.close()
        package.setLevel(level)
        package.propagate = propagates
