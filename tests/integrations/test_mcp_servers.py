"""Test published MCP servers: their tools are listed and run in episodes.

`make integrations` installs them into `.integrations/`: two of PyPI on the SDK's second major, one on its first, and
two of npm, of which one also speaks streamable HTTP. Two further servers run on the SDK's first major and on FastMCP's
implementation of tasks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.simulated_user import ScriptedUser
from reward_kit.checks import check_resource
from reward_kit.environments import open_snapshot
from reward_kit.environments.mcp import McpResource
from tests.agent.resources import call, reason, task_of, tool_answers

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2] / ".integrations"
TIME, GIT = ROOT / "mcp/bin/mcp-server-time", ROOT / "mcp/bin/mcp-server-git"
TIME_ON_SDK_1, PYTHON_ON_SDK_1 = ROOT / "mcp1/bin/mcp-server-time", ROOT / "mcp1/bin/python"
PYTHON_ON_FASTMCP = ROOT / "mcp_tasks/bin/python"
SERVERS = Path(__file__).parent / "mcp_servers"
FILESYSTEM, EVERYTHING = (
    ROOT / "npm/node_modules/.bin" / f"mcp-server-{name}" for name in ("filesystem", "everything")
)


@pytest.fixture(autouse=True)
def _are_installed() -> None:
    missing = [
        path.name for path in (TIME, GIT, TIME_ON_SDK_1, PYTHON_ON_FASTMCP, FILESYSTEM, EVERYTHING) if not path.exists()
    ]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; run `make integrations`")


async def played(config: dict, *script: dict, replies: list[str] | None = None) -> list[str]:
    """Return the answers of the tools in one episode that plays the script, with a user who gives the replies."""
    task = task_of(resource_type="mcp", base_resource_config=config, initial_user_prompt="x")
    user = None if replies is None else ScriptedUser(replies)
    episode = await RLRolloutWorker(task, ScriptedPolicy(list(script)), user=user).collect_episode()
    assert reason(episode) == "terminate_action", episode.custom_data
    return tool_answers(episode)


@contextmanager
def served(command: list[Any], port: int, **variables: str) -> Iterator[str]:
    """Run a server over streamable HTTP, and yield its URL."""
    quiet, environment = subprocess.DEVNULL, {**os.environ, **variables}
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("server", [TIME, TIME_ON_SDK_1], ids=["SDK 2", "SDK 1"])
async def test_mcp_server_time(server) -> None:
    converted, refused = await played(
        {"command": [str(server)]},
        call("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo"),
        call("get_current_time", timezone="Mars/Olympus"),
    )
    assert '"time_difference": "+9.0h"' in converted
    assert refused.startswith("Error: Error ")


async def test_mcp_server_git(tmp_path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    (tmp_path / "file").write_text("x\n")
    git("add", "file")
    git("commit", "--quiet", "--message", "the first")
    repository = str(tmp_path)
    status, log, refused = await played(
        {"command": [str(GIT), "--repository", repository]},
        call("git_status", repo_path=repository),
        call("git_log", repo_path=repository),
        call("git_show", repo_path=repository, revision="no-such-revision"),
    )
    assert "nothing to commit" in status and "the first" in log and refused.startswith("Error: ")


def filesystem_config(folder: Path) -> dict:
    (folder / "seed").mkdir()
    (folder / "seed" / "note.txt").write_text("milk")
    command = [str(FILESYSTEM), "{working_copy}"]
    return {"command": command, "cwd": "{working_copy}", "working_copy": "seed", "task_folder": str(folder)}


async def test_server_filesystem(tmp_path) -> None:
    config = filesystem_config(tmp_path)
    read, written, listed, refused = await played(
        config,
        call("read_text_file", path="note.txt"),
        call("write_file", path="/working_copy/new.txt", content="tea"),
        call("list_directory", path="."),
        call("read_text_file", path="/etc/passwd"),
    )
    assert read == "milk" and "/working_copy/new.txt" in written
    assert listed.splitlines() == ["[FILE] new.txt", "[FILE] note.txt"]
    assert "outside allowed directories: /etc/passwd not in /working_copy" in refused
    resource = McpResource()
    await resource.setup(config)
    await resource.step("write_file", {"path": "b", "content": "tea"})
    assert dict(open_snapshot(await resource.final_state())) == {"b": "tea", "note.txt": "milk"}
    await resource.close()


async def test_server_filesystem_keeps_its_declarations(tmp_path) -> None:
    tools = ["read_text_file", "write_file", "create_directory", "move_file", "list_directory"]
    config = {**filesystem_config(tmp_path), "fork": "replay", "tools": tools}
    findings = await check_resource(McpResource, config, steps=6)
    assert [finding.message for finding in findings if finding.level == "error"] == []


EVERYTHING_SCRIPT = (
    call("echo", message="hi"),
    call("get-sum", a=1, b=2),
    call("get-tiny-image"),
    call("get-structured-content", location="Chicago"),
    call("trigger-long-running-operation", duration=1, steps=2),
)


def is_right(answers: list[str]) -> bool:
    echoed, summed, image, structured, long = answers
    assert (echoed, summed) == ("Echo: hi", "The sum of 1 and 2 is 3.")
    assert "[image image/png, " in image and '"temperature"' in structured and "completed" in long
    return True


async def test_server_everything_over_stdio() -> None:
    assert is_right(await played({"command": [str(EVERYTHING)]}, *EVERYTHING_SCRIPT))


@pytest.fixture
def everything_url():
    port = free_port()
    with served([EVERYTHING, "streamableHttp"], port, PORT=str(port)) as url:
        yield url


async def test_server_everything_over_http(everything_url) -> None:
    for _ in range(2):
        assert is_right(await played({"url": everything_url}, *EVERYTHING_SCRIPT))


@contextmanager
def reached(python: Path, server: str, transport: str) -> Iterator[dict]:
    """Yield the configuration of a server of `mcp_servers` over a transport."""
    if transport == "stdio":
        yield {"command": [str(python), str(SERVERS / server)]}
        return
    port = free_port()
    with served([python, SERVERS / server, str(port)], port) as url:
        yield {"url": url}


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_forms_of_a_server_on_the_first_sdk(transport) -> None:
    script = (call("order", item="tea"), call("sample"), call("stock"))
    with reached(PYTHON_ON_SDK_1, "forms_server.py", transport) as config:
        ordered, sampled, stock = await played(config, *script, replies=['{"size": "small"}'])
        refused, *_ = await played(config, *script)
    assert ordered == "accept size='small' copies=1"
    assert sampled == "Error: Error executing tool sample: Sampling not supported"
    assert '"tea": 2' in stock
    assert refused == "Error: Error executing tool order: Elicitation not supported"


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_tasks_of_fastmcp(transport) -> None:
    script = (call("add", x=1, y=2), call("fail"), call("forever"), call("what_ended"))
    with reached(PYTHON_ON_FASTMCP, "tasks_server.py", transport) as config:
        summed, failed, cancelled, ended = await played({**config, "call_timeout_s": 3}, *script)
    assert (summed, ended) == ("3", "forever")
    assert failed == "Error: Error calling tool 'fail': no paper left"
    assert cancelled == "Error: forever did not respond within 3 s and was cancelled (call_timeout_s)"
