"""Test that endless answers of environments are cut at a documented size with one error and little memory."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from tests.endless_server import Peak, endless, peak

MCP = """
from reward_kit.environments.mcp import McpResource
import reward_kit.environments.mcp_session, reward_kit.environments.mcp_session, reward_kit.environments.mcp_session
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
def test_endless_mcp_answer_over_http_is_cut(kind: str) -> None:
    with endless(kind) as port:
        cost = peak(MCP, SET_UP.format(config={"url": f"http://127.0.0.1:{port}/mcp", "call_timeout_s": 5}))
    assert (cost.kind, cost.mb < 200) == ("EnvironmentFailure", True), cost
    assert f"http://127.0.0.1:{port}/mcp" in cost.message and "\n" not in cost.message


@pytest.mark.parametrize("flood", ["x" * 65536, "[]," * 20_000], ids=["text", "values"])
def test_endless_mcp_line_over_stdio_ends_the_server(tmp_path: Path, flood: str) -> None:
    cost = over_stdio(tmp_path, repr(flood), "sys.stdout.write(FLOOD)")
    assert (cost.kind, cost.mb < 200) == ("EnvironmentFailure", True), cost
    assert "ended during the call of 'run'; it sent a message larger than the limit of 64 MiB" in cost.message


NOTE = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 99}}
PROGRESS = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1, "progress": 1}}
QUESTION = {"jsonrpc": "2.0", "method": "roots/list", "id": 7}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("text", id="text"),
        pytest.param(NOTE, id="log", marks=pytest.mark.campaign),
        pytest.param(PROGRESS, id="progress", marks=pytest.mark.campaign),
        pytest.param(QUESTION, id="request", marks=pytest.mark.campaign),
    ],
)
def test_endless_mcp_messages_over_stdio_end_with_the_call_timeout(tmp_path: Path, message) -> None:
    cost = over_stdio(tmp_path, f"(json.dumps({message!r}) + chr(10)) * 500", "sys.stdout.write(FLOOD)", timeout_s=1)
    assert (cost.kind, cost.mb < 200) == ("ToolError", True), cost
    assert cost.message == "run did not respond within 1 s and was cancelled (call_timeout_s)"


def test_endless_mcp_errors_do_not_fill_the_disk(tmp_path: Path) -> None:
    largest = """
    import pathlib, threading
    from reward_kit import processes
    from reward_kit.processes import LOG_FOLDER
    processes.PROCESS_LOG_BYTES = 2_000_000
    LOG_FOLDER.set(pathlib.Path("%s"))
    """
    server = tmp_path / "server.py"
    again = "sys.stderr.write(FLOOD); sys.stderr.flush(); time.sleep(0.01)"
    server.write_text("import time\n" + STDIO_SERVER.format(flood="('x' * 99 + chr(10)) * 1000", again=again))
    config = {"command": [sys.executable, str(server)], "call_timeout_s": 2}
    cost = peak(MCP + textwrap.dedent(largest) % tmp_path, SET_UP.format(config=config))
    assert (cost.kind, cost.mb < 200) == ("ToolError", True), cost
    (log,) = tmp_path.glob("mcp-*.log")
    assert log.read_bytes().startswith(b"[reward-kit: the log was cut here; it had more than 1 MiB]\nx")


HTTP = """
from reward_kit.environments.http import JsonClient, ServerAddress
import aiohttp
"""
ASK_HTTP = """
client = JsonClient(ServerAddress("http://127.0.0.1:{port}", {{}}), 30)
try:
    await client.{method}
finally:
    await client.close()
"""


@pytest.mark.parametrize("method", ["get('/state')", "check_health('/health')"])
@pytest.mark.parametrize("kind", ["json", "gzip", "error", "header", "headers", "trailers"])
def test_endless_answer_of_an_http_environment_is_cut(kind: str, method: str) -> None:
    with endless(kind) as port:
        cost = peak(HTTP, ASK_HTTP.format(port=port, method=method))
    assert (cost.kind, cost.mb < 200) == ("EnvironmentFailure", True), cost
    assert f"GET http://127.0.0.1:{port}/" in cost.message and "\n" not in cost.message


OPENENV = """
import aiohttp
from reward_kit.environments.http import ServerAddress
from reward_kit.environments.openenv import OpenEnvConfig, OpenEnvSession
"""
ASK_OPENENV = """
session = OpenEnvSession(ServerAddress("http://127.0.0.1:{port}", {{}}), OpenEnvConfig(connect_timeout=30, timeout=30))
try:
    await session.open()
finally:
    await session.close()
"""


@pytest.mark.parametrize("kind", ["websocket-frame", "websocket-fragments", "websocket-messages", "json", "header"])
def test_endless_answer_of_an_openenv_server_is_cut(kind: str) -> None:
    with endless(kind) as port:
        cost = peak(OPENENV, ASK_OPENENV.format(port=port))
    assert (cost.kind, cost.mb < 200) == ("EnvironmentFailure", True), cost
    assert f"ws://127.0.0.1:{port}/ws" in cost.message and "\n" not in cost.message
    if kind in ("websocket-frame", "websocket-fragments"):
        assert "the response is larger than the limit of 64 MiB" in cost.message


ENGINE = "from reward_kit.environments.engine_process import EngineProcess"
ASK_ENGINE = """
engine = EngineProcess("test engine", [sys.executable, "-c", {code!r}])
try:
    await engine.start()
finally:
    await engine.close()
"""


def test_endless_answer_of_an_engine_ends_the_engine() -> None:
    cost = peak(ENGINE, ASK_ENGINE.format(code="while True: print('x' * 65536, end='')"))
    assert (cost.kind, cost.mb < 200) == ("EnvironmentFailure", True), cost
    assert cost.message == "test engine: a response larger than the limit of 16 MiB"
