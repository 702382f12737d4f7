"""What happens in a run, as records of the logger `reward_kit.events`: for whoever watches the program from outside.

The logger is off unless the command line is asked for logs; then its records are of the level INFO, each with what it
is about as fields of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from reward_kit.runs.summary import EpisodeRow
from reward_kit.runs.training_files import HELD_OUT_SCORE

NAME = "reward_kit.events"
_log = logging.getLogger(NAME)
_OF_UPDATE = (HELD_OUT_SCORE, "score/mean", "learner/approx_kl", "time/total_s")


def began(run: Path, kind: str, total: int) -> None:
    """A run begins, or goes on; `total` is how many episodes or updates it has in all."""
    _log.info("%s begins", kind, extra={"run": str(run), "total": total})


def ended(run: Path, kind: str, status: str) -> None:
    """It ended: "complete", "interrupted" or "failed"."""
    _log.info("%s ended", kind, extra={"run": str(run), "status": status})


def episode_stopped(row: EpisodeRow) -> None:
    """An episode is over."""
    if _log.isEnabledFor(logging.INFO):
        told = {"stop_reason": row.stop_reason, "steps": row.num_steps, "error": row.error_class}
        _log.info("episode stopped", extra={**_named(row), **told})


def episode_scored(row: EpisodeRow, took_s: float) -> None:
    """It has its score, or none and why."""
    if _log.isEnabledFor(logging.INFO):
        told = {"score": row.score, "error": row.score_error, "took_s": round(took_s, 6)}
        _log.info("episode scored", extra={**_named(row), **told})


def updated(update: int, figures: Mapping[str, float]) -> None:
    """An update of training is made; 0 is the evaluation before the first."""
    if _log.isEnabledFor(logging.INFO):
        told = {name.replace("/", "_"): figures[name] for name in _OF_UPDATE if name in figures}
        _log.info("update made", extra={"update": update, **told})


def _named(row: EpisodeRow) -> dict[str, str | int]:
    return {"rollout_id": row.rollout_id, "policy": row.policy, "attempt": row.attempt}
