"""The world behind an MCP server; nothing is imported of the SDK before a world is set up.

What a server does is its own affair, so by default a world cannot be forked and nothing is known of its determinism:
`fork: none`, and each episode of a group makes a fresh start. A server that a `command` starts and that keeps all it
changes to itself (in memory, or in its `working_copy`) may be declared `fork: replay`; every fork is then a new server
that answers the same calls once more, and each answer is compared.

What a server answers with an error counts as refused, and refused calls change nothing, as everywhere. After a call
without an answer the state is another one, since nobody knows what was done.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio.to_thread

from reward_kit.environments import confined
from reward_kit.environments.base import (
    ForkableResource,
    ForkKind,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
)
from reward_kit.environments.confined import Entry
from reward_kit.environments.filesystem import files_key, files_snapshot
from reward_kit.environments.mcp.config import McpConfig, header_values, launch_of, read_mcp_config, source_folder
from reward_kit.environments.mcp.tools import McpTool, NoAnswerError, check_wanted, result_text, tool_table
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.errors import ConfigError, DeadlineError, EnvironmentFailure, ToolError, did_you_mean, how_to_install
from reward_kit.processes import remove_folder, temporary_folder

if TYPE_CHECKING:
    from reward_kit.environments.mcp.session import McpSession, Server

SHOWN_PATH = "/working_copy"
"""The path of every working copy as agents see and write it, so that equal episodes read equal texts."""

_MAX_FILE_BYTES = 256_000_000
_numbers = itertools.count(1)
_SHOWN_PATH = re.compile(rf"{SHOWN_PATH}(?![\w-])")

logger = logging.getLogger("reward_kit.environments.mcp")


class McpResource(ReplayForkResource):
    """A session with an MCP server, over stdio or streamable HTTP."""

    fork_kind = "none"
    deterministic = False
    takes_task_folder = True
    per_sample_keys = frozenset({"expert_calls"})

    def __init__(self) -> None:
        super().__init__()
        self._settings: McpConfig | None = None
        self._session: McpSession | None = None
        self._folder: Path | None = None
        self._tools: dict[str, McpTool] = {}
        self._is_fresh = False
        self._key = ""
        self._expert_next = 0

    @classmethod
    def fork_kind_for(cls, config: Mapping[str, Any]) -> ForkKind:
        return "replay" if config.get("fork") == "replay" else "none"

    @classmethod
    def is_deterministic_for(cls, config: Mapping[str, Any]) -> bool:
        return config.get("fork") == "replay"

    async def _setup(self, config: Mapping[str, Any]) -> None:
        self._settings = read_mcp_config(config)
        await self._open()

    async def _reset(self, seed: int) -> None:
        # A server that was asked nothing yet is as good as a new one, and costs no second start.
        self._expert_next = 0
        if not self._is_fresh:
            await self._shut()
            await self._open()

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        take = super().step if self._config_here.fork == "replay" else self._step
        outcome = await take(action_name, action_params)
        expected = self._config_here.expert_calls[self._expert_next : self._expert_next + 1]
        if expected and (expected[0].name, expected[0].arguments) == (action_name, dict(action_params)):
            self._expert_next += 1
        return outcome

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        session, tool = self._here, self._tools.get(action_name)
        if tool is None:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, self._tools)}")
        tool.check(action_params)
        self._is_fresh = False
        before, call = self._key, (action_name, canonical_json(action_params))
        # Until an answer is there, nobody knows what was done; so it stays where none comes.
        self._key = hash_key(before, *call, "unanswered")
        try:
            text = await self._answer(session, tool, action_params)
        except ToolError:
            self._key = before
            raise
        except (DeadlineError, NoAnswerError) as error:
            if self._config_here.fork == "replay":
                raise error if isinstance(error, DeadlineError) else EnvironmentFailure(str(error)) from error
            raise ToolError(str(error)) from error
        self._key = hash_key(before, *call, text)
        return StepOutcome(text)

    async def _answer(self, session: McpSession, tool: McpTool, arguments: Mapping[str, Any]) -> str:
        result = await session.call(tool.name, _with_path(dict(arguments), self._folder))
        text = self._without_path(result_text(result))
        if result.is_error:
            raise ToolError(text or f"{tool.name} failed and does not say why")
        return text

    async def fork(self) -> ForkableResource:
        if self._config_here.fork == "none":
            return await ForkableResource.fork(self)
        return await super().fork()

    async def checkpoint(self) -> Any:
        if self._config_here.fork == "none":
            return await ForkableResource.checkpoint(self)
        return await super().checkpoint()

    async def restore(self, state: Any) -> None:
        if self._config_here.fork == "none":
            await ForkableResource.restore(self, state)
        await super().restore(state)

    async def get_observation(self) -> Any:
        instructions = self._here.instructions
        return self._without_path(instructions) if instructions else None

    async def get_tools_spec(self) -> list[ToolSpec]:
        if self._here.tools_changed:
            await self._list_tools()
        return [tool.spec for tool in self._tools.values()]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """The next of the configured `expert_calls`; None once all have been made, or where there are none."""
        for call in self._config_here.expert_calls[self._expert_next :]:
            return {"type": "tool_call", "name": call.name, "arguments": dict(call.arguments)}
        return None

    async def state_key(self) -> str:
        if self._config_here.keys_are_files:
            return await anyio.to_thread.run_sync(lambda: files_key(self._entries()))
        return self._key

    async def final_state(self) -> StateSnapshot | None:
        if self._folder is None:
            return None
        return await anyio.to_thread.run_sync(lambda: files_snapshot(self._entries()))

    async def close(self) -> None:
        await self._shut()

    @property
    def _config_here(self) -> McpConfig:
        if self._settings is None:
            raise EnvironmentFailure("the mcp resource was not set up")
        return self._settings

    @property
    def _here(self) -> McpSession:
        if self._session is None:
            raise EnvironmentFailure("the mcp resource is closed, or was not set up")
        return self._session

    async def _open(self) -> None:
        settings = self._config_here
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._shut)
            if settings.working_copy is not None:
                self._folder = await anyio.to_thread.run_sync(_copied, source_folder(settings))
            self._session = _session(settings, self._folder)
            await self._session.start()
            self._is_fresh = True
            await self._list_tools()
            self._check_expert(settings)
            undo.pop_all()
        self._key = hash_key("mcp", *(settings.command or ()), settings.url or "", settings.working_copy or "")

    def _check_expert(self, settings: McpConfig) -> None:
        for call in settings.expert_calls:
            if call.name not in self._tools:
                hint = did_you_mean(call.name, self._tools)
                raise ConfigError(f"mcp resource: expert_calls: the server has no {call.name!r}{hint}")

    async def _shut(self) -> None:
        session, self._session = self._session, None
        folder, self._folder = self._folder, None
        with anyio.CancelScope(shield=True):
            if session is not None:
                await session.close()
            if folder is not None:
                await anyio.to_thread.run_sync(remove_folder, folder)

    async def _list_tools(self) -> None:
        found, wanted = await self._here.list_tools(), self._config_here.tools
        if self._is_fresh and wanted is not None:
            check_wanted(found, wanted)
        self._tools = tool_table(found, wanted)

    def _entries(self) -> tuple[Entry, ...]:
        if self._folder is None:
            raise EnvironmentFailure("the mcp resource is closed, or was not set up")
        return _entries_of(self._folder)

    def _without_path(self, text: str) -> str:
        return text if self._folder is None else text.replace(str(self._folder), SHOWN_PATH)


def _with_path(value: Any, folder: Path | None) -> Any:
    """`value` with the working copy's own path in the place of `SHOWN_PATH`, in every text of it."""
    if folder is None:
        return value
    if isinstance(value, str):
        return _SHOWN_PATH.sub(lambda _: str(folder), value)
    if isinstance(value, dict):
        return {key: _with_path(item, folder) for key, item in value.items()}
    return [_with_path(item, folder) for item in value] if isinstance(value, list | tuple) else value


