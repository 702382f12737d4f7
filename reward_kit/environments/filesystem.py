"""A private temporary directory for agents that read and edit files.

No path, link or race condition gives access to anything outside the directory. A path is resolved one name at a time
with `openat` and `O_NOFOLLOW`, starting from an open descriptor for the directory. A symbolic link is therefore
rejected at the time of use, even if it was created after a check.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import logging
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
from pydantic import Field

from reward_kit.display_text import truncate
from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    check_call,
    hash_key,
    strict_tool,
)
from reward_kit.environments.config import ResourceConfig, read_config, task_path
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, boundary
from reward_kit.processes import remove_folder, temporary_folder

EntryKind = Literal["file", "directory"]
_MAX_PATH_BYTES = 4_096
_MAX_NAME_BYTES = 255
_MAX_PARTS = 64
# Windows lacks these flags. The module can be imported there, but `SUPPORTED` is False.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_FOLLOW
# O_NONBLOCK is set because opening a named pipe would otherwise wait forever for a writer.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_FOLLOW
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
_logger = logging.getLogger(__name__)
SUPPORTED = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or directory in a tree."""

    path: str
    kind: EntryKind
    content: bytes = b""
    executable: bool = False


def split_path(path: object) -> tuple[str, ...]:
    """Return the names in a relative path, or () for the directory itself.

    Raises:
        ToolError: the path is not text, is absolute, or leaves the directory.
    """
    if not isinstance(path, str):
        raise ToolError(f"a path must be a string, got {path!r}")
    shown = truncate(path, 80)
    if "\0" in path:
        raise ToolError(f"path {shown!r} contains a NUL byte")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise ToolError(f"path {shown!r} is not valid Unicode text") from None
    if path.startswith("/"):
        raise ToolError(f"path {shown!r} is absolute; paths are relative to the working directory")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise ToolError(f"path {shown!r} contains '..'; paths cannot leave the working directory")
    if size > _MAX_PATH_BYTES or len(parts) > _MAX_PARTS:
        raise ToolError(f"path {shown!r} is too long; the limit is {_MAX_PATH_BYTES} bytes and {_MAX_PARTS} names")
    for part in parts:
        if len(part.encode()) > _MAX_NAME_BYTES:
            raise ToolError(f"path {shown!r} has a name longer than {_MAX_NAME_BYTES} bytes")
    return parts


def format_path(parts: tuple[str, ...]) -> str:
    """Return a path in the form shown in messages."""
    return repr("/".join(parts) or ".")


@contextmanager
def open_directory(root: int, parts: tuple[str, ...]) -> Iterator[int]:
    """Open the directory at `parts` below the open directory `root`. No part may be a symbolic link."""
    current = os.open(".", _DIRECTORY_FLAGS, dir_fd=root)
    try:
        for position, name in enumerate(parts):
            with path_errors(current, name, parts[: position + 1]):
                inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=current)
            os.close(current)
            current = inner
        yield current
    finally:
        os.close(current)


@contextmanager
def path_errors(directory: int, name: str, parts: tuple[str, ...]) -> Iterator[None]:
    """Convert an `OSError` from a call on `name` to a `ToolError` that contains the path and the reason."""
    try:
        yield
    except OSError as error:
        if kind_at(directory, name) == "symlink":
            raise ToolError(f"{format_path(parts)} is a symbolic link; links are not followed") from None
        reasons = {
            errno.ENOENT: "does not exist",
            errno.ENOTDIR: "is not a directory",
            errno.EISDIR: "is a directory",
            errno.EEXIST: "already exists",
            errno.EINVAL: "cannot be moved into itself",
        }
        detail = reasons.get(error.errno or 0, os.strerror(error.errno or 0))
        raise ToolError(f"{format_path(parts)} {detail}") from None


