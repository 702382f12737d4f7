"""A fast server of chat completions, Responses and Messages for benchmarks: it answers immediately or after a delay.

    python benchmarks/instant_server.py [--turns 5] [--delay 2.0]

The server prints its port and listens on 127.0.0.1. It answers a request with tools with a call of the first tool until
the conversation has `--turns` - 1 assistant messages, then with the text "4". It answers a request without tools with
the text. `--delay` adds that many seconds to each response. Other benchmarks start it with `running_server`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ARGUMENTS = {"x": 1, "y": 1}


def completion(body: dict[str, Any], turns: int, number: int) -> dict[str, Any]:
    """Return a chat completion."""
    turns_so_far = sum(message.get("role") == "assistant" for message in body["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": "4"}
    finish = "stop"
    if body.get("tools") and turns_so_far < turns - 1:
        name = body["tools"][0]["function"]["name"]
        function = {"name": name, "arguments": json.dumps(ARGUMENTS)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        message, finish = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": body.get("model"),
        "choices": [{"index": 0, "finish_reason": finish, "message": message, "logprobs": None}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def response(body: dict[str, Any], turns: int, number: int) -> dict[str, Any]:
    """Return a response of OpenAI, which repeats the options of the request."""
    turns_so_far = sum(item.get("type") == "function_call" for item in body["input"])
    part = {"type": "output_text", "text": "4", "annotations": [], "logprobs": []}
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    if body.get("tools") and turns_so_far < turns - 1:
        call = {"name": body["tools"][0]["name"], "arguments": json.dumps(ARGUMENTS), "call_id": f"call_{number}"}
        item = {"id": f"fc_{number}", "type": "function_call", "status": "completed", **call}
    options = {"parallel_tool_calls": True, "tool_choice": "auto", "temperature": 1.0, "top_p": 1.0, "store": False}
    empty = dict.fromkeys(["error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id"])
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": body.get("model"),
        "output": [item],
        "tools": body.get("tools", []),
        **options,
        **empty,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": usage,
        "metadata": {},
    }


def message(body: dict[str, Any], turns: int, number: int) -> dict[str, Any]:
    """Return a message of Anthropic."""
    turns_so_far = sum(message["role"] == "assistant" for message in body["messages"])
    block: dict[str, Any] = {"type": "text", "text": "4"}
    reason = "end_turn"
    if body.get("tools") and turns_so_far < turns - 1:
        name = body["tools"][0]["name"]
        block, reason = {"type": "tool_use", "id": f"call_{number}", "name": name, "input": ARGUMENTS}, "tool_use"
    usage = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": [block],
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {**usage, "service_tier": "standard"},
    }


ANSWERS = {"chat/completions": completion, "responses": response, "messages": message}
"""The functions that answer a request, by path."""


def serve(turns: int, delay_s: float) -> None:
    """Serve until killed."""
    from aiohttp import web

    served = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal served
        served += 1
        value = ANSWERS[request.path.removeprefix("/v1/")](await request.json(), turns, served)
        if delay_s:
            await asyncio.sleep(delay_s)
        return web.Response(body=json.dumps(value).encode(), content_type="application/json")

    async def main() -> None:
        app = web.Application(client_max_size=1 << 24)
        for path in ANSWERS:
            app.router.add_post(f"/v1/{path}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def running_server(turns: int = 5, delay_s: float = 0.0) -> Iterator[str]:
    """Start the server in a subprocess, yield its base URL and kill it on exit."""
    command = [sys.executable, str(Path(__file__).resolve()), "--turns", str(turns), "--delay", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="assistant messages per conversation")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per response")
    options = parser.parse_args()
    serve(options.turns, options.delay)
