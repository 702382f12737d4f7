"""A world on an OpenEnv server: one session of its own, one action a step, the server's reward for each.

OpenEnv says nothing of determinism, and its server drops the seed in silence where the environment's `reset` takes
none. So nothing is declared by default: `deterministic: false`, no forks, fresh starts that are marked as unverified.
Where the task says `deterministic: true`, a fork is a new session that takes the same actions again, and every answer
is compared.

`done` is all that OpenEnv says of an end. It counts as `terminated`, unless the observation or its metadata has a
`truncated` that is true.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import (
    ForkableResource,
    ForkKind,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import headers_from_environment, read_config
from reward_kit.environments.mcp.tools import McpTool
from reward_kit.environments.openenv_session import OpenEnvSession, RefusedError
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.environments.servers import Server, ServerPool, ServerSpec
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, did_you_mean
from reward_kit.task_parts import ResourceServerConfig

# As many as NumPy's older generators take.
_SEEDS = 2**32
_OF_MCP = ("Action", "CallToolAction", "ListToolsAction")
_LIST_TOOLS = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


class OpenEnvConfig(BaseModel):
    """The configuration of `openenv`."""

    model_config = ConfigDict(extra="forbid")

    base_url: str | None = Field(default=None, description="by default the address of the task's resource_server")
    timeout: float = Field(default=60.0, gt=0, description="seconds for one answer")
    connect_timeout: float = Field(default=10.0, gt=0, description="seconds until the server has a free session")
    reset: dict[str, Any] = Field(default_factory=dict, description="handed to the environment's reset, with the seed")
    action_schema: dict[str, Any] | None = Field(
        default=None, description="of the one tool; by default what the server says, or its MCP tools"
    )
    action_tool: str = Field(default="act", pattern="^[a-zA-Z0-9_-]{1,64}$", description="the name of that tool")
    observation_field: str | None = Field(default=None, description="show this field alone, and not all as JSON")
    deterministic: bool = Field(default=False, description="the seed and the actions decide everything")
    state_key: Literal["history", "observation", "state"] = Field(
        default="history", description="what names a state; observation and state must say all that matters"
    )
    state_ignores: list[str] = Field(
        default=["episode_id", "step_count"], description="fields of the server's state that no future depends on"
    )
    execution_errors: Literal["failure", "refusal"] = Field(
        default="failure", description="refusal: an action that raises on the server changed nothing there"
    )
    headers: dict[str, str] = Field(default_factory=dict)
    headers_env: dict[str, str] = Field(
        default_factory=dict, description="headers whose values are environment variables, by their names"
    )
    resource_server: ResourceServerConfig | None = Field(default=None, description="set by the task's resource_server")
    task_folder: str | None = Field(default=None, description="set by the task; where the server's command runs")


class OpenEnvResource(ReplayForkResource):
    """One session with an OpenEnv server."""

    fork_kind = "none"
    deterministic = False
    takes_task_folder = True
    takes_resource_server = True
    per_sample_keys = frozenset({"reset"})

    def __init__(self) -> None:
        super().__init__()
        self._settings = OpenEnvConfig()
        self._session: OpenEnvSession | None = None
        self._private_servers: ServerPool | None = None
        self._tools: dict[str, McpTool] = {}
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
            raise ConfigError("openenv resource: reset: seed: it is the run's to choose; leave it out")
        server = await self._lease(settings)
        url, started = _base_url(settings, server), server.address if server is not None else ""
        headers = {**settings.headers, **headers_from_environment(settings.headers_env, url, "openenv", started)}
        self._session = OpenEnvSession(
            url,
            headers,
            connect_timeout=settings.connect_timeout,
            timeout=settings.timeout,
            obituary=server.obituary if server is not None else None,
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self._session.open()
            await self._find_tools(settings, self._session)
            undo.pop_all()

    async def _lease(self, settings: OpenEnvConfig) -> Server | None:
        if settings.resource_server is None:
            return None
        pool = ServerPool.current()
        if pool is None:
            pool = self._private_servers = ServerPool()
        folder = Path(settings.task_folder) if settings.task_folder else Path.cwd()
        return await pool.lease(ServerSpec.of(settings.resource_server, folder))

    async def _find_tools(self, settings: OpenEnvConfig, session: OpenEnvSession) -> None:
        schema = settings.action_schema or (await session.schemas()).get("action")
        if not isinstance(schema, Mapping):
            raise EnvironmentFailure(f"openenv resource: the server gave no schema of its actions but {schema!r:.120}")
        self._calls_tools = settings.action_schema is None and schema.get("title") in _OF_MCP
        if not self._calls_tools:
            self._tools = {settings.action_tool: McpTool(settings.action_tool, _action_tool(settings, schema))}
        elif "action_tool" in settings.model_fields_set:
            raise ConfigError("openenv resource: action_tool has no effect: the server has tools of its own; remove it")
        else:
            await self._list_tools()

    async def _list_tools(self) -> None:
        answer = await self._ask("mcp", _LIST_TOOLS)
        result = answer.get("result")
        listed = result.get("tools") if isinstance(result, Mapping) else None
        if not isinstance(listed, list):
            raise EnvironmentFailure(f"openenv resource: tools/list: expected a list of tools, got {answer!r:.200}")
        self._tools = {}
        for tool in listed:
            spec = tool_spec(tool["name"], tool.get("description") or "", _object_schema(tool.get("inputSchema")))
            self._tools[tool["name"]] = McpTool(tool["name"], spec)

    async def _reset(self, seed: int) -> None:
        body = {**self._settings.reset, "seed": seed % _SEEDS}
        answer = await self._ask("reset", body)
        self._is_over = False
        self._history_key = hash_key(canonical_json(body))
        self._take(_outcome(answer, self._settings.observation_field))
        if self._calls_tools:
            await self._list_tools()

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        # A world that is never replayed needs no history.
        take = super().step if self._settings.deterministic else self._step
        return await take(action_name, action_params)

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        tool = self._tools.get(action_name)
        if tool is None:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, self._tools)}")
        tool.check(action_params)
        if self._is_over:
            raise ToolError("the episode is over; no action changes anything")
        action = dict(action_params)
        if self._calls_tools:
            action = {"type": "call_tool", "tool_name": tool.name, "arguments": action}
        try:
            answer = await self._open_session.ask("step", action)
        except RefusedError as refusal:
            is_refusal = self._settings.execution_errors == "refusal" and refusal.code == "EXECUTION_ERROR"
            if is_refusal or refusal.code == "VALIDATION_ERROR":  # which never reached the environment
                raise ToolError(f"{action_name}: {refusal.message}") from None
            raise EnvironmentFailure(f"openenv resource: step: {refusal.code}: {refusal.message}") from None
        outcome = _outcome(answer, self._settings.observation_field)
        self._history_key = hash_key(self._history_key, canonical_json(action), canonical_json(outcome.observation))
        self._take(outcome)
        return outcome

    def _take(self, outcome: StepOutcome) -> None:
        self._observation = outcome.observation
        self._is_over = outcome.terminated or outcome.truncated

    async def _ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """An answer that no agent asked for: what the server refuses of it is a failure of the world."""
        try:
            return await self._open_session.ask(kind, data)
        except RefusedError as refusal:
            raise EnvironmentFailure(f"openenv resource: {kind}: {refusal.code}: {refusal.message}") from None

    @property
    def _open_session(self) -> OpenEnvSession:
        if self._session is None:
            raise EnvironmentFailure("the openenv resource is closed, or was not set up")
        return self._session

    async def get_observation(self) -> Any:
        return self._observation

    async def get_tools_spec(self) -> list[ToolSpec]:
        return [tool.spec for tool in self._tools.values()]

    async def state_key(self) -> str:
        named = self._settings.state_key
        if named == "history":
            return hash_key(named, self._history_key)
        seen = self._observation if named == "observation" else await self._state()
        return hash_key(named, canonical_json([seen, self._is_over]))

    async def final_state(self) -> StateSnapshot | None:
        """The server's state, what was seen last, and whether it is over; where history names states, that name too."""
        seen = {"state": await self._state(), "observation": self._observation, "done": self._is_over}
        history = {"history": self._history_key} if self._settings.state_key == "history" else {}
        return StateSnapshot.from_json({**seen, **history})

    async def _state(self) -> dict[str, Any]:
        state = await self._ask("state")
        return {name: value for name, value in state.items() if name not in self._settings.state_ignores}

    async def fork(self) -> ForkableResource:
        return await (super().fork() if self._settings.deterministic else ForkableResource.fork(self))

    async def checkpoint(self) -> Any:
        return await (super().checkpoint() if self._settings.deterministic else ForkableResource.checkpoint(self))

    async def close(self) -> None:
        session, self._session = self._session, None
        servers, self._private_servers = self._private_servers, None
        try:
            if session is not None:
                await session.close()
        finally:
            if servers is not None:
                await servers.close()


