"""Landlock (linux/landlock.h). It restricts access to files and, on newer kernels, to TCP connections and signals.

Landlock does not need namespaces. Each version adds restrictions: version 1 on files (Linux 5.13), 2 on renaming across
directories, 3 on truncation, 4 on TCP, 5 on device ioctls, and 6 on abstract sockets and signals.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterable
from typing import Final

from reward_kit.sandbox import linux

EXECUTE: Final = 1 << 0
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
READ: Final = _READ_FILE | _READ_DIR
READ_DEVICE: Final = _READ_FILE
WRITE_DEVICE: Final = _READ_FILE | _WRITE_FILE
_NEVER = EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK | _MAKE_FIFO | _IOCTL_DEV
_TCP = 0b11
_SCOPES = 0b11
_RULE_PATH_BENEATH = 1
_CREATE_VERSION = 1


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """Return the version that the kernel supports, or 0 if Landlock is missing or was disabled at boot."""
    number = linux.NUMBERS.get("landlock_create_ruleset")
    if number is None:
        return 0
    try:
        return linux.syscall(number, 0, 0, _CREATE_VERSION, step="query the Landlock version")
    except linux.SetupError:
        return 0


def handled(version: int) -> int:
    """Return all file access rights that this version can restrict."""
    newest = {1: 12, 2: 13, 3: 14, 4: 14}.get(version, 15)
    return (1 << (newest + 1)) - 1


def work_folder_rights(version: int, *, may_execute: bool) -> int:
    """Return the access rights that the code has in its work directory.

    They include all rights except those to create devices, sockets and named pipes.
    """
    return handled(version) & ~(_NEVER & ~(EXECUTE if may_execute else 0))


def restrict(version: int, rules: Iterable[tuple[str, int]]) -> None:
    """Confine the calling thread and its descendants permanently. `no_new_privs` must be set for the thread."""
    files = handled(version)
    attr = _RulesetAttr(files, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    numbers = linux.NUMBERS
    step = "confine files with Landlock"
    ruleset = linux.syscall(numbers["landlock_create_ruleset"], ctypes.addressof(attr), size, 0, step=step)
    try:
        for path, rights in rules:
            _allow(numbers["landlock_add_rule"], ruleset, path, rights & files)
        linux.syscall(numbers["landlock_restrict_self"], ruleset, 0, step=step)
    finally:
        os.close(ruleset)


def _allow(number: int, ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return
        raise linux.SetupError(f"open {path} for Landlock", os.strerror(error.errno or 0), error.errno or 0) from error
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, parent)
        step = f"grant {path} with Landlock"
        linux.syscall(number, ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule), 0, step=step)
    finally:
        os.close(parent)
