"""Small runs on disk with given scores by sample; None for an episode without a score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.runs.comparison import Comparison, compare, read_sides
from reward_kit.runs.run_folder import RunFolder, RunHeader

Scores = Mapping[str, Sequence[float | None]]


def make_run(
    folder: Path,
    scores: Scores,
    *,
    policy: str = "p",
    append: bool = False,
    metrics: Mapping[str, Scores] | None = None,
    **header: Any,
) -> Path:
    """Write a run with these scores and metrics; `append` adds another policy to an existing run."""
    task = {"pass_threshold": 1.0, **header.pop("task", {})}
    full_header = {"task_name": "t", "task_path": "/t.yaml", "status": "complete", "task": task, **header}
    total = sum(map(len, scores.values()))
    if not append:
        RunFolder.create(folder, RunHeader(**{"total": total, **full_header}))
    with (folder / "episodes.jsonl").open("a") as episodes, (folder / "scores.jsonl").open("a") as lines:
        for sample, values in scores.items():
            for number, value in enumerate(values):
                name = f"{sample}-{policy}-{number}"
                episodes.write(json.dumps(_episode(name, sample, policy)) + "\n")
                line = _score(name, value)
                for metric, given in (metrics or {}).items() if value is not None else ():
                    if sample in given and given[sample][number] is not None:
                        line["result"]["metrics"][metric] = {"score": given[sample][number], "reason": ""}
                lines.write(json.dumps(line) + "\n")
    return folder


def _episode(name: str, sample: str, policy: str) -> dict[str, Any]:
    line = {"schema_version": 1, "rollout_id": name, "sample_id": sample, "group_id": sample, "rollout_index": 0}
    line |= {"attempt": 0, "policy": policy, "stop_reason": "answered", "failure": None, "environment_return": None}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.001}
    return line | {"num_steps": 1, "usage": usage, "messages": [], "steps": [{}], "timing": {}}


def _score(name: str, value: float | None) -> dict[str, Any]:
    failure = {"class": "crash", "where": "RewardError", "message": "it broke"} if value is None else None
    result = {"score": value, "metrics": {}} if value is not None else None
    scorer = {"id": "reward.py:right", "hash": "abcdef0123456789"}
    return {"rollout_id": name, "attempt": 0, "score": value, "result": result, "failure": failure, "scorer": scorer}


def compared(*runs: Path, policies: Sequence[str] = ()) -> Comparison:
    """Return the comparison of these runs."""
    return compare(read_sides(runs, policies))
