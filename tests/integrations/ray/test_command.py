"""Test `reward-kit run --engine ray` from the command line: output, files, errors and cleanup."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from reward_kit.providers.keys import ORIGINS_VARIABLE
from reward_kit.runs.run_folder import read_episodes
from tests.chat_server import ChatServer, answer, status
from tests.integrations.ray.counting_task import CountingTask, without_the_clock

pytestmark = pytest.mark.campaign

WHERE = """
import os
from reward_kit import AgentPolicy, PolicyOutput

class Where(AgentPolicy):
    "Says where its file is, and where it works."
    async def get_action(self, observation, available_tools_specs=None):
        text = f"{os.path.dirname(__file__)}|{os.getcwd()}"
        return PolicyOutput({"type": "text", "content": text, "is_final": True})
"""


class Shell:
    """Commands in a folder, with their own folder for temporary files."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "REWARD_KIT_", "RAY_"))
        }
        origins = {name: os.environ[name] for name in (ORIGINS_VARIABLE,) if name in os.environ}
        home = {
            "REWARD_KIT_TRUST": "1",
            "HOME": str(self.temporary),
            "TMPDIR": str(self.temporary),
            "RAY_AUTH_MODE": "disabled",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "reward_kit.cli.main", "run", *arguments, "--display", "none"],
            cwd=self.folder,
            env={**kept, **home, **origins, "REWARD_KIT_TRUST": "1", "PYTHONPATH": str(Path.cwd())},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code and the output of a command."""
        with self.start(*arguments) as process:
            output, errors = ended(process)
        return process.returncode, output, errors

    def run_path(self, log_dir: str = "runs") -> Path:
        """Return the path of the only run."""
        (path,) = (self.folder / log_dir).iterdir()
        return path

    def children(self) -> list[str]:
        """Return the command lines of processes with files in the temporary folder, and of their children."""
        listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
        homes = {pid for pid, _, command in rows if str(self.temporary) in command}
        return [command for pid, parent, command in rows if pid in homes or parent in homes]


def ended(process: subprocess.Popen[str], seconds: float = 90.0) -> tuple[str, str]:
    """Wait for a process to end and return its output."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture
def shell(folder: Path) -> Iterator[Shell]:
    temporary = Path(f"/tmp/{secrets.token_hex(2)}")  # sockets with very short names lie deep in it
    temporary.mkdir()
    yield Shell(folder / "task", temporary)
    shutil.rmtree(temporary)


