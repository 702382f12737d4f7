"""A private directory of files, for agents that read and edit; no path, link or race leads out of it.

The world is a fresh directory in the system's place for temporary files, removed by `close` (or when the world is
collected, or the process ends). Symbolic links are neither followed nor copied, and are no part of the state.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments import confined
from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
)
from reward_kit.environments.config import read_config, task_path
from reward_kit.environments.confined import Entry, split_path
from reward_kit.environments.file_tools import FILE_TOOLS, FILES_FOLDER, FileCall, FileLimits, FileWorld
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, boundary, did_you_mean

_logger = logging.getLogger(__name__)


class FilesystemConfig(BaseModel):
    """The configuration of `filesystem`."""

    model_config = ConfigDict(extra="forbid")

    files: dict[str, str] = Field(default_factory=dict, description="path to text, written at reset")
    source_dir: str | None = Field(default=None, description="a directory copied in at reset, before `files`")
    task_folder: str | None = Field(default=None, description="what source_dir is relative to and must lie in")
    max_file_bytes: int = Field(default=1_000_000, gt=0)
    max_files: int = Field(default=1_000, gt=0, description="files and directories together")
    max_total_bytes: int = Field(default=64_000_000, gt=0)


class FilesystemResource(ForkableResource):
    """A private temporary directory with seven tools."""

    fork_kind = "native"
    takes_task_folder = True
    per_sample_keys = frozenset({"files"})

    def __init__(self) -> None:
        self._settings = FilesystemConfig()
        self._initial: tuple[Entry, ...] = ()
        self._world: FileWorld | None = None
        self._key: str | None = None
        self._touched = False

    @property
    def root(self) -> Path:
        """The directory itself, for tools that run programs in it."""
        # From here on others may write, so a key is computed anew each time it is asked for.
        self._touched = True
        return Path(self._here.path) / FILES_FOLDER

    @property
    def _limits(self) -> FileLimits:
        settings = self._settings
        return FileLimits(settings.max_file_bytes, settings.max_files, settings.max_total_bytes)

    @property
    def _here(self) -> FileWorld:
        if self._world is None:
            raise EnvironmentFailure("the filesystem resource is closed, or was not set up")
        return self._world

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._settings = read_config(FilesystemConfig, config, "filesystem")
        if not confined.SUPPORTED:
            raise ConfigError("the filesystem resource needs openat and O_NOFOLLOW, which this system does not have")
        self._initial = await anyio.to_thread.run_sync(_initial_entries, self._settings)
        await self._replace(self._initial)

    async def reset(self, seed: int | None = None) -> None:
        await self._replace(self._initial)

    async def fork(self) -> ForkableResource:
        twin = type(self)()
        twin._settings, twin._initial = self._settings, self._initial
        await twin._replace(await self.checkpoint())
        return twin

    async def checkpoint(self) -> Any:
        return await anyio.to_thread.run_sync(self._entries)

    async def restore(self, state: Any) -> None:
        await self._replace(state)

    async def get_observation(self) -> Any:
        return None

    async def get_tools_spec(self) -> list[ToolSpec]:
        return [tool.spec for tool in FILE_TOOLS.values()]

    async def state_key(self) -> str:
        if self._key is None or self._touched:
            self._key = await anyio.to_thread.run_sync(lambda: files_key(self._entries()))
        return self._key

    async def final_state(self) -> StateSnapshot:
        return await anyio.to_thread.run_sync(lambda: files_snapshot(self._entries()))

    async def close(self) -> None:
        if self._world is not None:
            world, self._world = self._world, None
            await anyio.to_thread.run_sync(world.remove)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        tool = FILE_TOOLS.get(action_name)
        if tool is None:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, FILE_TOOLS)}")
        arguments = tool.checked(action_params)
        if tool.writes:
            self._key = None
        call = FileCall(self._here, self._limits)
        return StepOutcome(await anyio.to_thread.run_sync(lambda: tool.run(call, **arguments)))

    def _entries(self) -> tuple[Entry, ...]:
        limit = max(self._settings.max_file_bytes, self._settings.max_total_bytes)
        with boundary(EnvironmentFailure, "reading the filesystem resource"):
            try:
                return tuple(confined.scan(self._here.files, limit))
            except ToolError as error:
                raise EnvironmentFailure(str(error)) from error

    async def _replace(self, entries: tuple[Entry, ...]) -> None:
        fresh = await anyio.to_thread.run_sync(FileWorld.make, entries)
        old, self._world, self._key = self._world, fresh, None
        if old is not None:
            await anyio.to_thread.run_sync(old.remove)


def _initial_entries(settings: FilesystemConfig) -> tuple[Entry, ...]:
    entries = {entry.path: entry for entry in _source_entries(settings)}
    for path, text in settings.files.items():
        try:
            parts = split_path(path)
        except ToolError as error:
            raise ConfigError(f"filesystem resource: files: {error}") from None
        if not parts:
            raise ConfigError(f"filesystem resource: files: {path!r} names no file")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if entries.setdefault(folder, Entry(folder, "directory")).kind != "directory":
                raise ConfigError(f"filesystem resource: files: {path!r} lies below {folder!r}, which is a file")
        name = "/".join(parts)
        if name in entries and entries[name].kind == "directory":
            raise ConfigError(f"filesystem resource: files: {path!r} is a directory too")
        entries[name] = Entry(name, "file", text.encode("utf-8", "surrogatepass"))
    ordered = tuple(entries[path] for path in sorted(entries, key=lambda path: path.split("/")))
    _check_limits(ordered, settings)
    return ordered


def _source_entries(settings: FilesystemConfig) -> Iterator[Entry]:
    if settings.source_dir is None:
        return
    folder = task_path(settings.source_dir, settings.task_folder, "filesystem resource: source_dir")
    if not folder.is_dir():
        raise ConfigError(f"filesystem resource: source_dir: no such directory: {folder}")
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield from confined.scan(handle, settings.max_file_bytes)
    except ToolError as error:
        raise ConfigError(f"filesystem resource: source_dir: {error}") from None
    finally:
        os.close(handle)
    links = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink()]
    if links:
        _logger.warning("source_dir %s: symbolic links are not copied: %s", folder, ", ".join(sorted(links)[:5]))


def _check_limits(entries: tuple[Entry, ...], settings: FilesystemConfig) -> None:
    problem = ""
    too_large = [entry.path for entry in entries if len(entry.content) > settings.max_file_bytes]
    if too_large:
        problem = f"{too_large[0]!r} is larger than max_file_bytes ({settings.max_file_bytes})"
    elif len(entries) > settings.max_files:
        problem = f"{len(entries)} files and directories; max_files is {settings.max_files}"
    elif sum(len(entry.content) for entry in entries) > settings.max_total_bytes:
        problem = f"the files together are larger than max_total_bytes ({settings.max_total_bytes})"
    if problem:
        raise ConfigError(f"filesystem resource: {problem}")


def files_key(entries: tuple[Entry, ...]) -> str:
    """The state key of a set of files: their paths, contents and executable bits."""
    parts: list[str] = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        content = hashlib.blake2b(entry.content, digest_size=16).hexdigest()
        parts += [entry.path, entry.kind, content, "x" if entry.executable else "-"]
    return hash_key(*parts)


def files_snapshot(entries: tuple[Entry, ...]) -> StateSnapshot:
    """The final state of kind "files" that `FilesState` opens."""
    files: dict[str, Any] = {}
    for entry in entries:
        if entry.kind == "file":
            shown: dict[str, Any] = _text_or_base64(entry.content)
            files[entry.path] = {**shown, "executable": True} if entry.executable else shown
    value = {"directories": [entry.path for entry in entries if entry.kind == "directory"], "files": files}
    return StateSnapshot("files", canonical_json(value).encode("utf-8", "surrogateescape"))


def _text_or_base64(content: bytes) -> dict[str, str]:
    try:
        return {"text": content.decode("utf-8")}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode("ascii")}
