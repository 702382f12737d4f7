"""Test proofs of tasks: reference solutions score 1, doing nothing scores 0, and exceptions are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.checks.reward import SampleProof, check_task, prove
from reward_kit.errors import ConfigError
from reward_kit.runs.tasks import load_task

REWARDS = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def said(messages: list, ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == ground_truth), reason="compared")

@reward_function
def generous(messages: list) -> EvaluateResult:
    return EvaluateResult(score=0.5)

@reward_function
def counted(messages: list, state: dict) -> EvaluateResult:
    return EvaluateResult(score=float(state["x"] == 3))

@reward_function
def fragile(messages: list) -> EvaluateResult:
    return EvaluateResult(score=1.0 / len(messages[-1].text))
"""
WORLD = """
from reward_kit import ToolRegistry
from reward_kit.environments.python_state import PythonStateResource

class Counter(PythonStateResource):
    registry = ToolRegistry("counter")

    async def expert_action(self):
        return {"type": "tool_call", "name": "add", "arguments": {}} if self.state["x"] < 3 else None

@Counter.registry.tool
def add(world: Counter) -> int:
    "Count one."
    world.state["x"] += 1
    return world.state["x"]
"""
COUNTING: dict[str, Any] = {
    "reward_function_path": "reward.py:counted",
    "resource_type": "world.py:Counter",
    "base_resource_config": {"initial_state": {"x": 0}},
}


def task_file(folder: Path, rows: list[dict[str, Any]], **keys: Any) -> Path:
    for name, text in (("reward.py", REWARDS), ("world.py", WORLD)):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "name": "small",
        "dataset_path": "rows.jsonl",
        "reward_function_path": "reward.py:said",
        "messages": [{"role": "user", "content": "What is it?"}],
    }
    path = folder / "task.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in {**task, **keys}.items() if value is not None}), encoding="utf-8"
    )
    return path


def proved(path: Path, **more: Any) -> list[SampleProof]:
    task = load_task(path, {"sandbox.level": "in_process"})
    return anyio.run(lambda: prove(task, task.samples, **more))


def test_gold_answer_scores_one_and_doing_nothing_zero(tmp_path: Path) -> None:
    rows = [{"ground_truth": "Paris", "gold_answer": "Paris"}, {"ground_truth": "Rome", "gold_answer": "Rom"}]
    right, wrong = proved(task_file(tmp_path, rows))
    assert right.by == "gold_answer" and right.problems == []
    assert right.nothing is not None and right.nothing.scored.score == 0.0
    assert (
        wrong.problems
        == [
            "the reference solution (gold_answer) does not score 1: 0 (compared); "
            "the episode ended with task_done after 1 steps"
        ]
        or "does not score 1: 0 (compared)" in wrong.problems[0]
    )


def test_gold_actions_of_a_row_are_played(tmp_path: Path) -> None:
    add = {"type": "tool_call", "name": "add", "arguments": {}}
    rows = [{"id": "three", "gold_actions": [add] * 3}, {"id": "two", "gold_actions": [add] * 2}]
    three, two = proved(task_file(tmp_path, rows, **COUNTING))
    assert (three.by, three.problems) == ("gold_actions", []) and "does not score 1: 0" in two.problems[0]


def test_expert_of_the_resource_is_played(tmp_path: Path) -> None:
    (proof,) = proved(task_file(tmp_path, [{"id": "one"}], **COUNTING))
    assert (proof.by, proof.problems) == ("expert", [])
    (short,) = proved(task_file(tmp_path, [{"id": "one"}], max_episode_steps=2, **COUNTING))
    assert "the episode ended with max_steps after 2 steps" in short.problems[0]


def test_sample_for_which_the_resource_has_no_expert_is_without_a_reference_solution(tmp_path: Path) -> None:
    rows = [{"id": "a"}, {"id": "b", "resource_config": {"initial_state": {"x": 3}}}]
    path = task_file(tmp_path, rows, **COUNTING)
    solved, unsolved = proved(path)
    assert (solved.by, unsolved.by, unsolved.gold) == ("expert", "", None)
    assert solved.problems == [] and not any("reference" in problem for problem in unsolved.problems)


