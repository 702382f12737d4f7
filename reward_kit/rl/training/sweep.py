"""The function `sweep`, which is the Python equivalent of `reward-kit sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reward_kit.errors import requires_extra
from reward_kit.rl.training.sweep_file import SweepFile

if TYPE_CHECKING:
    from reward_kit.rl.training.sweep_session import SweepOutcome


def sweep(file: str | Path, *, log_dir: str | Path = "runs") -> SweepOutcome:
    """Train and evaluate all arms and seeds of a sweep file, and return the new sweep.

    This call blocks, even inside a running event loop. Resume a sweep with `reward-kit sweep --resume FOLDER`. Code
    that the files refer to runs without a trust prompt.

    Args:
        file: the sweep file.
        log_dir: the directory in which the directory of the sweep is created.

    Raises:
        ConfigError: If a file is invalid.
        TrainingError: If the untrained policy cannot be evaluated. A failed run does not raise an error.
    """
    with requires_extra("train", "sweep"):
        from reward_kit.rl.training.sweep_session import create_sweep, load_sweep, sweep_into
    plan = load_sweep(SweepFile.read(Path(file)))
    return sweep_into(create_sweep(plan, Path(log_dir)), plan)
