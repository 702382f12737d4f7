"""A world behind four URLs (start, step, end, health), so that an environment can be written in any language.

Each world is an episode of its own on the server, told apart by the id that the server gave it.
`docs/guides/environments.md` has the exact JSON. Where the task names a `resource_server`, that server is started for
it (`servers`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import anyio
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import (
    ForkableResource,
    ForkKind,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
)
from reward_kit.environments.config import headers_from_environment, read_config
from reward_kit.environments.http_client import Answer, JsonClient
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.environments.servers import Server, ServerPool, ServerSpec
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, did_you_mean
from reward_kit.task_parts import ResourceServerConfig

_END_S = 5.0
logger = logging.getLogger("reward_kit.environments")


class HttpConfig(BaseModel):
    """The configuration of `http`."""

    model_config = ConfigDict(extra="forbid")

    base_url: str | None = Field(default=None, description="by default the address of the task's resource_server")
    start_episode_endpoint: str = "/start_episode"
    step_endpoint: str = "/step"
    end_episode_endpoint: str = "/end_episode"
    health_endpoint: str | None = Field(
        default="/health", description="asked once a world, where no resource_server is; null: not asked"
    )
    timeout: float = Field(default=30.0, gt=0, description="seconds for one answer")
    config: dict[str, Any] | None = Field(default=None, description="handed to the server at each start")
    tools: list[dict[str, Any]] | None = Field(default=None, description="in OpenAI form")
    tools_endpoint: str | None = Field(default=None, description="GET, answers a list of tools")
    action_form: Literal["call", "value"] = Field(
        default="call", description="call: {name, arguments}; value: the one argument's value alone"
    )
    headers: dict[str, str] = Field(default_factory=dict)
    headers_env: dict[str, str] = Field(
        default_factory=dict, description="headers whose values are environment variables, by their names"
    )
    fork: Literal["replay", "none"] = "replay"
    deterministic: bool = True
    resource_server: ResourceServerConfig | None = Field(default=None, description="set by the task's resource_server")
    task_folder: str | None = Field(default=None, description="set by the task; where the server's command runs")


class HttpResource(ReplayForkResource):
    """One episode on a server. Forks start a new episode there and take the same actions again."""

    takes_task_folder = True
    takes_resource_server = True
    per_sample_keys = frozenset({"config"})

    def __init__(self) -> None:
        super().__init__()
        self._settings = HttpConfig()
        self._client: JsonClient | None = None
        self._private_servers: ServerPool | None = None
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
            raise ConfigError("http resource: give tools or tools_endpoint, not both")
        tools = _tool_specs(settings.tools or [], ConfigError, "http resource: tools")
        server = await self._lease(settings)
        obituary, started = (server.obituary, server.address) if server is not None else (None, "")
        url = _base_url(settings, server)
        headers = {**settings.headers, **headers_from_environment(settings.headers_env, url, "http", started)}
        client = self._client = JsonClient(url, headers, settings.timeout, obituary)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            if server is None and settings.health_endpoint is not None:
                await client.check_health(settings.health_endpoint)
            self._tools = tools if settings.tools_endpoint is None else await _listed(client, settings.tools_endpoint)
            undo.pop_all()

    async def _lease(self, settings: HttpConfig) -> Server | None:
        if settings.resource_server is None:
            return None
        pool = ServerPool.current()
        if pool is None:
            pool = self._private_servers = ServerPool()
        folder = Path(settings.task_folder) if settings.task_folder else Path.cwd()
        return await pool.lease(ServerSpec.of(settings.resource_server, folder))

    async def _reset(self, seed: int) -> None:
        await self._end_episode()
        settings = self._settings
        body: dict[str, Any] = {"seed": seed}
        if settings.config is not None:
            body["config"] = settings.config
        answer = await self._connection.post(settings.start_episode_endpoint, body)
        fields = answer.fields()
        episode = fields.get("episode_id")
        if isinstance(episode, bool) or not isinstance(episode, str | int):
            raise answer.wrong(f"episode_id: expected text or a whole number, got {episode!r:.80}")
        self._episode, self._is_over = episode, False
        if fields.get("tools") is not None:
            self._tools = _tool_specs(fields["tools"], EnvironmentFailure, answer.source)
        self._given_key = None
        self._history_key = hash_key(canonical_json(body))
        self._take(answer, fields)

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        names = [tool["function"]["name"] for tool in self._tools]
        if action_name not in names:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, names)}")
        if self._is_over:
            raise ToolError("the episode is over; no action changes anything")
        action = self._action(action_name, action_params)
        answer = await self._connection.post(
            self._settings.step_endpoint, {"episode_id": self._episode, "action": action}
        )
        fields = answer.value if isinstance(answer.value, Mapping) else {}
        refusal = answer.refusal or fields.get("error")
        if isinstance(refusal, str):
            raise ToolError(refusal)
        outcome = _outcome(answer, answer.fields())
        self._history_key = hash_key(self._history_key, canonical_json(action))
        self._take(answer, fields)
        self._is_over = outcome.terminated or outcome.truncated
        return outcome

    def _action(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if self._settings.action_form == "call":
            action: Any = {"name": name, "arguments": dict(arguments)}
        elif len(arguments) == 1:
            (action,) = arguments.values()
        else:
            raise ToolError(f"{name}: expected one argument, got {len(arguments)}")
        try:
            json.dumps(action, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"{name}: the arguments are not JSON: {error}") from None
        return action

    def _take(self, answer: Answer, fields: Mapping[str, Any]) -> None:
        """The state after a start or a step."""
        if "observation" not in fields:
            raise answer.wrong(f"observation: missing; there are {', '.join(map(str, fields)) or 'no fields'}")
        key = fields.get("state_key")
        if key is not None and not isinstance(key, str):
            raise answer.wrong(f"state_key: expected text, got {key!r:.80}")
        if key is None and self._given_key is not None:
            raise answer.wrong("state_key: missing, and was there before; give it always or never")
        self._given_key, self._observation, self._state = key, fields["observation"], fields.get("state")

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
        """What the server names it, else its `state`, else all that was done since the reset."""
        if self._given_key is not None:
            return hash_key("given", self._given_key)
        if self._state is not None:
            return hash_key("state", canonical_json([self._state, self._is_over]))
        return hash_key("history", self._history_key)

    async def final_state(self) -> StateSnapshot | None:
        return None if self._state is None else StateSnapshot.from_json(self._state)

    async def fork(self) -> ForkableResource:
        if self._settings.fork == "none":
            raise NotImplementedError("the http resource is configured with fork: none")
        return await super().fork()

    async def checkpoint(self) -> Any:
        if self._settings.fork == "none":
            raise NotImplementedError("the http resource is configured with fork: none")
        return await super().checkpoint()

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._end_episode()
            client, self._client = self._client, None
            if client is not None:
                await client.close()
            servers, self._private_servers = self._private_servers, None
            if servers is not None:
                await servers.close()

    async def _end_episode(self) -> None:
        """Tell the server. A server that is gone, or does not want to know, has no episode to end either."""
        episode, self._episode = self._episode, None
        if episode is None or self._client is None:
            return
        with anyio.move_on_after(_END_S):
            try:
                await self._client.post(self._settings.end_episode_endpoint, {"episode_id": episode})
            except EnvironmentFailure as error:
                logger.info("the end of episode %r was not taken: %s", episode, error)


def _base_url(settings: HttpConfig, server: Server | None) -> str:
    if settings.base_url is None:
        if server is None:
            raise ConfigError("http resource: base_url: missing; give it, or the task's resource_server")
        return server.address
    if not settings.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"http resource: base_url: {settings.base_url!r} is no http address")
    if "{port}" in settings.base_url:
        if server is None or not server.port:
            raise ConfigError("http resource: base_url: {port} is that of a resource_server, and there is none")
        return settings.base_url.replace("{port}", str(server.port))
    return settings.base_url


async def _listed(client: JsonClient, endpoint: str) -> list[ToolSpec]:
    """The tools that a server lists."""
    answer = await client.get(endpoint)
    listed = answer.value if isinstance(answer.value, list) else answer.fields().get("tools")
    return _tool_specs(listed, EnvironmentFailure, answer.source)


def _tool_specs(listed: Any, error_type: type[ConfigError | EnvironmentFailure], where: str) -> list[ToolSpec]:
    """Tools in OpenAI form; one without the outer `function`, as older servers list them, gets it."""
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise error_type(f"{where}: expected a list of tools, got {listed!r:.80}")
    specs: list[ToolSpec] = []
    for tool in listed:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise error_type(f"{where}: a tool is {{type: function, function: {{name, …}}}}, got {tool!r:.120}")
        parameters = function.get("parameters", {"type": "object", "properties": {}})
        if not isinstance(parameters, Mapping):
            raise error_type(f"{where}: tool {name!r}: parameters: expected a JSON schema, got {parameters!r:.80}")
        specs.append({"type": "function", "function": {**function, "parameters": dict(parameters)}})
    return specs


def _outcome(answer: Answer, fields: Mapping[str, Any]) -> StepOutcome:
    flags = {name: fields.get(name) for name in ("is_done", "terminated", "truncated")}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise answer.wrong(f"{name}: expected true or false, got {flag!r:.80}")
    reward = fields.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float) or not isfinite(reward)):
        raise answer.wrong(f"reward: expected a finite number, got {reward!r:.80}")
    info = fields.get("info")
    if info is not None and not isinstance(info, Mapping):
        raise answer.wrong(f"info: expected an object, got {info!r:.80}")
    return StepOutcome(
        observation=fields.get("observation"),
        reward=None if reward is None else float(reward),
        # An older server says only that it is over.
        terminated=bool(flags["terminated"] or (flags["is_done"] and not flags["truncated"])),
        truncated=bool(flags["truncated"]),
        info=dict(info or {}),
    )
