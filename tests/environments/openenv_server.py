"""A server for the OpenEnv 0.10 protocol with a counter, MCP tools and faults on demand.

The `reset` of a session names a fault, which the next step then shows; see `_FAULTS`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ACTION: dict[str, Any] = {
    "type": "object",
    "title": "Move",
    "description": "Add to the counter.",
    "additionalProperties": False,
    "properties": {
        "amount": {"type": "integer", "minimum": 1, "maximum": 3},
        "metadata": {"type": "object", "additionalProperties": True},
    },
    "required": ["amount"],
}
TOOL = {"name": "add", "description": "Add.", "inputSchema": {k: v for k, v in ACTION.items() if k != "title"}}
TOOL["inputSchema"] = {**TOOL["inputSchema"], "properties": {"amount": ACTION["properties"]["amount"]}}  # type: ignore[dict-item]

Socket = web.WebSocketResponse


class Counter:
    """Counts to six; the seed says from where."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.value = self.steps = 0
        self.is_reset = False

    def reset(self, given: dict[str, Any]) -> dict[str, Any]:
        self.given, self.is_reset, self.steps = given, True, 0
        self.value = given.get("seed", 0) % 3
        return self.shown(None)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        call = action["arguments"] if action.get("type") == "call_tool" else action
        amount = call.get("amount")
        if type(amount) is not int or call.keys() - {"amount"}:
            return error("VALIDATION_ERROR", errors=[{"loc": ["amount"], "msg": "Input should be an integer"}])
        if amount > 3:
            return error("EXECUTION_ERROR", "amount must be 1, 2 or 3")
        self.value += amount
        self.steps += 1
        return self.shown(float(self.value == 6), action)

    def shown(self, reward: float | None, action: dict[str, Any] | None = None) -> dict[str, Any]:
        metadata = {"success": self.value == 6, "truncated": self.value > 6}
        seen: dict[str, Any] = {"value": self.value, "text": f"at {self.value}"}
        if action is not None and "tool_name" in action:
            result = {"content": [{"type": "text", "text": f"at {self.value}"}], "data": None, "is_error": False}
            seen = {"tool_name": action["tool_name"], "result": result, "error": None}
        data = {"observation": {**seen, "metadata": metadata}, "reward": reward, "done": self.value >= 6}
        return {"type": "observation", "data": {**data, "metadata": metadata}}


def error(code: str, message: str = "Invalid message", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


async def _hang(socket: Socket) -> None:
    await asyncio.sleep(30)


async def _hang_up(socket: Socket) -> None:
    await socket.close(code=1011, message=b"broken")


async def _says_twice(socket: Socket) -> None:
    for _ in range(2):
        await _answers(observation={"value": 7})(socket)


async def _floods(socket: Socket) -> None:
    for _ in range(40):
        await _answers(observation={"text": "x" * 2**20})(socket)


def _says(text: str) -> Callable[[Socket], Awaitable[None]]:
    return lambda socket: socket.send_str(text)


def _answers(**data: Any) -> Callable[[Socket], Awaitable[None]]:
    return _says(
        json.dumps({"type": "observation", "data": {"observation": {}, "reward": None, "done": False, **data}})
    )


_FAULTS: dict[str, Callable[[Socket], Awaitable[None]]] = {
    "hang": _hang,
    "hang_up": _hang_up,
    "html": _says("<html>hello</html>"),
    "nan": _says('{"type": "observation", "data": {"reward": NaN}}'),
    "list": _says("[1]"),
    "other": _says('{"type": "state", "data": {}}'),
    "binary": lambda socket: socket.send_bytes(b"\x00"),
    "bad_reward": _answers(reward="high"),
    "bad_done": _answers(done="yes"),
    "no_observation": _answers(observation=None),
    "tool_error": _answers(
        observation={"tool_name": "add", "result": None, "error": {"message": "jammed"}}, reward=0.5
    ),
    "large": _answers(observation={"text": "x" * 5 * 2**20}),
    "twice": _says_twice,
    "flood": _floods,
    "huge_reward": _says('{"type": "observation", "data": {"observation": {}, "reward": 1' + "0" * 400 + "}}"),
    "bare": _answers(observation={"metadata": {"hint": "left"}}),
}


class OpenEnvServer:
    """The server, with what was seen of its clients.

    Args:
        capacity: sessions at a time.
        with_tools: its actions are calls of MCP tools.
        heartbeat: seconds between two pings.
    """

    def __init__(self, capacity: int = 8, *, with_tools: bool = False, heartbeat: float | None = None) -> None:
        self.capacity, self.with_tools, self.heartbeat = capacity, with_tools, heartbeat
        self.open = 0
        self.headers: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        self.url = ""
        self.redirects_to = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[OpenEnvServer]:
        app = web.Application()
        app.add_routes([web.get("/ws", self._session), web.get("/schema", self._schema)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"action": {"title": "CallToolAction", "type": "object"} if self.with_tools else ACTION}
        )

    async def _session(self, request: web.Request) -> Socket:
        if self.redirects_to:
            raise web.HTTPFound(self.redirects_to)
        socket = Socket(heartbeat=self.heartbeat)
        await socket.prepare(request)
        if self.open >= self.capacity:
            await socket.send_json(error("CAPACITY_REACHED", f"Server at capacity: {self.open}/{self.capacity}"))
            return socket
        self.open += 1
        self.headers = dict(request.headers)
        counter = Counter()
        try:
            async for message in socket:
                asked = message.json()
                self.asked.append(asked)
                if asked["type"] == "close":
                    break
                if asked["type"] == "step" and (fault := counter.given.get("fault")):
                    await _FAULTS[fault](socket)
                else:
                    await socket.send_json(self._answer(counter, asked))
        finally:
            self.open -= 1
        return socket

    def _answer(self, counter: Counter, asked: dict[str, Any]) -> dict[str, Any]:
        match asked["type"]:
            case "reset":
                return counter.reset(asked["data"])
            case "step":
                return counter.step(asked["data"])
            case "mcp":
                more = [{**TOOL, "name": name} for name in counter.given.get("more_tools", ())]
                return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": [TOOL, *more]}}}
            case _ if not counter.is_reset:
                return error("EXECUTION_ERROR", "not reset yet")
        return {
            "type": "state",
            "data": {"episode_id": str(id(counter)), "step_count": counter.steps, "value": counter.value},
        }
