"""Test the OpenEnv protocol: sessions, tools, server faults and declared forks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import resource_class
from reward_kit.environments.openenv import OpenEnvResource
from reward_kit.errors import ConfigError, DeadlineError, EnvironmentFailure, ToolError
from tests.environments.openenv_server import OpenEnvServer


@pytest.fixture
async def server() -> AsyncIterator[OpenEnvServer]:
    async with OpenEnvServer().running() as running:
        yield running


async def made(server: OpenEnvServer, seed: int = 0, **config: Any) -> OpenEnvResource:
    resource = OpenEnvResource()
    try:
        await resource.setup({"base_url": server.url, **config})
        await resource.reset(seed)
    except BaseException:
        await resource.close()
        raise
    return resource


async def act(resource: Any, amount: Any) -> Any:
    return await resource.step("act", {"amount": amount})


async def test_episode_runs_from_reset_to_end(server: OpenEnvServer) -> None:
    resource = await made(server, seed=4, reset={"split": "test"})
    assert server.asked[-1] == {"type": "reset", "data": {"split": "test", "seed": 4}}
    assert await resource.get_observation() == {"value": 1, "text": "at 1"}
    (tool,) = await resource.get_tools_spec()
    assert tool["function"]["name"] == "act"
    assert tool["function"]["description"] == "Add to the counter."
    assert tool["function"]["parameters"]["properties"].keys() == {"amount"}, "metadata are no choice of an agent"
    outcome = await act(resource, 2)
    assert (outcome.observation, outcome.reward, outcome.terminated) == ({"value": 3, "text": "at 3"}, 0.0, False)
    outcome = await act(resource, 3)
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (1.0, True, False)
    assert outcome.info == {"success": True, "truncated": False}
    final = await resource.final_state()
    assert final is not None
    assert json.loads(final.payload)["state"] == {"value": 6}
    with pytest.raises(ToolError, match="the episode is over"):
        await act(resource, 1)
    await resource.reset(0)
    assert await resource.get_observation() == {"value": 0, "text": "at 0"}
    await resource.close()
    assert server.open == 0


async def test_seed_is_reduced_to_32_bits(server: OpenEnvServer) -> None:
    resource = await made(server, seed=2**40 + 5)
    assert server.asked[-1]["data"]["seed"] == 5
    await resource.close()


async def test_truncated_end_is_truncated(server: OpenEnvServer) -> None:
    resource = await made(server, seed=1)
    for amount in (2, 2):
        await act(resource, amount)
    outcome = await act(resource, 3)
    assert (outcome.terminated, outcome.truncated, outcome.reward) == (False, True, 0.0)
    await resource.close()


async def test_server_tools_are_called_as_actions() -> None:
    async with OpenEnvServer(with_tools=True).running() as server:
        resource = await made(server, seed=1)
        assert [tool["function"]["name"] for tool in await resource.get_tools_spec()] == ["add"]
        outcome = await resource.step("add", {"amount": 2})
        assert (outcome.observation, outcome.reward) == ("at 3", 0.0)
        action = {"type": "call_tool", "tool_name": "add", "arguments": {"amount": 2}}
        assert server.asked[-1] == {"type": "step", "data": action}
        await resource.reset(0)
        await resource.close()
        with pytest.raises(ConfigError, match="action_tool has no effect: the server has its own tools"):
            await made(server, action_tool="play")


async def test_tools_added_by_a_reset_are_offered() -> None:
    async with OpenEnvServer(with_tools=True).running() as server:
        resource = await made(server, reset={"more_tools": ["count"]})
        assert [tool["function"]["name"] for tool in await resource.get_tools_spec()] == ["add", "count"]
        await resource.close()


async def test_failed_tool_is_shown_to_the_agent_and_keeps_its_reward() -> None:
    async with OpenEnvServer(with_tools=True).running() as server:
        resource = await made(server, reset={"fault": "tool_error"})
        outcome = await resource.step("add", {"amount": 1})
        assert (outcome.observation, outcome.reward, outcome.info["is_action_valid"]) == ("jammed", 0.5, False)
        await resource.close()


async def test_state_key_is_the_history_by_default(server: OpenEnvServer) -> None:
    names: dict[str, list[str]] = {}
    for kind in ("history", "observation", "state"):
        for amounts in ((1, 2), (2, 1), (1, 2)):
            resource = await made(server, state_key=kind)
            for amount in amounts:
                await act(resource, amount)
            names.setdefault(kind, []).append(await resource.state_key())
            await resource.close()
    first, other, same = names["history"]
    assert first == same != other
    assert len(set(names["observation"])) == len(set(names["state"])) == 1


CHECKED: list[tuple[dict[str, Any], bool, list[str]]] = [
    ({"deterministic": True}, False, []),
    ({"deterministic": True}, True, []),
    ({"deterministic": True, "state_key": "state"}, True, []),
    ({"deterministic": True, "state_key": "observation"}, False, []),
    ({}, False, ["deterministic = False", "fork_kind = 'none'"]),
]


@pytest.mark.parametrize(("config", "with_tools", "expected"), CHECKED)
async def test_checker_findings_match_the_declaration(config: Any, with_tools: bool, expected: list[str]) -> None:
    async with OpenEnvServer(32, with_tools=with_tools).running() as server:
        findings = await check_resource(OpenEnvResource, {"base_url": server.url, **config}, steps=8)
        assert [finding.message.split(":")[0] for finding in findings] == expected
        assert server.open == 0


async def test_fork_is_a_separate_session(server: OpenEnvServer) -> None:
    resource = await made(server, deterministic=True)
    await act(resource, 2)
    twin = await resource.fork()
    await act(twin, 3)
    assert ((await twin.get_observation())["value"], (await resource.get_observation())["value"]) == (5, 2)
    saved = await resource.checkpoint()
    await act(resource, 1)
    await resource.restore(saved)
    assert (await resource.get_observation())["value"] == 2
    assert server.open == 2
    await resource.close()
    await act(twin, 1)
    await twin.close()


async def test_fork_is_declared_only_by_the_configuration(server: OpenEnvServer) -> None:
    for config, kind in (({}, "none"), ({"deterministic": True}, "replay"), ({"deterministic": "yes"}, "none")):
        assert OpenEnvResource.fork_kind_for(config) == kind
        assert OpenEnvResource.is_deterministic_for(config) == (kind == "replay")
    resource = await made(server)
    for call in (resource.fork, resource.checkpoint):
        with pytest.raises(NotImplementedError):
            await call()
    await resource.close()


async def test_invalid_call_is_a_tool_error_and_changes_nothing(server: OpenEnvServer) -> None:
    resource = await made(server, execution_errors="refusal")
    key = await resource.state_key()
    for name, arguments, message in (
        ("acts", {}, "unknown tool 'acts'; did you mean 'act'"),
        ("act", {"amuont": 1}, "unknown argument 'amuont'; did you mean 'amount'"),
        ("act", {}, "amount: missing"),
        ("act", {"amount": "two"}, "act: amount: Input should be an integer"),
        ("act", {"amount": 9}, "act: amount must be 1, 2 or 3"),
        ("act", {"amount": float("inf")}, "the arguments are not JSON"),
    ):
        with pytest.raises(ToolError, match=message):
            await resource.step(name, arguments)
    assert await resource.state_key() == key
    await resource.close()
    resource = await made(server)
    with pytest.raises(EnvironmentFailure, match="step: EXECUTION_ERROR: amount must be 1, 2 or 3"):
        await act(resource, 9)
    await resource.close()


FAULTS = {
    "hang_up": r"step at ws://127.0.0.1:\d+/ws: the connection was closed \(code 1011\)",
    "html": r"the response is not JSON \(.*\): <html>hello</html>",
    "nan": "the response is not JSON .NaN is not JSON.",
    "list": r'expected {"type": "observation", "data": {…}}, got \[1\]',
    "other": 'got {"type": "state"',
    "binary": "a binary message",
    "bad_reward": "reward: expected a finite number, got 'high'",
    "huge_reward": "reward: expected a finite number, got 1000",
    "bad_done": "expected observation, reward and done",
    "no_observation": "expected observation, reward and done",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items(), ids=FAULTS)
async def test_server_fault_is_one_failure(server: OpenEnvServer, fault: str, message: str) -> None:
    resource = await made(server, reset={"fault": fault})
    with pytest.raises(EnvironmentFailure, match=message):
        await act(resource, 1)
    await resource.close()
    await resource.close()


async def test_missing_answer_is_a_timeout_and_ends_the_session(server: OpenEnvServer) -> None:
    resource = await made(server, reset={"fault": "hang"}, timeout=0.1)
    with pytest.raises(DeadlineError, match=r"step at .*: no response within 0.1 s") as failed:
        await act(resource, 1)
    assert failed.value.failure_class == "timeout"
    with pytest.raises(EnvironmentFailure, match="the session is closed: no response within"):
        await resource.state_key() and await resource.final_state()
    await resource.close()


async def test_answer_of_a_cancelled_call_is_not_used(server: OpenEnvServer) -> None:
    resource = await made(server, reset={"fault": "hang"})
    step = asyncio.create_task(act(resource, 1))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    with pytest.raises(
        EnvironmentFailure,
        match="the session is closed: an earlier request was cancelled before it received a response",
    ):
        await resource.final_state()
    await resource.close()


async def test_unrequested_messages_are_not_answers(server: OpenEnvServer) -> None:
    resource = await made(server, reset={"fault": "twice"})
    assert (await act(resource, 1)).observation == {"value": 7}
    await asyncio.sleep(0.05)
    with pytest.raises(EnvironmentFailure, match=r'step at .*: the server sent an unrequested message: {"type": '):
        await act(resource, 1)
    with pytest.raises(EnvironmentFailure, match="the session is closed: the server sent an unrequested"):
        await resource.final_state()
    await resource.close()


async def test_flooding_server_is_blocked_by_backpressure(server: OpenEnvServer) -> None:
    resource = await made(server, reset={"fault": "flood"})
    await act(resource, 1)
    await asyncio.sleep(0.3)
    assert resource._session is not None
    assert resource._session._answers.qsize() <= 3  # two messages, and that nothing more is read
    with pytest.raises(EnvironmentFailure, match="the server sent an unrequested message"):
        await act(resource, 1)
    await resource.close()


async def test_full_server_is_retried_until_a_session_is_free() -> None:
    async with OpenEnvServer(capacity=1).running() as server:
        first = await made(server)
        with pytest.raises(
            DeadlineError, match=r"no session within 0.1 s: Server at capacity: 1/1; .*max_concurrent_envs"
        ):
            await made(server, connect_timeout=0.1)
        waiting = asyncio.create_task(made(server, seed=2))
        await asyncio.sleep(0.05)
        await first.close()
        second = await waiting
        assert (await second.get_observation())["value"] == 2
        await second.close()


async def test_session_survives_pings_between_actions() -> None:
    async with OpenEnvServer(heartbeat=0.05).running() as server:
        resource = await made(server)
        await asyncio.sleep(0.3)
        assert (await act(resource, 1)).observation["value"] == 1
        await resource.close()


async def test_single_observation_field_or_bare_metadata_is_shown(server: OpenEnvServer) -> None:
    resource = await made(server, observation_field="text")
    assert await resource.get_observation() == "at 0"
    await resource.close()
    resource = await made(server, reset={"fault": "bare"})
    assert (await act(resource, 1)).observation == {"hint": "left"}
    await resource.close()
    with pytest.raises(EnvironmentFailure, match="observation_field 'txt'; did you mean 'text'"):
        await made(server, observation_field="txt")


async def test_large_observation_is_accepted(server: OpenEnvServer) -> None:
    resource = await made(server, reset={"fault": "large"})
    assert len((await act(resource, 1)).observation["text"]) == 5 * 2**20
    await resource.close()


async def test_headers_are_sent_on_connection(server: OpenEnvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "Bearer secret")
    given = {"headers": {"X-Key": "1"}, "headers_env": {"Authorization": "TOKEN_OF_TEST"}}
    with pytest.raises(ConfigError, match=r"Authorization: TOKEN_OF_TEST is not configured for http://127\.0\.0\.1:"):
        await made(server, **given)
    assert not server.headers
    monkeypatch.setenv("REWARD_KIT_KEY_ORIGINS", f"TOKEN_OF_TEST={server.url}")
    resource = await made(server, **given)
    assert (server.headers["X-Key"], server.headers["Authorization"]) == ("1", "Bearer secret")
    await resource.close()


async def test_redirect_is_not_followed(server: OpenEnvServer) -> None:
    async with OpenEnvServer().running() as other:
        server.redirects_to = f"{other.url}/ws"
        with pytest.raises(EnvironmentFailure, match=r"redirect \(HTTP 302\) to http.*/ws; use that address"):
            await made(server, headers={"X-Api-Key": "secret"})
        assert other.headers == {} and server.open == 0


WRONG = {
    "base_url: missing": {},
    "'ftp://x' is not a http or https or ws or wss URL": {"base_url": "ftp://x"},
    "base_url: must not contain a user name or password; use headers_env": {
        "base_url": "http://me:hunter2@127.0.0.1:1"
    },
    "needs a resource_server that uses {port}, but the task has no such server": {"base_url": "http://x:{port}"},
    "reset: seed is set by the run": {"base_url": "http://x", "reset": {"seed": 1}},
    "headers_env: A: the environment variable NO_SUCH_ONE is not set": {
        "base_url": "http://x",
        "headers_env": {"A": "NO_SUCH_ONE"},
    },
    "did you mean 'timeout'": {"base_url": "http://x", "timeuot": 1},
}


@pytest.mark.parametrize(("message", "config"), WRONG.items(), ids=[message[:20] for message in WRONG])
async def test_invalid_configuration_is_reported(message: str, config: dict[str, Any]) -> None:
    resource = OpenEnvResource()
    with pytest.raises(ConfigError, match=message) as caught:
        await resource.setup(config)
    assert "hunter2" not in str(caught.value)
    await resource.close()


async def test_action_that_is_not_an_object_needs_a_schema(server: OpenEnvServer) -> None:
    with pytest.raises(ConfigError, match="set action_schema to a JSON schema of type object"):
        await made(server, action_schema={"anyOf": []})
    given = {"type": "object", "properties": {"amount": {"enum": [1, 2]}}, "required": ["amount"]}
    resource = await made(server, action_schema=given, action_tool="add")
    (tool,) = await resource.get_tools_spec()
    assert (tool["function"]["name"], tool["function"]["parameters"]) == ("add", given)
    assert (await resource.step("add", {"amount": 1})).observation["value"] == 1
    await resource.close()


async def test_unserved_address_is_reported() -> None:
    async with OpenEnvServer().running() as server:
        pass
    with pytest.raises(EnvironmentFailure, match=r"ws://127.0.0.1:\d+/ws: ClientConnectorError"):
        await made(server)


def test_openenv_is_a_built_in_resource() -> None:
    assert resource_class("openenv") is OpenEnvResource
