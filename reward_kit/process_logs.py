"""The log of a child process: a file that the child appends to, kept from growing without end."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from reward_kit.input_limits import MIB, PROCESS_LOG_BYTES

_CHECK_S = 0.1
_KEPT_BYTES = MIB
_NOTICE = b"[reward-kit: the log was cut here; it had more than %d MiB]\n"
_TAIL_BYTES = 32_768


class LogLimit:
    """Watch a log while its writer runs; one above `PROCESS_LOG_BYTES` keeps its last MiB and goes on.

    A thread does it, so that a blocked event loop does not fill the disk. The writer must have the file open for
    appending: it then goes on at the new end.

    Args:
        log: the file.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name=f"log of {log.name}").start()

    def stop(self) -> None:
        """End the watch. Called when the writer has ended; stopping again does nothing."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_CHECK_S):
            with contextlib.suppress(OSError):
                if self._log.stat().st_size > PROCESS_LOG_BYTES:
                    self._cut()

    def _cut(self) -> None:
        kept = log_end(self._log, _KEPT_BYTES)
        os.truncate(self._log, 0)
        with self._log.open("ab") as file:
            file.write(_NOTICE % (PROCESS_LOG_BYTES // MIB) + kept.partition(b"\n")[2])


def log_end(log: Path, size: int = _TAIL_BYTES) -> bytes:
    """Return the last bytes of a log; nothing if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)
    except OSError:
        return b""
