"""Test tasks as tasksets run by verifiers: its rollout, interception and scoring with a local endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf

from reward_kit import EvaluateResult, MetricResult, reward_function
from reward_kit.errors import ConfigError
from reward_kit.integrations.verifiers.tasksets import TaskFileConfig, TaskFileTaskset, as_verifiers_reward, loaded
from reward_kit.models import Message
from reward_kit.process_guardian import MARK, find_processes
from reward_kit.processes import child_environment
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.runs.logs.verifiers_traces import trace_score, trace_to_episode
from tests.chat_server import Behavior, ChatServer, answer

REWARDS = """
import time
from reward_kit import EvaluateResult, MetricResult, reward_function

@reward_function
def exact(messages, ground_truth, sample, assistant_turns, **kwargs):
    right = messages[-1].text.strip() == str(ground_truth)
    metrics = {"turns": MetricResult(score=1 / len(assistant_turns), reason=sample["id"])}
    return EvaluateResult(score=float(right), metrics=metrics)

@reward_function
def broken(messages, **kwargs):
    raise ValueError("no idea")

@reward_function
def undecided(messages, **kwargs):
    return EvaluateResult(score=0.0, is_score_valid=False, reason="cannot tell")

@reward_function
def slow(messages, **kwargs):
    time.sleep(30)

@reward_function(mode="batch")
def groups(rollouts_messages, **kwargs):
    return []
"""
TASK = """
name: sums
dataset_path: sums.jsonl
reward_function_path: rewards.py:exact
messages:
  - {role: system, content: Answer with a number.}
  - {role: user, content: "What is {{ question }}?"}
