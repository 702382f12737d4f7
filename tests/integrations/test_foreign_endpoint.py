"""Test complete tool episodes on other OpenAI-compatible servers: `transformers serve` and litellm's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.environments.tools import ToolRegistry
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers import ProviderSession
from tests.chat_server import ChatServer, answer, tool_calls

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parent.parent.parent
TRANSFORMERS = ROOT / ".integrations" / "transformers" / "bin"
LITELLM = ROOT / ".integrations" / "litellm" / "bin"
TASK = TaskDefinitionModel(
    name="sum", initial_user_prompt="How much is 2 + 2? Use the tool.", on_text="end", max_episode_steps=4
)
CALL = ("add", {"x": 2, "y": 2})
tools = ToolRegistry("adder")


@tools.tool
async def add(x: int, y: int) -> int:
    """Sum of two numbers.

    Args:
        x: one number.
        y: another number.
    """
    return x + y


@contextlib.asynccontextmanager
async def serving(command: list[str], health: str, environment: dict[str, str] | None = None) -> AsyncIterator[str]:
    """Yield the base URL of a server with `{port}` in its command, and stop the server at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(part.format(port=port) for part in command),
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(180), aiohttp.ClientSession() as session:
            while not await is_up(session, f"http://127.0.0.1:{port}{health}"):
                assert process.returncode is None, f"{command[0]} ended with {process.returncode}"
                await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        await process.wait()


async def is_up(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def collect(url: str, model: str, *, stream: bool, count: int = 4, **options):
    """Collect episodes concurrently with one policy on a run's shared traffic."""
    policy = OpenAIAgentPolicy(model, base_url=url, stream=stream, traffic=ProviderSession(), **options)
    worker = RLRolloutWorker(TASK, policy, tools=tools)
    try:
        return await asyncio.gather(*(worker.collect_episode(seed=seed) for seed in range(count)))
    finally:
        await policy.close()


def said(episode) -> list[tuple[str, str]]:
    return [(message.role, message.text.strip()) for message in episode.messages[1:]]


@pytest.mark.parametrize("stream", [False, True])
async def test_transformers_serve_runs_tool_episodes(tmp_path, stream):
    if not TRANSFORMERS.exists():
        pytest.skip("run `make integrations`")
    maker, model = Path(__file__).with_name("transition_model.py"), str(tmp_path / "model")
    made = await asyncio.create_subprocess_exec(TRANSFORMERS / "python", maker, model)
    assert await made.wait() == 0
    command = [str(TRANSFORMERS / "transformers"), "serve", model, "--device", "cpu", "--port", "{port}"]
    async with serving([*command, "--host", "127.0.0.1"], "/health") as url:
        episodes = await collect(url, model, stream=stream, max_tokens=16)
    for episode in episodes:
        assert episode.custom_data["failure"] is None and episode.custom_data["stop_reason"] == "answered"
        assert said(episode) == [("assistant", ""), ("tool", "4"), ("assistant", "four")]
        assert episode.messages[1].tool_calls[0].function.name == "add"
        assert episode.custom_data["usage"]["completion_tokens"] == 4 + 2


def litellm_config(upstream: str) -> dict:
    """Return a configuration with litellm's mock responses and a route to another endpoint."""
    mock = {"model": "openai/mock", "api_key": "none"}
    function = {"name": "add", "arguments": '{"x": 2, "y": 2}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    models = {
        "mock": {**mock, "mock_response": "four"},
        "mock-calls": {**mock, "mock_tool_calls": calls},
        "routed": {"model": "openai/routed", "api_base": upstream, "api_key": "none"},
    }
    return {"model_list": [{"model_name": name, "litellm_params": params} for name, params in models.items()]}


def ask_then_answer(body):
    """Answer with a call first, and with text once its result is present."""
    return answer("four") if body["messages"][-1]["role"] == "tool" else tool_calls([CALL])


async def test_litellm_proxy_runs_tool_episodes(tmp_path):
    if not LITELLM.exists():
        pytest.skip("run `make integrations`")
    config, key = tmp_path / "config.yaml", f"sk-{secrets.token_hex(16)}"
    environment = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(LITELLM / "litellm"), "--config", str(config), "--port", "{port}", "--host", "127.0.0.1"]
    async with ChatServer(ask_then_answer) as upstream:
        config.write_text(yaml.safe_dump(litellm_config(upstream.base_url)))
        async with serving(command, "/health/liveliness", environment) as url:
            for stream in (False, True):
                for episode in await collect(url, "mock", stream=stream, api_key=key):
                    assert said(episode) == [("assistant", "four")]
                for episode in await collect(url, "routed", stream=stream, api_key=key):
                    assert episode.custom_data["failure"] is None
                    assert said(episode) == [("assistant", ""), ("tool", "4"), ("assistant", "four")]
            for episode in await collect(url, "mock-calls", stream=False, api_key=key):
                assert episode.custom_data["stop_reason"] == "max_steps"
                assert [text for role, text in said(episode) if role == "tool"] == ["4"] * 4
            (refused,) = await collect(url, "mock", stream=False, count=1, api_key="sk-wrong")
            assert refused.custom_data["failure"]["class"] == "provider_error"
