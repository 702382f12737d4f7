"""Log the events of a run with the logger `reward_kit.events`, and write the run's log file, `run.log`.

The logger is disabled unless logs are enabled on the command line. Its records have the level INFO and contain details
as fields.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path

from reward_kit.display_text import SafeFormatter
from reward_kit.private_files import private_opener
from reward_kit.processes import LOG_FOLDER
from reward_kit.runs.files import HELD_OUT_SCORE, LOG_FILE
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.summary import EpisodeRow

NAME = "reward_kit.events"
_log = logging.getLogger(NAME)
_OF_UPDATE = (HELD_OUT_SCORE, "score/mean", "learner/approx_kl", "time/total_s")


def began(run: Path, kind: str, total: int | None) -> None:
    """Log that a run with `total` episodes or updates was started or resumed. None means that the total is unknown."""
    _log.info("%s started", kind, extra={"run": str(run), "total": total})


def ended(run: Path, kind: str, status: str) -> None:
    """Log the end of a run: "complete", "interrupted" or "failed"."""
    _log.info("%s ended", kind, extra={"run": str(run), "status": status})


def episode_stopped(row: EpisodeRow) -> None:
    """Log a stopped episode."""
    if _log.isEnabledFor(logging.INFO):
        fields = {"stop_reason": row.stop_reason, "steps": row.num_steps, "error": row.error_class}
        _log.info("episode stopped", extra={**_named(row), **fields})


def episode_scored(row: EpisodeRow, took_s: float) -> None:
    """Log the score of an episode, or the error of its scoring."""
    if _log.isEnabledFor(logging.INFO):
        fields = {"score": row.score, "error": row.score_error, "took_s": round(took_s, 6)}
        _log.info("episode scored", extra={**_named(row), **fields})


def updated(update: int, figures: Mapping[str, float]) -> None:
    """Log a finished training update; update 0 is the evaluation before training."""
    if _log.isEnabledFor(logging.INFO):
        fields = {name.replace("/", "_"): figures[name] for name in _OF_UPDATE if name in figures}
        _log.info("update finished", extra={"update": update, **fields})


def _named(row: EpisodeRow) -> dict[str, str | int]:
    return {"rollout_id": row.rollout_id, "policy": row.policy, "attempt": row.attempt}


class _LogFile(logging.FileHandler):
    """A handler for a log file. It ignores a full disk, because the run reports that problem."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the file is opened when the first record is logged
            super().emit(record)

    def _open(self) -> TextIOWrapper:
        arguments = {"encoding": self.encoding, "errors": self.errors, "opener": private_opener}
        return open(self.baseFilename, self.mode, **arguments)  # type: ignore[call-overload, no-any-return] # noqa: PTH123

    def handleError(self, record: logging.LogRecord) -> None:
        return

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes data that could not be written to a full disk
            super().close()


def log_handler(path: Path, redaction: Redaction) -> logging.Handler:
    """Return the handler that writes the log of a run."""
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", redaction.redact_text))
    handler.addFilter(lambda record: record.name != NAME)  # these records are already in the run's files
    return handler


class _ForwardHandler(logging.Handler):
    """A handler that forwards records to the handlers of the program."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger().callHandlers(record)


@contextlib.contextmanager
def run_logs(run: Path, redaction: Redaction) -> Iterator[None]:
    """Write the log of a run and the output of its processes to the directory of the run during the block."""
    token = LOG_FOLDER.set(run / "logs")
    try:
        with log_to_file(run / LOG_FILE, redaction):
            yield
    finally:
        LOG_FOLDER.reset(token)


@contextlib.contextmanager
def log_to_file(path: Path, redaction: Redaction) -> Iterator[None]:
    """Write the log of a run during the block, in addition to the handlers of the program."""
    package = logging.getLogger("reward_kit")
    level, propagates, before = package.level, package.propagate, package.getEffectiveLevel()
    added = [log_handler(path, redaction), *([_ForwardHandler(before)] if propagates else [])]
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
