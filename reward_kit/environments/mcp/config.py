"""The configuration of `mcp`, read, checked and made ready before any server is started."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reward_kit.environments.config import headers_from_environment, read_config, task_path
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.task_parts import Word

PYTHON, TASK_FOLDER, WORKING_COPY = "{python}", "{task_folder}", "{working_copy}"
_PLACEHOLDERS = (PYTHON, TASK_FOLDER, WORKING_COPY)
_ONLY_WITH_COMMAND = ("env", "pass_env", "cwd")
_ONLY_WITH_URL = ("headers", "headers_env")


class ExpertCall(BaseModel):
    """A call that an expert makes."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class McpConfig(BaseModel):
    """The configuration of `mcp`: exactly one of `command` (a server over stdio) and `url` (streamable HTTP)."""

    model_config = ConfigDict(extra="forbid")

    command: list[Word] | None = Field(default=None, description="a list, or one text that is split as a shell does")
    env: dict[str, Word] = Field(default_factory=dict, description="variables added to the server's environment")
    pass_env: list[str] = Field(default_factory=list, description="further variables handed on, by name")
    cwd: str | None = Field(default=None, description="relative to the task's folder, which is the default")
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    headers_env: dict[str, str] = Field(default_factory=dict, description="header to the variable that holds its value")
    tools: list[str] | None = Field(default=None, min_length=1, description="the tools to offer, by default all")
    start_timeout_s: float = Field(default=60.0, gt=0)
    call_timeout_s: float = Field(default=50.0, gt=0)
    fork: Literal["none", "replay"] = "none"
    working_copy: str | None = Field(default=None, description="a folder of which each episode gets a private copy")
    state_key: Literal["history", "files"] | None = Field(
        default=None, description="what names the state; by default the files where there is a working copy"
    )
    expert_calls: list[ExpertCall] = Field(default_factory=list, description="what an expert would call, in order")
    task_folder: str | None = None

    @property
    def keys_are_files(self) -> bool:
        """The state is named by the files of the working copy, not by the calls and results so far."""
        return self.state_key == "files" or (self.state_key is None and self.working_copy is not None)

    @field_validator("command", mode="before")
    @classmethod
    def _is_split(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/]", value):
            raise ValueError("must begin with http:// or https://")
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> McpConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("give exactly one of command (a server over stdio) and url (streamable HTTP)")
        needed, foreign = ("command", _ONLY_WITH_URL) if self.url is None else ("url", _ONLY_WITH_COMMAND)
        for key in foreign:
            if getattr(self, key):
                raise ValueError(f"{key} has no meaning with {needed}")
        if self.url and (self.fork == "replay" or self.working_copy):
            key = "fork: replay" if self.fork == "replay" else "working_copy"
            raise ValueError(f"{key} needs a private server, which is one that command starts")
        if self.state_key == "files" and not self.working_copy:
            raise ValueError("state_key: files needs a working_copy")
        return self


@dataclass(frozen=True, slots=True)
class Launch:
    """How a private server is started, with every placeholder filled in."""

    command: tuple[str, ...]
    env: dict[str, str]
    pass_env: tuple[str, ...]
    cwd: Path | None


def read_mcp_config(config: Mapping[str, Any]) -> McpConfig:
    """The configuration, with everything checked that can be without a server.

    Raises:
        ConfigError: a key is unknown, a value wrong, a folder or variable missing, a placeholder misspelt or unfilled.
    """
    settings = read_config(McpConfig, config, "mcp")
    for text in (*(settings.command or ()), *settings.env.values(), settings.cwd or ""):
        _check_placeholders(text, settings)
    if settings.working_copy is not None:
        source_folder(settings)
    header_values(settings)
    return settings


def _check_placeholders(text: str, settings: McpConfig) -> None:
    for word in re.findall(r"\{\w+\}", text):
        hint = did_you_mean(word, _PLACEHOLDERS)
        if word not in _PLACEHOLDERS and hint.startswith("; did"):
            raise ConfigError(f"mcp resource: unknown placeholder {word} in {text!r}{hint}")
        if word == WORKING_COPY and settings.working_copy is None:
            raise ConfigError(f"mcp resource: {text!r} names {WORKING_COPY}, and there is no working_copy")


def source_folder(settings: McpConfig) -> Path:
    """The folder that is copied for each episode.

    Raises:
        ConfigError: there is none, or it lies outside the task's folder.
    """
    folder = task_path(settings.working_copy or "", settings.task_folder, "mcp resource: working_copy")
    if not folder.is_dir():
        raise ConfigError(f"mcp resource: working_copy: no such directory: {folder}")
    return folder


def header_values(settings: McpConfig) -> dict[str, str]:
    """The headers of every request, those from the environment included.

    Raises:
        ConfigError: a variable is not set, or not configured for the server's origin.
    """
    return {**settings.headers, **headers_from_environment(settings.headers_env, settings.url or "", "mcp")}


def launch_of(settings: McpConfig, working_copy: Path | None) -> Launch:
    """How to start the server of one episode.

    Raises:
        ConfigError: `cwd` is no directory, or lies outside the task's folder.
    """
    values = {PYTHON: sys.executable, TASK_FOLDER: settings.task_folder or str(Path.cwd())}
    if working_copy is not None:
        values[WORKING_COPY] = str(working_copy)
    command = tuple(_filled(part, values) for part in settings.command or ())
    env = {name: _filled(value, values) for name, value in settings.env.items()}
    return Launch(command, env, tuple(settings.pass_env), _cwd(settings, values))


def _cwd(settings: McpConfig, values: Mapping[str, str]) -> Path | None:
    if settings.cwd is None:
        return Path(settings.task_folder) if settings.task_folder else None
    if settings.cwd.startswith(WORKING_COPY):
        folder = Path(_filled(settings.cwd, values))
    else:
        folder = task_path(_filled(settings.cwd, values), settings.task_folder, "mcp resource: cwd")
    if not folder.is_dir():
        raise ConfigError(f"mcp resource: cwd: no such directory: {folder}")
    return folder


def _filled(text: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
