"""A private temporary directory, for agents that read and edit files; no path, link or race leads out of it.

Symbolic links are neither followed nor copied, and are not part of the state. Every tool call takes effect as a whole
or not at all.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
from pydantic import Field

from reward_kit.environments import confined
from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    check_call,
    strict_tool,
)
from reward_kit.environments.config import ResourceConfig, read_config, task_path
from reward_kit.environments.confined import (
    Entry,
    explained,
    files_key,
    files_snapshot,
    kind_at,
    open_directory,
    read_tree,
    show,
    split_path,
)
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, boundary
from reward_kit.processes import remove_folder, temporary_folder

FILES_FOLDER = "files"
_SCRATCH_FOLDER = "new"


class FilesystemConfig(ResourceConfig):
    """The configuration of `filesystem`."""

    files: dict[str, str] = Field(default_factory=dict, description="path to text, written at reset")
    source_dir: str | None = Field(default=None, description="a directory copied in at reset, before `files`")
    task_folder: str | None = Field(default=None, description="what source_dir is relative to and must lie in")
    max_file_bytes: int = Field(default=1_000_000, gt=0)
    max_files: int = Field(default=1_000, gt=0, description="files and directories together")
    max_total_bytes: int = Field(default=64_000_000, gt=0)


class FileWorld:
    """The directory on disk: the agent sees `files`; a file is written in `new` before it moves there."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.path = str(temporary_folder("files-"))
        for name in (FILES_FOLDER, _SCRATCH_FOLDER):
            os.mkdir(f"{self.path}/{name}", 0o700)  # noqa: PTH102
        self.files = os.open(f"{self.path}/{FILES_FOLDER}", os.O_RDONLY)
        self.scratch = os.open(f"{self.path}/{_SCRATCH_FOLDER}", os.O_RDONLY)
        self.remove = weakref.finalize(self, _remove, self.path, self.files, self.scratch)
        try:
            confined.materialise(self.files, entries)
        except BaseException:
            self.remove()
            raise


def _remove(path: str, *handles: int) -> None:
    for handle in handles:
        os.close(handle)
    remove_folder(Path(path))


@dataclass(frozen=True, slots=True)
class FileCall:
    """One tool call. Every method either has its whole effect or raises `ToolError` and changes nothing."""

    world: FileWorld
    limits: FilesystemConfig

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
            return self._put(directory, parts, b"", content)

    def append_file(self, path: str, content: str) -> str:
        with self._parent(path) as (directory, parts):
            before = b""
            if kind_at(directory, parts[-1]) is not None:
                before, _ = confined.read_file(directory, parts, self.limits.max_file_bytes)
            return self._put(directory, parts, before, content)

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
        # The first directory that is missing; if there is none, opening the whole path checks that it is a directory.
        for depth in range(len(parts) + 1):
            with open_directory(self.world.files, parts[:depth]) as directory:
                if depth < len(parts) and kind_at(directory, parts[depth]) is None:
                    break
        self._check_room(more_files=len(parts) - depth, more_bytes=0)
        for end in range(depth + 1, len(parts) + 1):
            made = parts[:end]
            with open_directory(self.world.files, made[:-1]) as directory, explained(directory, made[-1], made):
                os.mkdir(made[-1], 0o700, dir_fd=directory)
        return f"{show(parts)} is there"

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

    def _put(self, directory: int, parts: tuple[str, ...], before: bytes, text: str) -> str:
        try:
            content = before + text.encode("utf-8")
        except UnicodeEncodeError:
            raise ToolError("content is not valid Unicode text") from None
        name, limit = parts[-1], self.limits.max_file_bytes
        if len(content) > limit:
            raise ToolError(f"{show(parts)} would be larger than {limit} bytes")
        executable = False
        if kind_at(directory, name) is None:
            self._check_room(more_files=1, more_bytes=len(content))
        else:
            # Refuses anything but a regular file, and keeps the executable bit of the file that is replaced.
            replaced, executable = confined.read_file(directory, parts, self.limits.max_total_bytes)
            self._check_room(more_files=0, more_bytes=len(content) - len(replaced))
        confined.create_file(self.world.scratch, name, content, executable)
        try:
            with explained(directory, name, parts):
                os.rename(name, name, src_dir_fd=self.world.scratch, dst_dir_fd=directory)
        except ToolError:
            confined.remove(self.world.scratch, name)
            raise
        return f"{show(parts)} has {len(content)} bytes"

    def _check_room(self, more_files: int, more_bytes: int) -> None:
        files = size = 0
        for _, directories, names, handle in os.fwalk(".", dir_fd=self.world.files):
            files += len(directories) + len(names)
            size += sum(os.stat(name, dir_fd=handle, follow_symlinks=False).st_size for name in names)
        if more_files > 0 and files + more_files > self.limits.max_files:
            raise ToolError(f"there is room for {self.limits.max_files} files and directories, and {files} are there")
        if more_bytes > 0 and size + more_bytes > self.limits.max_total_bytes:
            raise ToolError(f"there is room for {self.limits.max_total_bytes} bytes, and {size} are used")


