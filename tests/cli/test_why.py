"""Test `reward-kit why`, which measures finished episodes by continuing them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from reward_kit.runs.counterfactual_file import read_counterfactuals
from reward_kit.runs.files import read_json
from tests.chat_server import ChatServer, answer
from tests.cli.project import Project

AGENT = '''
import random
from reward_kit import AgentPolicy, PolicyOutput

class Walker(AgentPolicy):
    """Solves the chore with the expert, but in step 2 it starts to do nothing but look."""
    is_free = True

    def __init__(self, context=None, step=0, slips=True):
        self.resource, self.step, self.slips = context and context.resource, step, slips

    async def open(self, context):
        return type(self)(context, slips=context.rollout_index == 0 and "-at-" not in context.rollout_id)

    async def resume(self, turns):
        self.step = len(turns)

    async def get_action(self, observation, available_tools_specs=None):
        self.step += 1
        if self.slips and self.step >= 3:
            return PolicyOutput({"type": "tool_call", "name": "act", "arguments": {"command": "look"}})
        action = await self.resource.expert_action()
        return PolicyOutput(dict(action) if action else {"type": "terminate"})
'''
REWARD = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def solved(messages, environment_return=None, **kwargs):
    return EvaluateResult(score=float(environment_return == 1.0), reason="solved")
"""


