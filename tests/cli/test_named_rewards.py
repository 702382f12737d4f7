"""Test tasks with several rewards: the score, metrics, errors, resume, rescoring and checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit import Task
from reward_kit.errors import ConfigError
from tests.cli.project import Project, lines

REWARD = """
from reward_kit import EvaluateResult, MetricResult, StepOutput, reward_function

def right(messages, ground_truth, assistant_turns):
    steps = [StepOutput(step_index=i, base_reward=0.5) for i in range(len(assistant_turns))]
    metrics = {"letters": MetricResult(score=0.25, reason="")}
    is_right = messages[-1].text == ground_truth
    reason = f"wanted\\n{ground_truth}"
    return EvaluateResult(score=is_right, reason=reason, metrics=metrics, step_outputs=steps)

def cost(messages, sample):
    print("counted")
    if sample["number"] == 2:
        raise ValueError("no price")
    return -3.0

@reward_function(mode="batch")
def ranks(rollouts_messages):
    return [float(index) for index in range(len(rollouts_messages))]
"""
REWARDS = [
    {"name": "right", "weight": 3, "reward_function_path": "reward.py:right"},
    {"name": "cost", "reward_function_path": "reward.py:cost"},
]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path, reward_function_path=None, rewards=REWARDS, num_rollouts_per_sample=1)
    (tmp_path / "reward.py").write_text(REWARD)
    return project


def test_score_is_the_weighted_mean_and_an_unscored_reward_leaves_the_episode_unscored(project: Project) -> None:
    done = project.call("run", "task.yaml", "--fail-under", "cost=-3", "--fail-under", "right=0.9")
    assert done.returncode == 1 and "Gate failed: mean of 'right' below 0.9" in done.stderr
    assert "mean of 'cost'" not in done.stderr
    zero, one, two = lines(project.run_path() / "scores.jsonl")
    assert (zero["score"], one["score"]) == (pytest.approx(-0.75), pytest.approx(0.0))
    assert one["result"]["reason"] == "cost -3 (weight 0.25); right 1 (weight 0.75): wanted done"
    metrics = {name: metric["score"] for name, metric in one["result"]["metrics"].items()}
    assert metrics == {"right": 1.0, "cost": -3.0, "right.letters": 0.25}
    assert [step["base_reward"] for step in one["result"]["step_outputs"]] == [0.375, 0.375]
    assert one["output"]["stdout"] == "counted\n" and one["scorer"]["id"] == "right + cost"
    assert (two["score"], two["result"], two["failure"]["class"]) == (None, None, "crash")
    assert two["failure"]["message"] == "rewards.cost: reward 'cost': ValueError: no price"
    (summary,) = json.loads((project.run_path() / "summary.json").read_text())["policies"]
    assert {name: (m["mean"], m["n"], m["n_unscored"]) for name, m in summary["metrics"].items()} == {
        "right": (0.5, 2, 1),
        "cost": (-3.0, 2, 1),
        "right.letters": (0.25, 2, 1),
    }
    assert (summary["scored"], summary["errors"]) == (2, {"crash": 1})


@pytest.mark.parametrize(
    ("gate", "problem"),
    [("rigth=0.9", "did you mean 'right'?"), ("letters=0.2", "unknown metric 'letters'; known: cost, right")],
)
def test_gate_on_an_unknown_reward_is_rejected_before_the_run(project: Project, gate: str, problem: str) -> None:
    done = project.call("run", "task.yaml", "--fail-under", gate, "--fail-under", "right.letters=0.2")
    assert done.returncode == 2 and problem in done.stderr, done.stderr
    assert not (project.folder / "runs").exists()


def test_resume_scores_with_all_rewards_and_notices_a_change_of_one(project: Project) -> None:
    assert project.call("run", "task.yaml").returncode == 0
    (project.folder / "reward.py").write_text(REWARD.replace('if sample["number"] == 2', "if False"))
    changed = project.call("run", "--resume", "--only-failed")
    assert changed.returncode == 2 and "inputs changed" in changed.stderr and "reward cost" in changed.stderr
    assert project.call("run", "--resume", "--only-failed", "--force").returncode == 0
    (summary,) = json.loads((project.run_path() / "summary.json").read_text())["policies"]
    assert (summary["scored"], summary["metrics"]["cost"]["n"]) == (3, 3)


def test_run_is_scored_again_by_one_reward(project: Project) -> None:
    assert project.call("run", "task.yaml").returncode == 0
    done = project.call("score", str(project.run_path()), "--reward", "reward.py:right", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policies"][0]["metrics"].keys() == {"letters"}


def test_dry_run_and_check_name_every_reward(project: Project) -> None:
    assert "right + cost" in project.call("run", "task.yaml", "--dry-run").stdout
    report = project.call("check", "task.yaml")
    assert "cost: error:   out-of-range" in report.stdout and "right: reward.py:right: " in report.stdout
    found = json.loads(project.call("check", "task.yaml", "--json").stdout)
    assert found["reward"] is None
    assert found["rewards"].keys() == {"right", "cost"}


def test_group_reward_is_combined_with_a_pointwise_reward(project: Project) -> None:
    rewards = [REWARDS[0], {"name": "rank", "weight": 0, "reward_function_path": "reward.py:ranks"}]
    project.write_task(reward_function_path=None, rewards=rewards, num_rollouts_per_sample=2)
    assert project.call("run", "task.yaml").returncode == 0
    scores = lines(project.run_path() / "scores.jsonl")
    assert [score["score"] for score in scores] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert [score["result"]["metrics"]["rank"]["score"] for score in scores] == [0.0, 1.0] * 3


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "rewards: List should have at least 1 item"),
        ([REWARDS[0], REWARDS[0]], "rewards: two rewards are named 'right'; rename one of them"),
        ([{**REWARDS[0], "weight": -1}], "rewards.0.weight: must be 0 or more"),
        ([{**REWARDS[0], "weight": 0}], "the weights sum to 0"),
        ([{**REWARDS[0], "nmae": "x"}], "rewards.0.nmae: unknown key; did you mean 'name'?"),
        ([REWARDS[0], {**REWARDS[1], "reward_function_path": "reward.py:costs"}], "did you mean 'cost'?"),
        ([REWARDS[0], {**REWARDS[1], "reward_options": {"x": 1}}], "rewards.1.reward_function_path: reward 'cost'"),
        ([{**REWARDS[0], "name": "judge_usage"}], "rewards.0.name: the name 'judge_usage' is invalid"),
    ],
)
def test_wrong_rewards_are_reported_with_their_line(project: Project, rewards: Any, message: str) -> None:
    project.write_task(reward_function_path=None, rewards=rewards)
    done = project.call("run", "task.yaml")
    assert done.returncode == 2 and message in done.stderr
    begin = (project.folder / "task.yaml").read_text().splitlines().index("rewards:" if rewards else "rewards: []") + 1
    (line,) = done.stderr.removeprefix("error: task.yaml:").splitlines()
    assert begin <= int(line.split(":")[0]) <= begin + 10


@pytest.mark.parametrize("other", [{"reward_function_path": "reward.py:right"}, {"reward_options": {"x": 1}}])
def test_rewards_beside_a_single_reward_are_rejected(project: Project, other: dict[str, Any]) -> None:
    project.write_task(**{"reward_function_path": None, "rewards": REWARDS, **other})
    done = project.call("run", "task.yaml")
    assert done.returncode == 2 and f"rewards: rewards replaces {next(iter(other))}; remove one" in done.stderr


def right(messages: Any, ground_truth: str) -> float:
    return float(messages[-1].text == ground_truth)


def test_python_task_takes_functions_and_files(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def brief(messages):\n    return len(messages[-1].text) < 5\n")
    rows = [{"id": "a", "ground_truth": "done"}, {"id": "b", "ground_truth": "no"}]
    keys: dict[str, Any] = {
        "dataset": rows,
        "initial_user_prompt": "?",
        "policy": {"type": "scripted", "actions": [{"type": "text", "content": "done"}]},
        "folder": tmp_path,
    }
    task = Task("two", rewards={"right": (right, 3), "brief": "reward.py:brief"}, **keys)
    run = task.run(log_dir=tmp_path / "runs")
    assert sorted(row.score for row in run.rows) == [0.25, 1.0]
    means = {name: mean and mean.mean for name, mean in run.policies[0].metrics.items()}
    assert means == {"right": 0.5, "brief": 1.0}
    assert "Metrics" in str(run)
    with pytest.raises(ConfigError, match=r"rewards\.0\.weight has no effect: the task's rewards"):
        task.run(log_dir=tmp_path / "runs", overrides={"rewards.0.weight": 1})
    with pytest.raises(ConfigError, match="rewards replaces reward_function_path"):
        Task("both", reward=right, rewards={"right": right}, **keys)
    with pytest.raises(ConfigError, match="pair of a reward and its weight"):
        Task("three", rewards={"right": (right, 1, 2)}, **keys)  # type: ignore[dict-item]
