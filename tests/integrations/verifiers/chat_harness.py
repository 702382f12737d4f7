"""An in-process harness for verifiers: chat completions and MCP tools until the model answers with text.

verifiers' own are scripts that `uv` runs with packages from the network; this one is the same loop without them.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import verifiers.v1 as vf
from mcp.client import Client

__all__ = ["ChatHarness"]


class ChatHarnessConfig(vf.HarnessConfig):
    pass


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **_: Any,
    ) -> vf.ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages = [message.model_dump(exclude_none=True) for message in prompt or ()]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as http:
            tools = [tool for url in mcp_urls.values() for tool in await _listed(url)]
            while True:
                body = {
                    "model": ctx.model,
                    "messages": messages,
                    **({"tools": [spec for _, spec in tools]} if tools else {}),
                }
                answer = await http.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=0 if trace.stop_condition else 1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    url = next(url for url, spec in tools if spec["function"]["name"] == call["function"]["name"])
                    text = await _called(url, call["function"]["name"], json.loads(call["function"]["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def _listed(url: str) -> list[tuple[str, dict[str, Any]]]:
    async with Client(url) as client:
        found = (await client.list_tools()).tools
    return [
        (
            url,
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            },
        )
        for t in found
    ]


async def _called(url: str, name: str, arguments: dict[str, Any]) -> str:
    async with Client(url) as client:
        result = await client.call_tool(name, arguments)
    return "\n".join(block.text for block in result.content if block.type == "text")
