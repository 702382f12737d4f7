"""Files below one directory that no path can leave, whatever an agent or another process puts there.

A path is walked name by name with `openat` and `O_NOFOLLOW` from an open descriptor of the directory, so that a
symbolic link is refused at the moment of use, even if it was made after a check.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reward_kit.display_text import truncate
from reward_kit.environments.base import StateSnapshot, canonical_json, hash_key
from reward_kit.errors import ToolError

EntryKind = Literal["file", "directory"]
_MAX_PATH_BYTES = 4_096
_MAX_NAME_BYTES = 255
_MAX_PARTS = 64
# Windows has none of these flags; the module is importable there, and `SUPPORTED` is False.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_FOLLOW
# O_NONBLOCK, because opening a named pipe would otherwise wait forever for a writer.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_FOLLOW
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
_logger = logging.getLogger(__name__)
SUPPORTED = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or directory of a tree."""

    path: str
    kind: EntryKind
    content: bytes = b""
    executable: bool = False


def split_path(path: object) -> tuple[str, ...]:
    """Return the names of a relative path; () for the directory itself. A `ToolError` refuses any other path."""
    if not isinstance(path, str):
        raise ToolError(f"a path is text, got {path!r}")
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
        raise ToolError(f"path {shown!r} is too long: at most {_MAX_PATH_BYTES} bytes and {_MAX_PARTS} names")
    for part in parts:
        if len(part.encode()) > _MAX_NAME_BYTES:
            raise ToolError(f"path {shown!r} has a name longer than {_MAX_NAME_BYTES} bytes")
    return parts


def show(parts: tuple[str, ...]) -> str:
    """Return the path for a message."""
    return repr("/".join(parts) or ".")


@contextmanager
def open_directory(root: int, parts: tuple[str, ...]) -> Iterator[int]:
    """Open the directory at `parts` below the open directory `root`; no part may be a symbolic link."""
    current = os.open(".", _DIRECTORY_FLAGS, dir_fd=root)
    try:
        for position, name in enumerate(parts):
            with explained(current, name, parts[: position + 1]):
                inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=current)
            os.close(current)
            current = inner
        yield current
    finally:
        os.close(current)


@contextmanager
def explained(directory: int, name: str, parts: tuple[str, ...]) -> Iterator[None]:
    """Turn an `OSError` of a call on `name` into a `ToolError` that names the path and the reason."""
    try:
        yield
    except OSError as error:
        if kind_at(directory, name) == "symlink":
            raise ToolError(f"{show(parts)} is a symbolic link; links are not followed") from None
        reasons = {
            errno.ENOENT: "does not exist",
            errno.ENOTDIR: "is not a directory",
            errno.EISDIR: "is a directory",
            errno.EEXIST: "exists already",
            errno.EINVAL: "cannot be moved into itself",
        }
        detail = reasons.get(error.errno or 0, os.strerror(error.errno or 0))
        raise ToolError(f"{show(parts)} {detail}") from None


def kind_at(directory: int, name: str) -> str | None:
    """Return "file", "directory", "symlink" or "other"; None if nothing is there."""
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
    with explained(directory, parts[-1], parts):
        handle = os.open(parts[-1], _READ_FLAGS, dir_fd=directory)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise ToolError(f"{show(parts)} is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(handle)
    if len(content) > max_bytes:
        raise ToolError(f"{show(parts)} is larger than {max_bytes} bytes")
    return content, bool(mode & stat.S_IXUSR)


def create_file(directory: int, name: str, content: bytes, executable: bool = False) -> None:
    """Create a file that does not exist yet in the open `directory`."""
    handle = os.open(name, _CREATE_FLAGS, 0o700 if executable else 0o600, dir_fd=directory)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def list_names(directory: int) -> list[tuple[str, str]]:
    """Return names and kinds in the open `directory`, sorted by name."""
    with os.scandir(directory) as entries:
        return sorted((entry.name, _kind(entry.stat(follow_symlinks=False).st_mode)) for entry in entries)


def scan(root: int, max_bytes: int, parts: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Yield every directory and regular file below `root`, parents first, names sorted; no links and devices."""
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
    """Return the entries below a folder; warn of links if it is the source named by a configuration `key`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        entries = tuple(scan(handle, max_bytes))
    finally:
        os.close(handle)
    if key and (links := sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink())):
        _logger.warning("%s %s: symbolic links are not copied: %s", key, folder, ", ".join(links[:5]))
    return entries


def materialise(root: int, entries: tuple[Entry, ...]) -> None:
    """Create `entries` (parents first) below the empty open directory `root`."""
    for entry in entries:
        *way, name = entry.path.split("/")
        with open_directory(root, tuple(way)) as directory:
            if entry.kind == "directory":
                os.mkdir(name, 0o700, dir_fd=directory)
            else:
                create_file(directory, name, entry.content, entry.executable)


def remove(directory: int, name: str) -> None:
    """Remove `name` from the open `directory` with everything below it; links are removed, never followed."""
    if kind_at(directory, name) == "directory":
        shutil.rmtree(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def files_key(entries: tuple[Entry, ...]) -> str:
    """Return the state key of a set of files: their paths, contents and executable bits."""
    parts: list[str] = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        content = hashlib.blake2b(entry.content, digest_size=16).hexdigest()
        parts += [entry.path, entry.kind, content, "x" if entry.executable else "-"]
    return hash_key(*parts)


def files_snapshot(entries: tuple[Entry, ...]) -> StateSnapshot:
    """Return the final state of kind "files" that `FilesState` opens."""
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
