"""A server that speaks the Model Context Protocol as an environment.

The agent's tools are the server's tools, and each episode has its own session. By default, the resource cannot be
forked and is not deterministic. A server that is started by `command` may be declared as `fork: replay` if all of its
changes stay in its memory or its `working_copy`. If the server returns an error, the call counts as rejected. If a call
receives no response, the state key changes, because the effect of the call is unknown. The SDK is imported only during
setup.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import anyio.to_thread
from pydantic import Field, field_validator, model_validator

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
from reward_kit.environments.config import ResourceConfig, headers_from_environment, read_config, task_path
from reward_kit.environments.elicitation import CURRENT_USER, FormAnswer, fill_form
from reward_kit.environments.filesystem import SUPPORTED, Entry, files_key, files_snapshot, read_tree, write_entries
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.errors import ConfigError, DeadlineError, EnvironmentFailure, ToolError, did_you_mean, install_hint
from reward_kit.processes import child_environment, remove_folder, temporary_folder
from reward_kit.run_warnings import warn_once
from reward_kit.task_parts import Word

if TYPE_CHECKING:
    import mcp_types

    from reward_kit.environments.mcp_session import FillForm, McpSession, StdioServer

SHOWN_PATH = "/working_copy"
"""The path that agents see for every working copy, so that identical episodes have identical texts."""
PYTHON, TASK_FOLDER, WORKING_COPY = "{python}", "{task_folder}", "{working_copy}"
_PLACEHOLDERS = (PYTHON, TASK_FOLDER, WORKING_COPY)
_ONLY_WITH_COMMAND = ("env", "pass_env", "cwd")
_ONLY_WITH_URL = ("headers", "headers_env")
_MAX_NAME_CHARS = 64
_MAX_FILE_BYTES = 256_000_000
_MAX_RECORDED_CHARS = 64 * 1024
_SHOWN_PATH = re.compile(rf"{SHOWN_PATH}(?![\w-])")
_NO_BACK_CHANNEL = "no back-channel for server-initiated requests"
"""Part of the SDK's error message when a tool asks the user over a connection that cannot carry requests from the
server.
"""
_numbers = itertools.count(1)
logger = logging.getLogger("reward_kit.environments.mcp")


class ExpertCall(ResourceConfig):
    """One tool call of the expert."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class McpConfig(ResourceConfig):
    """The configuration of `mcp`. Set exactly one of `command` (a server over stdio) and `url` (streamable HTTP)."""

    command: list[Word] | None = Field(
        default=None, description="a list, or a string that is split like a shell command"
    )
    env: dict[str, Word] = Field(default_factory=dict, description="variables added to the server's environment")
    pass_env: list[str] = Field(
        default_factory=list, description="names of environment variables to pass to the server"
    )
    cwd: str | None = Field(default=None, description="relative to the task's directory; defaults to this directory")
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    headers_env: dict[str, str] = Field(
        default_factory=dict, description="maps header names to the environment variables that contain their values"
    )
    tools: list[str] | None = Field(
        default=None, min_length=1, description="names of the tools to offer; defaults to all tools"
    )
    protocol: Literal["auto", "legacy"] = Field(
        default="auto",
        description="legacy: use at most version 2025-11-25, in which the server may ask the user during a call",
    )
    start_timeout_s: float = Field(default=60.0, gt=0)
    call_timeout_s: float = Field(default=50.0, gt=0)
    fork: Literal["none", "replay"] = "none"
    working_copy: str | None = Field(default=None, description="a directory; each episode gets a private copy of it")
    state_key: Literal["history", "files"] | None = Field(
        default=None, description="what the state key covers; defaults to the files if there is a working copy"
    )
    expert_calls: list[ExpertCall] = Field(default_factory=list, description="the calls that an expert makes, in order")
    task_folder: str | None = None

    @field_validator("command", mode="before")
    @classmethod
    def _is_split(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/]", value):
            raise ValueError("must start with http:// or https://")
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> McpConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("set exactly one of command (a server over stdio) and url (streamable HTTP)")
        needed, foreign = ("command", _ONLY_WITH_URL) if self.url is None else ("url", _ONLY_WITH_COMMAND)
        for key in foreign:
            if getattr(self, key):
                raise ValueError(f"{key} does not apply to {needed}")
        if self.url and (self.fork == "replay" or self.working_copy):
            key = "fork: replay" if self.fork == "replay" else "working_copy"
            raise ValueError(f"{key} needs a private server; set `command` instead of `url`")
        if self.state_key == "files" and not self.working_copy:
            raise ValueError("state_key: files needs a working_copy")
        return self

    def header_values(self) -> dict[str, str]:
        """Return the headers to send with every request, including those from environment variables."""
        return {**self.headers, **headers_from_environment(self.headers_env, self.url or "", "mcp")}

    def source_folder(self) -> Path:
        """Return the directory that is copied for each episode."""
        folder = task_path(self.working_copy or "", self.task_folder, "mcp resource: working_copy")
        if not folder.is_dir():
            raise ConfigError(f"mcp resource: working_copy: no such directory: {folder}")
        return folder


