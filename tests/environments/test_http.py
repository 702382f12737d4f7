"""Test HTTP environments: the protocol, forks by replay, and server faults."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import HttpResource, resource_class
from reward_kit.environments import http as http_client
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from reward_kit.process_guardian import MARK, find_processes
from reward_kit.processes import child_environment

SERVER: dict[str, Any] = {
    "start_command": f"'{sys.executable}' -S counter_server.py --port {{port}}",
    "health_check_url": "http://127.0.0.1:{port}/health",
}
CONFIG: dict[str, Any] = {
    "resource_server": SERVER,
    "task_folder": str(Path(__file__).parent),
    "tools_endpoint": "/tools",
}


def server_with(option: str, **more: Any) -> dict[str, Any]:
    return {"resource_server": {**SERVER, "start_command": f"{SERVER['start_command']} {option}", **more}}


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Any]]:
    """A running server for tests that need no server of their own."""
    folder = Path(__file__).parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, "-S", "counter_server.py", "--port", str(port)], cwd=folder) as process:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        yield {"resource_server": None, "base_url": f"http://127.0.0.1:{port}"}
        process.kill()


async def made(seed: int = 0, **config: Any) -> HttpResource:
    resource = HttpResource()
    try:
        await resource.setup({**CONFIG, **config})
        await resource.reset(seed)
    except BaseException:
        await resource.close()
        raise
    return resource


async def add(resource: Any, amount: Any) -> Any:
    return await resource.step("add", {"amount": amount})


async def seen(resource: HttpResource) -> dict[str, Any]:
    assert resource._client is not None
    return dict((await resource._client.get("/seen")).fields())


async def test_episode_runs_from_start_to_end() -> None:
    async with ServerPool():
        resource = await made(seed=4)
        assert await resource.get_observation() == {"value": 1, "target": 10}
        names = [tool["function"]["name"] for tool in await resource.get_tools_spec()]
        assert names == ["add", "clear"]
        outcome = await add(resource, 3)
        assert (outcome.observation, outcome.reward, outcome.terminated) == ({"value": 4, "target": 10}, 0.0, False)
        for amount in (3, 2):
            await add(resource, amount)
        outcome = await add(resource, 1)
        assert (outcome.reward, outcome.terminated, outcome.truncated) == (1.0, True, False)
        assert outcome.info == {"success": True}
        final = await resource.final_state()
        assert final is not None
        assert final.payload == b'{"target":10,"value":10}'
        with pytest.raises(ToolError, match="the episode is over"):
            await add(resource, 1)
        other = await made()
        assert (await seen(other))["open"] == 2
        await resource.close()
        assert (await seen(other))["open"] == 1
        await other.reset(1)
        assert (await seen(other))["open"] == 1
        await other.close()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"config": {"states": "state"}}, []),
        ({"config": {"states": "none"}}, ["warning: observations recur, but state keys do not"]),
        ({"fork": "none"}, ["warning: fork_kind = 'none'"]),
        ({"deterministic": False}, ["warning: deterministic = False"]),
    ],
)
async def test_checker_findings_match_the_declaration(config: dict[str, Any], expected: list[str]) -> None:
    findings = await check_resource(HttpResource, {**CONFIG, **config}, steps=10 if config else 20)
    found = [f"{finding.level}: {finding.message}" for finding in findings]
    assert len(found) == len(expected), found
    assert all(message.startswith(start) for message, start in zip(found, expected, strict=True))
    assert find_processes(child_environment()[MARK]) == []


async def test_fork_is_a_separate_episode_with_the_same_actions() -> None:
    async with ServerPool():
        resource = await made(config={"target": 20})
        await add(resource, 2)
        twin = await resource.fork()
        assert await twin.state_key() == await resource.state_key()
        await add(twin, 3)
        assert await twin.get_observation() == {"value": 5, "target": 20}
        assert await resource.get_observation() == {"value": 2, "target": 20}
        saved = await resource.checkpoint()
        await add(resource, 1)
        await resource.restore(saved)
        assert await resource.get_observation() == {"value": 2, "target": 20}
        await resource.close()
        await add(twin, 1)
        await twin.close()


async def test_resource_without_a_pool_has_its_own_server() -> None:
    resource = await made()
    assert len(find_processes(child_environment()[MARK])) == 1
    await resource.close()
    await resource.close()
    assert find_processes(child_environment()[MARK]) == []


async def test_fork_none_rejects_forks_and_checkpoints(shared) -> None:
    assert HttpResource.fork_kind_for({"fork": "none"}) == "none"
    assert HttpResource.fork_kind_for({}) == "replay"
    resource = await made(**shared, fork="none")
    for call in (resource.fork, resource.checkpoint):
        with pytest.raises(NotImplementedError, match="cannot be forked"):
            await call()
    await resource.close()


async def test_invalid_call_is_a_tool_error_and_changes_nothing(shared) -> None:
    resource = await made(**shared)
    key = await resource.state_key()
    for name, arguments, message in (
        ("ad", {}, "unknown tool 'ad'; did you mean 'add'"),
        ("add", {"amount": 7}, "amount must be 1, 2 or 3"),
        ("add", {"amount": float("nan")}, "the arguments are not JSON"),
    ):
        with pytest.raises(ToolError, match=message):
            await resource.step(name, arguments)
    assert await resource.state_key() == key
    await resource.close()
    resource = await made(**shared, config={"fault": "error_field"})
    with pytest.raises(ToolError, match="not today"):
        await add(resource, 1)
    await resource.close()


FAULTS = {
    "html": r"POST http://127.0.0.1:\d+/step: the response is not JSON \(.*\): <html>hello</html>",
    "status": "/step: status 500: Traceback: oh",
    "not_json": "/step: the response is not JSON .NaN is not JSON.",
    "nested": "/step: the response is not JSON",
    "list": r"/step: expected a JSON object, got \[1\]",
    "no_observation": "/step: observation: missing; the response has reward",
    "bad_reward": "/step: reward: expected a finite number, got 'high'",
    "hang": r"/step: no response within 0.2 s",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items(), ids=FAULTS)
async def test_server_fault_is_one_failure_that_names_the_address(shared, fault: str, message: str) -> None:
    resource = await made(**shared, config={"fault": fault}, timeout=0.2 if fault == "hang" else 30)
    with pytest.raises(EnvironmentFailure, match=message):
        await add(resource, 1)
    await resource.close()


@pytest.mark.parametrize(("states", "covers"), [("key", True), ("state", False), ("none", False)])
async def test_only_a_state_key_of_the_server_covers_the_results(shared, states: str, covers: bool) -> None:
    resource = await made(**shared, config={"states": states})
    await add(resource, 1)
    assert resource.state_key_covers_results == covers
    await resource.close()


async def test_missing_state_key_after_an_earlier_answer_is_rejected(shared) -> None:
    resource = await made(**shared, config={"fault": "no_key"})
    await add(resource, 1)
    with pytest.raises(EnvironmentFailure, match="state_key: missing, but an earlier response had one"):
        await add(resource, 1)
    await resource.close()


async def test_observation_up_to_the_size_limit_is_accepted(shared, monkeypatch) -> None:
    resource = await made(**shared, config={"fault": "large"})
    assert len((await add(resource, 1)).observation) == 50_000_000
    monkeypatch.setattr(http_client, "ENVIRONMENT_ANSWER_BYTES", 40 * 2**20)
    with pytest.raises(EnvironmentFailure, match="/step: the response is larger than the limit of 40 MiB"):
        await add(resource, 1)
    await resource.close()


async def test_rejected_start_and_missing_server_are_named() -> None:
    async with ServerPool():
        with pytest.raises(EnvironmentFailure, match="/start_episode: rejected: no more episodes"):
            await made(**server_with("--refuse-start"))
    with pytest.raises(EnvironmentFailure, match=r"GET http://127.0.0.1:1/health: ClientConnectorError"):
        await made(resource_server=None, base_url="http://127.0.0.1:1")


async def test_failed_setup_leaves_no_open_connection() -> None:
    with pytest.raises(EnvironmentFailure):
        await HttpResource().setup({"base_url": "http://127.0.0.1:1"})
    gc.collect()  # aiohttp warns of an open session when it is collected, and a warning is an error


async def test_headers_from_the_environment_need_an_allowed_origin(shared, monkeypatch) -> None:
    monkeypatch.setenv("COUNTER_KEY", "s3cret")
    with pytest.raises(ConfigError, match=r"headers_env: X-Key: COUNTER_KEY is not configured for http://127.0.0.1:\d"):
        await made(**shared, headers_env={"X-Key": "COUNTER_KEY"})
    monkeypatch.setenv("REWARD_KIT_KEY_ORIGINS", f"COUNTER_KEY={shared['base_url']}")
    resource = await made(**shared, headers_env={"X-Key": "COUNTER_KEY"})
    assert (await seen(resource))["header"] == "s3cret"
    await resource.close()
    with pytest.raises(EnvironmentFailure, match=r"GET http://127.0.0.1:\d+/nothing: status 404: <html>Not Found"):
        await made(**shared, health_endpoint="/nothing")


async def test_server_started_by_the_task_gets_headers_and_other_origins_do_not(shared, monkeypatch) -> None:
    monkeypatch.setenv("COUNTER_KEY", "s3cret")
    headers = {"X-Key": "COUNTER_KEY"}
    async with ServerPool():
        resource = await made(headers_env=headers)
        assert (await seen(resource))["header"] == "s3cret"
        await resource.close()
        with pytest.raises(ConfigError, match=r"COUNTER_KEY is not configured for http://127\.0\.0\.1:"):
            await made(headers_env=headers, base_url=shared["base_url"])


async def test_value_action_form_and_configured_tools_are_supported(shared) -> None:
    old = {"name": "move", "description": "Add.", "parameters": {"type": "object", "properties": {"amount": {}}}}
    resource = await made(**shared, tools_endpoint=None, tools=[old], action_form="value", config={"target": 3})
    assert (await resource.get_tools_spec())[0] == {"type": "function", "function": old}
    with pytest.raises(ToolError, match="expected one argument, got 2"):
        await resource.step("move", {"amount": 1, "speed": 2})
    assert (await resource.step("move", {"amount": 3})).terminated
    await resource.close()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"base_ur": "x"}, "base_ur: unknown key; did you mean 'base_url'"),
        ({"resource_server": None}, "base_url: missing"),
        ({"base_url": "localhost:80"}, "'localhost:80' is not a http or https URL"),
        (
            {"resource_server": None, "base_url": "http://x:{port}"},
            "needs a resource_server that uses {port}, but the task has no such server",
        ),
        ({"tools": []}, "set either tools or tools_endpoint"),
        ({"tools_endpoint": None, "tools": [{"type": "function"}]}, "a tool must have the form {type: function"),
        ({"tools_endpoint": None, "tools": [{"name": "a", "parameters": []}]}, "tool 'a': parameters"),
        ({"headers_env": {"X": "NOT_THERE"}}, "headers_env: X: the environment variable NOT_THERE is not set"),
        ({"fork": "native"}, "fork: .*'replay' or 'none'"),
    ],
)
async def test_invalid_configuration_is_named(config: dict[str, Any], problem: str) -> None:
    async with ServerPool():
        with pytest.raises(ConfigError, match=problem):
            await made(**config)


async def test_dead_server_fails_only_the_running_episodes() -> None:
    async with ServerPool():
        base = await made()
        doomed = await base.fork()
        breaker = await made(config={"fault": "die"})
        for resource in (breaker, doomed):
            with pytest.raises(EnvironmentFailure, match=r"(?s)/step: .*; the server ended with exit code 3; .*broke$"):
                await add(resource, 1)
        # The base of the group is gone on the server too; its forks start again on the next one.
        fresh = await base.fork()
        assert (await add(fresh, 1)).observation == {"value": 1, "target": 10}
        before = time.monotonic()
        for resource in (breaker, doomed, base, fresh):
            await resource.close()
        assert time.monotonic() - before < 1


def test_http_is_a_built_in_resource() -> None:
    assert resource_class("http") is HttpResource
