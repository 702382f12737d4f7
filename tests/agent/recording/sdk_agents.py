"""The usual agent loop in each API, with the official SDKs, streaming or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from reward_kit.agent.policies.own_agent_policy import AgentTask


def chat_agent(stream: bool) -> Callable[..., Any]:
    async def agent(task: AgentTask, base_url: str) -> None:
        messages: list[Any] = list(task.messages)
        request: dict[str, Any] = {"model": "any", "tools": task.tools}
        async with AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            while True:
                if stream:
                    async with client.chat.completions.stream(messages=messages, **request) as events:
                        reply = (await events.get_final_completion()).choices[0].message
                else:
                    reply = (await client.chat.completions.create(messages=messages, **request)).choices[0].message
                dumped = reply.model_dump(exclude_none=True)
                for call in dumped.get("tool_calls", ()):
                    call["function"].pop("parsed_arguments", None)
                messages.append(dumped)
                if not reply.tool_calls:
                    return
                for call in reply.tool_calls:
                    text = await task.call_tool(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    return agent


def responses_agent(stream: bool, by_id: bool = False) -> Callable[..., Any]:
    """Return an agent that sends all items back, or only the new ones and the id of the response before them."""

    async def agent(task: AgentTask, base_url: str) -> None:
        items: list[Any] = list(task.messages)
        request: dict[str, Any] = {
            "model": "any",
            "tools": [tool["function"] | {"type": "function"} for tool in task.tools],
        }
        async with AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            while True:
                if stream:
                    async with client.responses.stream(input=items, **request) as events:
                        reply = await events.get_final_response()
                else:
                    reply = await client.responses.create(input=items, **request)
                if by_id:
                    request["previous_response_id"], items = reply.id, []
                else:
                    items += [
                        {key: value for key, value in item.to_dict().items() if key != "parsed_arguments"}
                        for item in reply.output
                    ]
                calls = [item for item in reply.output if item.type == "function_call"]
                if not calls:
                    return
                for call in calls:
                    text = await task.call_tool(call.name, call.arguments)
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})

    return agent


def messages_agent(stream: bool) -> Callable[..., Any]:
    async def agent(task: AgentTask, base_url: str) -> None:
        system, asked = task.messages
        messages: list[Any] = [asked]
        tools = [
            {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
            for function in (tool["function"] for tool in task.tools)
        ]
        request: dict[str, Any] = {"model": "any", "max_tokens": 100, "system": system["content"], "tools": tools}
        root = base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=root, api_key="any", max_retries=0) as client:
            while True:
                if stream:
                    async with client.messages.stream(messages=messages, **request) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(messages=messages, **request)
                messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
                calls = [block for block in reply.content if block.type == "tool_use"]
                assert (reply.stop_reason == "tool_use") == bool(calls)
                if not calls:
                    return
                results = []
                for call in calls:
                    text = await task.call_tool(call.name, json.dumps(call.input))
                    results.append({"type": "tool_result", "tool_use_id": call.id, "content": text})
                messages.append({"role": "user", "content": results})

    return agent
