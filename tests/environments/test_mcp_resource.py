"""Test the MCP resource: configuration, start, private folders, forks and cleanup."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import mcp_session as stdio
from reward_kit.environments import open_snapshot
from reward_kit.environments.mcp import McpResource
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from tests.environments.mcp_resources import AFTER, TINY, ask, copies, opened

# The start


async def failed_start(*command: str, **config) -> str:
    resource = McpResource()
    with pytest.raises(EnvironmentFailure) as raised:
        await resource.setup({"command": list(command), **config})
    await resource.close()
    return str(raised.value)


async def test_server_that_exits_at_start_is_reported_with_code_and_output() -> None:
    message = await failed_start("{python}", "-S", "-c", "import sys; print('noise'); sys.exit('no licence')")
    assert "could not be started: Connection closed; exit code 1" in message
    assert "1 lines on its standard output are not messages; the first is 'noise'" in message
    assert message.endswith("its log ends with:\nno licence")


async def test_server_that_never_answers_times_out(tmp_path) -> None:
    code = f"import os, sys; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); sys.stdin.read()"
    message = await failed_start("{python}", "-S", "-c", code, start_timeout_s=0.4)
    assert "did not respond within 0.4 s (start_timeout_s); its log is empty" in message
    assert await gone(*await pids_in(tmp_path / "pid", 1))


async def test_unserved_url_is_one_failure() -> None:
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        with pytest.raises(EnvironmentFailure, match="could not be started: All connection attempts failed"):
            await McpResource().setup({"url": f"http://127.0.0.1:{unserved.getsockname()[1]}/mcp"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "exactly one of command"),
        ({"command": "a", "url": "http://a"}, "exactly one of command"),
        ({"comand": ["a"]}, "comand: unknown key; did you mean 'command'"),
        ({"command": ["a", True]}, "command.1: YAML reads this as true"),
        ({"command": "a", "env": {"A": False}}, "env.A: YAML reads this as false; put the value in quotes"),
        ({"command": "a", "headers": {"a": "b"}}, "headers does not apply to command"),
        ({"url": "http://a", "env": {"a": "b"}}, "env does not apply to url"),
        ({"url": "ftp://a"}, "must start with http://"),
        ({"url": "http://a", "fork": "replay"}, "fork: replay needs a private server"),
        ({"url": "http://a", "working_copy": "x"}, "working_copy needs a private server"),
        ({"url": "http://a", "headers_env": {"Authorization": "NO_SUCH"}}, "variable NO_SUCH is not set"),
        ({"command": "a", "pass_env": ["NO_SUCH"]}, "variable NO_SUCH is not set"),
        ({"command": "a {working_copy}"}, "no working_copy is set"),
        ({"command": "a {workin_copy}"}, r"unknown placeholder \{workin_copy\}.* did you mean '\{working_copy\}'"),
        ({"command": "a", "working_copy": "no_such_folder"}, "working_copy: no such directory"),
        ({"command": "a", "cwd": "no_such_folder"}, "cwd: no such directory"),
        ({"command": "a", "state_key": "files"}, "state_key: files needs a working_copy"),
        ({"command": "no-such-program"}, "cannot be started: No such file or directory: no-such-program"),
        ({"command": TINY, "expert_calls": [{"name": "putt"}]}, "expert_calls: .* 'putt'; did you mean 'put'"),
        ({"command": TINY, "tools": ["putt"]}, "tools: the server has no tool 'putt'; did you mean 'put'"),
    ],
)
async def test_invalid_configuration_is_one_error(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await McpResource().setup(config)


def test_missing_sdk_names_the_extra() -> None:
    code = (
        "import sys, asyncio; sys.modules['mcp'] = None\n"
        "from reward_kit.environments.mcp import McpResource\n"
        "asyncio.run(McpResource().setup({'command': 'a'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith(
        "ConfigError: the mcp resource needs the MCP SDK; install the extra 'mcp': "
        "pip install '/path/to/reward-kit[mcp]' (in the clone: '.[mcp]')\n"
    )


SAY_WHERE = """
import os, sys
sys.exit(f"{os.getcwd()} {sorted(name for name in os.environ if name.startswith('TEST_'))} {os.environ['AT']}")
"""


async def test_server_gets_its_folder_and_only_its_variables(tmp_path, monkeypatch) -> None:
    for name in ("TEST_TOKEN", "TEST_OTHER_TOKEN", "TEST_PLAIN"):
        monkeypatch.setenv(name, "set")
    (tmp_path / "inner").mkdir()
    variables = {"AT": "{task_folder}/x", "TEST_NUMBER": 3}
    config = {"env": variables, "pass_env": ["TEST_TOKEN"], "task_folder": str(tmp_path)}
    command = ["{python}", "-S", str(tmp_path / "say.py")]
    (tmp_path / "say.py").write_text(SAY_WHERE)
    message = await failed_start(*command, **config, cwd="inner")
    assert f"{tmp_path}/inner ['TEST_NUMBER', 'TEST_TOKEN'] {tmp_path}/x" in message
    message = await failed_start(*command, **config)
    assert f"ends with:\n{tmp_path} [" in message


# Worlds


@pytest.fixture
def seeded(tmp_path) -> dict:
    (tmp_path / "seed" / "inner").mkdir(parents=True)
    (tmp_path / "seed" / "a").write_text("first")
    return {"command": [*TINY, "{working_copy}"], "working_copy": "seed", "task_folder": str(tmp_path)}


async def test_each_episode_has_a_private_copy_that_is_removed(seeded) -> None:
    async with opened(**seeded) as one, opened(**seeded) as two:
        assert await one.state_key() == await two.state_key()
        assert len(copies()) == 2
        await ask(one, "write", name="b", text="new")
        assert dict(open_snapshot(await one.final_state())) == {"a": "first", "b": "new"}
        assert dict(open_snapshot(await two.final_state())) == {"a": "first"}
        await one.reset(1)
        assert dict(open_snapshot(await one.final_state())) == {"a": "first"}
        assert len(copies()) == 2
    assert not copies()
    async with opened() as nothing_kept:
        assert await nothing_kept.final_state() is None


async def test_agent_sees_one_path_for_every_working_copy(seeded) -> None:
    async with opened(**seeded) as resource:
        assert await ask(resource, "write", name="/working_copy/b", text="new") == "/working_copy/b is written"
        assert await ask(resource, "files") == "/working_copy/a /working_copy/b /working_copy/inner"
        assert set(open_snapshot(await resource.final_state())) == {"a", "b"}


async def test_state_key_is_the_history_or_the_files(seeded) -> None:
    async with opened(**seeded, state_key="history") as by_history, opened(**seeded) as by_files:
        keys = {}
        for resource in (by_history, by_files):
            start = await resource.state_key()
            await ask(resource, "files")
            looked = await resource.state_key()
            await ask(resource, "write", name="b", text="new")
            keys[resource] = (start == looked, looked == await resource.state_key())
    assert keys == {by_history: (False, False), by_files: (True, False)}


async def test_equal_histories_have_equal_keys_without_rejected_calls() -> None:
    async with opened() as one, opened() as two:
        await ask(one, "put", word="a")
        with pytest.raises(ToolError):
            await ask(two, "put", wrd="a")
        assert await one.state_key() != await two.state_key()
        await ask(two, "put", word="a")
        assert await one.state_key() == await two.state_key()


async def test_private_server_forks_by_replay_in_another_folder(seeded) -> None:
    async with opened(**seeded, fork="replay", state_key="history") as resource:
        await ask(resource, "put", word="a")
        await ask(resource, "write", name="/working_copy/b", text="new")
        twin = await resource.fork()
        assert await twin.state_key() == await resource.state_key()
        assert await ask(twin, "put", word="b") == "a b"
        await ask(twin, "write", name="c", text="")
        assert await ask(resource, "get") == "a"
        assert dict(open_snapshot(await resource.final_state())) == {"a": "first", "b": "new"}
        saved = await resource.checkpoint()
        await ask(resource, "put", word="c")
        await resource.restore(saved)
        assert await ask(resource, "get") == "a"
        await twin.close()
        assert len(copies()) == 1


async def test_server_with_varying_answers_cannot_be_replayed() -> None:
    code = f"import os, runpy; n = os.getpid(); g = runpy.run_path({TINY[-1]!r}); \
g['words'].append(str(n)); g['main']()"
    async with opened(["{python}", "-S", "-c", code], fork="replay") as resource:
        await ask(resource, "get")
        with pytest.raises(EnvironmentFailure, match=r"replay: step 0 \(get \{\}\): the observation differs"):
            await resource.fork()


async def test_expert_makes_the_configured_calls(seeded) -> None:
    plan = [{"name": "put", "arguments": {"word": "a"}}, {"name": "get"}]
    async with opened(**seeded, fork="replay", expert_calls=plan) as resource:
        assert await resource.expert_action() == {"type": "tool_call", "name": "put", "arguments": {"word": "a"}}
        await ask(resource, "files")
        await ask(resource, "put", word="a")
        twin = await resource.fork()
        for each in (resource, twin):
            assert await each.expert_action() == {"type": "tool_call", "name": "get", "arguments": {}}
        await ask(resource, "get")
        assert await resource.expert_action() is None
        await resource.reset(0)
        assert (await resource.expert_action())["name"] == "put"
        await twin.close()


async def test_undeclared_fork_is_rejected() -> None:
    async with opened() as resource:
        for refused in (resource.fork(), resource.checkpoint(), resource.restore(None)):
            with pytest.raises(NotImplementedError):
                await refused


TOOLS = ["put", "get", "write", "files"]


@pytest.mark.parametrize("fork", ["none", "replay"])
async def test_declared_properties_pass_the_checker(fork, seeded) -> None:
    findings = await check_resource(McpResource, {**seeded, "fork": fork, "tools": TOOLS[:3]}, steps=3)
    assert [finding.message for finding in findings if finding.level == "error"] == []


# Nothing is left behind


async def gone(*pids: int) -> bool:
    """Return whether the processes end within five seconds; a zombie has ended."""
    for _ in range(500):
        if not any(is_alive(pid) for pid in pids):
            return True
        await asyncio.sleep(0.01)
    return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def pids_in(path: Path, count: int = 2) -> list[int]:
    while len(found := words_of(path)) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return [int(pid) for pid in found]


def words_of(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


PARENT = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
sys.stdin.read()
"""


