"""Test that tasks built in Python run like task files, and how they are recorded."""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.environments.python_state import PythonStateResource
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message
from reward_kit.runs.evaluation import Task, evaluate, evaluate_async
from reward_kit.runs.plan import read_resumable_header
from reward_kit.runs.run_folder import RunHeader, latest_run
from reward_kit.typed_interface import reward_function

ROWS = [
    {"id": "f", "country": "France", "ground_truth": "Paris"},
    {"id": "i", "country": "Italy", "ground_truth": "Rome"},
]
PROMPT = "The capital of {{ country }}?"
_SELF: dict[str, Any] = {}
_SELF["itself"] = _SELF


@reward_function
def right(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == ground_truth), reason="<b>compared</b>")


@reward_function(sandbox="isolated")
def careful(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=1.0)


class Says(AgentPolicy):
    """A policy that answers with one town and counts how often it was closed."""

    def __init__(self, town: str = "Rome") -> None:
        self.town, self.closed = town, 0

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
        return PolicyOutput({"type": "text", "content": self.town})

    async def close(self) -> None:
        self.closed += 1


class NeedsTown(Says):
    def __init__(self, town: str) -> None:
        super().__init__(town)


class Counter(PythonStateResource):
    pass


def capitals(**keys: Any) -> Task:
    return Task("capitals", **{"reward": right, "policy": Says, "dataset": ROWS, "initial_user_prompt": PROMPT, **keys})


def test_task_runs_inside_an_event_loop(tmp_path: Path) -> None:
    async def notebook() -> tuple[float | None, float | None]:
        task = capitals()
        awaited = await task.run_async(rollouts=2, log_dir=tmp_path)
        return task.run(log_dir=tmp_path).score, awaited.score

    assert asyncio.run(notebook()) == (0.5, 0.5)


def test_task_from_python_leaves_the_same_files_as_a_task_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "task.yaml").write_text(
        f"name: capitals\ndataset_path: rows.jsonl\ninitial_user_prompt: '{PROMPT}'\n"
        f"reward_function_path: {__name__}:right\n"
    )
    here = capitals().run(log_dir=tmp_path / "here", seed=7)
    asked = {"policies": Says, "seed": 7, "overrides": {"sandbox.level": "in_process"}}
    of_file = Task.from_file(tmp_path / "task.yaml").run(log_dir=tmp_path / "file", **asked)
    assert evaluate(tmp_path / "task.yaml", log_dir=tmp_path / "third", **asked).score == 0.5
    for name in ("episodes.jsonl", "scores.jsonl"):
        output = [[json.loads(line) for line in (run.path / name).read_text().splitlines()] for run in (here, of_file)]
        for one in (line for lines in output for line in lines):
            one.pop("timing"), one.pop("scorer", None)
        assert output[0] == output[1]


def test_run_records_settings_of_a_python_task(tmp_path: Path) -> None:
    tools = ToolRegistry("geo")

    @tools.tool
    def look_up(country: str) -> str:
        """Look up a capital."""
        return country

    run = capitals(tools=tools).run(log_dir=tmp_path)
    header = RunHeader.read(run.path)
    assert header.from_python == {
        "task": "capitals",
        "reward": f"{__name__}:right",
        "dataset": "2 rows",
        "tools": ["look_up"],
        "policy Says": f"{__name__}:Says",
    }
    kept = {path.name: path.read_text() for path in (run.path / "inputs").iterdir()}
    assert kept["policy_Says.py"] == inspect.getsource(Says) and "def right" in kept["reward.py"]
    assert [json.loads(line) for line in kept["dataset.jsonl"].splitlines()] == ROWS
    levels = {json.loads(line)["sandbox"]["level"] for line in (run.path / "scores.jsonl").read_text().splitlines()}
    assert levels == {"in_process"}
    assert any("in_process, unconfined" in note for note in run.notes) and "unconfined" in run._repr_html_()


