"""What all processes of a call may hold together, where a control group can be had; nothing changes where it cannot."""

from __future__ import annotations

import asyncio

from reward_kit.sandbox.kernel import cgroups
from reward_kit.sandbox.kernel.libc import SetupError
from reward_kit.sandbox.kernel.rlimits import MEBIBYTE, THREADS
from reward_kit.sandbox.limits import Limits

_KERNEL_MB = 16
"""Room for what the kernel charges besides: page tables, stacks of threads, pipes."""
_LOOKS, _LOOK_S = 100, 0.005


class Tree:
    """The group of one zygote, and so of its children and of what they start.

    Args:
        pid: the zygote, which has started nothing yet.
        own_processes: that it keeps, itself included.

    Raises:
        SetupError: groups work here, and this one could not be made.
    """

    def __init__(self, pid: int, own_processes: int) -> None:
        self._own_processes = own_processes
        self._group: cgroups.Group | None = None
        self._zygote_bytes = 0
        place = cgroups.probe().place
        if place is None:
            return
        try:
            self._group = cgroups.Group(place)
            self._group.add(pid)
        except OSError as error:
            if self._group is not None:
                self._group.close()
            raise SetupError("make a control group", str(error)) from error

    def zygote_is_ready(self) -> None:
        """What it holds from now on is not held against its children."""
        if self._group is not None:
            self._zygote_bytes = self._group.held()

    def set_limits(self, limits: Limits) -> None:
        """For the next child: its memory, its files, and a copy of all that it shares with the zygote at first.

        Raises:
            OSError: the kernel refused.
        """
        if self._group is not None:
            own = (limits.memory_mb + limits.disk_mb + _KERNEL_MB) * MEBIBYTE
            tasks = self._own_processes + 1 + (limits.processes or THREADS)
            self._group.set_limits(2 * self._zygote_bytes + own, tasks)

    def memory_kills(self) -> int:
        """How many processes the kernel has killed in it for want of memory."""
        return self._group.memory_kills() if self._group is not None else 0

    async def end(self) -> None:
        """Kill what is left and remove the group; a zygote that has ended leaves none, so this waits for the kernel."""
        for _ in range(_LOOKS):
            if self._group is None or self._group.close():
                return
            await asyncio.sleep(_LOOK_S)
