"""The files that only a run of training has, and the names in them that those who write and those who read share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

METRICS: Final = "metrics.jsonl"
"""A line for each update, with its figures."""
HELD_OUT_SCORE: Final = "held_out/score"
"""The figure of an evaluation: the mean score on the samples that are not trained on."""
EPISODES: Final = "episodes"
"""The folder of the episodes that were kept, a file for each update of which they were."""
TRAINING: Final = "training"
"""The key of a kept episode's line under which stands what the update made of it; see `rl/training/figures.py`."""


def kept_file(run: Path, update: int) -> Path:
    """Where the episodes of an update are kept."""
    return run / EPISODES / f"update-{update:06d}.jsonl"


def kept_files(run: Path) -> dict[int, Path]:
    """The files of the updates whose episodes were kept, by the number of the update, ascending."""
    named = {file.stem.removeprefix("update-"): file for file in (run / EPISODES).glob("update-*.jsonl")}
    return dict(sorted((int(number), file) for number, file in named.items() if number.isdecimal()))
