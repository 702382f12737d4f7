"""Test published MCP servers: their tools are listed and run in episodes.

`make integrations` installs them into `.integrations/`: two of PyPI on the SDK's second major, one on its first, and
two of npm, of which one also speaks streamable HTTP.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import open_snapshot
from reward_kit.environments.mcp import McpResource
from tests.agent.resources import call, reason, tool_answers, worker_of

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2] / ".integrations"
TIME, GIT = ROOT / "mcp/bin/mcp-server-time", ROOT / "mcp/bin/mcp-server-git"
TIME_ON_SDK_1 = ROOT / "mcp1/bin/mcp-server-time"
FILESYSTEM, EVERYTHING = (
    ROOT / "npm/node_modules/.bin" / f"mcp-server-{name}" for name in ("filesystem", "everything")
)


@pytest.fixture(autouse=True)
def _are_installed() -> None:
    missing = [path.name for path in (TIME, GIT, TIME_ON_SDK_1, FILESYSTEM, EVERYTHING) if not path.exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; run `make integrations`")


async def played(config: dict, *script: dict) -> list[str]:
    """Return the answers of the tools in one episode that plays the script."""
    worker = worker_of(list(script), resource_type="mcp", base_resource_config=config, initial_user_prompt="x")
    episode = await worker.collect_episode()
    assert reason(episode) == "terminate_action", episode.custom_data
    return tool_answers(episode)


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PORT": str(port)}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([EVERYTHING, "streamableHttp"], env=environment, stdout=quiet, stderr=quiet)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


async def test_server_everything_over_http(everything_url) -> None:
    for _ in range(2):
        assert is_right(await played({"url": everything_url}, *EVERYTHING_SCRIPT))
