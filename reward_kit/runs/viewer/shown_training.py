"""The pages of training runs: made of their files, and again where those changed."""

from __future__ import annotations

import threading
from pathlib import Path

from reward_kit.runs.files import EPISODES, METRICS
from reward_kit.runs.run_folder import FILE
from reward_kit.runs.viewer import pages
from reward_kit.runs.viewer.catalogue import SUMMARY

_MOST_PAGES = 8


class ShownTraining:
    """The pages that were made last, each with the state of the files that it is of."""

    def __init__(self) -> None:
        self._made: dict[Path, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def page(self, run: Path) -> str:
        """The page of the run in a folder, as it is now.

        Raises:
            StoreError: a file of the run is damaged.
        """
        with self._lock:
            mark = mark_of(run)
            made = self._made.pop(run, None)
            if made is None or made[0] != mark:
                made = (mark, pages.training_page(run, mark))
            self._made[run] = made
            if len(self._made) > _MOST_PAGES:
                del self._made[next(iter(self._made))]
            return made[1]


def mark_of(run: Path) -> str:
    """Another one where a file of the run is another: digits and dashes.

    A file in the folder of episodes is put there as a whole, which the folder's own time tells.
    """
    found = []
    for name in (FILE, METRICS, SUMMARY, EPISODES):
        try:
            facts = (run / name).stat()
            found += [facts.st_ino, facts.st_size, facts.st_mtime_ns]
        except OSError:
            found.append(0)
    return "-".join(map(str, found))
