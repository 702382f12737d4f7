"""A reward server: its OpenAPI document, authentication and routes of requests, its socket and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import anyio
import pydantic
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic.json_schema import models_json_schema

from reward_kit.errors import ConfigError, RewardError, RewardKitError, boundary
from reward_kit.integrations.reward_server.keys import Keys
from reward_kit.integrations.reward_server.options import RefusedError, ServerOptions, json_response, plain_response
from reward_kit.integrations.reward_server.served import CONTENT_TYPE, Metrics, Named, ServedReward
from reward_kit.integrations.reward_server.wire import (
    MOST_PARTS,
    BatchAnswerBody,
    BatchBody,
    Held,
    ListBody,
    ScoreBody,
    answer_of,
    body_of,
    requests_in,
)
from reward_kit.reward_agent.remote import AboutBody, AnswerBody

_ERRORS = {
    400: "The body is no JSON as RFC 8259 has it.",
    401: "There is no key, or it is none of this server's.",
    404: "There is no such reward.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is no JSON in UTF-8, or compressed.",
    422: "The body is no such request; the message names the field.",
    429: "Too much is asked for at the moment; Retry-After says when to ask again.",
    500: "A fault of the server.",
    503: "The server is ending.",
}
_OF_BODIES = (400, 408, 413, 415, 422, 429)


class ErrorDetail(pydantic.BaseModel):
    """What went wrong: a code for programs and a message for people."""

    code: str
    message: str


class ErrorBody(pydantic.BaseModel):
    """A request that was not answered with what it asked for."""

    model_config = pydantic.ConfigDict(title="Error")

    error: ErrorDetail


class HealthBody(pydantic.BaseModel):
    """Whether the server takes requests."""

    model_config = pydantic.ConfigDict(title="Health")

    status: str


def openapi_of(names: Iterable[str], options: ServerOptions) -> bytes:
    """The document of a server, in JSON.

    Args:
        names: of its rewards.
        options: its limits stand in the schemas.
    """
    incoming, outgoing = (
        (ScoreBody, BatchBody),
        (AnswerBody, BatchAnswerBody, AboutBody, ListBody, ErrorBody, HealthBody),
    )
    modes: list[Any] = [
        *((model, "validation") for model in incoming),
        *((model, "serialization") for model in outgoing),
    ]
    keys, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    definitions = _limited(schemas["$defs"], options)
    refs = {model.__name__: ref for (model, _), ref in keys.items()}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "reward-kit: rewards over HTTP",
            "version": version("reward-kit"),
            "description": "Unscored is null, with the reason in error; it is never 0.",
        },
        "paths": _paths(refs, sorted(names)),
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
    return json.dumps(document, separators=(",", ":")).encode("utf-8")


def _paths(refs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    where = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": names}}
    scored = "Scores, also where a reward failed: score is then null, and error says why."
    return {
        "/health": {
            "get": {**_operation("health", "Whether it runs", refs["HealthBody"], refs, (503,)), "security": []}
        },
        "/metrics": {"get": _operation("metrics", "Figures for Prometheus", None, refs)},
        "/openapi.json": {"get": _operation("openapi", "This document", {"type": "object"}, refs)},
        "/v1/rewards": {"get": _operation("list", "All rewards", refs["ListBody"], refs)},
        "/v1/rewards/{name}": {
            "parameters": [where],
            "get": _operation("about", "What a reward is", refs["AboutBody"], refs, (404,)),
        },
        **{
            f"/v1/rewards/{{name}}/{action}": {
                "parameters": [where],
                "post": {
                    **_operation(action, scored, refs[answer], refs, (404, *_OF_BODIES)),
                    "requestBody": {"required": True, "content": {"application/json": {"schema": refs[body]}}},
                },
            }
            for action, body, answer in (
                ("score", "ScoreBody", "AnswerBody"),
                ("score_batch", "BatchBody", "BatchAnswerBody"),
            )
        },
    }


def _operation(
    name: str, summary: str, schema: Any, refs: dict[str, Any], errors: tuple[int, ...] = ()
) -> dict[str, Any]:
    kind, told = ("application/json", schema) if schema else ("text/plain", {"type": "string"})
    responses = {"200": {"description": summary, "content": {kind: {"schema": told}}}}
    for status in sorted({*errors, *(() if name == "health" else (401, 500, 503))}):
        told = refs["HealthBody"] if name == "health" else refs["ErrorBody"]
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": told}},
            **({"headers": {"Retry-After": _RETRY_AFTER}} if status in (429, 503) and name != "health" else {}),
        }
    return {"operationId": name, "summary": summary, "responses": responses}


_RETRY_AFTER = {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}


def _limited(definitions: dict[str, Any], options: ServerOptions) -> dict[str, Any]:
    """The schemas with the limits that are the server's own."""
    definitions["BatchBody"]["properties"]["rollouts"]["maxItems"] = options.max_batch
    for name in ("ScoreBody", "RolloutBody"):
        definitions[name]["properties"]["messages"]["maxItems"] = options.max_messages
    for name in ("content", "tool_calls"):
        for kind in definitions["Message"]["properties"][name]["anyOf"]:
            if kind.get("type") == "array":
                kind["maxItems"] = MOST_PARTS
    return definitions


