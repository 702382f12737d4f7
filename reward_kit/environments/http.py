"""An environment on an HTTP server with four endpoints. The server may be written in any language.

The endpoints are start, step, end and health. `docs/guides/environments.md` documents the exact JSON. If the task has a
`resource_server`, that server is started first. `openenv` also uses `JsonClient`, `connect_server` and `parse_answer`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
from pydantic import Field

from reward_kit.environments.base import ForkKind, StateSnapshot, StepOutcome, ToolSpec, canonical_json, hash_key
from reward_kit.environments.config import ResourceConfig, headers_from_environment, read_config
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.environments.servers import Server, ServerPool
from reward_kit.errors import ConfigError, DeadlineError, EnvironmentFailure, ToolError, did_you_mean
from reward_kit.safe_input import (
    ENVIRONMENT_ANSWER_BYTES,
    ENVIRONMENT_ANSWER_VALUES,
    TooLargeError,
    check_values,
    parse_json,
    read_body,
)
from reward_kit.task_parts import ResourceServerConfig
from reward_kit.telemetry.current import trace_headers

_END_S = 5.0
_PARSED_IN_A_THREAD = 2**20
_EXCERPT = 200
# Shorter than the timeout of servers, so that a connection that the server is closing is not reused.
_KEEP_ALIVE_S = 1.0
logger = logging.getLogger("reward_kit.environments")


class ServerConfig(ResourceConfig):
    """The configuration keys that all server-based resources share."""

    base_url: str | None = Field(default=None, description="by default, the address of the task's resource_server")
    headers: dict[str, str] = Field(default_factory=dict)
    headers_env: dict[str, str] = Field(
        default_factory=dict, description="maps header names to the environment variables that contain their values"
    )
    resource_server: ResourceServerConfig | None = Field(default=None, description="set by the task's resource_server")
    task_folder: str | None = Field(
        default=None, description="set by the runner; the directory in which the server's command runs"
    )


class HttpConfig(ServerConfig):
    """The configuration of `http`."""

    start_episode_endpoint: str = "/start_episode"
    step_endpoint: str = "/step"
    end_episode_endpoint: str = "/end_episode"
    health_endpoint: str | None = Field(
        default="/health",
        description="checked once per resource unless there is a resource_server; null disables it",
    )
    timeout: float = Field(default=30.0, gt=0, description="seconds to wait for each response")
    config: dict[str, Any] | None = Field(default=None, description="sent to the server at each start")
    tools: list[dict[str, Any]] | None = Field(default=None, description="tools in OpenAI format")
    tools_endpoint: str | None = Field(default=None, description="an endpoint that returns a list of tools on GET")
    action_form: Literal["call", "value"] = Field(
        default="call",
        description="the body of a step: call sends {name, arguments}; value sends only the value of the argument",
    )
    fork: Literal["replay", "none"] = "replay"
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The base URL of a resource's server, and the headers to send with every request.

    `started` is the server, or None if the task did not start it.
    """

    url: str
    headers: dict[str, str]
    started: Server | None = None

    async def failure(
        self, problem: str, kind: type[EnvironmentFailure | DeadlineError] = EnvironmentFailure
    ) -> EnvironmentFailure | DeadlineError:
        """Return the error for a broken connection.

        If the task started the server, the message includes the exit status of the server.
        """
        return kind(f"{problem}{await self.started.describe_exit() if self.started is not None else ''}")