@pytest.mark.parametrize("is_in_file", [False, True])
def test_offered_tools_may_be_a_list_of_names_and_the_own_ones(tmp_path: Path, is_in_file: bool) -> None:
    tools = ToolRegistry("geo")

    @tools.tool
    def look_up(country: str) -> str:
        """Look up a capital."""
        return country

    seen = []

    def act(observation: Any, specs: Any) -> Any:
        seen.append([spec["function"]["name"] for spec in specs])
        return {"type": "text", "content": "Rome"}

    resource = {"resource": "sqlite", "on_text": "end", "policy": ScriptedPolicy(act), "folder": tmp_path}
    if is_in_file:
        (tmp_path / "tools.py").write_text(
            "from reward_kit import ToolRegistry\nr = ToolRegistry('geo')\n@r.tool\ndef look_up(country: str): ''\n"
        )
        task = capitals(tools=["look_up", "execute_sql"], tools_module_path="tools.py", **resource)
    else:
        task = capitals(tools=[tools, "execute_sql"], **resource)
        assert RunHeader.read(task.run(log_dir=tmp_path).path).task["tools"] == ["look_up", "execute_sql"]
    assert "look_up" in task._repr_html_() and "execute_sql" in task._repr_html_()
    task.run(log_dir=tmp_path)
    assert all(sorted(names) == ["execute_sql", "look_up"] for names in seen)
    with pytest.raises(ConfigError, match=r"tools: unknown tool 'excute_sql'; did you mean 'execute_sql'\?"):
        task.run(log_dir=tmp_path, overrides={"tools": ["excute_sql"]})


def test_rows_with_python_only_values_are_kept(tmp_path: Path) -> None:
    row = {**ROWS[0], "counts": np.arange(2), "pairs": {(1, 2): "ü"}}
    run = capitals(dataset=[row]).run(log_dir=tmp_path)
    (kept,) = (run.path / "inputs" / "dataset.jsonl").read_text("utf-8").splitlines()
    found = from_json_value(json.loads(kept))
    assert found["counts"].tolist() == [0, 1] and found["pairs"] == row["pairs"] and "ü" in kept


def test_run_of_a_task_from_python_cannot_be_resumed(tmp_path: Path) -> None:
    run = capitals().run(log_dir=tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"was started from Python with objects .* \(task capitals, .*a new run from Python",
    ):
        read_resumable_header(run.path)
    with pytest.raises(ConfigError, match="no run in"):  # the latest that can go on is not this one
        latest_run(tmp_path)


def test_lent_policies_stay_open_and_own_ones_are_closed(tmp_path: Path) -> None:
    lent, made = Says("Paris"), []

    class Noted(Says):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    run = capitals().run(policies={"paris": lent, "noted": Noted}, log_dir=tmp_path)
    assert {one.policy: one.pass_at_1 for one in run.policies} == {"paris": 0.5, "noted": 0.5}
    assert lent.closed == 0 and [one.closed for one in made] == [1]


