"""Test environments of the `openenv` package on its server as resources, compared with its own client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, collect_group
from reward_kit.agent.samples import Sample
from reward_kit.checks import check_resource
from reward_kit.environments.openenv import OpenEnvResource
from reward_kit.environments.servers import ServerPool
from reward_kit.episodes.record import get_facts
from reward_kit.errors import DeadlineError, EnvironmentFailure, ToolError
from reward_kit.models import TaskDefinitionModel
from reward_kit.task_parts import ResourceServerConfig
from tests.command_line import call

pytestmark = pytest.mark.campaign

FOLDER = Path(__file__).parent / "openenv"
PYTHON = Path(__file__).parents[2] / ".integrations/openenv/bin/python"
if not PYTHON.exists():
    pytest.skip("openenv is not installed in .integrations/openenv; run `make integrations`", allow_module_level=True)


def serving(world: str, sessions: int = 8) -> dict[str, Any]:
    return {
        "start_command": f"'{PYTHON}' environments.py {world} --port {{port}} --sessions {sessions}",
        "health_check_url": "http://127.0.0.1:{port}/health",
    }


def config(world: str, **more: Any) -> dict[str, Any]:
    return {"resource_server": serving(world), "task_folder": str(FOLDER), **more}


@pytest.fixture
async def pool() -> AsyncIterator[ServerPool]:
    async with ServerPool() as open_pool:
        yield open_pool


async def made(seed: int, given: dict[str, Any]) -> OpenEnvResource:
    resource = OpenEnvResource()
    await resource.setup(given)
    await resource.reset(seed)
    return resource


MOVES = [{"kind": "add", "amount": 2}, {"kind": "clear"}, {"kind": "add", "amount": 3}, {"kind": "add"}]


async def test_resource_matches_the_openenv_client(pool: ServerPool) -> None:
    resource = await made(11, config("counter"))
    server = await pool.lease(ResourceServerConfig(**serving("counter")), FOLDER)
    call = (PYTHON, FOLDER / "client.py", server.address.replace("http", "ws"), "11", json.dumps(MOVES))
    process = await asyncio.create_subprocess_exec(*call, stdout=asyncio.subprocess.PIPE)
    theirs = json.loads((await process.communicate())[0])
    seen = [(await resource.get_observation(), None, False, {"success": False, "steps": 0})]
    for move in MOVES:
        outcome = await resource.step("act", move)
        seen.append((outcome.observation, outcome.reward, outcome.terminated, dict(outcome.info)))
    final = await resource.final_state()
    assert final is not None
    for ours, (observation, reward, done, metadata) in zip(seen, theirs["answers"], strict=True):
        assert ours == ({k: v for k, v in observation.items() if k != "metadata"}, reward, done, metadata)
    theirs["state"] = {k: v for k, v in theirs["state"].items() if k not in ("episode_id", "step_count")}
    assert json.loads(final.payload)["state"] == theirs["state"]
    await resource.close()


@pytest.mark.parametrize(
    ("world", "more", "expected"),
    [
        ("counter", {"deterministic": True}, []),
        ("counter", {"deterministic": True, "state_key": "state"}, []),
        ("workshop", {"deterministic": True}, []),
        ("moody", {"execution_errors": "refusal"}, ["deterministic = False", "fork_kind = 'none'"]),
    ],
)
async def test_resource_checker_reports_correct_findings(world: str, more: dict[str, Any], expected: list[str]) -> None:
    findings = await check_resource(OpenEnvResource, config(world, **more), steps=10)
    assert [finding.message.split(":")[0] for finding in findings] == expected


async def test_resource_checker_detects_undeclared_nondeterminism() -> None:
    given = config("moody", deterministic=True, execution_errors="refusal")
    findings = await check_resource(OpenEnvResource, given, steps=10)
    assert any("the same seed and actions produced different results" in finding.message for finding in findings)


async def test_mcp_tools_of_the_environment_are_listed(pool: ServerPool) -> None:
    resource = await made(3, config("workshop"))
    assert await resource.get_observation() == {"task": "Put the gear on the bench."}
    assert [tool["function"]["name"] for tool in await resource.get_tools_spec()] == ["look", "take"]
    shelf = {"shelf": ["bolt", "gear", "nut", "spring"], "bench": []}
    assert (await resource.step("look", {})).observation == shelf
    failed = await resource.step("take", {"part": "lamp"})
    assert "there is no lamp on the shelf" in failed.observation
    assert failed.info["is_action_valid"] is False
    with pytest.raises(ToolError, match="part: missing"):
        await resource.step("take", {})
    won = await resource.step("take", {"part": "gear"})
    assert (won.observation, won.reward, won.terminated) == ("gear is on the bench", 1.0, True)
    await resource.close()


async def test_environment_exception_is_a_failure_and_not_an_answer(pool: ServerPool) -> None:
    resource = await made(0, config("moody"))
    with pytest.raises(EnvironmentFailure, match="EXECUTION_ERROR: the counter is jammed"):
        await resource.step("act", {"kind": "add", "amount": 3})
    with pytest.raises(ToolError, match="act: amount: Input should be less than or equal to 3"):
        await resource.step("act", {"kind": "add", "amount": 4})
    for _ in range(4):
        outcome = await resource.step("act", {"kind": "clear"})
    assert outcome.truncated is False, "it says truncated, and not done"
    await resource.close()


async def test_dead_server_fails_its_episode_with_the_reason(pool: ServerPool) -> None:
    resource = await made(0, config("counter"))
    server = await pool.lease(ResourceServerConfig(**serving("counter")), FOLDER)
    os.kill(server.process.pid, 9)
    with pytest.raises(EnvironmentFailure, match=r"step at ws://.*the server ended with exit code -9"):
        await resource.step("act", {"kind": "clear"})
    await resource.close()


async def test_single_session_server_serves_episodes_in_sequence(pool: ServerPool) -> None:
    given = {**config("counter", connect_timeout=1.0), "resource_server": serving("counter", sessions=1)}
    for seed in range(3):
        resource = await made(seed, given)
        if seed == 2:
            with pytest.raises(DeadlineError, match=r"no session within 1 s: Server at capacity: 1/1 sessions active"):
                await made(seed, given)
        await resource.close()


async def test_episodes_of_a_group_start_from_the_same_state(pool: ServerPool) -> None:
    task = TaskDefinitionModel(
        name="count",
        resource_type="openenv",
        base_resource_config=config("counter", deterministic=True, observation_field="text"),
        initial_user_prompt="Count.",
        max_episode_steps=2,
    )
    move = {"type": "tool_call", "name": "act", "arguments": {"kind": "add", "amount": 3}}
    worker = RLRolloutWorker(task, ScriptedPolicy([move] * 2))
    episodes = await collect_group(worker, Sample.from_task(task), 3)
    starts = [get_facts(episode)["start"] for episode in episodes]
    assert starts[0]["fork"] == "replay"
    assert starts[0] == starts[1] == starts[2]
    for episode in episodes:
        assert get_facts(episode)["failure"] is None
        assert episode.environment_rewards() == episodes[0].environment_rewards()
        assert episode.environment_rewards()[0] is not None


def test_folder_made_by_openenv_runs_with_the_python_of_its_environment(tmp_path: Path) -> None:
    subprocess.run([PYTHON.with_name("openenv"), "init", "echo_env"], cwd=tmp_path, check=True, capture_output=True)
    folder = tmp_path / "echo_env"
    (folder / ".venv").symlink_to(PYTHON.parents[1])
    (tmp_path / "bin").mkdir()
    env = {**os.environ, "PATH": str(tmp_path / "bin"), "REWARD_KIT_TRUST": "1"}
    actions = [{"type": "tool_call", "name": "act", "arguments": {"message": "hello"}}, {"type": "terminate"}]
    policy = f"policy={json.dumps({'type': 'scripted', 'actions': actions})}"
    done = call("run", str(folder), "-T", policy, "-n", "2", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["policies"]
    assert (summary["score"]["mean"], summary["errors"]) == (0.5, {})
