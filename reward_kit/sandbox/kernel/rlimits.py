"""The limits the kernel counts by itself, set hard so that nothing can raise them again."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

from reward_kit.sandbox.kernel import libc

MEBIBYTE = 1 << 20
THREADS = 64
"""Threads that confined code may have at once, whatever it is granted."""
SIGNALS_AND_TIMERS = 1_024
"""Signals that wait and timers of the kernel, which it counts together, for all processes of a user id."""
_SIGPENDING = 11
"""`RLIMIT_SIGPENDING` (asm-generic/resource.h), which Python has no name for."""
SPARE_TASKS = 1_024
"""How many tasks a user id that others share may gain before confined code can start no thread."""


class ProcessLimits(NamedTuple):
    """What `apply` sets, in the kernel's units."""

    cpu_s: int
    address_space: int
    file_size: int
    open_files: int
    tasks: int  # processes and threads of this user id; 0 sets no limit, where others share the id

    def apply(self) -> None:
        """Limit the calling process.

        Raises:
            SetupError: a limit lies above the one that holds already.
        """
        fixed = [
            (resource.RLIMIT_CPU, self.cpu_s),
            (resource.RLIMIT_AS, self.address_space),
            (resource.RLIMIT_FSIZE, self.file_size),
            (resource.RLIMIT_NOFILE, self.open_files),
            # Not 0, at which the kernel still hands a dump to a program that collects them; 1 byte is too few for any.
            (resource.RLIMIT_CORE, 1),
            (resource.RLIMIT_MEMLOCK, 0),
            (_SIGPENDING, SIGNALS_AND_TIMERS),
        ]
        if self.tasks:
            fixed.append((resource.RLIMIT_NPROC, self.tasks))
        for which, value in fixed:
            _, hard = resource.getrlimit(which)
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(which, (bound, bound))
            except (OSError, ValueError) as error:
                raise libc.SetupError(f"set resource limit {which} to {bound}", str(error)) from error


def tasks_of(user: int) -> int:
    """Processes and threads that this user id has now; 0 where /proc does not say."""
    count = 0
    try:
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                count += _tasks_of_process(f"/proc/{name}", user)
    except OSError:
        return 0
    return count


def _tasks_of_process(folder: str, user: int) -> int:
    try:
        return len(os.listdir(f"{folder}/task")) if os.stat(folder).st_uid == user else 0  # noqa: PTH116, PTH208
    except OSError:  # it has ended
        return 0


def address_space_in_use(statm: int) -> int:
    """Bytes of address space this process has mapped, libraries included.

    Args:
        statm: an open descriptor of its `/proc/self/statm`.
    """
    return int(os.pread(statm, 64, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")
