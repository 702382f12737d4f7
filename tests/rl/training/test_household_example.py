"""Test the household example's train file, and the arms of its sweep."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reward_kit.agent.policies.simple_policies import RandomPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.environments.household_engine import HouseholdEngine
from reward_kit.environments.household_problems import generate_problem
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl.training.sweep_file import SweepFile
from tests.rl.training.frozen_lake import metrics_of, train

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "alfworld_household"
SMALL = {"updates": 2, "rollout.samples_per_update": 3, "rollout.group_size": 4, "ppo.minibatches": 2, "ppo.epochs": 1}
SMALL |= {
    "evaluation.limit": 2,
    "evaluation.every": 2,
    "max_env_steps": None,
    "task.max_episode_steps": 6,
    "policy.max_sessions": 12,
}


@pytest.fixture(scope="module")
def asked() -> dict[str, list[str]]:
    """Return the requests of each arm that was run."""
    return {}


SWEEP = SweepFile.read(EXAMPLE / "sweep.yaml")


@pytest.mark.parametrize("arm", SWEEP.config.arms)
async def test_two_small_updates_of_each_arm(tmp_path: Path, asked: dict[str, list[str]], arm: str) -> None:
    plan = load_plan(EXAMPLE / "train.yaml", {**SWEEP.overrides(arm), **SMALL, "logs.episodes_every": 1})
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


async def test_the_sweep_evaluates_problems_of_the_held_out_split() -> None:
    plan = load_plan(EXAMPLE / "train.yaml", SWEEP.evaluation_overrides({}))
    assert plan.held_out is not None and len(plan.held_out.samples) == 256
    worker = RLRolloutWorker(plan.held_out.task.definition, RandomPolicy())
    for index in (0, 5, 255):
        problem = generate_problem("held_out", index)
        sample = plan.held_out.samples[index]
        async with worker.group(sample, 1) as start:
            episode = await worker.collect_episode(start, 0)
        assert HouseholdEngine(problem).tables.introduction in str(episode.messages[1].content)
        assert sample.row["task_type"] == problem.task_type
