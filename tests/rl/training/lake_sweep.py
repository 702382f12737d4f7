"""A sweep file on disk whose runs take about a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.rl.training.frozen_lake import lake_folder

SWEEP: dict[str, Any] = {
    "name": "lakes",
    "train": "train.yaml",
    "seeds": 2,
    "arms": {"gigpo": {}, "grpo": {"credit": {"estimator": "grpo"}}},
    "processes": 2,
    "evaluation": {"rollouts": 2},
}


def sweep_folder(folder: Path, train: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write `sweep.yaml`, `train.yaml` and their files into a folder; None removes a key."""
    lake_folder(folder, **{"evaluation": {"dataset_path": "held_out.jsonl", "every": 2}, **(train or {})})
    rows = [{"id": name, "side": side, "tags": ["far"] if name == "w" else []} for name, side in SIDES.items()]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {key: value for key, value in {**SWEEP, **changes}.items() if value is not None}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


SIDES = {"w": "left", "x": "left", "y": "right"}


def without_clock(value: Any) -> Any:
    """Return a summary without its CPU seconds and the Markdown text that contains them."""
    if isinstance(value, Mapping):
        return {key: without_clock(item) for key, item in value.items() if key not in ("cpu_s", "markdown")}
    return value
