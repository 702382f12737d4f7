"""What a stage receives: the device, the size, the time left, and a place to record figures and checks.

Only the standard library is imported, because the runner uses this file on machines without any package.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

RUNNING = "running.json"
"""The file with the state of the stage that is running."""


class SkipStageError(Exception):
    """A requirement of a whole stage is missing."""


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never incomplete."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class StageContext:
    """What a stage receives, and where it records figures and checks.

    Everything recorded is written at once, so that a stage that is killed keeps its figures.
    """

    def __init__(self, name: str, device: str, size: str, limit_s: float, out: Path, work: Path) -> None:
        self.name, self.device, self.size, self.out, self.work = name, device, size, out, work
        self.ends = time.monotonic() + limit_s
        self._state: dict[str, Any] = {"stage": name, "figures": {}, "failures": [], "skipped": []}

    @property
    def is_full(self) -> bool:
        """Whether the sizes are those for an accelerator."""
        return self.size == "full"

    @property
    def left_s(self) -> float:
        """The seconds until the time limit."""
        return self.ends - time.monotonic()

    def record(self, **figures: Any) -> None:
        """Record figures by name."""
        self._state["figures"].update({name: _rounded(value) for name, value in figures.items()})
        print(" ", *(f"{name}={_rounded(value)}" for name, value in figures.items()), flush=True)
        self._write()

    def check(self, is_met: bool, failure: str) -> None:
        """Record a failure unless a condition holds."""
        if not is_met:
            print(f"  FAILED: {failure}", flush=True)
            self._state["failures"].append(failure)
            self._write()

    def skip_part(self, part: str, reason: str) -> None:
        """Record that a part of the stage was not run."""
        print(f"  skipped {part}: {reason}", flush=True)
        self._state["skipped"].append(f"{part}: {reason}")
        self._write()

    def end(self, verdict: str, reason: str = "") -> None:
        """Record the verdict."""
        self._state |= {"verdict": verdict, "reason": reason, "torch": _torch_version()}
        self._write()

    def _write(self) -> None:
        write_whole(self.out / RUNNING, json.dumps(self._state))

    @property
    def failures(self) -> list[str]:
        """The checks that did not hold."""
        return list(self._state["failures"])


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _torch_version() -> str:
    module = sys.modules.get("torch")
    return str(module.__version__) if module is not None else ""