def _named(path: str) -> tuple[str, ...]:
    parts = split_path(path)
    if not parts:
        raise ToolError(f"path {path!r} is the working directory itself; name something in it")
    return parts


_PATH = {"type": "string", "description": "a path relative to the working directory, such as notes/today.txt"}
_TEXT = {"type": "string", "description": "the text"}
_TOOLS: dict[str, tuple[Callable[..., Any], bool, ToolSpec]] = {
    run.__name__: (run, writes, strict_tool(run.__name__, description, **parameters))
    for run, writes, description, parameters in (
        (FileCall.list_directory, False, "List a directory.", {"path": {**_PATH, "default": "."}}),
        (FileCall.read_file, False, "Read a text file.", {"path": _PATH}),
        (FileCall.write_file, True, "Write a file; its directory must exist.", {"path": _PATH, "content": _TEXT}),
        (FileCall.append_file, True, "Append text to a file, or create it.", {"path": _PATH, "content": _TEXT}),
        (FileCall.delete_path, True, "Delete a file, or a directory with all that is in it.", {"path": _PATH}),
        (FileCall.move_path, True, "Move or rename a file or a directory.", {"source": _PATH, "target": _PATH}),
        (FileCall.make_directory, True, "Make a directory, and those above it.", {"path": _PATH}),
    )
}
_SPECS = {name: spec for name, (_, _, spec) in _TOOLS.items()}


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
        # From here on others may write, so the key is computed each time.
        self._touched = True
        return Path(self._here.path) / FILES_FOLDER

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
        await self.restore(self._initial)

    async def reset(self, seed: int | None = None) -> None:
        await self.restore(self._initial)

    async def fork(self) -> ForkableResource:
        twin = type(self)()
        twin._settings, twin._initial = self._settings, self._initial
        await twin.restore(await self.checkpoint())
        return twin

    async def checkpoint(self) -> Any:
        return await anyio.to_thread.run_sync(self._entries)

    async def restore(self, state: Any) -> None:
        fresh = await anyio.to_thread.run_sync(FileWorld, state)
        old, self._world, self._key = self._world, fresh, None
        if old is not None:
            await anyio.to_thread.run_sync(old.remove)

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_SPECS.values())

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
        arguments = check_call(_SPECS, action_name, action_params)
        run, writes, _ = _TOOLS[action_name]
        if writes:
            self._key = None
        call = FileCall(self._here, self._settings)
        return StepOutcome(await anyio.to_thread.run_sync(lambda: run(call, **arguments)))

    def _entries(self) -> tuple[Entry, ...]:
        limit = max(self._settings.max_file_bytes, self._settings.max_total_bytes)
        with boundary(EnvironmentFailure, "reading the filesystem resource"):
            try:
                return tuple(confined.scan(self._here.files, limit))
            except ToolError as error:
                raise EnvironmentFailure(str(error)) from error


def _initial_entries(settings: FilesystemConfig) -> tuple[Entry, ...]:
    entries: dict[str, Entry] = {}
    if settings.source_dir is not None:
        where = "filesystem resource: source_dir"
        folder = task_path(settings.source_dir, settings.task_folder, where)
        if not folder.is_dir():
            raise ConfigError(f"{where}: no such directory: {folder}")
        try:
            entries = {entry.path: entry for entry in read_tree(folder, settings.max_file_bytes, "source_dir")}
        except ToolError as error:
            raise ConfigError(f"{where}: {error}") from None
    where = "filesystem resource: files"
    for path, text in settings.files.items():
        try:
            parts = split_path(path)
        except ToolError as error:
            raise ConfigError(f"{where}: {error}") from None
        if not parts:
            raise ConfigError(f"{where}: {path!r} names no file")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if entries.setdefault(above, Entry(above, "directory")).kind != "directory":
                raise ConfigError(f"{where}: {path!r} lies below {above!r}, which is a file")
        name = "/".join(parts)
        if name in entries and entries[name].kind == "directory":
            raise ConfigError(f"{where}: {path!r} is a directory too")
        entries[name] = Entry(name, "file", text.encode("utf-8", "surrogatepass"))
    ordered = tuple(entries[path] for path in sorted(entries, key=lambda path: path.split("/")))
    too_large = [entry.path for entry in ordered if len(entry.content) > settings.max_file_bytes]
    problem = ""
    if too_large:
        problem = f"{too_large[0]!r} is larger than max_file_bytes ({settings.max_file_bytes})"
    elif len(ordered) > settings.max_files:
        problem = f"{len(ordered)} files and directories; max_files is {settings.max_files}"
    elif sum(len(entry.content) for entry in ordered) > settings.max_total_bytes:
        problem = f"the files together are larger than max_total_bytes ({settings.max_total_bytes})"
    if problem:
        raise ConfigError(f"filesystem resource: {problem}")
    return ordered
