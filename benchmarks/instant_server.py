"""An OpenAI-compatible server that answers at once or after a fixed time, in a process of its own, to load clients.

    python benchmarks/instant_server.py [--turns 5] [--delay 2.0]

Prints its port and serves on 127.0.0.1. A request with tools gets a call of the first one until the conversation has
`--turns` - 1 assistant messages, then the text "4"; a request without tools gets the text in its first answer. With
`--delay` each answer takes that many seconds.
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

ARGUMENTS = '{"x": 1, "y": 1}'


def completion(body: dict[str, Any], turns: int, number: int) -> bytes:
    """The whole answer to one request."""
    asked = sum(message.get("role") == "assistant" for message in body["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": "4"}
    finish = "stop"
    if body.get("tools") and asked < turns - 1:
        name = body["tools"][0]["function"]["name"]
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        message, finish = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    answer = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": body.get("model"),
        "choices": [{"index": 0, "finish_reason": finish, "message": message, "logprobs": None}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    return json.dumps(answer).encode()


def serve(turns: int, delay_s: float) -> None:
    """Answer until killed."""
    from aiohttp import web

    served = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal served
        served += 1
        body = completion(await request.json(), turns, served)
        if delay_s:
            await asyncio.sleep(delay_s)
        return web.Response(body=body, content_type="application/json")

    async def main() -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def running_server(turns: int = 5, delay_s: float = 0.0) -> Iterator[str]:
    """The server's base URL while it runs."""
    command = [sys.executable, str(Path(__file__).resolve()), "--turns", str(turns), "--delay", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    serve(given.turns, given.delay)
