"""Task files and rewards written for reward-kit 0.4 run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.legacy_tasks import upgrade_notes, upgrade_task
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.evaluation import evaluate
from reward_kit.runs.tasks import load_task

REWARDS = """
from typing import Any, Dict, List, Optional

from reward_kit import EvaluateResult, Message, MetricResult, reward_function
from reward_kit.models import StepOutput


@reward_function
def calls_as_told(messages: List[Message], ground_truth: Optional[Dict[str, Any]] = None, **kwargs) -> EvaluateResult:
    done = [call.function.name for m in messages if m.role == "assistant" for call in m.tool_calls or []]
    wanted = [name for turn in ground_truth["function_calls"] for name in turn]
    right = done == wanted and kwargs["state"] == ground_truth["comparable_state"]
    metrics = {"calls": MetricResult(score=float(done == wanted), is_score_valid=True, reason=", ".join(done))}
    steps = [StepOutput(step_index=i, base_reward=1.0) for i, m in enumerate(kwargs["assistant_turns"])]
    return EvaluateResult(score=float(right), reason="as told" if right else "not", metrics=metrics, step_outputs=steps)


@reward_function
def rows(messages: List[Dict[str, Any]], ground_truth=None, **kwargs):
    ((counted,),) = kwargs["state"].query("select count(*) from goods")
    return {"score": float(counted == 2), "reason": f"{counted} rows", "metrics": {}}


@reward_function
def listed(messages: List[Message], **kwargs) -> EvaluateResult:
    return EvaluateResult(score=float("notes/todo.txt" in messages[-1].content), reason="")
"""
PYTHON_STATE = """
name: counter
description: counts
resource_type: PythonStateResource
base_resource_config: {initial_state: {count: 0}}
reward_function_path: my_rewards.calls_as_told
goal_description: count to two
initial_user_prompt: Set count to 2.
poc_max_turns: 3
evaluation_criteria:
  ground_truth_function_calls: [[set_value]]
  ground_truth_comparable_state: {count: 2}
policy:
  type: scripted
  actions: [{type: tool_call, name: set_value, arguments: {path: count, value: 2}}, {type: terminate}]
"""
SQL = """
name: shop
resource_type: SQLResource
base_resource_config:
  db_type: sqlite
  db_name: shop.db
  schema_sql: "create table goods (name text);"
  seed_sql: "insert into goods values ('tea');"
reward_function_path: my_rewards.rows
messages: [{role: system, content: You keep a shop.}, {role: user, content: Add milk.}]
policy:
  type: scripted
  actions:
    - {type: tool_call, name: execute_sql, arguments: {query: "insert into goods values ('milk')"}}
    - {type: text, content: It is there.}
"""
FILES = """
name: files
resource_type: FileSystemResource
base_resource_config: {base_dir_name: mine, initial_files: {notes/todo.txt: buy milk}}
reward_function_path: my_rewards.listed
initial_user_prompt: What is there?
policy:
  type: scripted
  actions: [{type: tool_call, name: list_directory, arguments: {}}, {type: text, content: "notes/todo.txt"}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)  # dotted paths were found there
    return tmp_path


@pytest.mark.parametrize("task", [PYTHON_STATE, SQL, FILES], ids=["python", "sql", "files"])
def test_task_of_reward_kit_0_4_runs(folder: Path, task: str) -> None:
    (folder / "task.yaml").write_text(task)
    run = evaluate(folder / "task.yaml", overrides={"sandbox.level": "in_process"}, log_dir=folder / "runs")
    assert [(row.score, row.error_message, row.score_error) for row in run.rows] == [(1.0, None, None)]
    header = json.loads((run.path / "run.json").read_text())
    assert header["task"]["resource_type"] in ("python_state", "sqlite", "filesystem")


def test_dropped_options_are_reported(folder: Path) -> None:
    (folder / "task.yaml").write_text(SQL)
    named, left_out = load_task(folder / "task.yaml", {"sandbox.level": "in_process"}).notes[:2]
    assert named == "resource_type SQLResource of reward-kit 0.4 is read as sqlite"
    assert left_out.startswith(
        "base_resource_config.db_name of reward-kit 0.4 has no effect: each episode has its own data"
    )


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ({"schema_sql": "a;", "seed_sql": "b;"}, {"seed_sql": "a;\nb;"}),
        ({"seed_sql": "b;"}, {"seed_sql": "b;"}),
        ({"schema_file": "s.sql"}, {"seed_sql_file": "s.sql"}),
        ({"seed_data_file": "s.sql", "db_name": "x", "db_type": "sqlite"}, {"seed_sql_file": "s.sql"}),
        ({"schema_file": "s.sql", "seed_data_file": "d.sql"}, {"schema_file": "s.sql", "seed_data_file": "d.sql"}),
        ({"schema_file": "s.sql", "seed_sql": "b;"}, {"schema_file": "s.sql", "seed_sql": "b;"}),
        ({"db_type": "postgres"}, {"db_type": "postgres"}),
    ],
)
def test_database_scripts_are_merged_into_seed_sql(config: dict[str, str], read: dict[str, str]) -> None:
    given = {"name": "t", "resource_type": "SQLResource", "base_resource_config": config}
    now = {"name": "t", "resource_type": "sqlite", "on_text": "end", "base_resource_config": read}
    assert upgrade_task(given) == now
    assert given["base_resource_config"] is config and given["resource_type"] == "SQLResource"


def test_explicit_ground_truth_overrides_the_legacy_comparison_state() -> None:
    criteria = {"ground_truth_comparable_state": {"a": 1}}
    both = {"name": "t", "evaluation_criteria": criteria, "ground_truth": "mine"}
    assert TaskDefinitionModel.model_validate(both).ground_truth == "mine"
    del both["ground_truth"]
    truth = {"function_calls": None, "comparable_state": {"a": 1}}
    assert TaskDefinitionModel.model_validate(both).ground_truth == truth
    assert TaskDefinitionModel(name="t", evaluation_criteria={"final_state_query": "x"}).ground_truth is None


@pytest.mark.parametrize("data", [None, [], "x", {}, {"resource_type": "sqlite"}, {"resource_type": ["SQLResource"]}])
def test_other_data_is_unchanged(data: object) -> None:
    assert upgrade_task(data) == data and upgrade_notes(data) == []


def test_removed_resources_are_reported(folder: Path) -> None:
    (folder / "task.yaml").write_text("name: t\nresource_type: DockerResource\ninitial_user_prompt: x\n")
    with pytest.raises(ConfigError, match=r"task\.yaml:2: resource_type: unknown resource 'DockerResource'"):
        evaluate(folder / "task.yaml", log_dir=folder / "runs")
