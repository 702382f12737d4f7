"""The C library as the sandbox calls it: one door for system calls, where each failure becomes a `SetupError`."""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38


class SetupError(Exception):
    """A wall of the sandbox could not be put up; nothing foreign has run.

    Attributes:
        step: what was being done, as in "mount the work folder".
        reason: why it failed, for people.
        errno: the kernel's number; 0 where there is none.
    """

    def __init__(self, step: str, reason: str, errno: int = 0) -> None:
        super().__init__(f"{step}: {reason}")
        self.step, self.reason, self.errno = step, reason, errno


_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the lock of the interpreter, which a child without the other threads could not get back.
_python = ctypes.PyDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 7


def syscall(number: int, *arguments: int, step: str) -> int:
    """A system call by number; pointers are passed as addresses.

    Raises:
        SetupError: the kernel refused; it names the step.
    """
    result = _syscall(number, *arguments, *[0] * (6 - len(arguments)))
    if result < 0:
        raise failed(step)
    return int(result)


def fork() -> int:
    """`fork(2)` of a process that has one thread, with random numbers drawn anew in the child.

    `os.fork` besides makes locks of all kinds anew in case another thread held one. That touches a hundred pages, each
    of which is then copied: a third of a millisecond.

    Raises:
        SetupError: there can be no further process.
    """
    process = int(_python.fork())
    if process < 0:
        raise failed("fork")
    if process == 0 and (random := sys.modules.get("random")) is not None:
        random.seed()
    return process


def failed(step: str) -> SetupError:
    """The error of the call that has just failed."""
    number = ctypes.get_errno()
    return SetupError(step, os.strerror(number), number)


def prctl(option: int, value: int, step: str) -> None:
    """`prctl(2)` with one argument."""
    if _libc.prctl(
        ctypes.c_int(option), ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
    ):
        raise failed(step)


def mount(source: str, target: str, kind: str, flags: int, data: str, step: str) -> None:
    """`mount(2)`; an empty source, kind or data is passed as none."""
    encoded = [ctypes.c_char_p(os.fsencode(text) or None) for text in (source, target, kind, data)]
    if _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]):
        raise failed(step)


def unmount(target: str, flags: int, step: str) -> None:
    """`umount2(2)`."""
    if _libc.umount2(os.fsencode(target), ctypes.c_int(flags)):
        raise failed(step)


def unshare(flags: int, step: str) -> None:
    """`unshare(2)`."""
    if _libc.unshare(ctypes.c_int(flags)):
        raise failed(step)


def enter_namespace(descriptor: int, kind: int, step: str) -> None:
    """`setns(2)`."""
    if _libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)):
        raise failed(step)
