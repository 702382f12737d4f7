"""Helpers that write training runs as `reward-kit train` does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reward_kit.runs.run_folder import RunHeader, RunTiming
from tests.report.run_factory import BEGAN

Figures = Mapping[str, float | None]


def update(number: int, **changes: float | None) -> dict[str, float | None]:
    """Return the metrics of an update; `__` in a name stands for a slash."""
    figures: dict[str, float | None] = {
        "score/mean": 0.5,
        "learner/approx_kl": 0.01,
        "learner/entropy": 1.0 / (1 + number),
        "progress/env_steps": 32.0 * number,
        "time/worked_s": 2.0 * number,
        "reward_agent/done": 8.0 * number,
    }
    return figures | {name.replace("__", "/"): value for name, value in changes.items()}


def make_training(folder: Path, lines: Iterable[tuple[int, Figures]], **header: Any) -> Path:
    """Write the folder `run` of a training run with these lines of `metrics.jsonl`."""
    run = folder / "run"
    run.mkdir()
    config = {"updates": 10, "ppo": {"lr": 0.001}} | header.pop("config", {})
    training = {"train_path": "/train.yaml", "config": config, "updates": 0}
    timing = RunTiming(started_at=BEGAN, worked_s=9.0)
    full_header = {"task_name": "lakes", "status": "complete", "timing": timing, "training": training, **header}
    (run / "run.json").write_bytes(RunHeader(**full_header).to_bytes())
    texts = [json.dumps({"update": number, "at": BEGAN.isoformat(), **figures}) + "\n" for number, figures in lines]
    (run / "metrics.jsonl").write_text("".join(texts))
    return run