def _session(settings: McpConfig, folder: Path | None) -> McpSession:
    """A session that is not started yet.

    Raises:
        ConfigError: the SDK is not installed.
    """
    try:
        from reward_kit.environments.mcp.http import HttpServer
        from reward_kit.environments.mcp.session import McpSession
        from reward_kit.environments.mcp.stdio import StdioServer
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "httpx2"):
            raise
        raise ConfigError(f"the mcp resource needs the MCP SDK; {how_to_install('mcp')}") from error
    server: Server
    if settings.url is not None:
        # What stands in the URL beside the place may be a secret.
        place = urlsplit(settings.url)
        name = f"the MCP server {place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"
        server = HttpServer(settings.url, header_values(settings), settings.call_timeout_s)
    else:
        launch = launch_of(settings, folder)
        name = f"the MCP server {' '.join(launch.command)[:200]!r}"
        server = StdioServer(launch, f"mcp-{next(_numbers)}")
    return McpSession(
        server, name, start_timeout_s=settings.start_timeout_s, call_timeout_s=settings.call_timeout_s, root=folder
    )


def _copied(source: Path) -> Path:
    """A private copy of the files and directories below `source`; links are not copied."""
    if not confined.SUPPORTED:
        raise ConfigError("working_copy needs openat and O_NOFOLLOW, which this system does not have")
    folder = temporary_folder("mcp-")
    handle = os.open(folder, os.O_RDONLY)
    try:
        with ExitStack() as undo:
            undo.callback(remove_folder, folder)
            confined.materialise(handle, _entries_of(source))
            if links := sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_symlink()):
                logger.warning("working_copy %s: symbolic links are not copied: %s", source, ", ".join(links[:5]))
            undo.pop_all()
    finally:
        os.close(handle)
    return folder


def _entries_of(folder: Path) -> tuple[Entry, ...]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        return tuple(confined.scan(handle, _MAX_FILE_BYTES))
    except ToolError as error:
        raise EnvironmentFailure(f"the working copy cannot be read: {error}") from error
    finally:
        os.close(handle)
