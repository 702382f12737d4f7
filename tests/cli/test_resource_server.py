"""Test tasks with resource servers: they run, and no process outlives the run."""

from __future__ import annotations

import json
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reward_kit.process_guardian import find_processes
from tests.cli.project import Project, lines

ENVIRONMENTS = Path(__file__).parent.parent / "environments"
SERVER, MCP_SERVER = ENVIRONMENTS / "counter_server.py", ENVIRONMENTS / "mcp_tiny_server.py"


class ServerProject:
    """A project whose resource is a server, and the processes left after its run."""

    def __init__(self, folder: Path, wait_ms: int = 0, options: str = "", rows: int = 3) -> None:
        shutil.copy(SERVER, folder)
        (folder / "tmp").mkdir()
        # All that a run starts inherits this, the guardian included.
        self.mark = secrets.token_hex(8)
        actions = [
            {"type": "tool_call", "name": "add", "arguments": {"amount": 1}},
            {"type": "tool_call", "name": "wait", "arguments": {"milliseconds": wait_ms}},
            {"type": "text", "content": "done"},
        ]
        self.project = Project(
            folder,
            rows,
            resource_type="http",
            tools=["add", "wait"],
            base_resource_config={"tools_endpoint": "/tools"},
            resource_server={
                "start_command": f"'{sys.executable}' -S counter_server.py --port {{port}} --chatty {options}",
                "health_check_url": "http://127.0.0.1:{port}/health",
            },
            policy={"type": "scripted", "actions": actions},
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.project.command("run", *([] if "--resume" in arguments else ["task.yaml"]), *arguments),
            cwd=self.project.folder,
            env=self.project.environment(TEST_MARK=self.mark, TMPDIR=str(self.project.folder / "tmp")),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finished(self) -> list[str]:
        """Return the ids of the completely written episodes."""
        found = []
        for path in self.project.runs():
            whole = (path / "episodes.jsonl").read_bytes() if (path / "episodes.jsonl").exists() else b""
            found += [json.loads(line)["rollout_id"] for line in whole[: whole.rfind(b"\n") + 1].splitlines()]
        return found

    def has_episodes(self) -> bool:
        return any(
            (path / "episodes.jsonl").read_text() for path in self.project.runs() if (path / "episodes.jsonl").exists()
        )

    def assert_nothing_is_left(self) -> None:
        end = time.monotonic() + 3
        while find_processes(self.mark) and time.monotonic() < end:
            time.sleep(0.02)
        assert find_processes(self.mark) == []
        assert list((self.project.folder / "tmp").iterdir()) == []


class McpProject(ServerProject):
    """A project in which each episode has its own server and folder."""

    def __init__(self, folder: Path, wait_ms: int = 0, options: str = "", rows: int = 3) -> None:
        super().__init__(folder, wait_ms, options, rows)
        (folder / "shelf").mkdir()
        (folder / "shelf" / "a.txt").write_text("a")
        shutil.copy(MCP_SERVER, folder)
        self.project.write_task(
            resource_type="mcp",
            tools=["put", "wait"],
            base_resource_config={
                "command": ["{python}", "-I", "-S", str(folder / MCP_SERVER.name), "{working_copy}"],
                "working_copy": "shelf",
                "state_key": "history",
                "tools": ["put", "get"],
            },
            policy={
                "type": "scripted",
                "actions": [
                    {"type": "tool_call", "name": "put", "arguments": {"word": "a"}},
                    {"type": "tool_call", "name": "wait", "arguments": {"milliseconds": wait_ms}},
                    {"type": "text", "content": "done"},
                ],
            },
        )


def test_run_starts_and_stops_its_server(tmp_path: Path) -> None:
    project = ServerProject(tmp_path)
    assert project.start().wait(timeout=60) == 0
    project.assert_nothing_is_left()
    path = project.project.run_path()
    episodes = lines(path / "episodes.jsonl")
    assert len(episodes) == 6
    assert {json.loads(episode["messages"][-4]["content"])["target"] for episode in episodes} == {10}
    assert json.loads((path / "run.json").read_text())["status"] == "complete"


def test_dead_server_fails_its_episodes_and_the_run_continues(tmp_path: Path) -> None:
    project = ServerProject(tmp_path)
    rows = [{"id": f"q{n}", "number": n, "ground_truth": "done"} for n in range(3)]
    rows[1]["resource_config"] = {"config": {"fault": "die"}}
    project.project.write_rows(rows)
    assert project.start("--max-concurrency", "1").wait(timeout=60) == 0
    project.assert_nothing_is_left()
    episodes = lines(project.project.run_path() / "episodes.jsonl")
    broken = [episode for episode in episodes if episode["stop_reason"] != "answered"]
    assert {episode["sample_id"] for episode in broken} == {"q1"}
    assert len(episodes) == 6
    assert "the server ended with exit code 3" in json.dumps(broken[0])


@pytest.mark.parametrize(
    ("moment", "number"), [("server", signal.SIGKILL), ("episode", signal.SIGKILL), ("episode", signal.SIGTERM)]
)
def test_killed_run_leaves_no_process_and_no_file(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    project = ServerProject(tmp_path, wait_ms=300, options="--stubborn" if moment == "server" else "")
    process = project.start("--max-concurrency", "2")
    reached = project.has_episodes if moment == "episode" else lambda: len(find_processes(project.mark)) > 2
    while not reached():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    process.wait(timeout=30)
    project.assert_nothing_is_left()


@pytest.mark.parametrize("kind", [ServerProject, McpProject])
@pytest.mark.parametrize(
    ("rows", "kills"),
    [pytest.param(12, 1, id="short"), pytest.param(60, 15, id="campaign", marks=pytest.mark.campaign)],
)
def test_repeated_kills_leave_no_process_and_lose_or_repeat_no_episode(
    tmp_path: Path, kind: type[ServerProject], rows: int, kills: int
) -> None:
    chance = random.Random(0)
    project = kind(tmp_path, wait_ms=200, options="--stubborn" if kills > 1 else "", rows=rows)
    arguments, landed = ["--max-concurrency", "4"], 0
    for kill in range(1, kills + 1):
        process = project.start(*arguments)
        # At any moment between the start of the servers and the next share of the episodes.
        wanted = rows * 2 * kill // (kills + 1) - chance.choice((0, 0, rows // kills))
        while len(project.finished()) < wanted and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        process.kill()
        landed += process.wait() == -signal.SIGKILL
        project.assert_nothing_is_left()
        if project.project.runs():
            arguments = ["--resume", "--max-concurrency", "4"]
    assert landed, "every run was over before it was killed"
    resumed = [*project.project.command("run"), *(arguments if "--resume" in arguments else ["task.yaml", *arguments])]
    environment = project.project.environment(TEST_MARK=project.mark, TMPDIR=str(tmp_path / "tmp"))
    assert subprocess.run(resumed, cwd=tmp_path, env=environment, capture_output=True).returncode == 0
    project.assert_nothing_is_left()
    assert len(project.finished()) == len(set(project.finished())) == rows * 2
    answered = [line["stop_reason"] for line in lines(project.project.run_path() / "episodes.jsonl")]
    assert answered == ["answered"] * rows * 2


def test_invalid_server_block_is_one_clear_line(tmp_path: Path) -> None:
    project = ServerProject(tmp_path).project
    project.write_task(resource_type="http", resource_server={"start_comand": "x", "health_check_url": "http://x"})
    done = project.call("run", "task.yaml")
    assert done.returncode == 2
    assert "resource_server.start_comand: unknown key; did you mean 'start_command'?" in done.stderr
    assert not project.runs()
