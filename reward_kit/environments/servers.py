"""Servers that are started for resources: one for all worlds that ask for the same, on a free port, ended for sure.

While a `ServerPool` is open, `lease` shares its servers. A server that has died is started again for the next world
that asks, so that only the episodes that were using it fail.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import anyio

from reward_kit.errors import ConfigError, EnvironmentFailure
from reward_kit.processes import ChildProcess, child_environment, start_process
from reward_kit.task_parts import ResourceServerConfig

_POLL_S = 0.05
_HEALTH_ANSWER_S = 2.0
_STARTS = 3
_PORT_TAKEN = ("address already in use", "address in use", "eaddrinuse", "port is already", "only one usage of each")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Which server: two worlds with equal specifications share one."""

    command: str
    health_check_url: str
    folder: Path
    start_timeout_s: float = 60.0
    env: tuple[tuple[str, str], ...] = ()
    pass_env: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: ResourceServerConfig, folder: Path) -> ServerSpec:
        """The server of a task; its command runs in `folder`."""
        variables, names = tuple(sorted(config.env.items())), tuple(config.pass_env)
        return cls(config.start_command, config.health_check_url, folder, config.start_timeout_s, variables, names)

    @property
    def has_free_port(self) -> bool:
        """The port is ours to choose."""
        return "{port}" in self.health_check_url


@dataclass(slots=True)
class Server:
    """A server that was healthy when it was leased.

    Attributes:
        address: scheme, host and port of the health check.
        port: what `{port}` stands for.
    """

    address: str
    port: int
    process: ChildProcess

    @property
    def is_running(self) -> bool:
        """The program we started has not ended."""
        return self.process.returncode is None

    async def obituary(self) -> str:
        """How it ended and its last lines, for the end of a message; "" while it runs."""
        with anyio.move_on_after(0.3):
            # A connection breaks a moment before the process is gone.
            while self.is_running:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        return "" if self.is_running else f"; the server ended {_how_it_ended(self.process)}"


@dataclass(slots=True)
class _Slot:
    """The place of one server in a pool."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    server: Server | None = None
    failures: int = 0
    last_failure: str = ""


_open_pool: ContextVar[ServerPool | None] = ContextVar("_open_pool", default=None)


class ServerPool:
    """Servers that live as long as the pool is open. Inside another open pool it is that one."""

    def __init__(self) -> None:
        self._slots: dict[ServerSpec, _Slot] = {}
        self._token: Token[ServerPool | None] | None = None

    @classmethod
    def current(cls) -> ServerPool | None:
        """The pool that is open here."""
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

    async def lease(self, spec: ServerSpec) -> Server:
        """The running, healthy server of a specification, started where it is not there or has died.

        Raises:
            ConfigError: the command cannot be run, or its fixed port is taken.
            EnvironmentFailure: it ended or did not become healthy in time; the message has its last lines. After three
                such starts in a row the pool does not try again.
        """
        slot = self._slots.setdefault(spec, _Slot())
        async with slot.lock:
            if slot.server is not None and slot.server.is_running:
                return slot.server
            if slot.failures >= _STARTS:
                raise EnvironmentFailure(slot.last_failure)
            if slot.server is not None:
                dead, slot.server = slot.server, None
                await dead.process.end()
            try:
                slot.server = await _start(spec)
            except EnvironmentFailure as failure:
                slot.failures, slot.last_failure = slot.failures + 1, str(failure)
                raise
            slot.failures = 0
            return slot.server

    async def close(self) -> None:
        """End every server, at the same time, with all that it started."""
        servers = [slot.server for slot in self._slots.values() if slot.server is not None]
        self._slots.clear()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for server in servers:
                    tasks.start_soon(server.process.end)


async def _start(spec: ServerSpec) -> Server:
    """Start a server; once more on another port where the one we found free was taken in between."""
    for attempt in range(_STARTS):
        port = _free_port() if spec.has_free_port else 0
        url = spec.health_check_url.replace("{port}", str(port))
        address = _address(url)
        if not spec.has_free_port:
            await _refuse_taken(address)
        process = await _spawn(spec, port)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(process.end)
            problem = await _until_healthy(process, url, spec.start_timeout_s)
            undo.pop_all()
        if not problem:
            return Server(address, port, process)
        said = process.log_tail(50).lower()
        await process.end()
        is_taken = spec.has_free_port and any(words in said for words in _PORT_TAKEN)
        if not is_taken or attempt == _STARTS - 1:
            raise EnvironmentFailure(f"resource_server: {spec.command!r}: {problem}")
    raise AssertionError("the last attempt returns or raises")


async def _spawn(spec: ServerSpec, port: int) -> ChildProcess:
    values = {"{port}": str(port), "{python}": sys.executable}
    variables = {name: _filled(value, values) for name, value in spec.env}
    # So that `python` is the one that runs us, also where its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = child_environment({"PATH": path, **variables}, pass_names=spec.pass_env)
    command = [_filled(word, values) for word in shlex.split(spec.command)]
    try:
        return await start_process(command, cwd=spec.folder, env=environment, log_name="resource-server")
    except ConfigError as error:
        raise ConfigError(f"resource_server: {error}") from error


def _filled(text: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


async def _until_healthy(process: ChildProcess, url: str, seconds: float) -> str:
    """Ask until the answer is 2xx or the server has ended: "", or what went wrong."""
    import aiohttp

    last = "no answer"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_ANSWER_S)) as session:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                # Where somebody else has the port, the answer may never come, and the server is long gone.
                tasks.start_soon(_cancel_at_the_end, process, tasks.cancel_scope)
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
        return f"the server ended {_how_it_ended(process)}"
    return f"not healthy within {seconds:g} s ({url}: {last}){_last_lines(process)}"


async def _cancel_at_the_end(process: ChildProcess, scope: anyio.CancelScope) -> None:
    while process.returncode is None:  # noqa: ASYNC110 - a process gives no event
        await anyio.sleep(_POLL_S)
    scope.cancel()


def _how_it_ended(process: ChildProcess) -> str:
    return f"with exit code {process.returncode}{_last_lines(process)}"


def _last_lines(process: ChildProcess) -> str:
    said = process.log_tail()
    return f"; its last lines:\n{said}" if said else "; it wrote nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _refuse_taken(address: str) -> None:
    """A server of somebody else on a fixed port would be taken for ours."""
    _, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    try:
        with anyio.fail_after(_HEALTH_ANSWER_S):
            stream = await anyio.connect_tcp(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return
    await stream.aclose()
    raise ConfigError(f"resource_server: something else listens at {address} already; write {{port}} for a free port")


def _address(url: str) -> str:
    """Scheme, host and port of a URL.

    Raises:
        ConfigError: it is no http address.
    """
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        port = 0
    if not port or not parts.hostname:
        raise ConfigError(f"resource_server: health_check_url: {url!r} is no http address")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"