def _stdio_server(settings: McpConfig, working_copy: Path | None) -> StdioServer:
    """Return the private server for one episode. All placeholders in its settings are filled in."""
    from reward_kit.environments.mcp_session import StdioServer

    values = {PYTHON: sys.executable, TASK_FOLDER: settings.task_folder or str(Path.cwd())}
    if working_copy is not None:
        values[WORKING_COPY] = str(working_copy)

    def fill(text: str) -> str:
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        return text

    cwd = Path(settings.task_folder) if settings.task_folder else None
    if settings.cwd is not None:
        if settings.cwd.startswith(WORKING_COPY):
            cwd = Path(fill(settings.cwd))
        else:
            cwd = task_path(fill(settings.cwd), settings.task_folder, "mcp resource: cwd")
        if not cwd.is_dir():
            raise ConfigError(f"mcp resource: cwd: no such directory: {cwd}")
    command = [fill(part) for part in settings.command or ()]
    variables = {name: fill(value) for name, value in settings.env.items()}
    environment = child_environment(variables, pass_names=settings.pass_env)
    return StdioServer(command, environment, cwd, f"mcp-{next(_numbers)}")


def tool_table(listed: Sequence[mcp_types.Tool], wanted: Sequence[str] | None) -> dict[str, tuple[str, ToolSpec]]:
    """Return the server's name and specification for each requested tool, keyed by the name that the agent sees."""
    by_name: dict[str, mcp_types.Tool] = {}
    for tool in listed:
        by_name.setdefault(tool.name, tool)
    if len(by_name) < len(listed):
        (twice, _), *_ = Counter(tool.name for tool in listed).most_common(1)
        logger.warning("the server lists multiple tools named %.100r; using the first one", twice)
    names = [name for name in by_name if wanted is None or name in wanted]
    shown = {name: name for name in names if re.fullmatch(rf"[a-zA-Z0-9_-]{{1,{_MAX_NAME_CHARS}}}", name)}
    taken, numbers = set(shown), Counter[str]()
    for name in names:
        if name not in shown:
            plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name[:_MAX_NAME_CHARS]) or "tool"
            free = plain
            while free in taken:
                numbers[plain] += 1
                suffix = f"_{numbers[plain] + 1}"
                free = f"{plain[: _MAX_NAME_CHARS - len(suffix)]}{suffix}"
            shown[name] = free
            taken.add(free)
    table = {}
    for name in names:
        tool = by_name[name]
        schema = {"type": "object", "properties": {}, **tool.input_schema}
        table[shown[name]] = name, tool_spec(shown[name], tool.description or tool.title or "", schema)
    return table


def result_text(result: mcp_types.CallToolResult) -> str:
    """Return a result as one string.

    The string contains the text blocks or otherwise the structured content. It also contains one line for
    each other item.
    """
    texts = []
    if result.structured_content is not None and not any(block.type == "text" for block in result.content):
        texts.append(canonical_json(result.structured_content))
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image" or block.type == "audio":
            texts.append(f"[{block.type} {block.mime_type}, {_decoded_size(block.data):,} bytes]")
        elif block.type == "resource_link":
            texts.append(f"[link to the resource {block.uri}{f', {block.mime_type}' if block.mime_type else ''}]")
        elif (blob := getattr(block.resource, "blob", None)) is None:
            texts.append(f"[resource {block.resource.uri}]\n{getattr(block.resource, 'text', '')}")
        else:
            kind = block.resource.mime_type or "binary"
            texts.append(f"[resource {block.resource.uri}, {kind}, {_decoded_size(blob):,} bytes]")
    return "\n".join(texts)


