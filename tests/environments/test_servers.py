"""Test servers of resources: sharing, health checks, restarts and shutdown."""

from __future__ import annotations

import asyncio
import shlex
import socket
import sys
import time
from pathlib import Path

import aiohttp
import anyio
import pytest
from pydantic import ValidationError

from reward_kit.environments import servers
from reward_kit.environments.servers import Server, ServerPool
from reward_kit.errors import ConfigError, EnvironmentFailure
from reward_kit.process_guardian import MARK, find_processes
from reward_kit.processes import child_environment
from reward_kit.task_parts import ResourceServerConfig

HERE = Path(__file__).parent
HEALTH = "http://127.0.0.1:{port}/health"


def spec(*options: str, health: str = HEALTH, timeout: float = 20.0, **more) -> tuple[ResourceServerConfig, Path]:
    command = f"'{sys.executable}' -S counter_server.py --port {{port}} {' '.join(options)}"
    config = ResourceServerConfig(start_command=command, health_check_url=health, start_timeout_s=timeout, **more)
    return config, HERE


def ours() -> list[int]:
    return find_processes(child_environment()[MARK])


async def get(server: Server, path: str) -> dict:
    async with aiohttp.ClientSession() as session, session.get(f"{server.address}{path}") as response:
        return await response.json(content_type=None)


async def test_equal_specifications_share_one_server_until_the_pool_closes() -> None:
    async with ServerPool() as pool:
        leased = [pool.lease(*spec("--stubborn")) for _ in range(4)]
        one, *others = await asyncio.gather(*leased)
        assert all(other is one for other in others)
        assert (await get(one, "/seen"))["folder"] == str(HERE)
        assert len(ours()) == 2
        before = time.monotonic()
        async with ServerPool() as inner:
            assert inner is pool
        assert one.process.returncode is None
        one.process.end = _impatient(one.process.end)
    assert time.monotonic() - before < 3
    assert ours() == []
    assert ServerPool.current() is None


def _impatient(end):
    return lambda: end(0.1)


async def test_different_specifications_start_different_servers() -> None:
    async with ServerPool() as pool:
        one, two = [await pool.lease(*spec(env={"NUMBER": number})) for number in "12"]
        assert one.address != two.address
        assert "NUMBER" in (await get(two, "/seen"))["variables"]


async def test_numeric_variables_become_text_and_booleans_are_rejected() -> None:
    assert spec(env={"NUMBER": 0, "SHARE": 0.5})[0].env == {"NUMBER": "0", "SHARE": "0.5"}
    with pytest.raises(ValidationError, match="YAML reads this as true; put the value in quotes"):
        spec(env={"FLAG": True})


async def test_python_placeholder_is_the_running_interpreter() -> None:
    say = "import os, sys; sys.exit(f'{sys.executable} {os.environ[\"BY\"]}')"
    config = ResourceServerConfig(
        start_command=f"{{python}} -S -c {shlex.quote(say)} {{port}}",
        health_check_url=HEALTH,
        env={"BY": "by {python}"},
    )
    async with ServerPool() as pool:
        with pytest.raises(EnvironmentFailure) as caught:
            await pool.lease(config, HERE)
    assert f"{sys.executable} by {sys.executable}" in str(caught.value)


async def test_large_output_does_not_block_and_its_end_is_quoted() -> None:
    async with ServerPool() as pool:
        server = await pool.lease(*spec("--chatty"))
        assert server.process.log_tail(1) == "ready to serve"


async def test_dead_server_is_restarted() -> None:
    async with ServerPool() as pool:
        first = await pool.lease(*spec())
        first.process._process.kill()
        assert "the server ended with exit code -9" in await first.describe_exit()
        second = await pool.lease(*spec())
        assert second is not first
        assert await second.describe_exit() == ""
        assert (await get(second, "/seen"))["open"] == 0


async def test_other_variables_reach_a_server_only_by_name(monkeypatch) -> None:
    for name in ("FIRST_API_KEY", "SECOND_API_KEY", "AN_INNOCENT_NAME"):
        monkeypatch.setenv(name, "x")
    async with ServerPool() as pool:
        server = await pool.lease(*spec(pass_env=["SECOND_API_KEY"]))
        seen = (await get(server, "/seen"))["variables"]
    assert "SECOND_API_KEY" in seen
    assert not {"FIRST_API_KEY", "AN_INNOCENT_NAME"} & {*seen}


async def test_server_that_exits_at_start_is_quoted_and_tried_three_times(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with ServerPool() as pool:
        for _ in range(5):
            with pytest.raises(EnvironmentFailure, match=r"ended with exit code 1; its last lines:\nno database"):
                await pool.lease(*spec("--ends", "--starts", str(starts)))
    assert len(starts.read_text().splitlines()) == 3


async def test_unhealthy_server_is_killed_without_blocking_other_tasks() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with ServerPool() as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        with pytest.raises(EnvironmentFailure, match=r"not healthy within 3 s \(http://.*/health: status 503\)"):
            await pool.lease(*spec("--never-healthy", timeout=3.0))
        assert ours() == []
        tasks.cancel_scope.cancel()
    assert ticks > 20


async def test_cancelled_start_leaves_nothing() -> None:
    async with ServerPool() as pool:
        with anyio.move_on_after(0.2):
            await pool.lease(*spec("--never-healthy"))
        assert ours() == []


async def test_port_taken_before_the_start_is_replaced(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], taken.getsockname()[1]])
        free = servers._free_port
        monkeypatch.setattr(servers, "_free_port", lambda: next(ports, None) or free())
        async with ServerPool() as pool:
            server = await pool.lease(*spec())
            assert server.port != taken.getsockname()[1]
            assert (await get(server, "/seen"))["pid"] == server.process.pid


async def test_fixed_port_in_use_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = ResourceServerConfig(start_command="sleep 100", health_check_url=f"{address}/health")
        async with ServerPool() as pool:
            with pytest.raises(ConfigError, match=f"another program is already listening at {address}"):
                await pool.lease(config, HERE)
    assert ours() == []


async def test_free_fixed_port_is_used() -> None:
    port = servers._free_port()
    command = f"'{sys.executable}' -S counter_server.py --port {port}"
    config = ResourceServerConfig(start_command=command, health_check_url=HEALTH.replace("{port}", str(port)))
    async with ServerPool() as pool:
        assert (await pool.lease(config, HERE)).address == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("command", "health", "problem"),
    [
        ("no-such-program --port {port}", HEALTH, "no-such-program --port .* cannot be started: No such file"),
        ("sleep {port}", "127.0.0.1:{port}/health", "is not an http URL"),
        ("sleep {port}", "http://127.0.0.1:{port}x/health", "is not an http URL"),
        ("sleep 'x {port}", HEALTH, "start_command: cannot be split into words: No closing quotation"),
        ("", "http://127.0.0.1:80", "start_command: the command is empty"),
        ("sleep 100", HEALTH, r"\{port\} must occur in both health_check_url and start_command"),
        ("sleep {port}", "http://127.0.0.1:80", r"\{port\} must occur in both health_check_url and start_command"),
    ],
)
async def test_invalid_configuration_is_named(command: str, health: str, problem: str) -> None:
    from reward_kit.environments.config import read_config

    async with ServerPool() as pool:
        with pytest.raises(ConfigError, match=problem):
            config = read_config(ResourceServerConfig, {"start_command": command, "health_check_url": health}, "http")
            await pool.lease(config, HERE)
    assert ours() == []
