"""The reward server: its rewards, metrics, OpenAPI document, routes, socket and shutdown."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import itertools
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pydantic
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic.json_schema import models_json_schema

from reward_kit.errors import ConfigError, RewardError, RewardKitError, boundary
from reward_kit.integrations.reward_server.options import (
    Keys,
    RefusedError,
    ServerOptions,
    busy,
    json_response,
    plain_response,
)
from reward_kit.integrations.reward_server.wire import (
    MOST_PARTS,
    BatchAnswerBody,
    BatchBody,
    BodyReader,
    ListBody,
    ScoreBody,
    make_answer,
    parse_requests,
)
from reward_kit.lazy import package_version
from reward_kit.loading import split_reference
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.remote import AboutBody, AnswerBody, checked_address
from reward_kit.reward_agent.sandboxed import SandboxedReward
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest
from reward_kit.runs.inputs import scorer_hash
from reward_kit.telemetry.current import continue_trace

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAMED = re.compile(rf"({_NAME.pattern})=(?!=)(.*)", re.DOTALL)
_LONGEST_WAIT_S = 60.0
_READS = ("GET", "HEAD")
logger = logging.getLogger("reward_kit.integrations.reward_server")


class NamedReward(NamedTuple):
    """A loaded reward and its name in URLs."""

    name: str
    reward: Reward
    notes: tuple[str, ...] = ()


def load_named_rewards(
    references: Sequence[str], folder: Path, choice: SandboxChoice, options: Mapping[str, Any]
) -> list[NamedReward]:
    """Load rewards. Each reward is named after its id or has the name given in its reference.

    Args:
        references: the rewards, as `file.py:function` or `name=file.py:function`.
        folder: the directory for relative file paths.
        choice: the user's sandbox settings.
        options: the options of the reward. If there are multiple rewards, each option is prefixed with its reward's
            name and a dot.

    Raises:
        ConfigError: If a reward cannot be loaded, if two rewards have the same name, or if an option belongs to no
            reward.
    """
    named: dict[str, NamedReward] = {}
    is_single, unused = len(references) == 1, set(options)
    for text in references:
        match = _NAMED.fullmatch(text)
        name, reference = (match[1], match[2]) if match else ("", text)
        if reference.startswith(("http://", "https://")):
            raise ConfigError(f"{checked_address(reference)} is already served; pass a local function")
        prefix = "" if is_single else f"{name or split_reference(reference)[1]}."
        own = {key.removeprefix(prefix): value for key, value in options.items() if key.startswith(prefix)}
        unused -= {prefix + key for key in own}
        loaded = load_reward(reference, folder, choice, own)
        name = name or loaded.reward.id
        if not _NAME.fullmatch(name):
            raise ConfigError(f"the reward name {name!r} cannot be part of a URL; pass NAME={reference}")
        if name in named:
            raise ConfigError(f"two rewards are named {name!r}; pass NAME={reference} for one of them")
        named[name] = NamedReward(name, loaded.reward, loaded.notes)
    if unused:
        names = " or ".join(f"{name}." for name in named)
        raise ConfigError(
            f"-O {min(unused)}: if there are multiple rewards, prefix each option with the name of its reward: {names}"
        )
    return list(named.values())


Labels = Mapping[str, str]


class Histogram:
    """A Prometheus histogram of durations in seconds."""

    def __init__(self) -> None:
        self.count, self.sum = 0, 0.0
        self._buckets = [0] * (len(_BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum += seconds
        self._buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def samples(self, labels: Labels) -> Iterator[tuple[str, Labels, float]]:
        """Yield the cumulative buckets, the sum and the count."""
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), itertools.accumulate(self._buckets), strict=True):
            yield "_bucket", {**labels, "le": bound}, count
        yield "_sum", labels, self.sum
        yield "_count", labels, self.count


def _family(name: str, kind: str, description: str, samples: Iterable[tuple[str, Labels, float]]) -> str:
    """Return a metric in Prometheus's text format."""
    name = f"reward_kit_serve_{name}"
    lines = [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
    for suffix, labels, value in samples:
        escaped = (text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for text in labels.values())
        pairs = ",".join(f'{label}="{text}"' for label, text in zip(labels, escaped, strict=True))
        lines.append(f"{name}{suffix}{f'{{{pairs}}}' if pairs else ''} {value:.17g}")
    return "\n".join(lines) + "\n"


class ServedReward:
    """A reward that scores requests from many clients.

    `pending` is the number of rollouts that have been accepted but not answered.
    """

    def __init__(self, named: NamedReward, options: ServerOptions) -> None:
        reward = named.reward
        scorer = make_scorer(reward, options.deadline_s)
        self.agent = AsyncRewardAgent(scorer, max_concurrency=options.max_concurrency)
        # A reward with `finish_group` returns the scores of a group together, so clients treat it as a batch reward.
        self._in_groups = scorer.mode == "batch" or reward.mode == "batch" or hasattr(scorer, "finish_group")
        self.about = AboutBody(
            name=named.name,
            id=reward.id,
            mode="batch" if self._in_groups else "pointwise",
            parameters=None if reward.parameters is None else sorted(reward.parameters),
            required=sorted(reward.required),
            level=reward.level if isinstance(reward, SandboxedReward) else "in_process",
            digest=scorer_hash(reward),
            deadline_s=options.deadline_s,
            max_batch=options.max_batch,
        )
        self.wants_episodes = reward.parameters is None or "step_data" in reward.parameters
        self._options = options
        self.pending = 0
        self.outcomes: Counter[str] = Counter()
        self.call_seconds = Histogram()

    def check_capacity(self, count: int = 1) -> None:
        """Raise a `RefusedError` if `count` more rollouts would exceed `max_pending`."""
        if self.pending + count > self._options.max_pending:
            mean_s = self.call_seconds.sum / max(1, self.call_seconds.count)
            wait_s = min(_LONGEST_WAIT_S, self.pending * mean_s / self._options.max_concurrency)
            raise busy(f"{self.pending} rollouts are waiting for reward {self.about.name!r} (max_pending)", wait_s)

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Count rollouts as pending during the block. This method raises the same errors as `check_capacity`."""
        self.check_capacity(count)
        self.pending += count
        try:
            yield
        finally:
            self.pending -= count

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """Return the scores of rollouts, in order. If the caller is cancelled, scoring is cancelled too."""
        scored = await self.agent.score_all(requests, len(requests) if self._in_groups else 1)
        for one in scored:
            self.outcomes["scored" if one.failure is None else one.failure.failure_class] += 1
            self.call_seconds.add(one.duration_s)
        return scored


_ERRORS = {
    400: "The body is not JSON according to RFC 8259.",
    401: "The key is missing or unknown to this server.",
    404: "The reward is unknown.",
    408: "The body did not arrive in time.",
    413: "The body exceeds the size limit.",
    415: "The body is compressed or is not JSON in UTF-8.",
    422: "The body is not a valid request. The message names the field.",
    429: "There are too many requests at the moment. Retry-After contains the time to wait.",
    500: "An internal server error.",
    503: "The server is shutting down.",
}
_BODY_ERRORS = (404, 400, 408, 413, 415, 422, 429)
_RETRY_AFTER = {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}


class ErrorDetail(pydantic.BaseModel):
    """An error. It has a code for programs and a message for people."""

    code: str
    message: str


class ErrorBody(pydantic.BaseModel):
    """The response to a request that failed."""

    model_config = pydantic.ConfigDict(title="Error")

    error: ErrorDetail


class HealthBody(pydantic.BaseModel):
    """The state of the server."""

    model_config = pydantic.ConfigDict(title="Health")

    status: str


def openapi_document(names: Iterable[str], options: ServerOptions) -> bytes:
    """Return the OpenAPI document of a server with these rewards, encoded as JSON. The schemas contain the limits."""
    models: list[Any] = [(model, "validation") for model in (ScoreBody, BatchBody)]
    answers = (AnswerBody, BatchAnswerBody, AboutBody, ListBody, ErrorBody, HealthBody)
    models += [(model, "serialization") for model in answers]
    keys, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    refs = {model.__name__: ref for (model, _), ref in keys.items()}
    definitions = schemas["$defs"]
    definitions["BatchBody"]["properties"]["rollouts"]["maxItems"] = options.max_batch
    for name in ("ScoreBody", "RolloutBody"):
        definitions[name]["properties"]["messages"]["maxItems"] = options.max_messages
    for name in ("content", "tool_calls"):
        for kind in definitions["Message"]["properties"][name]["anyOf"]:
            if kind.get("type") == "array":
                kind["maxItems"] = MOST_PARTS

    def operation(name: str, summary: str, schema: Any, errors: tuple[int, ...] = ()) -> dict[str, Any]:
        kind, schema = ("application/json", schema) if schema else ("text/plain", {"type": "string"})
        responses: dict[str, Any] = {"200": {"description": summary, "content": {kind: {"schema": schema}}}}
        for status in sorted({*errors, *(() if name == "health" else (401, 500, 503))}):
            body = refs["HealthBody" if name == "health" else "ErrorBody"]
            responses[str(status)] = {
                "description": _ERRORS[status],
                "content": {"application/json": {"schema": body}},
                **({"headers": {"Retry-After": _RETRY_AFTER}} if status in (429, 503) and name != "health" else {}),
            }
        return {"operationId": name, "summary": summary, "responses": responses}

    def scoring(name: str, body: str, answer: str) -> dict[str, Any]:
        scored = "The scores. If a reward failed, score is null and error contains the reason."
        request = {"required": True, "content": {"application/json": {"schema": refs[body]}}}
        return {**operation(name, scored, refs[answer], _BODY_ERRORS), "requestBody": request}

    schema = {"type": "string", "enum": sorted(names)}
    parameters = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "reward-kit: rewards over HTTP",
            "version": package_version(),
            "description": "The score of an unscored rollout is null, never 0. The reason is in error.",
        },
        "paths": {
            "/health": {
                "get": {**operation("health", "State of the server", refs["HealthBody"], (503,)), "security": []}
            },
            "/metrics": {"get": operation("metrics", "Metrics for Prometheus", None)},
            "/openapi.json": {"get": operation("openapi", "This document", {"type": "object"})},
            "/v1/rewards": {"get": operation("list", "All rewards", refs["ListBody"])},
            "/v1/rewards/{name}": {
                "parameters": parameters,
                "get": operation("about", "Description of a reward", refs["AboutBody"], (404,)),
            },
            "/v1/rewards/{name}/score": {
                "parameters": parameters,
                "post": scoring("score", "ScoreBody", "AnswerBody"),
            },
            "/v1/rewards/{name}/score_batch": {
                "parameters": parameters,
                "post": scoring("score_batch", "BatchBody", "BatchAnswerBody"),
            },
        },
        "components": {"schemas": definitions, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }
    return json.dumps(document, separators=(",", ":")).encode("utf-8")


@dataclass(slots=True)
class _Request:
    """The data about a request that metrics and the log need, even if the client has disconnected."""

    key: int
    route: str = "unknown"
    reward: str | None = None
    status: int = 499


_ROUTES = {"/health": "health", "/metrics": "metrics", "/openapi.json": "openapi", "/v1/rewards": "list"}


class Service:
    """The handlers of all requests. A request without a valid key is rejected, except for requests to `/health`."""

    def __init__(self, named: Sequence[NamedReward], keys: Keys, options: ServerOptions) -> None:
        self.rewards = {one.name: ServedReward(one, options) for one in named}
        self.connections: Callable[[], int] = lambda: 0
        self._keys, self._options = keys, options
        self._bodies = BodyReader(options)
        self._requests: Counter[tuple[str, int]] = Counter()
        self._request_seconds: dict[str, Histogram] = {}
        self._in_flight = 0
        self._is_ending = self.is_hurried = False
        self._idle = anyio.Event()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, count it, and log it.

        Internal errors are logged, and the response contains no details.
        """
        began = asyncio.get_running_loop().time()
        seen = _Request(self._keys.number_of(request.headers.getall("Authorization", [])))
        self._in_flight += 1
        continue_trace(request.headers)
        try:
            try:
                with boundary(RewardError, "a request"):
                    self._find_route(request, seen)
                    response = await self._answer(request, seen)
            except RefusedError as refusal:
                response = refusal.response()
            except RewardKitError as error:
                logger.error("%s failed", seen.route, exc_info=error)
                message = "internal server error; see the log of the server"
                response = RefusedError(500, "internal", message, closes=True).response()
            if not seen.key:  # A client without a key gets one response and cannot reuse the connection.
                response.force_close()
            seen.status = response.status
            return response
        finally:
            self._in_flight -= 1
            if not self._in_flight and self._is_ending:
                self._idle.set()
            seconds = asyncio.get_running_loop().time() - began
            self._requests[seen.route, seen.status] += 1
            self._request_seconds.setdefault(seen.route, Histogram()).add(seconds)
            facts = {"route": seen.route, "reward": seen.reward, "status": seen.status, "key": seen.key or None}
            logger.info("%s", request.method, extra={**facts, "peer": request.remote, "seconds": round(seconds, 6)})

    async def end(self, timeout_s: float) -> bool:
        """Reject new requests and wait for the pending ones. Return True if all of them were answered in time."""
        self._is_ending = True
        if self._in_flight:
            with anyio.move_on_after(timeout_s):
                await self._idle.wait()
        return not self._in_flight

    def stop(self) -> None:
        """Make `end` stop waiting."""
        self.is_hurried = True
        self._idle.set()

    def _find_route(self, request: web.BaseRequest, seen: _Request) -> None:
        """Set the route and the reward of a request.

        Raises:
            RefusedError: If the request has no valid key, or if the path is unknown.
        """
        path, name = request.rel_url.raw_path, None
        route = _ROUTES.get(path)
        if not seen.key and not (route == "health" and request.method in _READS):
            message = "send a key of this server: Authorization: Bearer KEY"
            raise RefusedError(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"}, closes=True)
        if route is None:
            prefix, _, rest = path.partition("/v1/rewards/")
            name, slash, action = rest.partition("/")
            if prefix or (slash and action not in ("score", "score_batch")) or not rest:
                message = f"unknown path {path!r:.200}; /openapi.json lists all paths"
                raise RefusedError(404, "not_found", message, closes=True)
            if name not in self.rewards:
                message = f"unknown reward {name!r:.100}; this server has {', '.join(self.rewards)}"
                raise RefusedError(404, "not_found", message, closes=True)
            route = action or "about"
        methods = ("POST",) if route in ("score", "score_batch") else _READS
        if request.method not in methods:
            allowed = ", ".join(methods)
            message = f"{path:.200} supports only {allowed}"
            raise RefusedError(405, "method_not_allowed", message, {"Allow": allowed}, closes=True)
        if self._is_ending and route != "health":
            raise RefusedError(503, "ending", "the server is shutting down", {"Retry-After": "1"}, closes=True)
        seen.route, seen.reward = route, name

    async def _answer(self, request: web.BaseRequest, seen: _Request) -> web.Response:
        match seen.route:
            case "health":
                return json_response({"status": "ending" if self._is_ending else "ok"}, 503 if self._is_ending else 200)
            case "metrics":
                return plain_response("".join(self._figures()).encode(), _METRICS_TYPE)
            case "openapi":
                return plain_response(self._openapi, "application/json")
            case "list":
                return json_response({"rewards": [reward.about.model_dump() for reward in self.rewards.values()]})
        reward = self.rewards[seen.reward or ""]
        if seen.route == "about":
            return json_response(reward.about.model_dump())
        is_batch = seen.route == "score_batch"
        reward.check_capacity()
        async with self._bodies.read(request) as body:
            requests, codec = await parse_requests(
                body, self._options, is_batch=is_batch, wants_episodes=reward.wants_episodes
            )
            body.clear()
            with reward.reserve(len(requests)):
                scored = await reward.score(requests)
        answers = [make_answer(one, codec) for one in scored]
        return json_response({"scores": answers} if is_batch else answers[0])

    @functools.cached_property
    def _openapi(self) -> bytes:
        return openapi_document(self.rewards, self._options)

    def _figures(self) -> Iterator[str]:
        requests = (("", {"route": r, "status": str(s)}, n) for (r, s), n in sorted(self._requests.items()))
        yield _family("requests_total", "counter", "Requests that were answered.", requests)
        spans = (one for route, h in sorted(self._request_seconds.items()) for one in h.samples({"route": route}))
        yield _family("request_seconds", "histogram", "Time from the head of a request to the response.", spans)
        yield _family("connections", "gauge", "Open connections.", [("", {}, self.connections())])
        yield _family("held_bytes", "gauge", "Size of the request bodies in memory.", [("", {}, self._bodies.bytes)])
        named = [(reward, {"reward": name}, reward.agent.stats) for name, reward in self.rewards.items()]
        outcomes = (
            ("", {**labels, "outcome": outcome}, count)
            for reward, labels, _ in named
            for outcome, count in sorted(reward.outcomes.items())
        )
        yield _family("rollouts_total", "counter", "Answered rollouts, by outcome.", outcomes)
        pending = [("", labels, reward.pending) for reward, labels, _ in named]
        yield _family("pending", "gauge", "Rollouts that have been accepted but not answered.", pending)
        flying = [("", labels, stats.in_flight) for _, labels, stats in named]
        yield _family("calls_in_flight", "gauge", "Calls to a reward that are in flight.", flying)
        cost = [("", labels, stats.cost_usd) for _, labels, stats in named if stats.cost_usd is not None]
        yield _family("cost_usd_total", "counter", "Cost of scores in US dollars, as reported.", cost)
        calls = (one for reward, labels, _ in named for one in reward.call_seconds.samples(labels))
        yield _family(
            "call_seconds", "histogram", "Duration of a call, including the wait for a thread or a worker.", calls
        )


_KEPT_ALIVE_S = 75.0
_LINGERING_S = 2.0
_SENDING_S, _LOOK_S = 10.0, 0.01
_CANCELLING_S = 0.1
_UNREAD_MS = 60_000
_BACKLOG = 4096
_SHOWN = 200
_http_logger = logging.getLogger("reward_kit.integrations.reward_server.http")


def _is_server_fault(record: logging.LogRecord) -> bool:
    """Return True for an error of the server. If a client sends invalid HTTP, only one line is logged."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        logger.info("invalid HTTP", extra={"status": error.code, "problem": str(error.message)[:_SHOWN]})
        return False
    return True


_http_logger.addFilter(_is_server_fault)


class _ProtocolFactory:
    """A factory that creates a protocol for each connection, up to `max_connections`.

    If the head of the first request does not arrive within the time limit, the connection is closed.
    """

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
        """Record that the connection has sent a complete request head."""
        self._silent.discard(protocol)

    def _close_if_silent(self, protocol: web.RequestHandler) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            protocol.force_close()


class _Full(asyncio.Protocol):
    """A protocol that rejects connections beyond `max_connections`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        transport.close()


class RunningServer(NamedTuple):
    """A running server. `stop` ends the wait for pending requests at shutdown."""

    address: str
    stop: Callable[[], None]


@asynccontextmanager
async def serving(named: Sequence[NamedReward], keys: Keys, options: ServerOptions) -> AsyncIterator[RunningServer]:
    """Serve rewards during the block. At its end, pending requests are answered within `shutdown_timeout_s`.

    Args:
        named: the rewards.
        keys: the accepted keys. Every request needs a key, except for requests to `/health`.
        options: the address and the limits.

    Raises:
        ConfigError: If the address or the port is not available.
    """
    _allow_descriptors(options.max_connections)
    service = Service(named, keys, options)
    async with AsyncExitStack() as stack:
        for reward in service.rewards.values():
            await stack.enter_async_context(reward.agent)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            protocols.heard(request.protocol)
            return await service.handle(request)

        server = web.Server(
            handle,
            handler_cancellation=True,
            access_log=None,
            logger=_http_logger,
            keepalive_timeout=_KEPT_ALIVE_S,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
        )
        protocols = _ProtocolFactory(server, options)
        service.connections = lambda: len(server.connections)
        loop, host, port = asyncio.get_running_loop(), options.host, options.port
        try:
            listener = await loop.create_server(protocols, host, port, backlog=_BACKLOG)
        except (OSError, OverflowError) as error:
            message = getattr(error, "strerror", None) or error
            raise ConfigError(f"--host {host} --port {port}: {message}") from error
        for (
            each
        ) in listener.sockets:  # Connections inherit the option, which limits how long responses may stay unread.
            with contextlib.suppress(OSError, AttributeError):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        bound, port = listener.sockets[0].getsockname()[:2]
        try:
            yield RunningServer(f"http://{f'[{bound}]' if ':' in bound else bound}:{port}", service.stop)
        finally:
            listener.close()
            with anyio.CancelScope(shield=True):
                await _end(service, server, options.shutdown_timeout_s)


async def _end(service: Service, server: web.Server, timeout_s: float) -> None:
    """Answer pending requests and wait until the responses are sent. After the timeout, cancel the rest."""
    if await service.end(timeout_s):
        server.pre_shutdown()
        with anyio.move_on_after(min(timeout_s, _SENDING_S)):
            while server.connections:  # noqa: ASYNC110 - aiohttp has no event for a closed connection
                await anyio.sleep(_LOOK_S)
    elif service.is_hurried:
        logger.warning("stopped before all requests were answered")
    else:
        logger.warning("not all requests were answered within %g s", timeout_s)
    await server.shutdown(_CANCELLING_S)


def _allow_descriptors(connections: int) -> None:
    """Raise the limit on open files to the number that the connections need, if the system allows it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
