"""An environment on an OpenEnv server. It uses one session, one action per step, and the server's rewards.

OpenEnv servers do not declare determinism, so the resource is deterministic and forkable only if the task sets
`deterministic: true`. `done` counts as `terminated`, unless `truncated` is true in the observation or its metadata. The
protocol of OpenEnv 0.10 consists of a few JSON messages over a WebSocket. It is implemented here because the `openenv`
package would add a hundred dependencies.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import anyio
from pydantic import Field

from reward_kit.environments.base import (
    ForkKind,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    check_schema,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import read_config
from reward_kit.environments.http import JsonClient, ServerAddress, ServerConfig, connect_server, parse_answer
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.errors import ConfigError, DeadlineError, EnvironmentFailure, ToolError, did_you_mean
from reward_kit.safe_input import ENVIRONMENT_ANSWER_BYTES, format_size
from reward_kit.telemetry.current import trace_headers

if TYPE_CHECKING:
    import aiohttp

# The seed range of NumPy's legacy generators.
_SEEDS = 2**32
_OF_MCP = ("Action", "CallToolAction", "ListToolsAction")
_LIST_TOOLS = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
_CLOSE_S = 5.0
_TOO_BIG = 1009  # RFC 6455, 7.4.1
_AGAIN_S = 0.2
_MOST_UNREAD = 2
_AT_CAPACITY = "CAPACITY_REACHED"
_NO_SESSION = (_AT_CAPACITY, "FACTORY_ERROR", "SESSION_ERROR")
_MORE_SESSIONS = "; start it with a larger max_concurrent_envs, or lower the run's concurrency"


class OpenEnvConfig(ServerConfig):
    """The configuration of `openenv`."""

    timeout: float = Field(default=60.0, gt=0, description="seconds to wait for each response")
    connect_timeout: float = Field(default=10.0, gt=0, description="seconds to wait for a free session")
    reset: dict[str, Any] = Field(
        default_factory=dict, description="passed to the environment's reset together with the seed"
    )
    action_schema: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the only tool; defaults to the server's schema, or to its MCP tools"
    )
    action_tool: str = Field(default="act", pattern="^[a-zA-Z0-9_-]{1,64}$", description="the name of that tool")
    observation_field: str | None = Field(
        default=None, description="show only this field of the observation; by default, all fields are shown as JSON"
    )
    deterministic: bool = Field(
        default=False, description="declares that the seed and the actions determine everything"
    )
    state_key: Literal["history", "observation", "state"] = Field(
        default="history",
        description="source of the state key; observation and state must contain everything that affects the future",
    )
    state_ignores: list[str] = Field(
        default=["episode_id", "step_count"], description="fields of the server's state that do not affect the future"
    )
    execution_errors: Literal["failure", "refusal"] = Field(
        default="failure", description="refusal: a failed action does not change anything on the server"
    )


class OpenEnvResource(ReplayForkResource):
    """A session with an OpenEnv server."""

    fork_kind = "none"
    deterministic = False
    takes_task_folder = True
    takes_resource_server = True
    per_sample_keys = frozenset({"reset"})

    def __init__(self) -> None:
        super().__init__()
        self._settings = OpenEnvConfig()
        self._session: OpenEnvSession | None = None
        self._exits = AsyncExitStack()
        self._tools: dict[str, ToolSpec] = {}
        self._calls_tools = False
        self._observation: Any = None
        self._history_key = ""
        self._is_over = False

    @classmethod
    def fork_kind_for(cls, config: Mapping[str, Any]) -> ForkKind:
        return "replay" if config.get("deterministic") is True else "none"

    @classmethod
    def is_deterministic_for(cls, config: Mapping[str, Any]) -> bool:
        return config.get("deterministic") is True

    async def _setup(self, config: Mapping[str, Any]) -> None:
        settings = self._settings = read_config(OpenEnvConfig, config, "openenv")
        if "seed" in settings.reset:
            raise ConfigError("openenv resource: reset: seed is set by the run; remove it")
        if "@" in (settings.base_url or ""):  # the message must not show the URL
            raise ConfigError("openenv resource: base_url: must not contain a user name or password; use headers_env")
        try:
            server = await connect_server(settings, "openenv", self._exits, ("http", "https", "ws", "wss"))
            session = self._session = OpenEnvSession(server, settings)
            self._exits.push_async_callback(session.close)
            await session.open()
            await self._find_tools(settings, session)
        except BaseException:
            await self.close()
            raise

    async def _find_tools(self, settings: OpenEnvConfig, session: OpenEnvSession) -> None:
        schema = settings.action_schema or (await session.schemas()).get("action")
        if not isinstance(schema, Mapping):
            raise EnvironmentFailure(
                f"openenv resource: expected a schema for the server's actions, got {schema!r:.120}"
            )
        self._calls_tools = settings.action_schema is None and schema.get("title") in _OF_MCP
        if self._calls_tools:
            if "action_tool" in settings.model_fields_set:
                raise ConfigError(
                    "openenv resource: action_tool has no effect: the server has its own tools; remove it"
                )
            await self._list_tools()
            return
        if schema.get("type") != "object":
            raise ConfigError(
                f"openenv resource: this server's action is not an object ({schema.get('title', schema)!r:.80}); "
                "set action_schema to a JSON schema of type object"
            )
        description = schema.get("description") or "Take one action."
        # The metadata of an action is not meant for the agent.
        spec = tool_spec(settings.action_tool, description, _object_schema(schema, without="metadata"))
        self._tools = {settings.action_tool: spec}

    async def _list_tools(self) -> None:
        answer = await self._ask("mcp", _LIST_TOOLS)
        result = answer.get("result")
        listed = result.get("tools") if isinstance(result, Mapping) else None
        if not isinstance(listed, list):
            raise EnvironmentFailure(f"openenv resource: tools/list: expected a list of tools, got {answer!r:.200}")
        self._tools = {
            tool["name"]: tool_spec(
                tool["name"], tool.get("description") or "", _object_schema(tool.get("inputSchema"))
            )
            for tool in listed
        }

    async def _reset(self, seed: int) -> None:
        body = {**self._settings.reset, "seed": seed % _SEEDS}
        answer = await self._ask("reset", body)
        self._history_key = hash_key(canonical_json(body))
        self._observation = _read_outcome(answer, self._settings.observation_field).observation
        self._is_over = answer.get("done", False)
        if self._calls_tools:
            await self._list_tools()

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        if action_name not in self._tools:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, self._tools)}")
        check_schema(self._tools[action_name], action_params)
        if self._is_over:
            raise ToolError("the episode is over; no action changes anything")
        action = dict(action_params)
        if self._calls_tools:
            action = {"type": "call_tool", "tool_name": action_name, "arguments": action}
        try:
            answer = await self._open_session.ask("step", action)
        except OpenEnvRefusedError as refusal:
            is_refusal = self._settings.execution_errors == "refusal" and refusal.code == "EXECUTION_ERROR"
            if is_refusal or refusal.code == "VALIDATION_ERROR":  # rejected before it reached the environment
                raise ToolError(f"{action_name}: {refusal.message}") from None
            raise EnvironmentFailure(f"openenv resource: step: {refusal.code}: {refusal.message}") from None
        outcome = _read_outcome(answer, self._settings.observation_field)
        self._history_key = hash_key(self._history_key, canonical_json(action), canonical_json(outcome.observation))
        self._observation, self._is_over = outcome.observation, outcome.terminated or outcome.truncated
        return outcome

    async def _ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return the server's response.

        Raises:
            EnvironmentFailure: the server rejects the message.
        """
        try:
            return await self._open_session.ask(kind, data)
        except OpenEnvRefusedError as refusal:
            raise EnvironmentFailure(f"openenv resource: {kind}: {refusal.code}: {refusal.message}") from None

    @property
    def _open_session(self) -> OpenEnvSession:
        if self._session is None:
            raise EnvironmentFailure("the openenv resource is closed, or was not set up")
        return self._session

    async def get_observation(self) -> Any:
        return self._observation

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(self._tools.values())

    async def state_key(self) -> str:
        named = self._settings.state_key
        if named == "history":
            return hash_key(named, self._history_key)
        seen = self._observation if named == "observation" else await self._state()
        return hash_key(named, canonical_json([seen, self._is_over]))

    async def final_state(self) -> StateSnapshot | None:
        """Return the server's state, the last observation, and whether the episode is over.

        If the state key is derived from the history, also return the history.
        """
        seen = {"state": await self._state(), "observation": self._observation, "done": self._is_over}
        history = {"history": self._history_key} if self._settings.state_key == "history" else {}
        return StateSnapshot.from_json({**seen, **history})

    async def _state(self) -> dict[str, Any]:
        state = await self._ask("state")
        return {name: value for name, value in state.items() if name not in self._settings.state_ignores}

    async def close(self) -> None:
        self._session = None
        await self._exits.aclose()


