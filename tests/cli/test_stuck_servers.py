"""Test that one Ctrl-C ends a run whose episodes wait for an unresponsive server."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import Project
from tests.endless_server import endless

MODEL = {"type": "openai", "model": "m", "api_key": "x"}
STUCK_SERVER = """
import json, pathlib, sys
RESULTS = {{
    "initialize": {{
        "protocolVersion": "2025-06-18",
        "capabilities": {{"tools": {{}}}},
        "serverInfo": {{"name": "s", "version": "1"}},
    }},
    "tools/list": {{"tools": [{{"name": "wait", "inputSchema": {{"type": "object", "properties": {{}}}}}}]}},
}}
for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == {silent_at!r}:
        pathlib.Path({mark!r}).touch()
    elif request["method"] in RESULTS:
        result = RESULTS[request["method"]]
        print(json.dumps({{"jsonrpc": "2.0", "id": request["id"], "result": result}}), flush=True)
    elif "id" in request:
        error = {{"code": -32601, "message": "unknown"}}
        print(json.dumps({{"jsonrpc": "2.0", "id": request["id"], "error": error}}), flush=True)
"""


def interrupted(project: Project, sign: signal.Signals, has_begun: Any) -> tuple[int, dict[str, Any] | None]:
    """Start a run, stop it once it waits for its server; return its exit code, and its header if any."""
    process = project.start("run", "task.yaml", REWARD_KIT_STOP_GRACE_S="0.5", REWARD_KIT_TRUST="1")
    try:
        for _ in range(3000):
            if has_begun() or process.poll() is not None:
                break
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(sign)
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    if not project.runs():
        return code, None
    checked = project.call("check", str(project.run_path()))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return code, json.loads((project.run_path() / "run.json").read_text())


@pytest.mark.parametrize(
    ("kind", "sign"),
    [
        ("event-trickle", signal.SIGINT),
        ("silence", signal.SIGTERM),
        pytest.param("trickle", signal.SIGINT, marks=pytest.mark.campaign),
        pytest.param("trickle", signal.SIGTERM, marks=pytest.mark.campaign),
    ],
)
def test_one_signal_ends_a_run_that_waits_for_a_model(tmp_path: Path, kind: str, sign: signal.Signals) -> None:
    with endless(kind) as port:
        options = {"base_url": f"http://127.0.0.1:{port}/v1", "stream": kind == "event-trickle"}
        project = Project(tmp_path, 1, policy={**MODEL, **options})

        def has_begun() -> bool:
            return any(path.joinpath("run.json").exists() for path in project.runs()) and _connected(port)

        code, header = interrupted(project, sign, has_begun)
    assert (code, header["status"]) == (130, "interrupted")


def _connected(port: int) -> bool:
    """Return whether a client is connected to the server."""
    wanted = f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(line[2].endswith(wanted) and line[3] == "01" for line in lines)


@pytest.mark.parametrize(
    "silent_at", ["tools/call", *(pytest.param(at, marks=pytest.mark.campaign) for at in ("initialize", "tools/list"))]
)
def test_one_signal_ends_a_run_that_waits_for_an_mcp_server(tmp_path: Path, silent_at: str) -> None:
    mark, server = tmp_path / "asked", tmp_path / "server.py"
    server.write_text(STUCK_SERVER.format(silent_at=silent_at, mark=str(mark)))
    config = {"command": [sys.executable, str(server)]}
    project = Project(tmp_path, 1, tools_module_path=None, resource_type="mcp", base_resource_config=config)
    code, header = interrupted(project, signal.SIGINT, mark.exists)
    assert code == 130
    # A task whose environment does not start is found before there is a run.
    assert header is None if silent_at != "tools/call" else header["status"] == "interrupted"


def test_non_numeric_grace_period_is_rejected(tmp_path: Path) -> None:
    done = Project(tmp_path, 1).call("run", "task.yaml", REWARD_KIT_STOP_GRACE_S="soon")
    assert done.returncode == 2
    assert "REWARD_KIT_STOP_GRACE_S='soon': must be a number of seconds" in done.stderr
