"""The page of a run of either kind: one that collected and scored episodes, or one that trained."""

from __future__ import annotations

from pathlib import Path

from reward_kit.runs.report.page import write_report
from reward_kit.runs.report.training.page import write_training_report
from reward_kit.runs.report.training.reading import is_training


def write_any_report(run: Path, target: Path | None = None) -> Path:
    """Write the page of a run, and beside it what is too large for one file.

    Args:
        run: its folder.
        target: the file; `report.html` in the folder by default.

    Returns:
        The file.

    Raises:
        ConfigError: the folder is not that of a run, or the file's folder is missing.
        StoreError: a file of the run is damaged, or the page cannot be written.
    """
    write = write_training_report if is_training(run) else write_report
    return write(run, target)
