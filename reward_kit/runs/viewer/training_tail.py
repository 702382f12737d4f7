"""The last held-out score of a training run, from the end of its `metrics.jsonl` alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_kit.runs.files import HELD_OUT_SCORE, METRICS, told_of

_END = 1 << 18


def last_held_out(run: Path) -> float | None:
    """The last score on held-out samples of the training run in a folder; None where the end of the file has none.

    Raises:
        StoreError: the file cannot be read.
    """
    path = run / METRICS
    if not path.exists():
        return None
    with told_of("read", path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    lines = [line for line in map(_object, whole) if line is not None]
    scores = [line[HELD_OUT_SCORE] for line in lines if isinstance(line.get(HELD_OUT_SCORE), int | float)]
    return float(scores[-1]) if scores else None


def _object(line: bytes) -> Mapping[str, Any] | None:
    """A line; None for the rest of one whose begin was not read, and for one that is damaged."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