def _decoded_size(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")


class McpResource(ReplayForkResource):
    """A session with an MCP server over stdio or streamable HTTP."""

    fork_kind = "none"
    deterministic = False
    takes_task_folder = True
    state_key_covers_results = False
    per_sample_keys = frozenset({"expert_calls"})

    def __init__(self) -> None:
        super().__init__()
        self._settings: McpConfig
        self._session: McpSession | None = None
        self._folder: Path | None = None
        self._tools: dict[str, tuple[str, ToolSpec]] = {}
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
        settings = self._settings = read_config(McpConfig, config, "mcp")
        for text in (*(settings.command or ()), *settings.env.values(), settings.cwd or ""):
            for word in re.findall(r"\{\w+\}", text):
                hint = did_you_mean(word, _PLACEHOLDERS)
                if word not in _PLACEHOLDERS and hint.startswith("; did"):
                    raise ConfigError(f"mcp resource: unknown placeholder {word} in {text!r}{hint}")
                if word == WORKING_COPY and settings.working_copy is None:
                    raise ConfigError(f"mcp resource: {text!r} uses {WORKING_COPY}, but no working_copy is set")
        await self._open()

    async def _reset(self, seed: int) -> None:
        # A server that has not received any calls need not be restarted.
        self._expert_next = 0
        if not self._is_fresh:
            await self._shut()
            await self._open()

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        outcome = await super().step(action_name, action_params)
        expected = self._settings.expert_calls[self._expert_next : self._expert_next + 1]
        if expected and (expected[0].name, expected[0].arguments) == (action_name, dict(action_params)):
            self._expert_next += 1
        return outcome

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        from reward_kit.environments.mcp_tasks import UnknownEffectError

        session = self._here
        if action_name not in self._tools:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, self._tools)}")
        tool, spec = self._tools[action_name]
        check_schema(spec, action_params)
        self._is_fresh = False
        before, call = self._key, (action_name, canonical_json(action_params))
        # The effect of a call is unknown until the server responds.
        self._key = hash_key(before, *call, "unanswered")
        try:
            result = await session.call(tool, _with_path(dict(action_params), self._folder), self._form_filler())
            text = self._without_path(result_text(result))
            if result.is_error:
                raise ToolError(text or f"{tool} failed without a message")
        except ToolError as error:
            self._key = before
            raise ToolError(f"{error}{_refusals(session.forms)}{self._unsent_form_hint(str(error))}") from error
        except (DeadlineError, UnknownEffectError) as error:
            if self._settings.fork == "replay":
                raise error if isinstance(error, DeadlineError) else EnvironmentFailure(str(error)) from error
            raise ToolError(f"{error}{_refusals(session.forms)}") from error
        forms = json.loads(self._without_path(canonical_json(session.forms)))
        answers = [canonical_json([form["action"], form.get("content")]) for form in forms]
        self._key = hash_key(before, *call, *answers, text)
        return StepOutcome(text, info=self._record(result, forms))

    def _form_filler(self) -> FillForm | None:
        """Return the function that answers the forms of a call.

        In a replay, the answers are taken from the record. Otherwise, the user answers the forms.
        """
        if self._replayed is not None:
            recorded = iter(self._replayed.info.get("forms", ()))

            async def repeat(message: str, schema: Mapping[str, Any]) -> FormAnswer:
                form = next(recorded, None)
                if form is None:
                    raise EnvironmentFailure("replay: the server asked for more input than it did in the recording")
                content = _with_path(form.get("content"), self._folder)
                return FormAnswer(form["action"], content, form.get("reason", ""), form.get("user", {}))

            return repeat
        if (ask := CURRENT_USER.get()) is None:
            return None

        async def fill(message: str, schema: Mapping[str, Any]) -> FormAnswer:
            answer = await fill_form(ask, self._without_path(message), schema)
            return replace(answer, content=_with_path(answer.content, self._folder))

        return fill

    def _unsent_form_hint(self, message: str) -> str:
        """Return a note about a call in which the server could not ask the simulated user.

        Also log a warning once per run.
        """
        if _NO_BACK_CHANNEL not in message or CURRENT_USER.get() is None:
            return ""
        if self._settings.protocol == "auto":
            cause = "ctx.elicit needs a version of the protocol before 2026-07-28"
            fix = "set protocol: legacy in the mcp resource, or use Resolve and Elicit in the tool"
        else:
            cause = "the server has no session"
            fix = "start the server without stateless_http"
        warn_once(logger, f"{self._here.name} could not ask the simulated user: {cause}; {fix}")
        return f" (the simulated user was not asked: {cause}; {fix})"

    def _record(self, result: mcp_types.CallToolResult, forms: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the data about a result that is recorded in addition to its text."""
        info: dict[str, Any] = {"forms": forms} if forms else {}
        if result.structured_content is None:
            return info
        text = self._without_path(canonical_json(result.structured_content))
        if len(text) > _MAX_RECORDED_CHARS:
            return {**info, "structured_content_chars": len(text)}
        return {**info, "structured_content": json.loads(text)}

    async def get_observation(self) -> Any:
        instructions = self._here.instructions
        return self._without_path(instructions) if instructions else None

    async def get_tools_spec(self) -> list[ToolSpec]:
        if self._here.tools_changed:
            await self._list_tools()
        return [spec for _, spec in self._tools.values()]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the next of the configured `expert_calls`, or None after the last one."""
        for call in self._settings.expert_calls[self._expert_next :]:
            return {"type": "tool_call", "name": call.name, "arguments": dict(call.arguments)}
        return None

    async def state_key(self) -> str:
        settings = self._settings
        if settings.state_key == "files" or (settings.state_key is None and settings.working_copy is not None):
            return await anyio.to_thread.run_sync(files_key, await self._entries())
        return self._key

    async def final_state(self) -> StateSnapshot | None:
        if self._folder is None:
            return None
        return await anyio.to_thread.run_sync(files_snapshot, await self._entries())

    async def close(self) -> None:
        await self._shut()

    @property
    def _here(self) -> McpSession:
        if self._session is None:
            raise EnvironmentFailure("the mcp resource is closed, or was not set up")
        return self._session

    async def _open(self) -> None:
        settings = self._settings
        try:
            from reward_kit.environments.mcp_session import HttpServer, McpServer, McpSession
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "httpx2"):
                raise
            raise ConfigError(f"the mcp resource needs the MCP SDK; {install_hint('mcp')}") from error
        try:
            if settings.working_copy is not None:
                self._folder = await anyio.to_thread.run_sync(_copy, settings.source_folder())
            server: McpServer
            if settings.url is not None:
                # Other parts of the URL may contain a secret.
                url = urlsplit(settings.url)
                name = f"the MCP server {url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
                server = HttpServer(settings.url, settings.header_values(), settings.call_timeout_s)
            else:
                server = _stdio_server(settings, self._folder)
                name = f"the MCP server {' '.join(server.command)[:200]!r}"
            start_s, call_s = settings.start_timeout_s, settings.call_timeout_s
            self._session = McpSession(
                server,
                name,
                start_timeout_s=start_s,
                call_timeout_s=call_s,
                root=self._folder,
                takes_forms=CURRENT_USER.get() is not None,
                protocol=settings.protocol,
            )
            await self._session.start()
            self._is_fresh = True
            await self._list_tools()
            for call in settings.expert_calls:
                if call.name not in self._tools:
                    hint = did_you_mean(call.name, self._tools)
                    raise ConfigError(f"mcp resource: expert_calls: the server has no tool {call.name!r}{hint}")
        except BaseException:
            await self._shut()
            raise
        self._key = hash_key("mcp", *(settings.command or ()), settings.url or "", settings.working_copy or "")

    async def _shut(self) -> None:
        session, self._session = self._session, None
        folder, self._folder = self._folder, None
        with anyio.CancelScope(shield=True):
            if session is not None:
                await session.close()
            if folder is not None:
                await anyio.to_thread.run_sync(remove_folder, folder)

    async def _list_tools(self) -> None:
        tools, wanted = await self._here.list_tools(), self._settings.tools
        if self._is_fresh and wanted is not None:
            names = {tool.name for tool in tools}
            for name in wanted:
                if name not in names:
                    raise ConfigError(
                        f"mcp resource: tools: the server has no tool {name!r}{did_you_mean(name, names)}"
                    )
        self._tools = tool_table(tools, wanted)

    async def _entries(self) -> tuple[Entry, ...]:
        if self._folder is None:
            raise EnvironmentFailure("the mcp resource is closed, or was not set up")
        return await anyio.to_thread.run_sync(_entries_of, self._folder)

    def _without_path(self, text: str) -> str:
        return text if self._folder is None else text.replace(str(self._folder), SHOWN_PATH)


