"""Agents with custom loops, and an episode of such an agent with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from openai import AsyncOpenAI, OpenAI

from reward_kit import RLRolloutWorker, TaskDefinitionModel, ToolRegistry
from reward_kit.agent.policies.own_agent_policy import AgentTask, OwnAgentPolicy
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from tests.chat_server import ChatServer, Script, tool_calls

registry = ToolRegistry("adder")


@registry.tool
async def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


SUM = tool_calls([("add", {"x": 1, "y": 2})])
COUNT = tool_calls([("add", {"by": 2})])


def task_of(**fields: Any) -> TaskDefinitionModel:
    return TaskDefinitionModel.model_validate({"name": "t", "initial_user_prompt": "Add.", **fields})


@asynccontextmanager
async def served(script: Script, agent: Callable[..., Any], **options: Any):
    async with ChatServer(script) as server:
        policy = OwnAgentPolicy(agent, "m", base_url=server.base_url, api_key="secret", retry_base_s=0.001, **options)
        try:
            yield server, policy
        finally:
            await policy.close()


async def collect(
    script: Script, agent: Callable[..., Any], *, tools: ToolRegistry | None = registry, **fields: Any
) -> tuple[SingleAgentEpisode, ChatServer]:
    options = fields.pop("options", {})
    async with served(script, agent, **options) as (server, policy):
        return await RLRolloutWorker(task_of(**fields), policy, tools=tools).collect_episode(seed=3), server


def shown(episode: SingleAgentEpisode) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in episode.messages]


def client_of(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="the agent's own", max_retries=0)


async def loop(task: AgentTask, base_url: str) -> None:
    """Run the usual agent loop: request, call the tools, request again."""
    messages = list(task.messages)
    async with client_of(base_url) as client:
        while True:
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=task.tools)
            reply_message = reply.choices[0].message
            messages.append(reply_message.model_dump(exclude_none=True))
            if not reply_message.tool_calls:
                return
            for call in reply_message.tool_calls:
                text = await task.call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def streaming_loop(task: AgentTask, base_url: str) -> None:
    """Run the loop with streams."""
    messages = list(task.messages)
    async with client_of(base_url) as client:
        while True:
            async with client.chat.completions.stream(
                model="any", messages=messages, tools=task.tools, stream_options={"include_usage": True}
            ) as stream:
                final = await stream.get_final_completion()
            assert final.usage is not None and final.usage.total_tokens == 18
            reply_message = final.choices[0].message
            messages.append(
                reply_message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
                | (
                    {"tool_calls": [plain(call) for call in reply_message.tool_calls]}
                    if reply_message.tool_calls
                    else {}
                )
            )
            if not reply_message.tool_calls:
                return
            for call in reply_message.tool_calls:
                text = await task.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def plain(call: Any) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }


def threaded_loop(task: AgentTask, base_url: str) -> str:
    """Run the loop in a plain function with a blocking client."""
    messages = list(task.messages)
    with OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        while True:
            reply = client.chat.completions.create(model="any", messages=messages, tools=task.tools)
            reply_message = reply.choices[0].message
            messages.append(reply_message.model_dump(exclude_none=True))
            if not reply_message.tool_calls:
                return reply_message.content or ""
            for call in reply_message.tool_calls:
                text = task.call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def bare_loop(task: AgentTask, base_url: str) -> None:
    """Run the loop over bare HTTP, which takes a hundredth of the time."""
    messages = list(task.messages)
    async with aiohttp.ClientSession() as http:
        while True:
            body = {"messages": messages, "tools": task.tools}
            async with http.post(f"{base_url}/chat/completions", json=body) as response:
                payload = (await response.json())["choices"][0]["message"]
            messages.append(payload)
            if not payload.get("tool_calls"):
                return
            for call in payload["tool_calls"]:
                text = await task.call_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def ask(base_url: str, *texts: str, **body: Any) -> dict[str, Any]:
    """Send one request over bare HTTP."""
    messages = [{"role": "user", "content": text} for text in texts]
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/chat/completions", json={"messages": messages, **body}) as response,
    ):
        return await response.json()
