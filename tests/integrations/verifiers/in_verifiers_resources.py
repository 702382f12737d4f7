"""Test resources as verifiers tool servers: verifiers plays them, and reward-kit rewards score the results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf

from reward_kit.agent.actions import as_text
from reward_kit.agent.tool_execution import Execution
from reward_kit.environments import SokobanResource
from reward_kit.environments.base import StateSnapshot
from reward_kit.errors import ConfigError
from reward_kit.integrations.verifiers.tasksets import ResourceState, ResourceTaskset, TaskFileConfig, _record
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest
from reward_kit.runs.logs.verifiers_traces import trace_to_episode
from tests.chat_server import Behavior, ChatServer, answer, tool_calls
from tests.integrations.verifiers.in_verifiers_tasksets import key, rollouts

__all__ = ["key"]

REWARDS = """
from reward_kit import EvaluateResult, MetricResult, reward_function

@reward_function
def solved(messages, environment_return, stop_reason, state, **kwargs):
    metrics = {"gave": MetricResult(score=float(environment_return is not None), reason=str(stop_reason))}
    return EvaluateResult(score=float(state is not None and state["solved"]), metrics=metrics)
"""
TASK = """
name: boxes
resource_type: sokoban
base_resource_config: {boxes: 1, width: 6, height: 6}
tools_module_path: tools.py
tools: [move, double]
reward_function_path: rewards.py:solved
messages: [{role: user, content: "Push the box.\\n{{ observation }}"}]
"""
TOOLS = '''
from reward_kit.environments import ToolRegistry
tools = ToolRegistry("own")

@tools.tool
def double(x: int, y: int = 2) -> int:
    """Multiply."""
    return x * y
'''


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    for name, text in (("rewards.py", REWARDS), ("task.yaml", TASK), ("tools.py", TOOLS)):
        (tmp_path / name).write_text(text)
    return tmp_path / "task.yaml"


def task_of(path: Path, **overrides: Any) -> Any:
    (task,) = ResourceTaskset(TaskFileConfig(task_file=path, overrides=overrides))
    return task


async def solution(prompt: str) -> list[dict[str, Any]]:
    """Return the expert's moves for the level in the prompt."""
    level = [line for line in prompt.splitlines()[1:] if line.startswith("#") and "wall" not in line]
    world, moves = SokobanResource(), []
    await world.setup({"level": "\n".join(level)})
    await world.reset(0)
    while (expert := await world.expert_action()) is not None:
        moves.append(dict(expert["arguments"]))
        await world.step(expert["name"], expert["arguments"])
    await world.close()
    return moves


def playing(moves: list[dict[str, Any]]) -> list[Behavior]:
    created = {"created": 0}
    return [*(tool_calls([("move", json.dumps(move))], top=created) for move in moves), answer("done", top=created)]


async def test_resource_is_played_and_scored_by_its_final_state(task_file: Path) -> None:
    task = task_of(task_file)
    moves = await solution(task.data.prompt[0].content)
    async with ChatServer(playing(moves)) as server:
        (trace,) = await rollouts(server, task)
        offered = server.bodies[0]["tools"]
    assert [tool["function"]["name"] for tool in offered] == ["move", "double"]
    assert offered[0]["function"]["parameters"]["properties"]["direction"]["enum"], "the schema is the world's own"
    assert (trace.ok, trace.reward, trace.metrics) == (True, 1.0, {"gave": 1.0})
    assert trace.num_turns == len(moves), "the conversation ends with the world"
    episode = trace_to_episode(trace)
    answers = [as_text(message.content) for message in episode.messages if message.role == "tool"]
    assert len(answers) == len(moves) - 1, "the last answer is not sent to the model"
    assert episode.get_actions()[0]["name"] == "move"


async def test_rejected_call_is_reported_to_the_model(task_file: Path) -> None:
    created = {"created": 0}
    script = [
        tool_calls([("move", '{"direction": "sideways"}')], top=created),
        tool_calls([("double", '{"x": 4}'), ("double", '{"x": 4, "y": 5}')], top=created),
        answer("I give up", top=created),
    ]
    async with ChatServer(script) as server:
        (trace,) = await rollouts(server, task_of(task_file))
    texts = [message.content for message in trace.tool_messages]
    assert "sideways" in texts[0]
    assert texts[1:] == ["8", "20"]
    assert (trace.ok, trace.reward) == (True, 0.0)


FIRST = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def stands_as_shown(messages, state, environment_return, **kwargs):
    assert environment_return is None
    return EvaluateResult(score=float(state["board"] in messages[0].text))
"""


async def test_final_state_without_calls_is_the_initial_state(task_file: Path) -> None:
    task_file.with_name("rewards.py").write_text(FIRST)
    task = task_of(task_file, reward_function_path="rewards.py:stands_as_shown")
    async with ChatServer([answer("I do nothing", top={"created": 0})]) as server:
        (trace,) = await rollouts(server, task)
    assert (trace.ok, trace.reward) == (True, 1.0), trace.errors
    assert trace.state.rewards == []
    asked = ScoringRequest.from_episode(trace_to_episode(trace))
    read_again = SimpleNamespace(state=ResourceState())  # a record has nothing of it
    assert (await task.request(asked, read_again)).final_state is not None
    played = replace(asked, messages=[*asked.messages, Message(role="tool", tool_call_id="1", content="moved")])
    assert (await task.request(played, read_again)).final_state is None, "and not the first one"


class Unreadable(SokobanResource):
    """A resource whose final state cannot be read."""

    async def final_state(self) -> StateSnapshot:
        raise OSError("no state")


async def test_unreadable_final_state_is_an_error() -> None:
    state = ResourceState()
    resource = Unreadable()
    await _record(state, Execution(messages=[], reward=1.0), resource, 5.0)
    assert state.failure == "crash: final_state of Unreadable: OSError: no state"
    assert state.rewards == [1.0]


def test_rollouts_of_a_task_share_a_start_state(task_file: Path) -> None:
    first, again = task_of(task_file), task_of(task_file)
    assert first.data.prompt == again.data.prompt
    assert first.hash == again.hash


def test_task_without_a_resource_has_no_tool_server(task_file: Path) -> None:
    with pytest.raises(ConfigError, match="terminate_tool has no effect in verifiers"):
        task_of(task_file, terminate_tool="finish")
    bare = "name: bare\nreward_function_path: rewards.py:solved\ninitial_user_prompt: hello\n"
    task_file.with_name("bare.yaml").write_text(bare)
    with pytest.raises(ConfigError, match="resource_type: missing; without a resource or tools, use TaskFileTaskset"):
        task_of(task_file.with_name("bare.yaml"))


def test_verifiers_finds_the_task_class() -> None:
    assert vf.Taskset in ResourceTaskset.__mro__
    assert ResourceTaskset.task_type().__name__ == "ResourceTask"