_READS = ("GET", "HEAD")
logger = logging.getLogger("reward_kit.integrations.reward_server")


class _Route(NamedTuple):
    """Where a request leads: its name in figures, which methods it takes, what answers, and for which reward."""

    name: str
    methods: tuple[str, ...]
    answer: Callable[[web.BaseRequest], Awaitable[web.Response]]
    reward: str | None = None


@dataclass(slots=True)
class _Seen:
    """What is known of a request, also of one that is not answered because whoever sent it hung up."""

    key: int
    route: str = "unknown"
    reward: str | None = None
    status: int = 499


class Service:
    """Answers requests.

    Args:
        named: the rewards.
        keys: without one of them, nothing is answered but `/health`.
        options: limits.

    Attributes:
        rewards: by name.
        connections: tells how many are open.
        is_hurried: `stop` was called.
    """

    def __init__(self, named: Sequence[Named], keys: Keys, options: ServerOptions) -> None:
        self.rewards = {one.name: ServedReward(one, options) for one in named}
        self.connections: Callable[[], int] = lambda: 0
        self._keys, self._options = keys, options
        self._held = Held(options.held_bytes)
        self._metrics = Metrics(self.rewards.values())
        self._in_flight = 0
        self._is_ending = self.is_hurried = False
        self._idle = anyio.Event()
        self._fixed = {
            "/health": _Route("health", _READS, self._health),
            "/metrics": _Route("metrics", _READS, self._figures),
            "/openapi.json": _Route("openapi", _READS, self._document),
            "/v1/rewards": _Route("list", _READS, self._list),
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, count it, and say so in the log."""
        began = asyncio.get_running_loop().time()
        seen = _Seen(self._keys.number_of(request.headers.getall("Authorization", [])))
        self._in_flight += 1
        try:
            response = await self._answered(request, seen)
            seen.status = response.status
            return response
        finally:
            self._in_flight -= 1
            if not self._in_flight and self._is_ending:
                self._idle.set()
            seconds = asyncio.get_running_loop().time() - began
            self._metrics.answered(seen.route, seen.status, seconds)
            facts = {"route": seen.route, "reward": seen.reward, "status": seen.status, "key": seen.key or None}
            logger.info("%s", request.method, extra={**facts, "peer": request.remote, "seconds": round(seconds, 6)})

    async def end(self, timeout_s: float) -> bool:
        """Take no further request, and wait for those in flight; whether all of them were answered in time."""
        self._is_ending = True
        if self._in_flight:
            with anyio.move_on_after(timeout_s):
                await self._idle.wait()
        return not self._in_flight

    def stop(self) -> None:
        """Have `end` wait no longer."""
        self.is_hurried = True
        self._idle.set()

    async def _answered(self, request: web.BaseRequest, seen: _Seen) -> web.Response:
        """The answer; a fault of ours is logged and told without details."""
        try:
            with boundary(RewardError, "a request"):
                route = self._route(request, seen.key)
                seen.route, seen.reward = route.name, route.reward
                response = await route.answer(request)
        except RefusedError as refusal:
            response = refusal.response()
        except RewardKitError as error:
            logger.error("%s failed", seen.route, exc_info=error)
            told = "a fault of the server; its log says more"
            response = RefusedError(500, "internal", told, closes=True).response()
        if not seen.key:  # whoever has none gets one answer, and cannot keep us waiting for more
            response.force_close()
        return response

    def _route(self, request: web.BaseRequest, key: int) -> _Route:
        """Where a request leads.

        Raises:
            RefusedError: it has no key, the server ends, or there is no such address or method.
        """
        path = request.rel_url.raw_path
        route = self._fixed.get(path)
        if not key and (route is None or route.name != "health" or request.method not in route.methods):
            told = "send a key of this server: Authorization: Bearer KEY"
            raise RefusedError(401, "unauthorized", told, {"WWW-Authenticate": "Bearer"}, closes=True)
        route = route or self._route_of_reward(path)
        if request.method not in route.methods:
            allowed = ", ".join(route.methods)
            told = f"{path:.200} takes {allowed}"
            raise RefusedError(405, "method_not_allowed", told, {"Allow": allowed}, closes=True)
        if self._is_ending and route.name != "health":
            raise RefusedError(503, "ending", "the server is ending", {"Retry-After": "1"}, closes=True)
        return route

    def _route_of_reward(self, path: str) -> _Route:
        prefix, _, rest = path.partition("/v1/rewards/")
        name, _, action = rest.partition("/")
        if prefix or action not in ("", "score", "score_batch") or (action == "" and path.endswith("/")):
            raise RefusedError(404, "not_found", f"there is no {path!r:.200}; /openapi.json lists what is", closes=True)
        if (reward := self.rewards.get(name)) is None:
            known = ", ".join(self.rewards)
            raise RefusedError(404, "not_found", f"there is no reward {name!r:.100}; there is {known}", closes=True)
        if not action:
            return _Route("about", _READS, functools.partial(self._about, reward), name)
        return _Route(action, ("POST",), functools.partial(self._score, reward, action == "score_batch"), name)

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return json_response({"status": "ending" if self._is_ending else "ok"}, 503 if self._is_ending else 200)

    async def _figures(self, request: web.BaseRequest) -> web.Response:
        text = self._metrics.text(self.connections(), self._held.bytes)
        return plain_response(text.encode(), CONTENT_TYPE)

    async def _document(self, request: web.BaseRequest) -> web.Response:
        return plain_response(self._openapi, "application/json")

    @functools.cached_property
    def _openapi(self) -> bytes:
        return openapi_of(self.rewards, self._options)

    async def _list(self, request: web.BaseRequest) -> web.Response:
        return json_response({"rewards": [reward.about.model_dump() for reward in self.rewards.values()]})

    async def _about(self, reward: ServedReward, request: web.BaseRequest) -> web.Response:
        return json_response(reward.about.model_dump())

    async def _score(self, reward: ServedReward, is_batch: bool, request: web.BaseRequest) -> web.Response:
        reward.check_room()
        async with body_of(request, self._options, self._held) as body:
            requests, codec = await requests_in(
                body, self._options, is_batch=is_batch, wants_episodes=reward.wants_episodes
            )
            body.clear()
            with reward.room_for(len(requests)):
                scored = await reward.score(requests)
        answers = [answer_of(one, codec) for one in scored]
        return json_response({"scores": answers} if is_batch else answers[0])


_KEPT_ALIVE_S = 75.0
_LINGERING_S = 2.0
_SENDING_S, _LOOK_S = 10.0, 0.01
_CANCELLING_S = 0.1
_UNREAD_MS = 60_000
_BACKLOG = 4096
_SHOWN = 200
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
