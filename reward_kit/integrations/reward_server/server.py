"""A reward server as a whole: its socket, who is let in how long, and its end, at which nothing in flight is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import anyio
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from reward_kit.errors import ConfigError
from reward_kit.integrations.reward_server.keys import Keys
from reward_kit.integrations.reward_server.options import ServerOptions
from reward_kit.integrations.reward_server.served import Named
from reward_kit.integrations.reward_server.service import Service

_KEPT_ALIVE_S = 75.0
_LINGERING_S = 2.0
_SENDING_S, _LOOK_S = 10.0, 0.01
_CANCELLING_S = 0.1
_UNREAD_MS = 60_000
_BACKLOG = 4096
_SHOWN = 200

logger = logging.getLogger("reward_kit.integrations.reward_server")
_of_http = logging.getLogger("reward_kit.integrations.reward_server.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a record of aiohttp is about a fault of ours. What a client sends that is no HTTP gets one line."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        logger.info("no HTTP", extra={"status": error.code, "problem": str(error.message)[:_SHOWN]})
        return False
    return True


_of_http.addFilter(_is_ours)


class _Door:
    """Makes a protocol for each connection: as many as may be open, each silent for a short time only."""

    def __init__(self, server: web.Server, options: ServerOptions) -> None:
        self._server, self._options = server, options
        self._silent: set[asyncio.Protocol] = set()

    def __call__(self) -> asyncio.Protocol:
        if len(self._server.connections) >= self._options.max_connections:
            return _Full()
        protocol = self._server()
        self._silent.add(protocol)
        asyncio.get_running_loop().call_later(self._options.head_timeout_s, self._close_if_silent, protocol)
        return protocol

    def heard(self, protocol: asyncio.Protocol) -> None:
        """A whole head came."""
        self._silent.discard(protocol)

    def _close_if_silent(self, protocol: web.RequestHandler) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            protocol.force_close()


class _Full(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say so, and hang up."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        transport.close()


class Running(NamedTuple):
    """A server that is there.

    Attributes:
        address: such as "http://127.0.0.1:8700".
        stop: have its end not wait any longer for what is in flight.
    """

    address: str
    stop: Callable[[], None]


@asynccontextmanager
async def serving(named: Sequence[Named], keys: Keys, options: ServerOptions) -> AsyncIterator[Running]:
    """Serve rewards inside the block; at its end, what is in flight is answered within `shutdown_timeout_s`.

    Args:
        named: the rewards.
        keys: without one of them, nothing answers but `/health`.
        options: where, and limits.

    Yields:
        Where it is, and how its end is hurried.

    Raises:
        ConfigError: the address or the port cannot be had.
    """
    _allow_descriptors(options.max_connections)
    service = Service(named, keys, options)
    async with AsyncExitStack() as stack:
        for reward in service.rewards.values():
            await stack.enter_async_context(reward.agent)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            door.heard(request.protocol)
            return await service.handle(request)

        server = web.Server(
            handle,
            handler_cancellation=True,
            access_log=None,
            logger=_of_http,
            keepalive_timeout=_KEPT_ALIVE_S,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
        )
        door = _Door(server, options)
        service.connections = lambda: len(server.connections)
        listener = await _listening(door, options)
        try:
            yield Running(_address(listener), service.stop)
        finally:
            listener.close()
            with anyio.CancelScope(shield=True):
                await _end(service, server, options.shutdown_timeout_s)


async def _end(service: Service, server: web.Server, timeout_s: float) -> None:
    """Answer what is in flight, see the answers off, and cancel what did not end in time."""
    if await service.end(timeout_s):
        server.pre_shutdown()
        with anyio.move_on_after(min(timeout_s, _SENDING_S)):
            while server.connections:  # noqa: ASYNC110 - aiohttp tells nobody when one is gone
                await anyio.sleep(_LOOK_S)
    elif service.is_hurried:
        logger.warning("stopped before everything was answered")
    else:
        logger.warning("not everything was answered within %g s", timeout_s)
    await server.shutdown(_CANCELLING_S)


async def _listening(door: _Door, options: ServerOptions) -> asyncio.Server:
    try:
        listener = await asyncio.get_running_loop().create_server(door, options.host, options.port, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        told = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {options.host} --port {options.port}: {told}") from error
    for each in listener.sockets:  # connections inherit it: answers that nobody reads are not kept for ever
        with contextlib.suppress(OSError, AttributeError):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    return listener


def _address(listener: asyncio.Server) -> str:
    host, port = listener.sockets[0].getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _allow_descriptors(connections: int) -> None:
    """Raise the limit of open files to what the connections need, as far as that is allowed."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