def chores(folder: Path, **changes: Any) -> Path:
    task = {
        "name": "chores",
        "resource_type": "alfworld",
        "base_resource_config": {"index": 3},
        "max_episode_steps": 9,
        "num_rollouts": 2,
        "reward_function_path": "reward.py:solved",
        "policy": {"type": "agent.py:Walker"},
        **changes,
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    (folder / "agent.py").write_text(AGENT)
    (folder / "reward.py").write_text(REWARD)
    done = call(folder, "run", "task.yaml", "--json")
    assert done.returncode == 0, done.stderr
    return folder / json.loads(done.stdout)["run"]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return Project.call(_In(folder), *arguments)  # type: ignore[arg-type]


class _In(Project):
    def __init__(self, folder: Path) -> None:
        self.folder = folder


def test_step_that_lost_the_episode_is_named_with_what_to_do_instead(tmp_path: Path) -> None:
    run = chores(tmp_path)
    done = call(tmp_path, "why", str(run), "--continuations", "64")
    assert done.returncode == 0, done.stderr
    (line,) = read_counterfactuals(run)
    assert (line["passed"], line["continued_by"], line["steps"]) == (False, "agent.py:Walker", 9)
    (change,) = line["changes"]
    first = next(value for value in line["values"] if value["step"] == change["step"])
    assert change["next"] == change["step"] + 1 and first["passed"] == first["scored"]
    assert change["instead"][0]["action"] != change["action"] == 'act(command="look")'
    assert f"Success probability lost at step {change['step']}: 1.00 → 0.00" in done.stdout
    assert "  first actions of the continuations from step " in done.stdout
    assert len(line["continuations"]) == sum(value["scored"] for value in line["values"]) <= 64
    assert read_json(run / "summary.json")["policies"]  # the run itself is unchanged


def test_results_are_replaced_per_episode_and_policy(tmp_path: Path) -> None:
    run = chores(tmp_path)
    (episode,) = (line["rollout_id"] for line in map(json.loads, call_json(run)))
    for arguments in ([], ["--seed", "1"], ["--policy", "expert"]):
        done = call(tmp_path, "why", str(run), episode, "--continuations", "24", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        (shown,) = json.loads(done.stdout)["episodes"]
        assert shown["rollout_id"] == episode
    lines = list(read_counterfactuals(run))
    assert [(line["continued_by"], line["seed"]) for line in lines] == [("agent.py:Walker", 1), ("expert", 0)]
    (run / "counterfactual.jsonl").write_text("{\n")
    done = call(tmp_path, "why", str(run), episode)
    assert done.returncode != 0 and "counterfactual.jsonl:1: not JSON" in done.stderr
    assert "continuations passed" not in done.stderr, "it is reported before measuring"


def call_json(run: Path) -> list[str]:
    lines = (run / "scores.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if json.loads(line)["score"] == 0.0]


def test_limit_on_cost_stops_the_search(tmp_path: Path) -> None:
    agent = AGENT.replace("is_free = True", "knows_cost = True").replace(
        'dict(action) if action else {"type": "terminate"})',
        'dict(action) if action else {"type": "terminate"}, None, {"usage": {"cost": 0.01}})',
    )
    run = chores(tmp_path)
    (tmp_path / "agent.py").write_text(agent)
    done = call(tmp_path, "why", str(run), "--max-cost", "4", "--force", "--continuations", "200")
    assert done.returncode == 0, done.stderr
    assert "stopped at a limit: 4." in done.stderr
    (line,) = read_counterfactuals(run)
    assert line["values"] and line["stopped"] and 2.0 < line["cost"] < 4.5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_search_keeps_its_values(tmp_path: Path, number: signal.Signals) -> None:
    run, project = chores(tmp_path), _In(tmp_path)
    hangs = "        self.step = len(turns)\n        await __import__('asyncio').sleep(60 if turns else 0)\n"
    (tmp_path / "agent.py").write_text(AGENT.replace("        self.step = len(turns)\n", hangs))
    said = tmp_path / "said.txt"
    with said.open("wb") as file:
        process = subprocess.Popen(
            project.command("why", str(run), "--force"), cwd=tmp_path, env=project.environment(), stderr=file
        )
    try:
        for _ in range(1_500):
            if "step 0: 16 of 16 continuations passed" in said.read_text():
                break
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    (line,) = read_counterfactuals(run)
    assert [(value["step"], value["passed"], value["scored"]) for value in line["values"]] == [(0, 16, 16)]
    assert (line["stopped"], line["cost"]) == ("interrupted", 0.0)
    if number == signal.SIGINT:
        assert f"interrupted; the measured values are in {run / 'counterfactual.jsonl'}" in said.read_text()
        assert "Traceback" not in said.read_text()


def test_search_that_measured_nothing_keeps_an_earlier_result(tmp_path: Path) -> None:
    run = chores(tmp_path)
    assert call(tmp_path, "why", str(run)).returncode == 0
    before = (run / "counterfactual.jsonl").read_bytes()
    done = call(tmp_path, "why", str(run), "-T", "run_limits.steps=5")
    assert done.returncode == 3 and "stopped at a limit: " in done.stderr
    assert "error: nothing was measured" in done.stderr
    assert (run / "counterfactual.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-here"], "has no episode 'nothing-here'; known: chores-"),
        (["chores"], "has 2 episodes whose ids start with 'chores'"),
        (["--policy", "expertt"], "unknown policy 'expertt'; did you mean 'expert'?"),
        (["--policy", "expert", "--model", "openai/x"], "use either --model or --policy"),
        (["--continuations", "3"], "Invalid value for '--continuations'"),
    ],
)
def test_wrong_arguments_are_reported(tmp_path: Path, arguments: list[str], message: str) -> None:
    run = chores(tmp_path)
    done = call(tmp_path, "why", str(run), *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (run / "counterfactual.jsonl").exists()


def test_changed_task_is_reported(tmp_path: Path) -> None:
    run = chores(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD + "\n# changed\n")
    done = call(tmp_path, "why", str(run))
    assert done.returncode == 2 and "or continue anyway with --force" in done.stderr
    assert "cannot be examined, because its inputs changed:\nthe reward" in done.stderr


def test_run_whose_episodes_all_passed_or_without_reward_is_reported(tmp_path: Path) -> None:
    run = chores(tmp_path, policy={"type": "expert"})
    done = call(tmp_path, "why", str(run))
    assert done.returncode == 2 and "no scored episode" in done.stderr and "pass the id of an EPISODE" in done.stderr
    (tmp_path / "second").mkdir()
    run = chores(tmp_path / "second", reward_function_path=None)
    assert call(tmp_path / "second", "why", str(run)).returncode == 2


async def test_episodes_of_a_model_are_continued_with_its_messages(tmp_path: Path) -> None:
    conversations: list[list[str]] = []

    def reply(request: Any) -> Any:
        conversations.append([message["content"] for message in request["messages"]])
        return answer("think" if len(request["messages"]) == 1 else "wrong")

    project = Project(tmp_path, rows=1, on_text="continue", max_episode_steps=2, num_rollouts_per_sample=1)
    async with ChatServer(reply) as server:
        arguments = ("run", "task.yaml", "--model", "openai/m", "--base-url", server.base_url, "--json")
        done = await asyncio.to_thread(project.call, *arguments, OPENAI_API_KEY="sk-test")
        assert done.returncode == 0, done.stderr
        run = json.loads(done.stdout)["run"]
        recorded, conversations[:] = list(conversations), []
        done = await asyncio.to_thread(project.call, "why", run, "--continuations", "16", OPENAI_API_KEY="sk-test")
    assert done.returncode == 0, done.stderr
    (line,) = read_counterfactuals(tmp_path / run)
    assert [(value["step"], value["passed"], value["scored"]) for value in line["values"]] == [(0, 0, 8), (1, 0, 8)]
    # From step 0, both requests of the episode are sent again; from step 1, only the second.
    assert sorted(conversations) == sorted([recorded[0]] * 8 + [recorded[1]] * 16)
