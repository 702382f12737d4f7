"""What an agent can do with the files of a `filesystem` world, each call whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    tool_spec,
)
from reward_kit.environments.config import read_config, task_path
from reward_kit.environments.confined import Entry, explained, kind_at, open_directory, show, split_path
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, boundary, did_you_mean
from reward_kit.processes import remove_folder, temporary_folder
from reward_kit.undoing import undone_on_error

FILES_FOLDER = "files"

_SCRATCH_FOLDER = "new"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How much a world may hold; bytes, and files and directories together."""

    max_file_bytes: int
    max_files: int
    max_total_bytes: int


class FileWorld:
    """The directory on disk: `files` is what the agent sees, `new` is where a file is written before it moves there."""

    def __init__(self) -> None:
        self.path = str(temporary_folder("files-"))
        for name in (FILES_FOLDER, _SCRATCH_FOLDER):
            os.mkdir(f"{self.path}/{name}", 0o700)  # noqa: PTH102
        self.files = os.open(f"{self.path}/{FILES_FOLDER}", os.O_RDONLY)
        self.scratch = os.open(f"{self.path}/{_SCRATCH_FOLDER}", os.O_RDONLY)
        self.remove = weakref.finalize(self, _remove_world, self.path, self.files, self.scratch)

    @classmethod
    def make(cls, entries: tuple[Entry, ...]) -> FileWorld:
        world = cls()
        with undone_on_error(world.remove):
            confined.materialise(world.files, entries)
        return world


def _remove_world(path: str, *handles: int) -> None:
    for handle in handles:
        os.close(handle)
    remove_folder(Path(path))