async def connect_server(
    settings: ServerConfig, resource: str, exits: AsyncExitStack, schemes: tuple[str, ...] = ("http", "https")
) -> ServerAddress:
    """Return the address of the configured or newly started server. A server that is not shared is stopped by `exits`.

    Raises:
        ConfigError: the address is missing or invalid, or the environment variable for a header is not set or may not
            be sent to the address.
        EnvironmentFailure: the server does not start.
    """
    server = None
    if settings.resource_server is not None:
        pool = ServerPool.current()
        if pool is None:
            pool = ServerPool()
            exits.push_async_callback(pool.close)
        folder = Path(settings.task_folder) if settings.task_folder else Path.cwd()
        server = await pool.lease(settings.resource_server, folder)
    where = f"{resource} resource: base_url"
    started = server.address if server is not None else ""
    url = settings.base_url or started
    if not url:
        raise ConfigError(f"{where}: missing; set it, or set resource_server in the task")
    if not url.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        shown = url if "@" not in url else "it"
        raise ConfigError(f"{where}: {shown!r} is not a {' or '.join(schemes)} URL")
    if "{port}" in url:
        if server is None or not server.port:
            raise ConfigError(
                f"{where}: {{port}} needs a resource_server that uses {{port}}, but the task has no such server"
            )
        url = url.replace("{port}", str(server.port))
    headers = {**settings.headers, **headers_from_environment(settings.headers_env, url, resource, started)}
    return ServerAddress(url, headers, server)


class HttpResource(ReplayForkResource):
    """An episode on a server. A fork starts a new episode on the same server and repeats the actions."""

    takes_task_folder = True
    takes_resource_server = True
    per_sample_keys = frozenset({"config"})

    def __init__(self) -> None:
        super().__init__()
        self._settings = HttpConfig()
        self._client: JsonClient | None = None
        self._exits = AsyncExitStack()
        self._tools: list[ToolSpec] = []
        self._episode: Any = None
        self._observation: Any = None
        self._state: Any = None
        self._given_key: str | None = None
        self._history_key = ""
        self._is_over = False

    @classmethod
    def fork_kind_for(cls, config: Mapping[str, Any]) -> ForkKind:
        return "none" if config.get("fork") == "none" else "replay"

    @classmethod
    def is_deterministic_for(cls, config: Mapping[str, Any]) -> bool:
        return config.get("deterministic") is not False

    async def _setup(self, config: Mapping[str, Any]) -> None:
        settings = self._settings = read_config(HttpConfig, config, "http")
        if settings.tools is not None and settings.tools_endpoint is not None:
            raise ConfigError("http resource: set either tools or tools_endpoint")
        self._tools = _tool_specs(settings.tools or [], ConfigError, "http resource: tools")
        try:
            server = await connect_server(settings, "http", self._exits)
            client = self._client = JsonClient(server, settings.timeout)
            self._exits.push_async_callback(client.close)
            if server.started is None and settings.health_endpoint is not None:
                await client.check_health(settings.health_endpoint)
            if settings.tools_endpoint is not None:
                answer = await client.get(settings.tools_endpoint)
                listed = answer.value if isinstance(answer.value, list) else answer.fields().get("tools")
                self._tools = _tool_specs(listed, EnvironmentFailure, answer.source)
        except BaseException:
            await self.close()
            raise

    async def _reset(self, seed: int) -> None:
        await self._end_episode()
        settings = self._settings
        body: dict[str, Any] = {"seed": seed}
        if settings.config is not None:
            body["config"] = settings.config
        answer = await self._connection.post(settings.start_episode_endpoint, body)
        fields = answer.fields()
        episode = answer.field("episode_id", (str, int), "text or a whole number")
        if episode is None:
            raise answer.error("episode_id: expected text or a whole number, got None")
        self._episode, self._is_over = episode, False
        if fields.get("tools") is not None:
            self._tools = _tool_specs(fields["tools"], EnvironmentFailure, answer.source)
        self._given_key = None
        self._history_key = hash_key(canonical_json(body))
        self._read_answer(answer, fields)

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        known = [tool["function"]["name"] for tool in self._tools]
        if action_name not in known:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, known)}")
        if self._is_over:
            raise ToolError("the episode is over; no action changes anything")
        if self._settings.action_form == "call":
            action: Any = {"name": action_name, "arguments": dict(action_params)}
        elif len(action_params) == 1:
            (action,) = action_params.values()
        else:
            raise ToolError(f"{action_name}: expected one argument, got {len(action_params)}")
        try:
            json.dumps(action, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"{action_name}: the arguments are not JSON: {error}") from None
        body = {"episode_id": self._episode, "action": action}
        answer = await self._connection.post(self._settings.step_endpoint, body)
        refusal = answer.refusal
        if refusal is None and isinstance(answer.value, Mapping):
            refusal = answer.value.get("error")
        if isinstance(refusal, str):
            raise ToolError(refusal)
        fields = answer.fields()
        names = ("is_done", "terminated", "truncated")
        is_done, terminated, truncated = (answer.field(name, bool, "true or false") for name in names)
        reward = answer.field("reward", (int, float), "a finite number")
        if reward is not None and not isfinite(reward):
            raise answer.error(f"reward: expected a finite number, got {reward!r:.80}")
        info = answer.field("info", Mapping, "an object")
        self._history_key = hash_key(self._history_key, canonical_json(action))
        self._read_answer(answer, fields)
        # An older server sends only `is_done`.
        terminated, truncated = bool(terminated or (is_done and not truncated)), bool(truncated)
        self._is_over = terminated or truncated
        reward = None if reward is None else float(reward)
        return StepOutcome(self._observation, reward, terminated, truncated, dict(info or {}))

    def _read_answer(self, answer: HttpAnswer, fields: Mapping[str, Any]) -> None:
        if "observation" not in fields:
            raise answer.error(f"observation: missing; the response has {', '.join(map(str, fields)) or 'no fields'}")
        key = answer.field("state_key", str, "text")
        if key is None and self._given_key is not None:
            raise answer.error("state_key: missing, but an earlier response had one; send it either always or never")
        self._given_key, self._observation, self._state = key, fields["observation"], fields.get("state")
        self.state_key_covers_results = key is not None

    @property
    def _connection(self) -> JsonClient:
        if self._client is None:
            raise EnvironmentFailure("the http resource is closed, or was not set up")
        return self._client

    async def get_observation(self) -> Any:
        return self._observation

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(self._tools)

    async def state_key(self) -> str:
        """Return a hash of the server's `state_key`.

        If the server sends no `state_key`, its `state` is hashed instead. If it sends neither, all actions since the
        reset are hashed.
        """
        if self._given_key is not None:
            return hash_key("given", self._given_key)
        if self._state is not None:
            return hash_key("state", canonical_json([self._state, self._is_over]))
        return hash_key("history", self._history_key)

    async def final_state(self) -> StateSnapshot | None:
        return None if self._state is None else StateSnapshot.from_json(self._state)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._end_episode()
            self._client = None
            await self._exits.aclose()

    async def _end_episode(self) -> None:
        """End the episode on the server. Errors are ignored if the server is unreachable or rejects the request."""
        episode, self._episode = self._episode, None
        if episode is None or self._client is None:
            return
        with anyio.move_on_after(_END_S):
            try:
                await self._client.post(self._settings.end_episode_endpoint, {"episode_id": episode})
            except EnvironmentFailure as error:
                logger.info("could not end episode %r: %s", episode, error)