"""
ROWS = '{"id": "a", "question": "2+2", "ground_truth": "4"}\n{"id": "b", "question": "2+3", "ground_truth": "5"}\n'


def says(text: str) -> Callable[[dict[str, Any]], Behavior]:
    return lambda body: answer(text, top={"created": 0})


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    for name, text in (("rewards.py", REWARDS), ("task.yaml", TASK), ("sums.jsonl", ROWS)):
        (tmp_path / name).write_text(text)
    return tmp_path / "task.yaml"


def tasks(path: Path, **overrides: Any) -> list[Any]:
    return list(TaskFileTaskset(TaskFileConfig(task_file=path, overrides=overrides)))


async def rollouts(server: ChatServer, *chosen: Any, **more: Any) -> list[vf.Trace]:
    client = vf.EvalClientConfig(base_url=server.base_url, api_key_var="NO_KEY_OF_TEST")
    config = vf.AgentConfig(
        harness={"id": "chat_harness"}, runtime=vf.SubprocessConfig(), model="tiny", client=client, **more
    )
    async with vf.Agent(config) as agent:
        return list(await asyncio.gather(*(agent.run(task) for task in chosen)))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_KEY_OF_TEST", "none")


def test_each_sample_is_a_verifiers_task(task_file: Path) -> None:
    first, second = tasks(task_file)
    assert [(task.data.idx, task.data.id) for task in (first, second)] == [(0, "a"), (1, "b")]
    assert [message.content for message in first.data.prompt] == ["Answer with a number.", "What is 2+2?"]
    assert (second.data.ground_truth, second.data.sample["question"]) == ("5", "2+3")
    assert [task.data.id for task in TaskFileTaskset(TaskFileConfig(task_file=task_file)).include(ids=["b"])] == ["b"]


async def test_taskset_rollouts_are_scored_by_the_task_reward(task_file: Path) -> None:
    async with ChatServer(says("4")) as server:
        right, wrong = await rollouts(server, *tasks(task_file))
    assert (right.ok, right.reward, right.metrics) == (True, 1.0, {"turns": 1.0})
    assert (wrong.ok, wrong.reward) == (True, 0.0)
    assert right.rewards["reward"].weight == 1.0
    episode = trace_to_episode(right)
    assert [message.role for message in episode.messages] == ["system", "user", "assistant"]
    assert episode.custom_data["ground_truth"] == "4"


@pytest.mark.parametrize(
    ("reward", "told"),
    [("broken", "crash: .*no idea"), ("undecided", "invalid_result: .*cannot tell"), ("slow", "timeout: ")],
)
async def test_unscored_rollout_is_none_and_not_trainable(task_file: Path, reward: str, told: str) -> None:
    overrides = {"reward_function_path": f"rewards.py:{reward}", "limits.reward_time_s": 1.0}
    async with ChatServer(says("4")) as server:
        (trace,) = await rollouts(server, tasks(task_file, **overrides)[0])
    assert (trace.ok, trace.rewards, trace.last_error.type) == (False, {"reward": None}, "TaskError")
    assert trace_score(trace) is None
    with pytest.raises(Exception, match=told):
        raise RuntimeError(trace.last_error.message)
    assert trace_to_episode(trace).custom_data["failure"] is None, "the rollout itself did not fail"


async def test_saved_trace_can_be_rescored(task_file: Path) -> None:
    async with ChatServer(says("4")) as server:
        (trace,) = await rollouts(server, tasks(task_file)[0])
    saved = vf.WireTrace.model_validate(trace.to_record())
    saved.rewards, saved.metrics = {}, {}
    kind = TaskFileTaskset.task_type()
    task = kind(kind.data_type().model_validate(saved.task.data.model_dump()))
    await task.score(saved)
    assert saved.reward == 1.0


async def test_step_limit_of_the_task_file_stops_the_rollout(task_file: Path) -> None:
    limited = tasks(task_file, max_episode_steps=1)[0]
    assert await limited.step_limit(_after(1)) is True
    assert await limited.step_limit(_after(0)) is False
    assert await tasks(task_file)[0].step_limit(_after(50)) is False


def _after(turns: int) -> Any:
    nodes = [{"message": {"role": "assistant", "content": "x"}, "sampled": True}] * turns
    record = {"task": {"type": "T", "data": {}}, "agent": {"config": {}}, "nodes": nodes}
    return vf.WireTrace.model_validate(record)


def test_sandbox_processes_end_with_their_event_loop(task_file: Path) -> None:
    scorer = loaded(str(task_file), {})[1]
    said = [Message(role="assistant", content="4")]
    request = ScoringRequest("r", said, ground_truth="4", sample={"id": "a"}, assistant_turns=[0])

    async def both() -> list[float | None]:
        return [scored.score for scored in await asyncio.gather(scorer.score(request), scorer.score(request))]

    for _ in range(2):
        assert asyncio.run(both()) == [1.0, 1.0]
        assert find_processes(child_environment()[MARK]) == []


REFUSED = {
    "stop": ({"stop_phrases": ["bye"]}, "stop_phrases has no effect in verifiers: write a @vf.stop"),
    "world": ({"resource_type": "python_state"}, "resource_type has no effect in verifiers: use ResourceTaskset"),
    "batch": ({"reward_function_path": "rewards.py:groups"}, "scores groups, but a @vf.reward receives one trace"),
    "none": ({"reward_function_path": None}, "reward_function_path: missing"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_ineffective_task_settings_are_rejected(task_file: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tasks(task_file, **overrides)


def test_taskset_class_can_set_its_task_file(task_file: Path) -> None:
    class Sums(TaskFileTaskset):
        pass

    with pytest.raises(ConfigError, match="task_file: missing; set it to a task file"):
        list(Sums(TaskFileConfig()))
    Sums.task_file = task_file
    assert len(list(Sums(TaskFileConfig()))) == 2


class Sum(vf.TaskData):
    answer: str


@reward_function
def close_enough(messages: list, ground_truth: str, sample: dict, **kwargs: Any) -> EvaluateResult:
    assert sample["answer"] == ground_truth
    metric = MetricResult(score=0.5, reason="half")
    return EvaluateResult(score=float(ground_truth in messages[-1].text), metrics={"half": metric})


exact = as_verifiers_reward(close_enough)


def compute_score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any, worth: float) -> float:
    return worth * (ground_truth in solution_str)


in_verls_form = as_verifiers_reward(compute_score, options={"worth": 0.25})


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=2.0)
    async def correct(self, task: Sum, trace: vf.Trace) -> float:
        return await exact(task, trace)


class ScoredAsByVerl(vf.Task[Sum]):
    @vf.reward
    async def correct(self, task: Sum, trace: vf.Trace) -> float:
        return await in_verls_form(task, trace)


async def test_reward_scores_a_native_verifiers_task() -> None:
    async with ChatServer(says("it is 4")) as server:
        data = Sum(prompt=[vf.UserMessage(content="2+2?")], answer="4")
        (trace,) = await rollouts(server, SumTask(data))
    assert (trace.ok, trace.reward, trace.metrics) == (True, 2.0, {"half": 0.5})


async def test_verl_style_reward_is_accepted_with_options() -> None:
    async with ChatServer(says("it is 4")) as server:
        data = Sum(prompt=[vf.UserMessage(content="2+2?")], answer="4")
        (trace,) = await rollouts(server, ScoredAsByVerl(data))
    assert (trace.ok, trace.reward) == (True, 0.25)


async def test_reward_reference_is_configurable(task_file: Path, monkeypatch: Any) -> None:
    module = "from reward_kit.integrations.verifiers.tasksets import as_verifiers_reward\nfrom pathlib import Path\n"
    module += 'plugged = as_verifiers_reward("rewards.py:broken", folder=Path(__file__).parent)\n'
    (task_file.parent / "plugged_reward.py").write_text(module)
    monkeypatch.syspath_prepend(task_file.parent)
    config = vf.TaskConfig(rewards={"plugged": {"fn": "plugged_reward.plugged"}})
    task = vf.Task[Sum](Sum(prompt=[vf.UserMessage(content="?")], answer="4"), config)
    async with ChatServer(says("4")) as server:
        (trace,) = await rollouts(server, task)
    assert (trace.ok, trace.rewards) == (False, {"plugged": None})
    with pytest.raises(ConfigError, match="folder has no effect on a loaded reward"):
        as_verifiers_reward(close_enough, folder=task_file.parent)