def until(holds: Callable[[], Any], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return bool(holds())


def test_ray_engine_writes_the_same_files_as_the_local_engine_and_cleans_up(folder: Path, shell: Shell) -> None:
    CountingTask(folder / "task", samples=6)
    code, output, errors = shell.call("task.yaml", "--engine", "ray", "--json", "-E", "workers=2", "--log-dir", "far")
    assert code == 0, errors
    assert json.loads(output)["policies"][0]["scored"] == 24
    assert "Traceback" not in errors and "WARNING" not in errors, errors
    assert shell.call("task.yaml", "--log-dir", "near")[0] == 0
    assert without_the_clock(shell.run_path("far")) == without_the_clock(shell.run_path("near"))
    assert until(lambda: not shell.children()), shell.children()
    assert until(lambda: not list(shell.temporary.rglob("*ray*"))), list(shell.temporary.rglob("*ray*"))[:5]


def test_workers_run_in_the_shipped_folder(folder: Path, shell: Shell) -> None:
    counting = CountingTask(folder / "task", samples=3, policy={"type": "where.py:Where"})
    (counting.folder / "where.py").write_text(WHERE)
    code, _, errors = shell.call("task.yaml", "--engine", "ray", "-E", "ship=true", "-E", "workers=2")
    assert code == 0, errors
    for record in read_episodes(shell.run_path()):
        file_folder, working = record["messages"][-1]["content"].split("|")
        assert file_folder == working != str(counting.folder)
    again = without_the_clock(shell.run_path())[0]
    assert len(again) == 12
    assert all(record["start"]["verified"] for record in again.values())


def test_interrupt_finishes_episodes_in_flight_and_any_engine_can_resume(folder: Path, shell: Shell) -> None:
    counting = CountingTask(folder / "task", samples=40, policy={"type": "mine.py:Adds", "wait_s": 0.1})
    with shell.start("task.yaml", "--engine", "ray", "-E", "workers=2") as process:
        assert until(lambda: _written(shell) > 4)
        process.send_signal(signal.SIGINT)
        _, errors = ended(process)
    assert process.returncode == 130, errors
    assert 4 < _written(shell) < 160
    assert {record["failure"] for record in read_episodes(shell.run_path())} == {None}
    assert until(lambda: not shell.children()), shell.children()
    assert shell.call("--resume")[0] == 0
    assert shell.call(str(counting.folder / "task.yaml"), "--log-dir", "near")[0] == 0
    assert without_the_clock(shell.run_path()) == without_the_clock(shell.run_path("near"))


def _written(shell: Shell) -> int:
    paths = list((shell.folder / "runs").glob("*/episodes.jsonl"))
    return len(list(read_episodes(paths[0].parent))) if paths else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_interrupt_stops_immediately_and_leaves_no_worker(
    folder: Path, shell: Shell, number: signal.Signals
) -> None:
    CountingTask(folder / "task", samples=4, policy={"type": "mine.py:Adds", "wait_s": 600})
    with shell.start("task.yaml", "--engine", "ray", "-E", "workers=2") as process:
        assert until(lambda: sum("ray::RolloutActor" in command for command in shell.children()) == 2)
        time.sleep(1.0)
        process.send_signal(number)
        time.sleep(0.5)
        process.send_signal(number)
        _, errors = ended(process)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors, errors
    assert until(lambda: not shell.children()), shell.children()


def test_killed_driver_shuts_down_its_own_cluster(folder: Path, shell: Shell) -> None:
    CountingTask(folder / "task", samples=4, policy={"type": "mine.py:Adds", "wait_s": 600})
    with shell.start("task.yaml", "--engine", "ray", "-E", "workers=2") as process:
        assert until(lambda: sum("ray::RolloutActor" in command for command in shell.children()) == 2)
        process.kill()
    assert until(lambda: not shell.children()), shell.children()
    assert until(lambda: not list(shell.temporary.glob("reward-kit-*")))


def test_unreachable_cluster_is_reported_in_a_single_line(folder: Path, shell: Shell) -> None:
    CountingTask(folder / "task", samples=1)
    code, _, errors = shell.call("task.yaml", "--engine", "ray", "--address", "127.0.0.1:1")
    assert code == 3, errors
    assert "error: no cluster responds at 127.0.0.1:1: " in errors and "Traceback" not in errors
    code, _, errors = shell.call("task.yaml", "--engine", "ray", "--address", "ray://127.0.0.1")
    assert code == 2 and "--address ray://127.0.0.1: pass HOST:PORT" in errors


def test_local_model_is_loaded_in_the_workers_and_not_in_the_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reward_kit.cli.run import without_model_weights
    from reward_kit.errors import PolicyError
    from reward_kit.runs.plan import RunArgs, make_policies
    from tests.agent.policies.hf.small_models import byte_tokenizer, small_llama

    tokenizer = byte_tokenizer()
    small_llama(len(tokenizer), context=4096).save_pretrained(folder / "task" / "small")
    tokenizer.save_pretrained(folder / "task" / "small")
    policy = {"type": "hf", "model": "./small", "action_format": "hermes", "max_new_tokens": 8}
    counting = CountingTask(folder / "task", samples=2, policy=policy, max_episode_steps=2)
    task = without_model_weights(counting.loaded())
    (driver,) = make_policies(task, RunArgs(task_path=task.path))
    with pytest.raises(PolicyError, match="has no weights"):
        driver.policy._engine  # type: ignore[attr-defined] # noqa: B018
    shell = Shell(folder / "task", Path(f"/tmp/{secrets.token_hex(2)}"))
    shell.temporary.mkdir()
    try:
        code, _, errors = shell.call("task.yaml", "--engine", "ray", "-E", "workers=1")
    finally:
        shutil.rmtree(shell.temporary)
    assert code == 0, errors
    records = list(read_episodes(shell.run_path()))
    assert len(records) == 8
    assert {record["failure"] for record in records} == {None}
    assert all(record["tokens"] for record in records)


def test_secret_logged_by_a_worker_is_redacted_in_the_run_log(
    folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"sk-{secrets.token_hex(12)}"
    monkeypatch.setenv("MY_API_KEY", secret)
    monkeypatch.setenv("REWARD_KIT_KEY_ORIGINS", "MY_API_KEY=https://api.openai.com")
    policy = {"type": "mine.py:Tells", "variable": "MY_API_KEY", "api_key_env": "MY_API_KEY"}
    counting = CountingTask(folder / "task", samples=2, policy=policy)
    mine = counting.folder / "mine.py"
    mine.write_text(mine.read_text().replace('variable="HOME"', 'variable="HOME", api_key_env=None'))
    code, output, errors = shell.call("task.yaml", "--engine", "ray", "-E", "workers=1", "--json")
    assert code == 0, errors
    assert "the key is (hidden)" in (shell.run_path() / "run.log").read_text()
    assert secret not in output + errors
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert not [file for file in files if secret.encode() in file.read_bytes()]


def test_documented_examples_run(folder: Path, shell: Shell) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "ray.md").read_text()
    blocks = re.findall(r"```\{ \.python \.ray \}\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 1
    (folder / "page.py").write_text("\n".join(blocks))
    quietly = {"TMPDIR": str(shell.temporary), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-W", "error::ResourceWarning", "page.py"]
    environment = {**os.environ, **quietly, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


async def test_workers_use_the_api_key_of_the_driver(
    folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVED_KEY", "sk-served")
    async with ChatServer(lambda body: answer("I counted")) as server:
        monkeypatch.setenv("REWARD_KIT_KEY_ORIGINS", f"SERVED_KEY={server.base_url}")
        counting = CountingTask(folder / "task", samples=4, resource_type=None, policy=served(server))
        code, _, errors = await anyio.to_thread.run_sync(shell.call, "task.yaml", "--engine", "ray", "-E", "workers=2")
        assert code == 0, errors
        assert len(server.requests) == 16
        assert {request.headers["Authorization"] for request in server.requests} == {"Bearer sk-served"}
        near = (str(counting.folder / "task.yaml"), "--log-dir", "near")
        assert (await anyio.to_thread.run_sync(shell.call, *near))[0] == 0
    assert without_the_clock(shell.run_path()) == without_the_clock(shell.run_path("near"))


async def test_rejected_api_key_ends_the_run_without_failed_episodes(
    folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVED_KEY", "sk-wrong")
    async with ChatServer(lambda body: status(401, text="wrong key")) as server:
        monkeypatch.setenv("REWARD_KIT_KEY_ORIGINS", f"SERVED_KEY={server.base_url}")
        CountingTask(folder / "task", samples=20, resource_type=None, policy=served(server))
        code, _, errors = await anyio.to_thread.run_sync(shell.call, "task.yaml", "--engine", "ray", "-E", "workers=2")
    assert code == 3, errors
    assert "refused the API key" in errors or "401" in errors
    assert "0 of 80 episodes are complete" in errors


def served(server: ChatServer) -> dict[str, Any]:
    return {"type": "openai", "model": "m", "base_url": server.base_url, "api_key_env": "SERVED_KEY"}
