"""Namespaces for sandboxed code (user, mount, PID, network, IPC, UTS and cgroup), and a root directory on tmpfs.

The order of the steps matters. A zygote that runs as root first builds its read-only root directory, because it may
need an interpreter in a private home directory. It then drops root privileges, and finally creates the user namespace.
An ordinary user must create the user namespace first. The zygote is process 1 of a PID namespace that belongs to its
user namespace. It can therefore return to that PID namespace after it has started a child in a different PID namespace.

A child gets new PID, mount, IPC, UTS and cgroup namespaces and a work directory. It shares the user namespace and the
network namespace with its zygote. Mapping the ids of a new user namespace would require `/proc`, which is missing. A
new network namespace would take a third of a millisecond and is not needed without `socket`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Final

from reward_kit.sandbox import linux

WORK_FOLDER: Final = "/tmp"
INNER_ID: Final = 1000
"""The user and group id of sandboxed code, in its own user namespace."""
DEVICES: Final = ("null", "zero", "random", "urandom")
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE, _MOVE_FROM_DESCRIPTOR = 1, 4
_OLD = "/.old-root"


class _MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace"))


def enter(read_paths: Sequence[tuple[str, str]], *, outer_user: int | None) -> int:
    """Move this process to new namespaces with a new root directory. Its children start in the new PID namespace."""
    try:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise linux.SetupError("open /proc", os.strerror(error.errno or 0), error.errno or 0) from error
    if outer_user is None:
        _unshare_all(proc)
        _build_root(read_paths)
    else:
        linux.unshare(_NEWNS, "create a mount namespace")
        _build_root(read_paths)
        linux.become_user(outer_user)
        _unshare_all(proc)
    return proc


def proc_file(proc: int, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a file of this process in the original `/proc`."""
    try:
        return os.open(f"self/{name}", flags | os.O_CLOEXEC, dir_fd=proc)
    except OSError as error:
        raise linux.SetupError(f"open /proc/self/{name}", os.strerror(error.errno or 0), error.errno or 0) from error


def _unshare_all(proc: int) -> None:
    user, group = os.geteuid(), os.getegid()
    linux.prctl(linux.PR_SET_DUMPABLE, 1, "make /proc files of this process accessible")
    linux.unshare(_NEWUSER | _NEWNS, "create a user namespace")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INNER_ID} {user} 1"),
        ("gid_map", f"{INNER_ID} {group} 1"),
    ):
        _write(proc_file(proc, name, os.O_WRONLY), text, f"write {name}")
    linux.unshare(_NEWNET | _NEWIPC | _NEWUTS | NEWPID, "create network, IPC, UTS and PID namespaces")
    _unshare_groups()


def _unshare_groups() -> None:
    try:
        linux.unshare(_NEWCGROUP, "create a cgroup namespace")
    except linux.SetupError as error:
        if error.errno != 22:  # EINVAL: a kernel without cgroups
            raise


def _write(descriptor: int, text: str, step: str) -> None:
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise linux.SetupError(step, os.strerror(error.errno or 0), error.errno or 0) from error
    finally:
        os.close(descriptor)


def _build_root(read_paths: Sequence[tuple[str, str]]) -> None:
    """Replace `/` with a tmpfs that contains only the given paths, and detach the old root directory."""
    linux.mount("", "/", "", _MS_REC | _MS_PRIVATE, "", "make mounts private")
    base = WORK_FOLDER
    linux.mount("sandbox", base, "tmpfs", _MS_NOSUID, "mode=0755,size=1m,nr_inodes=4096", "mount a new root")
    os.mkdir(base + _OLD)  # noqa: PTH102
    names = [ctypes.create_string_buffer(os.fsencode(path)) for path in (base, base + _OLD)]
    addresses = [ctypes.addressof(name) for name in names]
    linux.syscall(linux.NUMBERS["pivot_root"], *addresses, step="change the root")
    os.chdir("/")
    for path, real in sorted((path, real) for path, real in read_paths):
        _show(path, real)
    os.makedirs("/dev", exist_ok=True)  # noqa: PTH103
    for device in DEVICES:
        _show(f"/dev/{device}", f"/dev/{device}", is_device=True)
    os.makedirs(WORK_FOLDER, exist_ok=True)  # noqa: PTH103
    linux.unmount(_OLD, _MNT_DETACH, "detach the old root")
    os.rmdir(_OLD)  # noqa: PTH106
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID
    linux.mount("", "/", "", flags, "", "make the root read-only")


def _show(path: str, real: str, *, is_device: bool = False) -> None:
    """Mount `real`, a path in the old root directory, read-only at `path` in the new root directory."""
    source = _OLD + real
    if os.path.lexists(path):
        return  # below an existing mount
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if os.path.isdir(source):  # noqa: PTH112
        os.mkdir(path)  # noqa: PTH102
    elif os.path.exists(source):  # noqa: PTH110
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        return
    linux.mount(source, path, "", _MS_BIND | _MS_REC, "", f"show {path}")
    attributes = _ATTR_NOSUID if is_device else _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV
    name, attr = ctypes.create_string_buffer(os.fsencode(path)), _MountAttr(attributes, 0, 0, 0)
    linux.syscall(
        linux.NUMBERS["mount_setattr"],
        _AT_FDCWD,
        ctypes.addressof(name),
        _AT_RECURSIVE,
        ctypes.addressof(attr),
        ctypes.sizeof(attr),
        step=f"make {path} read-only",
    )


def send_next_child_away(own: int) -> None:
    """Start the next forked child as process 1 of a new PID namespace."""
    linux.enter_namespace(own, NEWPID, "return to the original PID namespace")
    linux.unshare(NEWPID, "create a PID namespace")


def enter_work_folder(size: int, files: int, *, may_execute: bool, keep: Sequence[str] = ()) -> None:
    """Move the child to separate mount, IPC, UTS and cgroup namespaces, with an empty work directory in memory."""
    linux.unshare(_NEWNS | _NEWIPC | _NEWUTS, "create mount, IPC and UTS namespaces")
    _unshare_groups()
    kept = []
    for path in keep:
        name = ctypes.create_string_buffer(os.fsencode(path))
        tree_flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
        number, step = linux.NUMBERS["open_tree"], f"open {path}"
        tree = linux.syscall(number, _AT_FDCWD, ctypes.addressof(name), tree_flags, step=step)
        kept.append((path, tree, os.path.isdir(path)))  # noqa: PTH112
    flags = _MS_NOSUID | _MS_NODEV | (0 if may_execute else _MS_NOEXEC)
    options = f"mode=0700,size={size},nr_inodes={files}"
    linux.mount("sandbox", WORK_FOLDER, "tmpfs", flags, options, "mount the work directory")
    for path, tree, is_folder in kept:
        _put(tree, path, is_folder)
    os.chdir(WORK_FOLDER)


def _put(tree: int, path: str, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    names = [ctypes.create_string_buffer(text) for text in (b"", os.fsencode(path))]
    source, target = (ctypes.addressof(name) for name in names)
    number = linux.NUMBERS["move_mount"]
    linux.syscall(number, tree, source, _AT_FDCWD, target, _MOVE_FROM_DESCRIPTOR, step=f"show {path}")
    os.close(tree)