def kind_at(directory: int, name: str) -> str | None:
    """Return "file", "directory", "symlink" or "other", or None if `name` does not exist."""
    try:
        return _kind(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return None


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def read_file(directory: int, parts: tuple[str, ...], max_bytes: int) -> tuple[bytes, bool]:
    """Return the content of the regular file `parts[-1]` in the open `directory`, and whether it is executable."""
    with path_errors(directory, parts[-1], parts):
        handle = os.open(parts[-1], _READ_FLAGS, dir_fd=directory)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise ToolError(f"{format_path(parts)} is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(handle)
    if len(content) > max_bytes:
        raise ToolError(f"{format_path(parts)} is larger than {max_bytes} bytes")
    return content, bool(mode & stat.S_IXUSR)


def create_file(directory: int, name: str, content: bytes, executable: bool = False) -> None:
    """Create a file that does not exist yet in the open `directory`."""
    handle = os.open(name, _CREATE_FLAGS, 0o700 if executable else 0o600, dir_fd=directory)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def list_names(directory: int) -> list[tuple[str, str]]:
    """Return the names and kinds of the entries in the open `directory`, sorted by name."""
    with os.scandir(directory) as entries:
        return sorted((entry.name, _kind(entry.stat(follow_symlinks=False).st_mode)) for entry in entries)


def scan(root: int, max_bytes: int, parts: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Yield every directory and regular file below `root`, sorted by name. Parents come before their children.

    Links and devices are skipped.
    """
    with open_directory(root, parts) as directory:
        for name, kind in list_names(directory):
            path = (*parts, name)
            if kind == "file":
                content, executable = read_file(directory, path, max_bytes)
                yield Entry("/".join(path), "file", content, executable)
            elif kind == "directory":
                yield Entry("/".join(path), "directory")
                yield from scan(root, max_bytes, path)


def read_tree(folder: Path, max_bytes: int, key: str = "") -> tuple[Entry, ...]:
    """Return the entries below `folder`.

    If `key` is given, it is the configuration key that sets the folder, and the symbolic links in the folder are
    logged.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        entries = tuple(scan(handle, max_bytes))
    finally:
        os.close(handle)
    if key and (links := sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink())):
        _logger.warning("%s %s: symbolic links are not copied: %s", key, folder, ", ".join(links[:5]))
    return entries


def write_entries(root: int, entries: tuple[Entry, ...]) -> None:
    """Create `entries` below the empty open directory `root`. Parents must come before their children."""
    for entry in entries:
        *parents, name = entry.path.split("/")
        with open_directory(root, tuple(parents)) as directory:
            if entry.kind == "directory":
                os.mkdir(name, 0o700, dir_fd=directory)
            else:
                create_file(directory, name, entry.content, entry.executable)


def remove(directory: int, name: str) -> None:
    """Remove `name` and everything below it from the open `directory`. Links are removed but never followed."""
    if kind_at(directory, name) == "directory":
        shutil.rmtree(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def files_key(entries: tuple[Entry, ...]) -> str:
    """Return the state key for a set of files. It covers their paths, contents and executable bits."""
    parts: list[str] = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        content = hashlib.blake2b(entry.content, digest_size=16).hexdigest()
        parts += [entry.path, entry.kind, content, "x" if entry.executable else "-"]
    return hash_key(*parts)


def files_snapshot(entries: tuple[Entry, ...]) -> StateSnapshot:
    """Return the final state of kind "files", which `FilesState` opens."""
    files: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry.kind == "file":
            try:
                files[entry.path] = {"text": entry.content.decode("utf-8")}
            except UnicodeDecodeError:
                files[entry.path] = {"base64": base64.b64encode(entry.content).decode("ascii")}
            if entry.executable:
                files[entry.path]["executable"] = True
    value = {"directories": [entry.path for entry in entries if entry.kind == "directory"], "files": files}
    return StateSnapshot("files", canonical_json(value).encode("utf-8", "surrogateescape"))


FILES_FOLDER = "files"
_SCRATCH_FOLDER = "new"


class FilesystemConfig(ResourceConfig):
    """The configuration of `filesystem`."""

    files: dict[str, str] = Field(
        default_factory=dict, description="the contents of text files, keyed by path; written at reset"
    )
    source_dir: str | None = Field(
        default=None, description="a directory whose contents are copied at reset, before `files` are written"
    )
    task_folder: str | None = Field(default=None, description="the directory that source_dir is relative to")
    max_file_bytes: int = Field(default=1_000_000, gt=0)
    max_files: int = Field(default=1_000, gt=0, description="maximum number of files and directories, counted together")
    max_total_bytes: int = Field(default=64_000_000, gt=0)


class FileTree:
    """The directory on disk. The agent sees its `files` subdirectory.

    A new file is first written to `new` and then moved.

    Every tool either succeeds completely or raises a `ToolError` and changes nothing.
    """

    def __init__(self, entries: tuple[Entry, ...], limits: FilesystemConfig) -> None:
        self.limits = limits
        self.path = str(temporary_folder("files-"))
        for name in (FILES_FOLDER, _SCRATCH_FOLDER):
            os.mkdir(f"{self.path}/{name}", 0o700)  # noqa: PTH102
        self.files = os.open(f"{self.path}/{FILES_FOLDER}", os.O_RDONLY)
        self.scratch = os.open(f"{self.path}/{_SCRATCH_FOLDER}", os.O_RDONLY)
        self.remove = weakref.finalize(self, _remove, self.path, self.files, self.scratch)
        try:
            write_entries(self.files, entries)
        except BaseException:
            self.remove()
            raise

    def list_directory(self, path: str) -> list[dict[str, str]]:
        with open_directory(self.files, split_path(path)) as directory:
            return [{"name": name, "type": kind} for name, kind in list_names(directory)]

    def read_file(self, path: str) -> str:
        with self._parent(path) as (directory, parts):
            content, _ = read_file(directory, parts, self.limits.max_file_bytes)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise ToolError(f"{format_path(parts)} is not UTF-8 text ({len(content)} bytes)") from None

    def write_file(self, path: str, content: str) -> str:
        with self._parent(path) as (directory, parts):
            return self._put(directory, parts, b"", content)

    def append_file(self, path: str, content: str) -> str:
        with self._parent(path) as (directory, parts):
            before = b""
            if kind_at(directory, parts[-1]) is not None:
                before, _ = read_file(directory, parts, self.limits.max_file_bytes)
            return self._put(directory, parts, before, content)

    def delete_path(self, path: str) -> str:
        with self._parent(path) as (directory, parts):
            self._refuse_link(directory, parts)
            # Rename first, so that a large directory is deleted completely or not at all.
            with path_errors(directory, parts[-1], parts):
                os.rename(parts[-1], "deleted", src_dir_fd=directory, dst_dir_fd=self.scratch)
        remove(self.scratch, "deleted")
        return f"{format_path(parts)} is deleted"

    def move_path(self, source: str, target: str) -> str:
        with self._parent(source) as (old, old_parts), self._parent(target) as (new, new_parts):
            self._refuse_link(old, old_parts)
            if kind_at(new, new_parts[-1]) is not None:
                raise ToolError(f"{format_path(new_parts)} already exists; delete it first")
            with path_errors(old, old_parts[-1], old_parts):
                os.rename(old_parts[-1], new_parts[-1], src_dir_fd=old, dst_dir_fd=new)
        return f"{format_path(old_parts)} is now {format_path(new_parts)}"

    def make_directory(self, path: str) -> str:
        parts = _named(path)
        # Find the first missing directory; opening the whole path checks that it is a directory.
        for depth in range(len(parts) + 1):
            with open_directory(self.files, parts[:depth]) as directory:
                if depth < len(parts) and kind_at(directory, parts[depth]) is None:
                    break
        self._check_room(more_files=len(parts) - depth, more_bytes=0)
        for end in range(depth + 1, len(parts) + 1):
            path_parts = parts[:end]
            with (
                open_directory(self.files, path_parts[:-1]) as directory,
                path_errors(directory, path_parts[-1], path_parts),
            ):
                os.mkdir(path_parts[-1], 0o700, dir_fd=directory)
        return f"{format_path(parts)} exists"

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        parts = _named(path)
        with open_directory(self.files, parts[:-1]) as directory:
            yield directory, parts

    def _refuse_link(self, directory: int, parts: tuple[str, ...]) -> None:
        kind = kind_at(directory, parts[-1])
        if kind is None:
            raise ToolError(f"{format_path(parts)} does not exist")
        if kind == "symlink":
            raise ToolError(f"{format_path(parts)} is a symbolic link; links are not followed")

    def _put(self, directory: int, parts: tuple[str, ...], before: bytes, text: str) -> str:
        try:
            content = before + text.encode("utf-8")
        except UnicodeEncodeError:
            raise ToolError("content is not valid Unicode text") from None
        name, limit = parts[-1], self.limits.max_file_bytes
        if len(content) > limit:
            raise ToolError(f"{format_path(parts)} would be larger than {limit} bytes")
        executable = False
        if kind_at(directory, name) is None:
            self._check_room(more_files=1, more_bytes=len(content))
        else:
            # Only regular files can be replaced; the executable bit is preserved.
            replaced, executable = read_file(directory, parts, self.limits.max_total_bytes)
            self._check_room(more_files=0, more_bytes=len(content) - len(replaced))
        create_file(self.scratch, name, content, executable)
        try:
            with path_errors(directory, name, parts):
                os.rename(name, name, src_dir_fd=self.scratch, dst_dir_fd=directory)
        except ToolError:
            remove(self.scratch, name)
            raise
        return f"{format_path(parts)} has {len(content)} bytes"

    def _check_room(self, more_files: int, more_bytes: int) -> None:
        files = size = 0
        for _, directories, names, handle in os.fwalk(".", dir_fd=self.files):
            files += len(directories) + len(names)
            size += sum(os.stat(name, dir_fd=handle, follow_symlinks=False).st_size for name in names)
        if more_files > 0 and files + more_files > self.limits.max_files:
            raise ToolError(
                f"the limit of {self.limits.max_files} files and directories is exceeded; there are already {files}"
            )
        if more_bytes > 0 and size + more_bytes > self.limits.max_total_bytes:
            raise ToolError(f"the limit of {self.limits.max_total_bytes} bytes is exceeded; {size} are already used")


def _remove(path: str, *handles: int) -> None:
    for handle in handles:
        os.close(handle)
    remove_folder(Path(path))


def _named(path: str) -> tuple[str, ...]:
    parts = split_path(path)
    if not parts:
        raise ToolError(f"path {path!r} is the working directory itself; name a file or directory in it")
    return parts


_PATH = {"type": "string", "description": "a path relative to the working directory, such as notes/today.txt"}
_TEXT = {"type": "string", "description": "the text"}
_TOOLS: dict[str, tuple[Callable[..., Any], bool, ToolSpec]] = {
    run.__name__: (run, writes, strict_tool(run.__name__, description, **parameters))
    for run, writes, description, parameters in (
        (FileTree.list_directory, False, "List a directory.", {"path": {**_PATH, "default": "."}}),
        (FileTree.read_file, False, "Read a text file.", {"path": _PATH}),
        (
            FileTree.write_file,
            True,
            "Write a file; its directory must exist.",
            {"path": _PATH, "content": _TEXT},
        ),
        (FileTree.append_file, True, "Append text to a file, or create it.", {"path": _PATH, "content": _TEXT}),
        (FileTree.delete_path, True, "Delete a file, or a directory with its contents.", {"path": _PATH}),
        (FileTree.move_path, True, "Move or rename a file or a directory.", {"source": _PATH, "target": _PATH}),
        (FileTree.make_directory, True, "Make a directory and its missing parents.", {"path": _PATH}),
    )
}
_SPECS = {name: spec for name, (_, _, spec) in _TOOLS.items()}


class FilesystemResource(ForkableResource):
    """A private temporary directory with seven tools."""

    fork_kind = "native"
    takes_task_folder = True
    has_cheap_state = True
    state_key_covers_results = False
    per_sample_keys = frozenset({"files"})

    def __init__(self) -> None:
        self._settings = FilesystemConfig()
        self._initial: tuple[Entry, ...] = ()
        self._directory: FileTree | None = None
        self._key: str | None = None
        self._touched = False

    @property
    def root(self) -> Path:
        """The path of the directory, for tools that run programs there."""
        # The caller may write to the directory, so from now on the state key must be computed every time.
        self._touched = True
        return Path(self._here.path) / FILES_FOLDER

    @property
    def _here(self) -> FileTree:
        if self._directory is None:
            raise EnvironmentFailure("the filesystem resource is closed, or was not set up")
        return self._directory

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._settings = read_config(FilesystemConfig, config, "filesystem")
        if not SUPPORTED:
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
        fresh = await anyio.to_thread.run_sync(FileTree, state, self._settings)
        old, self._directory, self._key = self._directory, fresh, None
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
        if self._directory is not None:
            directory, self._directory = self._directory, None
            await anyio.to_thread.run_sync(directory.remove)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        arguments = check_call(_SPECS, action_name, action_params)
        run, writes, _ = _TOOLS[action_name]
        if writes:
            self._key = None
        directory = self._here
        return StepOutcome(await anyio.to_thread.run_sync(lambda: run(directory, **arguments)))

    def _entries(self) -> tuple[Entry, ...]:
        limit = max(self._settings.max_file_bytes, self._settings.max_total_bytes)
        with boundary(EnvironmentFailure, "reading the filesystem resource"):
            try:
                return tuple(scan(self._here.files, limit))
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
            raise ConfigError(f"{where}: {path!r} is not a file path")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if entries.setdefault(above, Entry(above, "directory")).kind != "directory":
                raise ConfigError(f"{where}: {path!r} is inside {above!r}, which is a file")
        name = "/".join(parts)
        if name in entries and entries[name].kind == "directory":
            raise ConfigError(f"{where}: {path!r} is also a directory")
        entries[name] = Entry(name, "file", text.encode("utf-8", "surrogatepass"))
    ordered = tuple(entries[path] for path in sorted(entries, key=lambda path: path.split("/")))
    too_large = [entry.path for entry in ordered if len(entry.content) > settings.max_file_bytes]
    problem = ""
    if too_large:
        problem = f"{too_large[0]!r} is larger than max_file_bytes ({settings.max_file_bytes})"
    elif len(ordered) > settings.max_files:
        problem = f"there are {len(ordered)} files and directories, but max_files is {settings.max_files}"
    elif sum(len(entry.content) for entry in ordered) > settings.max_total_bytes:
        problem = f"the total size of the files is larger than max_total_bytes ({settings.max_total_bytes})"
    if problem:
        raise ConfigError(f"filesystem resource: {problem}")
    return ordered
