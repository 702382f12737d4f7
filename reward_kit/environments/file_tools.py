"""What an agent can do with the files of a `filesystem` world, each call whole or not at all."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_kit.environments import confined
from reward_kit.environments.base import ToolSpec, tool_spec
from reward_kit.environments.confined import Entry, explained, kind_at, open_directory, show, split_path
from reward_kit.errors import ToolError, did_you_mean
from reward_kit.processes import remove_folder, temporary_folder

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
        with ExitStack() as undo:
            undo.callback(world.remove)
            confined.materialise(world.files, entries)
            undo.pop_all()
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
