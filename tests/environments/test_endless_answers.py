"""Environments that never stop sending: the answer is cut at a documented size, with one error and little memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.endless import Peak, endless, peak

MCP = """
from reward_kit.environments.mcp.resource import McpResource
import reward_kit.environments.mcp.http, reward_kit.environments.mcp.session, reward_kit.environments.mcp.stdio
"""
SET_UP = """
world = McpResource()
try:
    await world.setup({config})
    await world.reset(0)
    await world.step("run", {{}})
finally:
    await world.close()
"""
STDIO_SERVER = """
import json, sys
FLOOD = {flood}
def send(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
for line in sys.stdin:
    request = json.loads(line)
    method, id = request["method"], request.get("id")
    if method == "initialize":
        result = {{"protocolVersion": "2025-06-18", "capabilities": {{"tools": {{}}}}}}
        send({{"jsonrpc": "2.0", "id": id, "result": {{**result, "serverInfo": {{"name": "s", "version": "1"}}}}}})
    elif method == "tools/list":
        schema = {{"type": "object", "properties": {{}}}}
        send({{"jsonrpc": "2.0", "id": id, "result": {{"tools": [{{"name": "run", "inputSchema": schema}}]}}}})
    elif method == "tools/call":
        while True:
            {again}
    elif id is not None:
        send({{"jsonrpc": "2.0", "id": id, "error": {{"code": -32601, "message": "unknown"}}}})
"""


def over_stdio(folder: Path, flood: str, again: str, timeout_s: float = 30.0) -> Peak:
    server = folder / "server.py"
    server.write_text(STDIO_SERVER.format(flood=flood, again=again))
    config = {"command": [sys.executable, str(server)], "call_timeout_s": timeout_s}
    return peak(MCP, SET_UP.format(config=config))


@pytest.mark.parametrize("kind", ["json", "json-values", "error", "mcp-event", "gzip", "header", "headers", "trailers"])
def test_an_endless_answer_of_an_mcp_server_over_http_is_cut(kind: str) -> None:
    with endless(kind) as port:
        cost = peak(MCP, SET_UP.format(config={"url": f"http://127.0.0.1:{port}/mcp", "call_timeout_s": 5}))
    assert (cost.kind, cost.mb < 200) == ("EnvironmentFailure", True), cost
    assert f"http://127.0.0.1:{port}/mcp" in cost.message and "\n" not in cost.message
