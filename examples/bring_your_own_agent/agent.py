"""An agent with its own loop and tool. It needs the model's URL and does not depend on reward-kit."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
MULTIPLY = {"name": "multiply", "description": "The product of two numbers.", "parameters": PARAMETERS}


def multiply(x: int, y: int) -> int:
    """Return the product of two numbers."""
    return x * y


async def agent(task: Any, base_url: str) -> None:
    """Call the model and execute its tool calls until it answers with text."""
    messages = [{"role": "system", "content": "Calculate with the tool."}, *task.messages]
    async with aiohttp.ClientSession() as http:
        while True:
            request = {"messages": messages, "tools": [{"type": "function", "function": MULTIPLY}]}
            async with http.post(f"{base_url}/chat/completions", json=request) as response:
                answer = (await response.json())["choices"][0]["message"]
            messages.append(answer)
            if not answer.get("tool_calls"):
                return
            for call in answer["tool_calls"]:
                product = multiply(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(product)})