def test_inaction_that_scores_or_fails_to_score_is_a_problem(tmp_path: Path) -> None:
    (generous,) = proved(task_file(tmp_path, [{"id": "one"}], reward_function_path="reward.py:generous"))
    assert generous.gold is None and generous.problems == [
        "doing nothing does not score 0: 0.5; if it is right to do nothing, set gold_actions: [] in the row"
    ]
    (fragile,) = proved(task_file(tmp_path, [{"id": "one"}], reward_function_path="reward.py:fragile"))
    assert fragile.problems[0].startswith(
        "doing nothing does not score 0: unscored (reward 'fragile': ZeroDivisionError"
    )


def test_doing_nothing_may_score_if_it_is_the_reference_solution(tmp_path: Path) -> None:
    untouched = {**COUNTING, "base_resource_config": {"initial_state": {"x": 3}}}
    rows = [{"id": "idle", "gold_actions": []}, {"id": "act", "gold_answer": "done"}]
    idle, act = proved(task_file(tmp_path, rows, **untouched))
    assert (idle.by, idle.problems) == ("gold_actions", []) and "doing nothing does not score 0: 1" in act.problems[0]
    (wrong,) = proved(task_file(tmp_path, rows[:1], **COUNTING))
    assert "the reference solution (gold_actions) does not score 1: 0" in wrong.problems[0]
    task = load_task(task_file(tmp_path, rows[:1], **untouched), {"sandbox.level": "in_process"})
    last = list(anyio.run(check_task, task, task.samples).lines())[-1]
    assert last.endswith(
        "(gold_actions) scores 1 on 0; doing nothing scores 0 on 0; doing nothing is right and scores 1 on 1"
    )


def test_given_policy_is_the_reference_solution(tmp_path: Path) -> None:
    path = task_file(tmp_path, [{"ground_truth": "Paris"}])
    policy = ("my policy", ScriptedPolicy([{"type": "text", "content": "Paris"}]))
    (proof,) = proved(path, policy=policy)
    assert (proof.by, proof.problems) == ("my policy", [])


def test_proofs_are_returned_in_sample_order_and_reported_as_they_finish(tmp_path: Path) -> None:
    rows = [{"id": f"s{index}", "ground_truth": "x", "gold_answer": "x"} for index in range(12)]
    told: list[str] = []
    proofs = proved(task_file(tmp_path, rows), tell=lambda proof: told.append(proof.sample.id), max_concurrency=3)
    assert [proof.sample.id for proof in proofs] == [row["id"] for row in rows] and sorted(told) == sorted(
        row["id"] for row in rows
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"gold_answer": 3}, "gold_answer must be a string, got 3"),
        ({"gold_actions": "go"}, "gold_actions must be a list of actions, got 'go'"),
        ({"gold_actions": [{"type": "dance"}]}, "gold_actions: "),
    ],
)
def test_invalid_gold_field_is_rejected_with_its_line(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        proved(task_file(tmp_path, [{"ground_truth": "x", **row}]))
    assert "rows.jsonl:1" in str(caught.value) and said in str(caught.value)


def test_task_without_a_reward_cannot_be_proved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no reward to check"):
        task = load_task(task_file(tmp_path, [{"id": "one"}], reward_function_path=None))
        anyio.run(prove, task, task.samples)


def test_equal_problems_are_one_line_and_the_checked_share_is_shown(tmp_path: Path) -> None:
    rows = [{"id": f"q{n}", "ground_truth": "4", "gold_answer": "5"} for n in range(4)]
    task = load_task(task_file(tmp_path, rows), {"sandbox.level": "in_process"})
    lines = list(anyio.run(check_task, task, task.samples[:3]).lines())
    (problem,) = [line for line in lines if "the reference solution (gold_answer) does not" in line]
    assert "sample 'q0'" in problem and problem.endswith("(and 2 other samples)")
    assert "3 of 4 samples (--limit)" in lines[-1]
