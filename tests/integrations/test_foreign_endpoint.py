"""Test complete tool episodes on `transformers serve` and litellm's proxy, in each of their APIs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from reward_kit.providers.chat import DIALECTS
from tests.chat_server import Behavior, ChatServer, answer, cut_body, cut_stream, dropped, status, tool_calls
from tests.providers.test_dialects import REASONING

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parent.parent.parent
TRANSFORMERS = ROOT / ".integrations" / "transformers" / "bin"
LITELLM = ROOT / ".integrations" / "litellm" / "bin"
TASK = TaskDefinitionModel(
    name="sum", initial_user_prompt="How much is 2 + 2? Use the tool.", on_text="end", max_episode_steps=4
)
CALL = ("add", {"x": 2, "y": 2})
EPISODE = [("assistant", ""), ("tool", "4"), ("assistant", "four")]
ROUTES = {"chat": "openai", "responses": "openai-responses", "messages": "anthropic"}
"""The models of the proxy that are served in the same API."""
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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_transformers_serve_runs_tool_episodes(tmp_path, api, stream):
    if not TRANSFORMERS.exists():
        pytest.skip("run `make test-integrations`")
    maker, model = Path(__file__).with_name("transition_model.py"), str(tmp_path / "model")
    made = await asyncio.create_subprocess_exec(TRANSFORMERS / "python", maker, model)
    assert await made.wait() == 0
    command = [str(TRANSFORMERS / "transformers"), "serve", model, "--device", "cpu", "--port", "{port}"]
    async with serving([*command, "--host", "127.0.0.1"], "/health") as url:
        episodes = await collect(url, model, api=api, stream=stream, max_tokens=16)
    for episode in episodes:
        assert episode.custom_data["failure"] is None and episode.custom_data["stop_reason"] == "answered"
        assert said(episode) == EPISODE
        assert episode.messages[1].tool_calls[0].function.name == "add"
        assert episode.custom_data["usage"]["completion_tokens"] == 4 + 2


def litellm_config(upstream: str) -> dict:
    """Return a configuration with litellm's mock responses, and routes to another endpoint in each API."""
    mock = {"model": "openai/mock", "api_key": "none"}
    function = {"name": "add", "arguments": '{"x": 2, "y": 2}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    routed = {"api_base": upstream, "api_key": "none"}
    models = {
        "mock": {**mock, "mock_response": "four"},
        "mock-calls": {**mock, "mock_tool_calls": calls},
        "openai": {**routed, "model": "openai/routed"},
        "openai-responses": {**routed, "model": "openai/responses/routed"},
        "anthropic": {**routed, "model": "anthropic/routed", "api_base": f"{upstream}/messages"},
    }
    return {"model_list": [{"model_name": name, "litellm_params": params} for name, params in models.items()]}


@contextlib.asynccontextmanager
async def litellm_proxy(folder: Path, upstream: ChatServer) -> AsyncIterator[tuple[str, str]]:
    """Yield the base URL and the key of a proxy whose models are those of another server."""
    if not LITELLM.exists():
        pytest.skip("run `make test-integrations`")
    config, key = folder / "config.yaml", f"sk-{secrets.token_hex(16)}"
    environment = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(LITELLM / "litellm"), "--config", str(config), "--port", "{port}", "--host", "127.0.0.1"]
    config.write_text(yaml.safe_dump(litellm_config(upstream.base_url)))
    async with serving(command, "/health/liveliness", environment) as url:
        yield url, key


def ask_then_answer(body):
    """Answer with a call first, and with text once its result is present, in any API."""
    last = body["messages" if "messages" in body else "input"][-1]
    blocks = last["content"] if isinstance(last.get("content"), list) else []
    kinds = [last.get("role"), last.get("type"), *(block["type"] for block in blocks)]
    is_result = {"tool", "function_call_output", "tool_result"}.intersection(kinds)
    return answer("four") if is_result else tool_calls([CALL])


async def test_litellm_proxy_runs_tool_episodes(tmp_path):
    async with ChatServer(ask_then_answer) as upstream, litellm_proxy(tmp_path, upstream) as (url, key):
        for stream in (False, True):
            for episode in await collect(url, "mock", stream=stream, api_key=key):
                assert said(episode) == [("assistant", "four")]
        for episode in await collect(url, "mock-calls", stream=False, api_key=key):
            assert episode.custom_data["stop_reason"] == "max_steps"
            assert [text for role, text in said(episode) if role == "tool"] == ["4"] * 4
        (refused,) = await collect(url, "mock", stream=False, count=1, api_key="sk-wrong")
        assert refused.custom_data["failure"]["class"] == "provider_error"


async def test_litellm_proxy_translates_between_all_apis(tmp_path):
    async with ChatServer(ask_then_answer) as upstream, litellm_proxy(tmp_path, upstream) as (url, key):
        for api, route, stream in itertools.product(DIALECTS, ROUTES.values(), (False, True)):
            seed = api != "chat" or route != "anthropic"  # litellm rejects a seed for models of Anthropic
            options = {"api": api, "stream": stream, "send_seed": seed, "api_key": key}
            for episode in await collect(url, route, **options):
                assert episode.custom_data["failure"] is None, (api, route, stream)
                assert said(episode) == EPISODE, (api, route, stream)
                usage = episode.custom_data["usage"]
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (22, 14)
        assert len(upstream.requests) == 3 * 3 * 2 * 4 * 2


async def test_reasoning_passes_a_litellm_proxy_unchanged(tmp_path):
    script: list[Behavior] = []
    server = ChatServer(lambda body: script.pop(0) if script else ask_then_answer(body))
    async with server as upstream, litellm_proxy(tmp_path, upstream) as (url, key):
        for api, stream in itertools.product(REASONING, (False, True)):
            script.append(tool_calls([CALL], "Going.", message={"items": REASONING[api]}))
            (episode,) = await collect(url, ROUTES[api], api=api, stream=stream, count=1, api_key=key)
            assert said(episode) == [("assistant", "Going."), *EPISODE[1:]]
            body = upstream.bodies[-1]
            sent = body["input"] if api == "responses" else body["messages"][1]["content"]
            for item in REASONING[api]:
                assert item in sent, (api, stream)


FAULTS = {
    **{f"status {code}": status(code, {"Retry-After": "0"}) for code in (429, 500, 503, 529)},
    "dropped connection": dropped(),
    "cut body": cut_body(),
    "cut connection": cut_stream(connection=True),
    "cut stream": cut_stream(),
    "no final event": cut_stream(keep=1),
    "half an event": cut_stream(half_event=True),
}


async def test_faults_behind_a_litellm_proxy_do_not_change_the_episode(tmp_path):
    script: list[Behavior] = []
    server = ChatServer(lambda body: script.pop(0) if script else ask_then_answer(body))
    async with server as upstream, litellm_proxy(tmp_path, upstream) as (url, key):
        for (api, route), stream, (name, fault) in itertools.product(ROUTES.items(), (False, True), FAULTS.items()):
            is_cut_quietly = fault in (FAULTS["cut stream"], FAULTS["no final event"], FAULTS["half an event"])
            if is_cut_quietly and (api == "chat" or not stream):
                continue  # for chat completions, litellm itself completes such an answer with finish_reason "stop"
            script.append(fault)
            (episode,) = await collect(url, route, api=api, stream=stream, count=1, api_key=key, retry_base_s=0.01)
            assert episode.custom_data["failure"] is None, (api, stream, name)
            assert said(episode) == EPISODE, (api, stream, name)
            assert not script
