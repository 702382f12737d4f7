"""Run Harbor task folders and OpenEnv folders in containers of a real engine.

Skipped if there is none, or if the base image is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import anyio
import pytest

from reward_kit.checks.harbor import can_use_container, check_harbor_task
from reward_kit.environments.containers import (
    Container,
    ContainerEngine,
    ContainerLimits,
    find_engine,
    start_container,
)
from reward_kit.environments.harbor import HarborResource
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from tests.command_line import call, command

pytestmark = pytest.mark.campaign

EXAMPLE = Path(__file__).parents[2] / "examples" / "harbor_tasks" / "count_errors"
CORPUS = Path(__file__).parents[2] / "benchmarks" / "red_team" / "harbor"
BASE = "python:3.11-slim"
TRUST = {**os.environ, "REWARD_KIT_TRUST": "1"}


def _find() -> ContainerEngine | None:
    async def find() -> ContainerEngine:
        engine = await find_engine()
        await engine.pull(BASE, 120.0)
        return engine

    try:
        return anyio.run(find)
    except (ConfigError, EnvironmentFailure):
        return None


ENGINE = _find()
if ENGINE is None:
    pytest.skip("needs Docker or Podman, and python:3.11-slim", allow_module_level=True)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "count_errors"))


@pytest.fixture
async def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Container]:
    assert ENGINE is not None
    monkeypatch.chdir(tmp_path)
    made = await start_container(ENGINE, BASE, ContainerLimits(cpus=1, memory_mb=128))
    yield made
    await made.close()


@pytest.fixture
async def resource(task: Path) -> AsyncIterator[HarborResource]:
    made = HarborResource()
    await made.setup({"folder": str(task)})
    await made.reset(1)
    yield made
    await made.close()


def containers() -> set[str]:
    assert ENGINE is not None
    listed = subprocess.run(
        [ENGINE.program, "ps", "-a", "--filter", "name=reward-kit-", "--format", "{{.Names}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listed.stdout.split())


def wait_until(is_done: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_done():
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(autouse=True)
def no_container_is_left() -> object:
    before = containers()
    yield
    assert not containers() - before


# Containers


async def test_command_reports_its_status_and_both_outputs(container: Container) -> None:
    result = await container.run("echo out; echo err >&2; exit 3", seconds=20)
    assert (result.output, result.status) == ("out\nerr\n", 3)


async def test_variables_and_long_scripts_arrive_unchanged(container: Container) -> None:
    text = 'it\'s "$HOME" \\ é\n' * 20_000
    script = f"cat > /text <<'END'\n{text}END\nsha256sum < /text; printf %s \"$A\""
    result = await container.run(script, seconds=20, env={"A": "a'b\n\"$c"})
    assert result.output == f"{hashlib.sha256(text.encode()).hexdigest()}  -\na'b\n\"$c"


async def test_late_command_and_its_children_are_killed(container: Container) -> None:
    result = await container.run("trap '' TERM; sleep 61 & sleep 61; sleep 61", seconds=1)
    assert result.status is None
    left = await container.run("cat /proc/[0-9]*/comm | grep -c sleep", seconds=20)
    assert left.output == "1\n"  # the first process of the container


async def test_background_process_does_not_delay_the_command(container: Container) -> None:
    begin = time.monotonic()
    result = await container.run("sleep 30 & echo started", seconds=25)
    assert result.output == "started\n" and time.monotonic() - begin < 20


async def test_endless_output_is_bounded(container: Container) -> None:
    result = await container.run("yes | head -c 50000000; echo end", seconds=60)
    assert len(result.output) < 20_000 and result.output.endswith("end\n")
    assert re.search(r"\[… [\d,]+ bytes omitted …\]", result.output)


async def test_memory_processes_and_network_are_limited(container: Container, tmp_path: Path) -> None:
    result = await container.run("python3 -c 'x = bytearray(1 << 29)'", seconds=30)
    assert result.status == 137 and [one async for one in anyio.Path(tmp_path).iterdir()] == []
    lines = await container.run("tail -n +3 /proc/net/dev | cut -d: -f1", seconds=20)
    assert lines.output.split() == ["lo"]
    forks = (
        "import os, time\nn = 0\ntry:\n    while n < 5000:\n        if not os.fork(): time.sleep(20)\n        n += 1\n"
    )
    forks += "except OSError: pass\nprint(n < 5000)"
    fork = await container.run(f"python3 -c '{forks}'", seconds=30)
    assert fork.output.splitlines()[-1:] != ["False"]


async def test_command_in_a_removed_container_fails(container: Container) -> None:
    await container.close()
    with pytest.raises(EnvironmentFailure, match="a command in the container failed"):
        await container.run("true", seconds=5)


# The resource


async def test_solution_gets_the_full_reward(resource: HarborResource) -> None:
    action = await resource.expert_action()
    assert action is not None
    await resource.step(action["name"], action["arguments"])
    state = await resource.final_state()
    assert state is not None and json.loads(state.payload)["rewards"] == {"reward": 1.0}
    assert await resource.final_state() == state
    with pytest.raises(ToolError, match="the tests have run"):
        await resource.step("bash", {"command": "true"})


async def test_agent_sees_outputs_exit_codes_and_time_limits(resource: HarborResource) -> None:
    outcomes = [
        (await resource.step("bash", {"command": text, "timeout_s": 1})).observation
        for text in ("pwd", "false", "sleep 9", "true")
    ]
    assert outcomes == ["/app", "[exit code 1]", "[the script was killed after 1 s]", "[no output]"]
    assert not (await resource.step("bash", {"command": "ls /tests /solution 2>&1 | grep -c cannot"})).truncated


async def test_reward_file_of_the_agent_does_not_count(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("true\n")
    resource = HarborResource()
    await resource.setup({"folder": str(task)})
    await resource.reset(1)
    planted = (
        "echo 1 > /logs/verifier/reward.txt; mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    )
    await resource.step("bash", {"command": planted})
    state = await resource.final_state()
    await resource.close()
    assert state is not None and "neither reward.json nor reward.txt" in json.loads(state.payload)["problem"]


async def test_episode_is_truncated_at_the_time_limit_of_the_agent(task: Path) -> None:
    file = task / "task.toml"
    file.write_text(file.read_text().replace("timeout_sec = 300.0", "timeout_sec = 2.0"))
    resource = HarborResource()
    await resource.setup({"folder": str(task)})
    await resource.reset(1)
    outcome = await resource.step("bash", {"command": "sleep 60"})
    state = await resource.final_state()
    await resource.close()
    assert outcome.truncated and "time limit of 2 s" in outcome.observation
    assert state is not None and json.loads(state.payload)["rewards"] == {"reward": 0.0}


async def test_failed_build_is_an_error_with_its_output(task: Path) -> None:
    (task / "environment" / "Dockerfile").write_text(f"FROM {BASE}\nRUN echo problem >&2; exit 7\n")
    resource = HarborResource()
    await resource.setup({"folder": str(task)})
    with pytest.raises(EnvironmentFailure, match="problem"):
        await resource.reset(1)
    await resource.close()


# Commands


def test_run_of_a_folder_scores_the_solution_and_a_lazy_agent(task: Path, tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(
        "from reward_kit import AgentPolicy, PolicyOutput\n"
        "class Lazy(AgentPolicy):\n"
        "    async def get_action(self, observation, available_tools_specs=None):\n"
        "        return PolicyOutput({'type': 'text', 'content': 'done'}, 'done')\n"
    )
    policies = ("--policy", "expert", "--policy", str(tmp_path / "lazy.py:Lazy"))
    done = call("run", str(task), *policies, "-n", "2", "--json", cwd=tmp_path, env=TRUST, timeout_s=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    means = {one["policy"].rpartition(":")[2]: (one["score"]["mean"], one["errors"]) for one in report["policies"]}
    assert means == {"expert": (1.0, {}), "Lazy": (0.0, {})}
    resumed = call("run", "--resume", report["run"], "--json", cwd=tmp_path, env=TRUST, timeout_s=300)
    assert resumed.returncode == 0, resumed.stderr


def test_check_of_a_folder_of_tasks_validates_the_solutions(task: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    task.rename(tmp_path / "tasks" / "count_errors")
    done = call("check", "tasks", cwd=tmp_path, env=TRUST, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "1 sample; the reference solution (expert) scores 1 on 1; doing nothing scores 0 on 1"
    assert done.stdout.splitlines()[-1].endswith(expected)


def test_missing_reward_file_leaves_the_episode_unscored(task: Path, tmp_path: Path) -> None:
    (task / "tests" / "test.sh").write_text("echo broken\n")
    done = call("run", str(task), "--policy", "expert", "--json", cwd=tmp_path, env=TRUST, timeout_s=300)
    (policy,) = json.loads(done.stdout)["policies"]
    assert policy["score"] is None and policy["episodes"] == 1 and policy["errors"] == {"crash": 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_run_leaves_no_container(task: Path, tmp_path: Path, number: signal.Signals) -> None:
    (task / "solution" / "solve.sh").write_text("sleep 200\n")
    before = containers()
    process = subprocess.Popen(
        command("run", str(task), "--policy", "expert"), cwd=tmp_path, env=TRUST, stderr=subprocess.DEVNULL
    )
    try:
        # The first container only checks that the resource starts.
        assert wait_until(lambda: any((tmp_path / "runs").glob("*/run.json")) and bool(containers() - before))
        process.send_signal(number)
        if number != signal.SIGKILL:  # the first signal lets the episode finish, and the second stops it
            time.sleep(0.5)
            process.send_signal(number)
        process.wait(60)
        assert wait_until(lambda: not containers() - before)
    finally:
        process.kill()
        process.wait()


async def test_check_finds_a_planted_weakness_in_a_container(tmp_path: Path) -> None:
    task = Path(shutil.copytree(CORPUS / "exists_only" / "planted", tmp_path / "task"))
    file = task / "environment" / "Dockerfile"
    text = re.sub(r"FROM .*", f"FROM {BASE}", file.read_text())
    file.write_text(f"{text}\nRUN python3 -c 'print(1)'\n")
    toml = task / "task.toml"
    toml.write_text(re.sub(r"(?m)^network_mode.*\n|^allow_internet.*\n", "", toml.read_text()))
    assert await can_use_container(task)
    report = await check_harbor_task(task, in_container=True)
    assert report.level == "container" and [one.kind for one in report.findings] == ["empty-files-earn"]


# OpenEnv folders

SERVER = """
from aiohttp import web
from openenv_server import OpenEnvServer

