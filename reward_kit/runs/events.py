"""The events of a run as records of the logger `reward_kit.events`, and its log file `run.log`.

The logger is off unless the command line is asked for logs; then its records are of the level INFO, each with what it
is about as fields of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path

from reward_kit.display_text import SafeFormatter
from reward_kit.private_files import private_opener
from reward_kit.runs.files import HELD_OUT_SCORE
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.summary import EpisodeRow

NAME = "reward_kit.events"
_log = logging.getLogger(NAME)
_OF_UPDATE = (HELD_OUT_SCORE, "score/mean", "learner/approx_kl", "time/total_s")


def began(run: Path, kind: str, total: int) -> None:
    """A run begins, or goes on; `total` is how many episodes or updates it has in all."""
    _log.info("%s begins", kind, extra={"run": str(run), "total": total})


def ended(run: Path, kind: str, status: str) -> None:
    """It ended: "complete", "interrupted" or "failed"."""
    _log.info("%s ended", kind, extra={"run": str(run), "status": status})


def episode_stopped(row: EpisodeRow) -> None:
    """An episode is over."""
    if _log.isEnabledFor(logging.INFO):
        fields = {"stop_reason": row.stop_reason, "steps": row.num_steps, "error": row.error_class}
        _log.info("episode stopped", extra={**_named(row), **fields})


def episode_scored(row: EpisodeRow, took_s: float) -> None:
    """It has its score, or none and why."""
    if _log.isEnabledFor(logging.INFO):
        fields = {"score": row.score, "error": row.score_error, "took_s": round(took_s, 6)}
        _log.info("episode scored", extra={**_named(row), **fields})


def updated(update: int, figures: Mapping[str, float]) -> None:
    """An update of training is made; 0 is the evaluation before the first."""
    if _log.isEnabledFor(logging.INFO):
        fields = {name.replace("/", "_"): figures[name] for name in _OF_UPDATE if name in figures}
        _log.info("update made", extra={"update": update, **fields})


def _named(row: EpisodeRow) -> dict[str, str | int]:
    return {"rollout_id": row.rollout_id, "policy": row.policy, "attempt": row.attempt}


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

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is flushed once more here
            super().close()


def log_handler(path: Path, redaction: Redaction) -> logging.Handler:
    """Return the handler that writes the log of a run."""
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", redaction.redact_text))
    handler.addFilter(lambda record: record.name != NAME)  # the run's own files say it already
    return handler


class _PassedOn(logging.Handler):
    """Passes records on to the program's own handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger().callHandlers(record)


@contextlib.contextmanager
def logged_to(path: Path, redaction: Redaction) -> Iterator[None]:
    """Write the log of a run for as long as the block lasts. What the program itself logs of us stays as it is."""
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