async def test_cancelled_start_leaves_no_process_and_no_folder(seeded, tmp_path) -> None:
    command = ["{python}", "-S", "-c", PARENT, str(tmp_path / "pids")]
    task = asyncio.create_task(McpResource().setup({**seeded, "command": command}))
    pids = await pids_in(tmp_path / "pids")
    assert copies()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(*pids)
    assert not copies()


async def test_server_that_ignores_termination_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stdio, "_GRACE_S", 0.1)
    code = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); \
open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntry:\n {AFTER.strip()}\nfinally:\n time.sleep(600)"
    async with opened(["{python}", "-S", "-c", code]):
        pids = await pids_in(tmp_path / "pid", 1)
    assert await gone(*pids)


KILLED = """
import asyncio, sys
from reward_kit.environments.mcp import McpResource
async def main():
    world = McpResource()
    await world.setup({"command": sys.argv[2:], "working_copy": sys.argv[1]})
    await world.step("wait", {})
asyncio.run(main())
"""


def test_killed_run_leaves_no_server(tmp_path) -> None:
    (tmp_path / "seed").mkdir()
    pids = tmp_path / "pids"
    server = f"import os; open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}')" + AFTER
    command = [sys.executable, "-c", KILLED, str(tmp_path / "seed"), "{python}", "-S", "-c", server]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    of_server, of_run = asyncio.run(pids_in(pids))
    assert of_run == run.pid and is_alive(of_server)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert asyncio.run(gone(of_server))


def test_expert_of_the_example_solves_its_tasks(tmp_path) -> None:
    task = Path(__file__).parents[2] / "examples" / "mcp_filesystem" / "task.yaml"
    # Without forks it starts half as many servers.
    options = ["--policy", "expert", "-n", "1", "--json", "-T", "base_resource_config.fork=none"]
    command = [sys.executable, "-m", "reward_kit.cli.main", "run", str(task), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (policy,) = json.loads(done.stdout)["policies"]
    assert (policy["episodes"], policy["score"]["mean"], policy["tool_errors"]) == (4, 1.0, 0)