def _tool_specs(listed: Any, error_type: type[ConfigError | EnvironmentFailure], where: str) -> list[ToolSpec]:
    """Return tools in OpenAI format. Add the outer `function`, which older servers omit."""
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise error_type(f"{where}: expected a list of tools, got {listed!r:.80}")
    specs: list[ToolSpec] = []
    for tool in listed:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise error_type(
                f"{where}: a tool must have the form {{type: function, function: {{name, …}}}}, got {tool!r:.120}"
            )
        parameters = function.get("parameters", {"type": "object", "properties": {}})
        if not isinstance(parameters, Mapping):
            raise error_type(f"{where}: tool {name!r}: parameters: expected a JSON schema, got {parameters!r:.80}")
        specs.append({"type": "function", "function": {**function, "parameters": dict(parameters)}})
    return specs


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's JSON response. `source` is the method and the address of the request.

    `refusal` is the reason why the server rejected the request (status 4xx and `{"error": …}`).
    """

    source: str
    value: Any
    refusal: str | None = None

    def fields(self) -> Mapping[str, Any]:
        """Return the JSON object of the response.

        Raises:
            EnvironmentFailure: the server rejected the request or sent a value that is not an object.
        """
        if self.refusal is not None:
            raise self.error(f"rejected: {self.refusal}")
        if not isinstance(self.value, Mapping):
            raise self.error(f"expected a JSON object, got {json.dumps(self.value)[:_EXCERPT]}")
        return self.value

    def field(self, name: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        """Return a field of the object, or None if it is missing. A boolean is not accepted as a number."""
        value = self.fields().get(name)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
            raise self.error(f"{name}: expected {expected}, got {value!r:.80}")
        return value

    def error(self, problem: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self.source}: {problem}")


class JsonClient:
    """The connection between one resource and its server. Create it in the running event loop.

    `timeout` is the maximum number of seconds to wait for each response. Every server failure raises an
    `EnvironmentFailure` that includes the address.
    """

    def __init__(self, server: ServerAddress, timeout: float) -> None:
        import aiohttp

        self._server, self._timeout = server, timeout
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **server.headers},
            timeout=aiohttp.ClientTimeout(total=timeout),
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_ALIVE_S),
        )

    async def get(self, endpoint: str) -> HttpAnswer:
        """Send a GET request to an endpoint."""
        return await self._request("GET", endpoint, None)

    async def post(self, endpoint: str, body: Mapping[str, Any]) -> HttpAnswer:
        """Send a POST request with a JSON object to an endpoint."""
        return await self._request("POST", endpoint, json.dumps(body, allow_nan=False).encode())

    async def check_health(self, endpoint: str) -> None:
        """Send a GET request to an endpoint.

        Raises:
            EnvironmentFailure: the status is not 2xx, or the server cannot be reached.
        """
        source, status, body = await self._exchange("GET", endpoint, None)
        if not 200 <= status < 300:
            raise EnvironmentFailure(f"{source}: status {status}: {_excerpt(body)}")

    async def close(self) -> None:
        await self._session.close()

    async def _request(self, method: str, endpoint: str, data: bytes | None) -> HttpAnswer:
        source, status, body = await self._exchange(method, endpoint, data)
        value: Any = None
        try:
            is_large = len(body) > _PARSED_IN_A_THREAD
            value = (
                await anyio.to_thread.run_sync(parse_answer, body, source) if is_large else parse_answer(body, source)
            )
        except EnvironmentFailure:
            if 200 <= status < 300:
                raise
        if 200 <= status < 300:
            return HttpAnswer(source, value)
        refusal = value.get("error") if isinstance(value, Mapping) else None
        if 400 <= status < 500 and isinstance(refusal, str):
            return HttpAnswer(source, value, refusal)
        raise EnvironmentFailure(f"{source}: status {status}: {_excerpt(body)}")

    async def _exchange(self, method: str, endpoint: str, data: bytes | None) -> tuple[str, int, bytes]:
        import aiohttp

        url = f"{self._server.url.rstrip('/')}{endpoint}"
        source = f"{method} {url}"
        try:
            async with self._session.request(
                method, url, data=data, headers=trace_headers(), allow_redirects=False
            ) as response:
                return source, response.status, await read_body(response, ENVIRONMENT_ANSWER_BYTES)
        except TooLargeError as error:
            raise EnvironmentFailure(f"{source}: the response is larger than the limit of {error}") from None
        except TimeoutError as error:
            raise await self._server.failure(f"{source}: no response within {self._timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{source}: {type(error).__name__}: {error}".removesuffix(": ")
            raise await self._server.failure(problem) from error


def parse_answer(body: str | bytes, source: str) -> Any:
    """Return the JSON value of a server's response.

    Raises:
        EnvironmentFailure: the response is not JSON or is too large.
    """
    try:
        check_values(body, ENVIRONMENT_ANSWER_VALUES)
        return parse_json(body)
    except TooLargeError as error:
        raise EnvironmentFailure(f"{source}: the response is larger than the limit of {error}") from None
    except (ValueError, RecursionError) as error:
        raise EnvironmentFailure(f"{source}: the response is not JSON ({error}): {_excerpt(body)}") from None


def _excerpt(body: str | bytes) -> str:
    start = body[: 4 * _EXCERPT]
    text = " ".join((start if isinstance(start, str) else start.decode("utf-8", "replace")).split())
    return text[:_EXCERPT] + ("…" if len(text) > _EXCERPT or len(body) > 4 * _EXCERPT else "") or "(empty)"
