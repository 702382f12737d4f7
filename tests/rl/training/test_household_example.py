"""Test the household example's train file, and the campaign arms that override it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reward_kit.loading import load_module
from reward_kit.rl.training.plan import load_plan
from tests.rl.training.frozen_lake import metrics_of, train

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "alfworld_household"
SMALL = {"updates": 2, "rollout.samples_per_update": 3, "rollout.group_size": 4, "ppo.minibatches": 2, "ppo.epochs": 1}
SMALL |= {"evaluation.limit": 2, "evaluation.every": 2, "task.max_episode_steps": 6, "policy.max_sessions": 12}


@pytest.fixture(scope="module")
def campaign() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return load_module(str(ROOT / "benchmarks" / "learning.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def asked() -> dict[str, list[str]]:
    """Return the requests of each arm that was run."""
    return {}


@pytest.mark.parametrize("arm", ["gigpo", "grpo", "ppo"])
async def test_two_small_updates_of_each_arm(
    tmp_path: Path, campaign: ModuleType, asked: dict[str, list[str]], arm: str
) -> None:
    plan = load_plan(EXAMPLE / "train.yaml", {**SMALL, **campaign.ARMS[arm], "logs.episodes_every": 1})
    assert (await train(plan, tmp_path / "run")).status == "complete"
    lines = metrics_of(tmp_path / "run")
    assert [line["update"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(line["learner/loss"]) for line in lines[1:])
    assert max(line["learner/logprob_gap"] for line in lines[1:]) < 1e-3
    assert lines[-1]["learner/forced_share"] == 0.5  # after a command nothing is left but the end
    assert "held_out/score" in lines[-1]
    kept = sorted((tmp_path / "run" / "episodes").glob("*.jsonl"))
    asked[arm] = [first_observation(json.loads(line)) for path in kept for line in path.read_text().splitlines()]
    assert len(asked[arm]) == 24
    assert len(set(asked[arm])) == 6
    assert all(each == asked[arm] for each in asked.values())  # arms of one seed meet the same problems


def first_observation(record: dict[str, Any]) -> str:
    return next(one["content"] for one in record["messages"] if one["role"] == "user")


def test_interrupted_run_resumes_and_finished_run_is_skipped(
    tmp_path: Path, campaign: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "ARMS", {"gigpo": {**SMALL, "updates": 50, "checkpoints.every": 1}})
    monkeypatch.setattr(campaign, "DRAWS", {1.0: 1})
    monkeypatch.setattr(campaign, "PROBLEMS", 2)
    campaign.train("gigpo", {}, 3, tmp_path / "straight", 140)
    campaign.train("gigpo", {}, 3, tmp_path / "gigpo-3", 70)
    before = campaign.curves(tmp_path / "gigpo-3")
    campaign.one_run("gigpo", 3, tmp_path, 140)
    whole, found = campaign.curves(tmp_path / "straight"), json.loads((tmp_path / "gigpo-3/result.json").read_text())
    assert before["steps"] < whole["steps"] >= 140
    assert {key: found[key] for key in ("batches", "steps", "updates")} == {
        key: whole[key] for key in ("batches", "steps", "updates")
    }
    assert found["cpu_s"] is None  # a part of it was not timed
    assert len(found["held_out"]["1.0"]) == 1


def test_report_depends_only_on_the_results(
    tmp_path: Path, campaign: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm, add in (("gigpo", 0.3), ("grpo", 0.2)):
        for seed in range(3):
            score = 0.5 + add + seed / 100
            batches = [[start, 0.5 + add * start / 1000] for start in range(0, 1000, 100)]
            line = {"arm": arm, "seed": seed, "asked_steps": 1000, "steps": 1000, "cpu_s": 60.0, "batches": batches}
            line["held_out"] = {"1.0": [score, score], "0.5": [score], "0.0": [score]}
            (tmp_path / f"{arm}-{seed}").mkdir()
            (tmp_path / f"{arm}-{seed}" / "result.json").write_text(json.dumps(line))
    start = {"arm": "warm start", "held_out": {"1.0": [0.5, 0.5], "0.5": [0.7], "0.0": [0.75]}}
    (tmp_path / "before.json").write_text(json.dumps(start))
    campaign.report(campaign.all_results(tmp_path), tmp_path / "curves.svg")
    output = capsys.readouterr().out
    assert "| GiGPO | 0.810 (0.800 0.810 0.820) | 0.810 | 0.810 | 0.635 | 60 |" in output
    # The halves: 4.303 · 0.01 / √3 of the seeds, and 1.960 · √(0.5 · 0.5 / 512) of the start.
    assert "| GiGPO | after − before, T=1 | +0.310 * | +0.260 to +0.360 |" in output
    assert "| GiGPO | after at T=1 − before at its best, T=0.0 | +0.060 * | +0.001 to +0.119 |" in output
    assert "| GiGPO − GRPO | after, T=1 | +0.100 * | +0.100 to +0.100 |" in output
    assert (tmp_path / "curves.svg").read_text().count("<polyline") >= 6