def _object_schema(schema: Any, without: str = "") -> dict[str, Any]:
    given = dict(schema) if isinstance(schema, Mapping) else {}
    properties = {name: value for name, value in (given.get("properties") or {}).items() if name != without}
    kept = {name: value for name, value in given.items() if name not in ("title", "description", "properties")}
    return {"type": "object", **kept, "properties": properties}


def _read_outcome(answer: Mapping[str, Any], field: str | None) -> StepOutcome:
    seen, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done", False)
    if not isinstance(seen, Mapping) or not isinstance(done, bool):
        raise EnvironmentFailure(f"openenv resource: expected observation, reward and done, got {answer!r:.200}")
    # An integer may be too large for a float.
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max):
        raise EnvironmentFailure(f"openenv resource: reward: expected a finite number, got {reward!r:.80}")
    given = answer.get("metadata") or seen.get("metadata")
    metadata = dict(given) if isinstance(given, Mapping) else {}
    is_truncated = done and (seen.get("truncated") is True or metadata.get("truncated") is True)
    fields = {name: value for name, value in seen.items() if name != "metadata"}
    info = metadata
    if fields.keys() == {"tool_name", "result", "error"}:  # the response of an MCP tool
        error = fields["error"]
        if error is None:
            shown = result = fields["result"]
            if isinstance(result, Mapping) and "content" in result:  # wrapped as in MCP
                texts = [block.get("text") for block in result["content"] if isinstance(block, Mapping)]
                text = "\n".join(text for text in texts if isinstance(text, str))
                shown = text if result.get("data") is None else result["data"]
        else:
            shown = str(error.get("message") if isinstance(error, Mapping) else error)
            info = {**metadata, "is_action_valid": False}
    elif field is None:
        # An observation without fields is represented by its metadata.
        shown = fields or dict(metadata) or None
    else:
        shown = fields.get(field, metadata.get(field))
        if shown is None and field not in fields and fields:
            raise EnvironmentFailure(
                f"openenv resource: unknown observation_field {field!r}{did_you_mean(field, fields)}"
            )
    return StepOutcome(shown, None if reward is None else float(reward), done and not is_truncated, is_truncated, info)


