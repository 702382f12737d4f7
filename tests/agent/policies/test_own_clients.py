"""Test the user's own model clients in `OpenAIAgentPolicy` and in custom policies."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx2
import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletion

from reward_kit import AgentPolicy, PolicyOutput, RLRolloutWorker, TaskDefinitionModel
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.episodes.record import get_facts
from reward_kit.errors import ConfigError, PolicyError, ProviderError
from reward_kit.models import Message
from tests.chat_server import ChatServer, answer, dropped, status

TASK = TaskDefinitionModel(name="t", messages=[Message(role="user", content="6 * 7?")], on_text="end")
ASK = [Message(role="user", content="6 * 7?")]


class OpenAIClientPolicy(AgentPolicy):
    """A policy that uses the openai package as a new user would."""

    def __init__(self, base_url: str) -> None:
        self.client = openai.AsyncOpenAI(base_url=base_url, api_key="sk-of-the-user", max_retries=0)

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
        messages = [message.to_chat() for message in observation]
        done = await self.client.chat.completions.create(model="m", messages=messages)
        return PolicyOutput.from_chat_completion(done)

    async def close(self) -> None:
        await self.client.close()


@asynccontextmanager
async def worker_of(kind: type[OpenAIClientPolicy], base_url: str) -> AsyncIterator[RLRolloutWorker]:
    policy = kind(base_url)
    try:
        yield RLRolloutWorker(TASK, policy)
    finally:
        await policy.close()


# OpenAIAgentPolicy


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_use_the_given_client(stream: bool) -> None:
    async with ChatServer([status(503), answer("42")]) as server:
        headers = {"X-Team": "blue"}
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="sk-own", default_headers=headers) as client:
            policy = OpenAIAgentPolicy(
                "m", client=client, temperature=0.5, stream=stream, retry_base_s=0.01, extra_body={"top_k": 5}
            )
            output = await policy.get_action(ASK)
            await policy.close()
            assert not client.is_closed()
    assert output.action_structured == {"type": "text", "content": "42"}
    assert output.log_probs is not None and output.log_probs["usage"] == {"prompt_tokens": 11, "completion_tokens": 7}
    first, second = server.requests
    assert first.body == second.body, "our retry, not the client's"
    sent = {name.lower(): value for name, value in second.headers.items()}
    assert (sent["authorization"], sent["x-team"]) == ("Bearer sk-own", "blue")
    assert second.body["messages"] == [{"role": "user", "content": "6 * 7?"}]
    assert (second.body["temperature"], second.body["top_k"], second.body.get("stream", False)) == (0.5, 5, stream)


async def test_azure_client_addresses_its_deployment() -> None:
    asked = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((request.path, dict(request.query), request.headers["api-key"]))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "42"}}]})

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with openai.AsyncAzureOpenAI(azure_endpoint=url, api_key="azure-key", api_version="2024-10-21") as client:
        await OpenAIAgentPolicy("gpt-own", client=client).get_action(ASK)
    policy = OpenAIAgentPolicy(
        "m", base_url=f"{url}/v1/?api-version=7", default_headers={"api-key": "own-key"}, max_attempts=1
    )
    await policy.get_action(ASK)
    await policy.close()
    async with httpx2.AsyncClient(headers={"api-key": "of-the-client"}) as http_client:
        policy = OpenAIAgentPolicy("m", base_url=f"{url}/v1?api-version=8", api_key="k", http_client=http_client)
        await policy.get_action(ASK)
    await runner.cleanup()
    assert asked == [
        ("/openai/deployments/gpt-own/chat/completions", {"api-version": "2024-10-21"}, "azure-key"),
        ("/v1/chat/completions", {"api-version": "7"}, "own-key"),
        ("/v1/chat/completions", {"api-version": "8"}, "of-the-client"),
    ]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (status(401), r"returned HTTP 401: .*check the key"),
        (status(500), r"returned HTTP 500"),
        (dropped(), r"did not answer"),
    ],
)
async def test_failure_of_the_given_client_is_a_provider_error(behaviour: Any, message: str) -> None:
    async with (
        ChatServer([behaviour] * 2) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="sk-own-secret") as client,
        httpx2.AsyncClient() as http_client,
    ):
        policy = OpenAIAgentPolicy("m", client=client, max_attempts=1)
        with pytest.raises(ProviderError, match=message) as error:
            await policy.get_action(ASK)
        assert f"{server.base_url}/chat/completions" in str(error.value) and "sk-own-secret" not in str(error.value)
        policy = OpenAIAgentPolicy(
            "m", base_url=server.base_url, api_key="sk-own-secret", http_client=http_client, max_attempts=1
        )
        with pytest.raises(ProviderError, match=message.partition(": ")[0]):
            await policy.get_action(ASK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": "own", "base_url": "http://127.0.0.1:1/v1"}, "base_url: the client defines this setting"),
        ({"client": "sync"}, "client: expected an AsyncOpenAI or AsyncAzureOpenAI, got an OpenAI"),
        ({"http_client": 3, "api_key": "k"}, r"http_client: expected an httpx\.AsyncClient, got an int"),
        ({"default_headers": {"a": 1}, "api_key": "k"}, "default_headers must be a mapping of names to strings"),
        ({"base_url": "http://127.0.0.1:1/v1?api_key=secret", "api_key": "k"}, "contains a credential, 'api_key'"),
    ],
)
def test_contradicting_options_are_rejected(options: dict[str, Any], message: str) -> None:
    clients = {"own": openai.AsyncOpenAI(api_key="k"), "sync": openai.OpenAI(api_key="k")}
    options = {key: clients.get(value, value) if key == "client" else value for key, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        OpenAIAgentPolicy("m", **options)


# Custom policies


async def test_completion_converts_to_policy_output() -> None:
    message = {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}],
    }
    data = {
        "id": "x",
        "created": 0,
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": message,
                "token_ids": [5],
                "logprobs": {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": []}]},
            }
        ],
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    }
    for completion in (data, ChatCompletion.model_validate(data)):
        output = PolicyOutput.from_chat_completion(completion, value_estimate=0.5)
        call = {"name": "look", "arguments": {"at": 1}, "id": "c1"}
        action = {"type": "tool_calls", "calls": [call], "content": "Let me look.", "reasoning_content": "hm"}
        assert output.action_structured == action and output.raw_policy_output == "Let me look."
        assert output.value_estimate == 0.5 and output.log_probs == {
            "prompt_ids": [1, 2],
            "token_ids": [5],
            "logprobs": [-0.5],
            "usage": {"prompt_tokens": 2, "completion_tokens": 1},
            "finish_reason": "tool_calls",
        }
    with pytest.raises(PolicyError, match="must be a ChatCompletion or a mapping, got a str"):
        PolicyOutput.from_chat_completion("42")
    with pytest.raises(ProviderError, match="without choices"):
        PolicyOutput.from_chat_completion({"choices": []})


async def test_calls_without_ids_get_step_ids() -> None:
    call = {"function": {"name": "look", "arguments": {}}}
    output = PolicyOutput.from_chat_completion({"choices": [{"message": {"tool_calls": [call]}}]})
    assert output.action_structured == {"type": "tool_call", "name": "look", "arguments": {}, "id": ""}


async def test_temporary_client_failures_are_retried() -> None:
    script = [status(503), status(429, {"Retry-After": "0"}), dropped(), answer("42")]
    async with ChatServer(script) as server, worker_of(OpenAIClientPolicy, server.base_url) as worker:
        episode = await worker.collect_episode()
    assert get_facts(episode)["failure"] is None and episode.messages[-1].text == "42"
    assert len(server.requests) == 4


async def test_a_long_wait_for_a_retry_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    script = [status(503, {"Retry-After": "5"}), answer("42")]
    async with ChatServer(script) as server, worker_of(OpenAIClientPolicy, server.base_url) as worker:
        await worker.run_episode()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(
        r"attempt 1 failed; the next attempt starts in 5\.\d\d s: the endpoint of OpenAIClientPolicy returned HTTP 503",
        warning,
    )


async def test_unknown_keys_of_log_probs_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    class Typo(AgentPolicy):
        async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
            return PolicyOutput({"type": "text", "content": "42"}, None, {"tokn_ids": [1], "finish_reason": "stop"})

    worker = RLRolloutWorker(TASK, Typo())
    for _ in range(2):
        await worker.run_episode()
    (warning,) = caplog.messages
    assert "Typo: log_probs: unknown key 'tokn_ids' is dropped; did you mean 'token_ids'? (known: all" in warning


@pytest.mark.parametrize(
    ("code", "advice"),
    [(400, "fix the request"), (401, "check the key"), (404, "check the client's base URL"), (422, "fix the request")],
)
async def test_permanent_failure_reports_the_fix(code: int, advice: str) -> None:
    async with ChatServer([status(code)]) as server, worker_of(OpenAIClientPolicy, server.base_url) as worker:
        with pytest.raises(
            ProviderError, match=rf"the endpoint of OpenAIClientPolicy returned HTTP {code}: .*; {advice}"
        ):
            await worker.run_episode()
    assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["httpx", "aiohttp", "anthropic"])
async def test_errors_of_other_http_clients_are_retried(kind: str) -> None:
    class Other(OpenAIClientPolicy):
        async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
            url = f"{self.client.base_url}chat/completions"
            if kind == "aiohttp":
                async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(url, json={}) as done:
                    data = await done.json()
            elif kind == "httpx":
                async with httpx2.AsyncClient() as client:
                    data = (await client.post(url, json={})).raise_for_status().json()
            else:
                anthropic = pytest.importorskip("anthropic")
                own = anthropic.AsyncAnthropic(base_url=self.client.base_url, api_key="k", max_retries=0)
                async with own:
                    data = await own.post("/chat/completions", cast_to=object, body={})
            return PolicyOutput.from_chat_completion(data)

    async with ChatServer([status(503), answer("42")]) as server, worker_of(Other, server.base_url) as worker:
        steps, _, _ = await worker.run_episode()
    assert steps[0].raw_policy_output == "42" and len(server.requests) == 2


async def test_policy_that_has_called_tools_is_not_retried() -> None:
    class Acting(OpenAIClientPolicy):
        call_tool: Any = None

        async def open(self, context: Any) -> AgentPolicy:
            self.call_tool = context.call_tool
            return self

        async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
            await self.call_tool("look", {})
            return await super().get_action(observation, available_tools_specs)

    async with ChatServer([status(503)]) as server, worker_of(Acting, server.base_url) as worker:
        with pytest.raises(ProviderError, match=r"HTTP 503.*get_action was not retried"):
            await worker.run_episode()
    assert len(server.requests) == 1


async def test_bug_in_a_policy_is_not_retried() -> None:
    class Broken(AgentPolicy):
        async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
            raise KeyError("answer")

    with pytest.raises(PolicyError, match="KeyError"):
        await RLRolloutWorker(TASK, Broken()).run_episode()
