"""Servers that are started for resources.

Resources with equal specifications share a server, and all servers are stopped at the end. If a server has died, it is
restarted for the next resource, so only the episodes that used it fail.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import anyio

from reward_kit.environments.base import canonical_json
from reward_kit.errors import ConfigError, EnvironmentFailure
from reward_kit.processes import ChildProcess, child_environment, start_process
from reward_kit.task_parts import ResourceServerConfig

_POLL_S = 0.05
_HEALTH_ANSWER_S = 2.0
_STARTS = 3
_PORT_TAKEN = ("address already in use", "address in use", "eaddrinuse", "port is already", "only one usage of each")


@dataclass(slots=True)
class Server:
    """A server that was healthy when it was leased.

    `address` is the address of its health check, and `port` is the value of `{port}`.
    """

    address: str
    port: int
    process: ChildProcess

    async def describe_exit(self) -> str:
        """Return the server's exit code and last lines as a message suffix, or "" if the server is still running."""
        with anyio.move_on_after(0.3):
            # A connection breaks shortly before the process exits.
            while self.process.returncode is None:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        return "" if self.process.returncode is None else f"; the server ended {_describe_end(self.process)}"


@dataclass(slots=True)
class _Slot:
    """The state of one server in a pool."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    server: Server | None = None
    failures: int = 0
    last_failure: str = ""


_open_pool: ContextVar[ServerPool | None] = ContextVar("_open_pool", default=None)


class ServerPool:
    """A set of servers that run for as long as the pool is open.

    If a pool is already open, entering a new pool returns the open one.
    """

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._token: Token[ServerPool | None] | None = None

    @classmethod
    def current(cls) -> ServerPool | None:
        """Return the open pool of this context."""
        return _open_pool.get()

    async def __aenter__(self) -> ServerPool:
        outer = _open_pool.get()
        if outer is not None:
            return outer
        self._token = _open_pool.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _open_pool.reset(self._token)
            await self.close()

    async def lease(self, config: ResourceServerConfig, folder: Path) -> Server:
        """Return a healthy server for a specification. Start it in `folder` unless it is already running.

        Raises:
            ConfigError: the command cannot be run, or its fixed port is already in use.
            EnvironmentFailure: the server exited or did not become healthy in time. The message contains the last lines
                of its output. After three such failures in a row, the pool does not try again.
        """
        slot = self._slots.setdefault(canonical_json([str(folder), config.model_dump()]), _Slot())
        async with slot.lock:
            if slot.server is not None and slot.server.process.returncode is None:
                return slot.server
            if slot.failures >= _STARTS:
                raise EnvironmentFailure(slot.last_failure)
            if slot.server is not None:
                dead, slot.server = slot.server, None
                await dead.process.end()
            try:
                slot.server = await _start(config, folder)
            except EnvironmentFailure as failure:
                slot.failures, slot.last_failure = slot.failures + 1, str(failure)
                raise
            slot.failures = 0
            return slot.server

    async def close(self) -> None:
        """Stop all servers and the processes that they started. The servers are stopped concurrently."""
        servers = [slot.server for slot in self._slots.values() if slot.server is not None]
        self._slots.clear()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for server in servers:
                    tasks.start_soon(server.process.end)


async def _start(config: ResourceServerConfig, folder: Path) -> Server:
    """Start a server. If the free port has been taken in the meantime, try a different port."""
    has_free_port = "{port}" in config.health_check_url
    for attempt in range(_STARTS):
        port = _free_port() if has_free_port else 0
        url = config.health_check_url.replace("{port}", str(port))
        try:
            parts = urlsplit(url)
            number = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            number = 0
        if not number or not parts.hostname:
            raise ConfigError(f"resource_server: health_check_url: {url!r} is not an http URL")
        address = f"{parts.scheme}://{f'[{parts.hostname}]' if ':' in parts.hostname else parts.hostname}:{number}"
        if not has_free_port:
            await _refuse_used_port(parts.hostname, number, address)

        def fill(text: str, port: int = port) -> str:
            return text.replace("{port}", str(port)).replace("{python}", sys.executable)

        # `python` is this interpreter, even if its environment is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        variables = {"PATH": path, **{name: fill(value) for name, value in config.env.items()}}
        environment = child_environment(variables, pass_names=config.pass_env)
        command = [fill(word) for word in shlex.split(config.start_command)]
        try:
            process = await start_process(command, cwd=folder, env=environment, log_name="resource-server")
        except ConfigError as error:
            raise ConfigError(f"resource_server: {error}") from error
        try:
            problem = await _until_healthy(process, url, config.start_timeout_s)
        except BaseException:
            await process.end()
            raise
        if not problem:
            return Server(address, port, process)
        output = process.log_tail(50).lower()
        await process.end()
        is_taken = has_free_port and any(words in output for words in _PORT_TAKEN)
        if not is_taken or attempt == _STARTS - 1:
            raise EnvironmentFailure(f"resource_server: {config.start_command!r}: {problem}")
    raise AssertionError("the last attempt returns or raises")


async def _until_healthy(process: ChildProcess, url: str, seconds: float) -> str:
    """Poll the health check until it returns status 2xx or the server exits.

    Return "" if the server is healthy, and a description of the problem otherwise.
    """
    import aiohttp

    async def stop_at_the_end() -> None:
        while process.returncode is None:  # noqa: ASYNC110 - a process gives no event
            await anyio.sleep(_POLL_S)
        tasks.cancel_scope.cancel()

    last = "no answer"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_ANSWER_S)) as session:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                # If a different program uses the port, the server exits without responding.
                tasks.start_soon(stop_at_the_end)
                while True:
                    try:
                        async with session.get(url, allow_redirects=False) as response:
                            last = f"status {response.status}"
                            if 200 <= response.status < 300 and process.returncode is None:
                                tasks.cancel_scope.cancel()
                                return ""
                    except (aiohttp.ClientError, OSError) as error:
                        last = f"{type(error).__name__}: {error}".removesuffix(": ")
                    await anyio.sleep(_POLL_S)
    if process.returncode is not None:
        return f"the server ended {_describe_end(process)}"
    return f"not healthy within {seconds:g} s ({url}: {last}){_last_lines(process)}"


def _describe_end(process: ChildProcess) -> str:
    return f"with exit code {process.returncode}{_last_lines(process)}"


def _last_lines(process: ChildProcess) -> str:
    output = process.log_tail()
    return f"; its last lines:\n{output}" if output else "; it wrote no output"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _refuse_used_port(host: str, port: int, address: str) -> None:
    """Reject a fixed port that is already in use.

    Otherwise, the program that uses the port would be mistaken for the server.
    """
    try:
        with anyio.fail_after(_HEALTH_ANSWER_S):
            stream = await anyio.connect_tcp(host, port)
    except (OSError, TimeoutError):
        return
    await stream.aclose()
    raise ConfigError(
        f"resource_server: another program is already listening at {address}; use {{port}} to get a free port"
    )