def _base_url(settings: OpenEnvConfig, server: Server | None) -> str:
    url = settings.base_url or (server.address if server is not None else "")
    if not url:
        raise ConfigError("openenv resource: base_url: missing; give it, or the task's resource_server")
    if "@" in url:  # and it is not shown
        raise ConfigError("openenv resource: base_url: it holds no user name and no password; use headers_env instead")
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ConfigError(f"openenv resource: base_url: {url!r} is no http or ws address")
    if "{port}" in url:
        if server is None or not server.port:
            raise ConfigError("openenv resource: base_url: {port} is that of a resource_server, and there is none")
        return url.replace("{port}", str(server.port))
    return url


def _action_tool(settings: OpenEnvConfig, schema: Mapping[str, Any]) -> ToolSpec:
    """An action as the one tool; its metadata are for programs and no choice of an agent."""
    if schema.get("type") != "object":
        raise ConfigError(
            f"openenv resource: the action of this server is no object ({schema.get('title', schema)!r:.80}); "
            "write action_schema, a JSON schema of type object"
        )
    description = schema.get("description") or "Take one action."
    return tool_spec(settings.action_tool, description, _object_schema(schema, without="metadata"))


def _object_schema(schema: Any, without: str = "") -> dict[str, Any]:
    given = dict(schema) if isinstance(schema, Mapping) else {}
    properties = {name: value for name, value in (given.get("properties") or {}).items() if name != without}
    kept = {name: value for name, value in given.items() if name not in ("title", "description", "properties")}
    return {"type": "object", **kept, "properties": properties}


