"""Engines for the counting task, and faults that are injected while they run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from reward_kit.integrations.ray.engine import RayEngine
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.runs.summary import EpisodeRow
from tests.integrations.ray.counting_task import CountingTask


def engine_for(counting: CountingTask, **options: Any) -> RayEngine:
    return RayEngine(counting.loaded(), counting.request(), RayOptions.of(options))


class AfterEpisodes:
    """A listener that acts once a number of episodes have stopped."""

    def __init__(self, count: int, act: Any) -> None:
        self._count, self._act = count, act
        self._stopped = 0

    def episode_stopped(self, row: EpisodeRow) -> None:
        self._stopped += 1
        if self._stopped == self._count:
            threading.Thread(target=self._act).start()

    def episode_scored(self, row: EpisodeRow) -> None: ...


class ListenerGroup:
    """A listener that forwards to several listeners."""

    def __init__(self, listeners: list[AfterEpisodes]) -> None:
        self._listeners = listeners

    def episode_stopped(self, row: EpisodeRow) -> None:
        for listener in self._listeners:
            listener.episode_stopped(row)

    def episode_scored(self, row: EpisodeRow) -> None: ...


def killed(name: str, home: Path) -> int:
    """Kill one process of this name in the cluster with this home; return how many there were."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    command_of = {pid: command for pid, _, command in rows}
    found = [int(pid) for pid, parent, command in rows if name in command and str(home) in command_of.get(parent, "")]
    assert found, [row for row in rows if "ray" in row[2]]
    os.kill(found[0], signal.SIGKILL)
    return len(found)