async def health(request):
    return web.Response()

server = OpenEnvServer()
app = web.Application()
app.add_routes([web.get("/ws", server._session), web.get("/schema", server._schema), web.get("/health", health)])
web.run_app(app, port=8000)
"""
PACKAGES = "aiohttp aiohappyeyeballs aiosignal attr attrs frozenlist idna multidict propcache yarl typing_extensions.py"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Return an OpenEnv folder whose server needs only the packages in the folder."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the packages of this Python do not fit the base image")
    folder = tmp_path / "counter"
    shutil.copytree(Path(aiohttp.__file__).parents[1], folder / "packages", ignore=_not_needed)
    (folder / "server").mkdir()
    shutil.copy(Path(__file__).parents[1] / "environments" / "openenv_server.py", folder / "server")
    (folder / "server" / "app.py").write_text(SERVER)
    lines = f"FROM {BASE}\nCOPY . /app\nENV PYTHONPATH=/app/packages\n" + 'CMD ["python3", "/app/server/app.py"]\n'
    (folder / "server" / "Dockerfile").write_text(lines)
    (folder / "openenv.yaml").write_text("name: counter\nport: 8000\nvalidation: {resources: {memory_mb: 256}}\n")
    return folder


def _not_needed(folder: str, names: list[str]) -> set[str]:
    is_top = Path(folder) == Path(aiohttp.__file__).parents[1]
    return {name for name in names if name == "__pycache__" or (is_top and name not in PACKAGES.split())}


def test_server_of_an_openenv_folder_runs_in_a_container(served: Path, tmp_path: Path) -> None:
    actions = [{"type": "tool_call", "name": "act", "arguments": {"amount": 3}}, {"type": "terminate"}]
    policy = f"policy={json.dumps({'type': 'scripted', 'actions': actions})}"
    done = call("run", str(served), "-T", policy, "-n", "2", "--json", cwd=tmp_path, env=TRUST, timeout_s=300)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["policies"]
    assert summary["errors"] == {} and summary["episodes"] == 2


def test_failed_server_is_reported_with_its_output(served: Path, tmp_path: Path) -> None:
    (served / "server" / "app.py").write_text("raise SystemExit('no license')\n")
    done = call("run", str(served), "--policy", "random", cwd=tmp_path, env=TRUST, timeout_s=300)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == "no license", done.stderr


def test_server_of_a_killed_run_leaves_no_container(served: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\nfrom reward_kit import AgentPolicy\n"
        "class Slow(AgentPolicy):\n"
        "    is_free = True\n"
        "    async def get_action(self, observation, available_tools_specs=None):\n"
        "        await asyncio.sleep(300)\n"
    )
    before = containers()
    process = subprocess.Popen(
        command("run", str(served), "--policy", str(tmp_path / "slow.py:Slow")),
        cwd=tmp_path,
        env=TRUST,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: any((tmp_path / "runs").glob("*/run.json")) and bool(containers() - before))
        process.kill()
        process.wait()
        assert wait_until(lambda: not containers() - before)
    finally:
        process.kill()
        process.wait()