class OpenEnvRefusedError(Exception):
    """Raised if the server responds with an error such as "VALIDATION_ERROR". The session stays open."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class OpenEnvSession:
    """A private environment on the server, which lasts as long as the connection."""

    def __init__(self, server: ServerAddress, settings: OpenEnvConfig) -> None:
        http_url = "http" + server.url.rstrip("/").removeprefix("http").removeprefix("ws")
        self._url = f"ws{http_url.removeprefix('http')}/ws"
        self._server = replace(server, url=http_url)
        self._connect_timeout, self._timeout = settings.connect_timeout, settings.timeout
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()
        self._ended = self._broken = ""
        self._has_begun = False

    async def open(self) -> None:
        """Connect and wait for an environment. Retry while the server is full."""
        full: OpenEnvRefusedError | None = None
        with anyio.move_on_after(self._connect_timeout):
            while True:
                await self._connect()
                try:
                    # A full server sends an unrequested error, which would be mistaken for the first response.
                    await self.ask("state")
                    return
                except OpenEnvRefusedError as refusal:
                    if refusal.code not in _NO_SESSION:
                        return  # the environment exists, but has no state before a reset
                    full = refusal
                await self.close()
                if full.code != _AT_CAPACITY:
                    raise EnvironmentFailure(f"{self._url}: {full.code}: {full.message}")
                await anyio.sleep(_AGAIN_S)
        await self.close()
        reason = f": {full.message}{_MORE_SESSIONS}" if full is not None else ""
        problem = f"{self._url}: no session within {self._connect_timeout:g} s{reason}"
        raise await self._server.failure(problem, DeadlineError)

    async def _connect(self) -> None:
        import aiohttp

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        self._client = aiohttp.ClientSession(headers={**self._server.headers, **trace_headers()}, trace_configs=[trace])
        self._answers, self._ended, self._broken, self._has_begun = asyncio.Queue(), "", "", False
        try:
            self._socket = await self._client.ws_connect(self._url, max_msg_size=ENVIRONMENT_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            await self.close()
            problem = f"{self._url}: {type(error).__name__}: {error}".removesuffix(": ")
            raise await self._server.failure(problem) from error
        # A server disconnects clients that do not answer pings, and aiohttp answers pings only while a task reads.
        self._reader = asyncio.create_task(self._read(self._socket, self._answers))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, answers: asyncio.Queue[str | None]) -> None:
        import aiohttp

        try:
            async for message in socket:
                # The bound keeps a server from sending more than was requested.
                if message.type is aiohttp.WSMsgType.ERROR or answers.qsize() >= _MOST_UNREAD:
                    break
                answers.put_nowait(message.data if message.type is aiohttp.WSMsgType.TEXT else "(a binary message)")
        finally:
            problem = f": {socket.exception()}" if socket.exception() else ""
            if socket.close_code == _TOO_BIG:
                problem = f": the response is larger than the limit of {format_size(ENVIRONMENT_ANSWER_BYTES)}"
            code = f" (code {socket.close_code})" if socket.close_code else ""
            self._ended = f"the connection was closed{code}{problem}"
            answers.put_nowait(None)

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Send one message and return the `data` of the server's response.

        A session becomes unusable after an unrequested message and after a response that was late or no longer awaited,
        because such a message could be mistaken for the next response.

        Raises:
            OpenEnvRefusedError: the server responded with an error.
            DeadlineError: the server did not respond in time.
            EnvironmentFailure: the connection was lost, or the response has the wrong form.
        """
        source = f"{kind} at {self._url}"
        if self._socket is None or self._broken:
            raise EnvironmentFailure(f"{source}: the session is closed{f': {self._broken}' if self._broken else ''}")
        # A full server may send its error before the first request. Later, such a message would shift all responses by
        # one.
        if self._has_begun and not self._answers.empty():
            unasked = self._answers.get_nowait()
            if unasked is not None:
                self._broken = f"the server sent an unrequested message: {unasked[:200]}"
                raise EnvironmentFailure(f"{source}: {self._broken}")
            self._answers.put_nowait(None)  # disconnected
        self._has_begun = True
        self._broken = "an earlier request was cancelled before it received a response"
        message = json.dumps({"type": kind, **({} if data is None else {"data": dict(data)})}, allow_nan=False)
        try:
            with anyio.fail_after(self._timeout):
                # A server may have sent the reason before it disconnected.
                with suppress(ConnectionError):
                    await self._socket.send_str(message)
                text = await self._answers.get()
        except TimeoutError as error:
            self._broken = f"no response within {self._timeout:g} s"
            raise DeadlineError(f"{source}: {self._broken}") from error
        self._broken = ""
        if text is None:
            self._broken = self._ended
            raise await self._server.failure(f"{source}: {self._ended}")
        answer, expected = parse_answer(text, source), "observation" if kind in ("reset", "step") else kind
        received = answer.get("type") if isinstance(answer, Mapping) else None
        data = answer.get("data") if isinstance(answer, Mapping) else None
        if received not in (expected, "error") or not isinstance(data, Mapping):
            shape = '{"type": "' + expected + '", "data": {…}}'
            raise EnvironmentFailure(f"{source}: expected {shape}, got {text[:200]}")
        if received == "error":
            reason, errors = str(data.get("message", "no message")), data.get("errors")
            if (
                isinstance(errors, list) and errors
            ):  # if an action was rejected, these are the fields and their problems
                listed = [error for error in errors if isinstance(error, Mapping)]
                reason = "; ".join(
                    f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in listed
                )
            raise OpenEnvRefusedError(str(data.get("code", "")), reason)
        return data

    async def schemas(self) -> Mapping[str, Any]:
        """Return a mapping that contains the JSON schemas for the server's actions, observations and state."""
        client = JsonClient(self._server, self._timeout)
        try:
            return (await client.get("/schema")).fields()
        finally:
            await client.close()

    async def close(self) -> None:
        """End the environment on the server, and wait until the server has freed the session."""
        client, socket, reader = self._client, self._socket, self._reader
        self._client = self._socket = self._reader = None
        with anyio.CancelScope(shield=True):
            if socket is not None and reader is not None:
                # A busy server does not read messages, but it notices the closed connection.
                with anyio.move_on_after(0.0 if self._broken or self._ended else _CLOSE_S), suppress(ConnectionError):
                    await socket.send_str('{"type": "close"}')
                    await asyncio.wait([reader])
                    await socket.close()
                reader.cancel()
                await asyncio.wait([reader])
            if client is not None:
                await client.close()


async def _refuse_redirect(session: aiohttp.ClientSession, context: object, params: Any) -> None:
    """Reject a redirect, because the headers may contain a key that is meant for the configured server."""
    import aiohttp

    params.response.close()
    target = params.response.headers.get("Location", "nowhere")
    raise aiohttp.ClientError(f"redirect (HTTP {params.response.status}) to {target:.200}; use that address")