def test_reward_and_policy_can_be_given_by_name(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def right(messages, ground_truth):\n    from reward_kit import EvaluateResult\n"
        "    return EvaluateResult(score=float(messages[-1].content == ground_truth))\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    task = capitals(reward="reward.py:right", dataset="rows.jsonl", folder=tmp_path)
    assert task.run(log_dir=tmp_path / "runs").score == 1.0
    line = json.loads(next((tmp_path / "runs").glob("*/scores.jsonl")).read_text())
    assert line["sandbox"]["level"] == "warm"
    block = capitals(policy={"type": "scripted", "actions": [{"type": "text", "content": "Paris"}]})
    assert block.run(log_dir=tmp_path / "runs").score == 0.5
    assert capitals(policy="openai/gpt-x").definition.policy.options() == {"model": "gpt-x"}  # type: ignore[union-attr]


def test_resource_can_be_a_class(tmp_path: Path) -> None:
    assert capitals(resource=Counter, reward=None).definition.resource_type == f"{__name__}:Counter"
    run = capitals(resource=Counter, reward=None).run(log_dir=tmp_path)
    assert len(run.rows) == 2 and run.errors == []


def test_first_messages_can_be_inspected() -> None:
    task = capitals()
    assert [task.messages(i)[0].text for i in range(2)] == ["The capital of France?", "The capital of Italy?"]
    assert (task.name, len(task.samples), repr(task)) == ("capitals", 2, "Task('capitals', 2 samples)")
    assert "samples" in task._repr_html_() and "right" in task._repr_html_()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"polcy": Says}, "Task 'capitals': polcy: unknown key; did you mean 'policy'"),
        ({"reward": 3}, "a reward must be a function or a class, got an int"),
        ({"reward": careful}, r"sandbox='isolated'\) requires a reward in a file"),
        ({"sandbox": {"level": "warm"}}, r"sandbox\.level requires a reward in a file.*reward='reward\.py:right'"),
        ({"sandbox": {"read_paths": ["."]}}, r"sandbox\.read_paths requires a reward in a file"),
        ({"reward": right, "reward_function_path": "reward.py:right"}, "reward and reward_function_path set the same"),
        ({"dataset": [1]}, r"dataset\[0\]: expected a dict with string keys, got 1"),
        ({"dataset": []}, "dataset: the list has no rows"),
        ({"dataset": [{**ROWS[0], "at": object()}]}, r"dataset\[0\]: an object cannot be converted to JSON"),
        ({"dataset": [{**ROWS[0], "in": _SELF}]}, r"dataset\[0\]: it is nested too deeply or contains itself"),
        ({"resource": "python_state", "base_resource_config": _SELF}, "Task 'capitals': Circular reference"),
        ({"base_resource_config": {(1, 2): 3}}, "Task 'capitals': keys must be str.*not tuple"),
        ({"dataset": {"id": 1}}, "dataset: expected the path of a file or a list of rows, got a dict"),
        ({"dataset": [ROWS[0], ROWS[0]]}, r"dataset\[1\]: sample id 'f' is already used at dataset\[0\]"),
        (
            {"dataset": [{"land": "x", "ground_truth": "y"}]},
            r"'country' is undefined; known: ground_truth, land, observation; in sample 'sample-0' \(dataset\[0\]\)",
        ),
        ({"tools": right}, "tools: expected a ToolRegistry or a file that defines one, got a function"),
        ({"tools": [right]}, r"tools\.0: expected a string"),
        (
            {"tools": [ToolRegistry("a")], "tools_module_path": "tools.py"},
            "tools and tools_module_path set the same key",
        ),
        ({"tools": [ToolRegistry("a"), ToolRegistry("b")]}, "a task can have only one ToolRegistry, got more than one"),
        ({"policy": 3}, "policy: expected an AgentPolicy, a name or a dict of keys, got an int"),
        ({"resource": Says}, "resource: expected a name or a subclass of ForkableResource"),
        ({"num_rollouts": 3}, "num_rollouts has no effect: a task with a dataset uses num_rollouts_per_sample"),
    ],
)
def test_construction_errors_are_raised_in_the_constructor(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        capitals(**keys)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policies": NeedsTown}, r"policy 'NeedsTown' needs town; pass an instance, NeedsTown\(town=…\)"),
        ({"policies": [Says(), Says()]}, "duplicate policy label 'Says'; pass labels"),
        ({"policies": {"one": "random"}}, "expected a dict from labels to AgentPolicy objects, got a str"),
        ({"overrides": {"reward_function_path": "r.py:f"}}, "reward_function_path has no effect: the task's reward"),
        ({"overrides": {"dataset_path": "r.jsonl"}}, "dataset_path has no effect: the task's dataset"),
        ({"overrides": {"policy.type": "random"}}, r"policy\.type has no effect: the task's policy"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "base_url applies only to models, but this run has none"),
    ],
)
def test_option_errors_are_raised_before_writing(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        capitals().run(log_dir=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_missing_policy_is_reported_in_python_terms() -> None:
    with pytest.raises(ConfigError, match=r"Task 'capitals': no policy is set; pass policy=MyPolicy to Task"):
        capitals(policy=None).run()


def test_run_options_equal_those_of_evaluate() -> None:
    options = list(inspect.signature(evaluate_async).parameters)[1:]
    assert list(inspect.signature(Task.run).parameters) == list(inspect.signature(Task.run_async).parameters)
    assert list(inspect.signature(capitals().run).parameters) == options
    with pytest.raises(TypeError, match="'rolouts'"):
        capitals().run(rolouts=3)
    with pytest.raises(
        ConfigError, match=r"name must be a str, got a PosixPath; to read a task file, use Task\.from_file"
    ):
        Task(Path("task.yaml"))  # type: ignore[arg-type]


def test_changed_reward_in_memory_has_a_different_scorer_digest(tmp_path: Path) -> None:
    hashes = []
    for body in ("return EvaluateResult(score=1.0)", "return EvaluateResult(score=0.0)"):
        cell = tmp_path / "cell"
        space: dict[str, Any] = {"EvaluateResult": EvaluateResult}
        text = f"def f(messages):\n    {body}\n"
        linecache.cache[f"<cell {body}>"] = (len(text), None, text.splitlines(True), f"<cell {body}>")
        exec(compile(text, f"<cell {body}>", "exec"), space)
        run = capitals(reward=space["f"]).run(log_dir=cell)
        hashes.append(json.loads((run.path / "scores.jsonl").read_text().splitlines()[0])["scorer"]["hash"])
    assert hashes[0] != hashes[1]