def _refusals(forms: Sequence[Mapping[str, Any]]) -> str:
    """Return a note that explains why forms of a failed call were not filled in."""
    reasons = [form["reason"] for form in forms if form.get("reason")]
    return f" (the server asked for input, but {'; '.join(reasons)})" if reasons else ""


def _with_path(value: Any, folder: Path | None) -> Any:
    """Replace `SHOWN_PATH` with the path of the working copy in all strings of `value`."""
    if folder is None:
        return value
    if isinstance(value, str):
        return _SHOWN_PATH.sub(lambda _: str(folder), value)
    if isinstance(value, dict):
        return {key: _with_path(item, folder) for key, item in value.items()}
    return [_with_path(item, folder) for item in value] if isinstance(value, list | tuple) else value


def _copy(source: Path) -> Path:
    """Copy the files and directories below `source` to a private directory. Links are not copied."""
    if not SUPPORTED:
        raise ConfigError("working_copy needs openat and O_NOFOLLOW, which this system does not have")
    folder = temporary_folder("mcp-")
    handle = os.open(folder, os.O_RDONLY)
    try:
        write_entries(handle, _entries_of(source, "working_copy"))
    except BaseException:
        remove_folder(folder)
        raise
    finally:
        os.close(handle)
    return folder


def _entries_of(folder: Path, key: str = "") -> tuple[Entry, ...]:
    try:
        return read_tree(folder, _MAX_FILE_BYTES, key)
    except ToolError as error:
        raise EnvironmentFailure(f"the working copy cannot be read: {error}") from error
