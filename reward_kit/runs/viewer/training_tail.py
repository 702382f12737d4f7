"""The last figures of a training run, from the end of its `metrics.jsonl` alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.runs.files import told_of
from reward_kit.runs.header import RunHeader

METRICS = "metrics.jsonl"
HELD_OUT = "held_out/score"
_END = 1 << 18


class LastFigures(NamedTuple):
    """What the end of the file says; both are None where there is no such line in it.

    Attributes:
        line: the last line.
        held_out: the last score on held-out samples.
    """

    line: Mapping[str, Any] | None
    held_out: float | None


def training_of(header: RunHeader) -> Mapping[str, Any] | None:
    """What `run.json` says under `training`; None where the run is none of training."""
    told = (header.model_extra or {}).get("training")
    return told if isinstance(told, Mapping) else None


def last_figures(run: Path) -> LastFigures:
    """Of the training run in a folder.

    Raises:
        StoreError: the file cannot be read.
    """
    path = run / METRICS
    if not path.exists():
        return LastFigures(None, None)
    with told_of("read", path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    lines = [line for line in map(_object, whole) if line is not None]
    scores = [line[HELD_OUT] for line in lines if isinstance(line.get(HELD_OUT), int | float)]
    return LastFigures(lines[-1] if lines else None, float(scores[-1]) if scores else None)


def _object(line: bytes) -> Mapping[str, Any] | None:
    """A line; None for the rest of one whose begin was not read, and for one that is damaged."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
