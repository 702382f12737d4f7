"""Giving up root: another user id, no capabilities, none to be had again."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from reward_kit.sandbox.kernel import libc, syscalls

DAC_READ_SEARCH: Final = 2
_LAST_KNOWN: Final = 63
_VERSION_3: Final = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((f"{name}_{half}", ctypes.c_uint32) for half in (0, 1) for name in ("eff", "perm", "inh"))


def keep_only(*numbers: int) -> None:
    """Drop every capability of this thread but these, which it must hold; none of them survives an `execve`.

    Raises:
        SetupError: the kernel refuses.
    """
    mask = sum(1 << number for number in numbers)
    header = _Header(_VERSION_3, 0)
    sets = _Sets(mask, mask, 0, 0, 0, 0)
    number = syscalls.NUMBERS["capset"]
    libc.syscall(number, ctypes.addressof(header), ctypes.addressof(sets), step="drop capabilities")


def empty_bounding_set() -> None:
    """No program this process starts can gain a capability, also not a set-user-id one."""
    for number in range(_LAST_KNOWN + 1):
        try:
            libc.prctl(libc.PR_CAPBSET_DROP, number, "drop capabilities")
        except libc.SetupError as error:
            if error.errno == 22:  # EINVAL: beyond the last one this kernel has
                return
            raise


def become(user: int, *, keep_read_search: bool = False) -> None:
    """Change from root to an ordinary user id, of no other process, in every sense.

    Args:
        user: the user and group id.
        keep_read_search: keep the right to read any file, where only Landlock's list of paths decides.

    Raises:
        SetupError: the change failed or did not hold.
    """
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        if keep_read_search:
            libc.prctl(libc.PR_SET_KEEPCAPS, 1, "give up root")
        os.setresuid(user, user, user)
    except OSError as error:
        raise libc.SetupError("give up root", os.strerror(error.errno or 0), error.errno or 0) from error
    keep_only(*([DAC_READ_SEARCH] if keep_read_search else []))
    if os.getresuid() != (user, user, user) or os.getresgid() != (user, user, user):
        raise libc.SetupError("give up root", "the user id did not change")