def _outcome(answer: Mapping[str, Any], field: str | None) -> StepOutcome:
    seen, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done", False)
    if not isinstance(seen, Mapping) or not isinstance(done, bool):
        raise EnvironmentFailure(f"openenv resource: expected observation, reward and done, got {answer!r:.200}")
    # An integer may be beyond every float.
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max):
        raise EnvironmentFailure(f"openenv resource: reward: expected a finite number, got {reward!r:.80}")
    told = answer.get("metadata") or seen.get("metadata")
    metadata = dict(told) if isinstance(told, Mapping) else {}
    is_truncated = done and (seen.get("truncated") is True or metadata.get("truncated") is True)
    shown, info = _shown(seen, metadata, field)
    return StepOutcome(
        shown, None if reward is None else float(reward), done and not is_truncated, is_truncated, {**metadata, **info}
    )


def _shown(seen: Mapping[str, Any], metadata: Mapping[str, Any], field: str | None) -> tuple[Any, dict[str, Any]]:
    """What the agent is told, and what the infos have besides."""
    fields = {name: value for name, value in seen.items() if name != "metadata"}
    if fields.keys() == {"tool_name", "result", "error"}:  # the answer of an MCP tool
        if (error := fields["error"]) is not None:
            message = error.get("message") if isinstance(error, Mapping) else error
            return str(message), {"is_action_valid": False}
        return _result(fields["result"]), {}
    if field is None:
        # Where an observation has no field of its own, its metadata are all there is to read.
        return fields or dict(metadata) or None, {}
    found = fields.get(field, metadata.get(field))
    if found is None and field not in fields and fields:
        raise EnvironmentFailure(f"openenv resource: observation_field {field!r}{did_you_mean(field, fields)}")
    return found, {}


def _result(result: Any) -> Any:
    """What a tool returned; its texts where the server wraps them as MCP does."""
    if not isinstance(result, Mapping) or "content" not in result:
        return result
    if result.get("data") is not None:
        return result["data"]
    texts = [block.get("text") for block in result["content"] if isinstance(block, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))