@dataclass(frozen=True, slots=True)
class FileCall:
    """One tool call on one world. Every method either does all it says or raises `ToolError` and changes nothing."""

    world: FileWorld
    limits: FileLimits

    def list_directory(self, path: str) -> list[dict[str, str]]:
        with open_directory(self.world.files, split_path(path)) as directory:
            return [{"name": name, "type": kind} for name, kind in confined.list_names(directory)]

    def read_file(self, path: str) -> str:
        with self._parent(path) as (directory, parts):
            content, _ = confined.read_file(directory, parts, self.limits.max_file_bytes)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise ToolError(f"{show(parts)} is not UTF-8 text ({len(content)} bytes)") from None

    def write_file(self, path: str, content: str) -> str:
        with self._parent(path) as (directory, parts):
            return self._put(directory, parts, _encoded(content))

    def append_file(self, path: str, content: str) -> str:
        with self._parent(path) as (directory, parts):
            before = b""
            if kind_at(directory, parts[-1]) is not None:
                before, _ = confined.read_file(directory, parts, self.limits.max_file_bytes)
            return self._put(directory, parts, before + _encoded(content))

    def delete_path(self, path: str) -> str:
        with self._parent(path) as (directory, parts):
            self._refuse_link(directory, parts)
            # One rename takes it out of sight, so that a large directory is deleted whole or not at all.
            with explained(directory, parts[-1], parts):
                os.rename(parts[-1], "deleted", src_dir_fd=directory, dst_dir_fd=self.world.scratch)
        confined.remove(self.world.scratch, "deleted")
        return f"{show(parts)} is deleted"

    def move_path(self, source: str, target: str) -> str:
        with self._parent(source) as (old, old_parts), self._parent(target) as (new, new_parts):
            self._refuse_link(old, old_parts)
            if kind_at(new, new_parts[-1]) is not None:
                raise ToolError(f"{show(new_parts)} exists already; delete it first")
            with explained(old, old_parts[-1], old_parts):
                os.rename(old_parts[-1], new_parts[-1], src_dir_fd=old, dst_dir_fd=new)
        return f"{show(old_parts)} is now {show(new_parts)}"

    def make_directory(self, path: str) -> str:
        parts = _named(path)
        missing = self._missing_directories(parts)
        self._check_room(more_files=len(missing), more_bytes=0)
        for made in missing:
            with open_directory(self.world.files, made[:-1]) as directory, explained(directory, made[-1], made):
                os.mkdir(made[-1], 0o700, dir_fd=directory)
        return f"{show(parts)} is there"

    def _missing_directories(self, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        for depth in range(len(parts)):
            with open_directory(self.world.files, parts[:depth]) as directory:
                if kind_at(directory, parts[depth]) is None:
                    return [parts[:end] for end in range(depth + 1, len(parts) + 1)]
        with open_directory(self.world.files, parts):
            return []

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        parts = _named(path)
        with open_directory(self.world.files, parts[:-1]) as directory:
            yield directory, parts

    def _refuse_link(self, directory: int, parts: tuple[str, ...]) -> None:
        kind = kind_at(directory, parts[-1])
        if kind is None:
            raise ToolError(f"{show(parts)} does not exist")
        if kind == "symlink":
            raise ToolError(f"{show(parts)} is a symbolic link; links are not followed")

    def _put(self, directory: int, parts: tuple[str, ...], content: bytes) -> str:
        name, limit = parts[-1], self.limits.max_file_bytes
        if len(content) > limit:
            raise ToolError(f"{show(parts)} would be larger than {limit} bytes")
        executable = False
        kind = kind_at(directory, name)
        if kind is None:
            self._check_room(more_files=1, more_bytes=len(content))
        else:
            # Refuses what is no regular file, and keeps the executable bit of what is replaced.
            before, executable = confined.read_file(directory, parts, self.limits.max_total_bytes)
            self._check_room(more_files=0, more_bytes=len(content) - len(before))
        confined.create_file(self.world.scratch, name, content, executable)
        try:
            with explained(directory, name, parts):
                os.rename(name, name, src_dir_fd=self.world.scratch, dst_dir_fd=directory)
        except ToolError:
            confined.remove(self.world.scratch, name)
            raise
        return f"{show(parts)} has {len(content)} bytes"

    def _check_room(self, more_files: int, more_bytes: int) -> None:
        files, size = _usage(self.world.files)
        if more_files > 0 and files + more_files > self.limits.max_files:
            raise ToolError(f"there is room for {self.limits.max_files} files and directories, and {files} are there")
        if more_bytes > 0 and size + more_bytes > self.limits.max_total_bytes:
            raise ToolError(f"there is room for {self.limits.max_total_bytes} bytes, and {size} are used")


def _usage(root: int) -> tuple[int, int]:
    """How many entries there are below `root`, and how many bytes."""
    count = size = 0
    for _, directories, files, handle in os.fwalk(".", dir_fd=root):
        count += len(directories) + len(files)
        size += sum(os.stat(name, dir_fd=handle, follow_symlinks=False).st_size for name in files)
    return count, size


def _named(path: str) -> tuple[str, ...]:
    parts = split_path(path)
    if not parts:
        raise ToolError(f"path {path!r} is the working directory itself; name something in it")
    return parts


def _encoded(content: str) -> bytes:
    try:
        return content.encode("utf-8")
    except UnicodeEncodeError:
        raise ToolError("content is not valid Unicode text") from None


@dataclass(frozen=True, slots=True)
class FileTool:
    """One tool: what the agent reads of it, the method that does it, and whether that changes anything."""

    spec: ToolSpec
    run: Callable[..., Any]
    writes: bool

    def checked(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The arguments of a call; each is text.

        Raises:
            ToolError: one is unknown, missing or no text.
        """
        function = self.spec["function"]
        known: Mapping[str, Any] = function["parameters"]["properties"]
        values = {name: schema["default"] for name, schema in known.items() if "default" in schema}
        for name, value in given.items():
            if name not in known:
                raise ToolError(f"{function['name']}: unknown argument {name!r}{did_you_mean(str(name), known)}")
            if not isinstance(value, str):
                raise ToolError(f"{function['name']}: {name}: must be text, got {value!r}")
            values[name] = value
        for name in known:
            if name not in values:
                raise ToolError(f"{function['name']}: {name}: missing")
        return values


def _tool(run: Callable[..., Any], description: str, writes: bool, **parameters: dict[str, Any]) -> FileTool:
    properties = {name: {"type": "string", **schema} for name, schema in parameters.items()}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    required = [name for name, given in parameters.items() if "default" not in given]
    if required:
        schema["required"] = required
    return FileTool(tool_spec(run.__name__, description, schema), run, writes)


_PATH = {"description": "a path relative to the working directory, such as notes/today.txt"}

_TEXT = {"description": "the text"}

FILE_TOOLS: dict[str, FileTool] = {
    tool.spec["function"]["name"]: tool
    for tool in (
        _tool(FileCall.list_directory, "List a directory.", False, path={**_PATH, "default": "."}),
        _tool(FileCall.read_file, "Read a text file.", False, path=_PATH),
        _tool(FileCall.write_file, "Write a file; its directory must exist.", True, path=_PATH, content=_TEXT),
        _tool(FileCall.append_file, "Append text to a file, or create it.", True, path=_PATH, content=_TEXT),
        _tool(FileCall.delete_path, "Delete a file, or a directory with all that is in it.", True, path=_PATH),
        _tool(FileCall.move_path, "Move or rename a file or a directory.", True, source=_PATH, target=_PATH),
        _tool(FileCall.make_directory, "Make a directory, and those above it.", True, path=_PATH),
    )
}

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
