"""Control groups: one for each zygote, in which the kernel counts the memory and the processes of whole trees.

All is done from outside, by the host: it makes the group, puts the zygote in before that has read a byte, and clears it
away. Where nobody gave us a place to make groups in, there are none, and limits are those of single processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from reward_kit.sandbox.kernel import cgroup_places
from reward_kit.sandbox.kernel.cgroup_places import CONTROLLERS, HOW_TO, Found, Place, members, parent_and_start

_LEAF = "reward-kit-host"
_PREFIX = "reward-kit-zygote"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-\d+")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ROOM = 1 << 20
"""What is left above the memory in use where a limit has to be lowered to less."""
_EMPTYING_S = 1.0
_MEMORY_1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
_TRIAL_BYTES, _TRIAL_TASKS = 64 << 20, 7
_numbers = itertools.count()


class Group:
    """A group of our own; one folder in version 2, one for each counter in version 1.

    Args:
        place: where it is made.

    Raises:
        OSError: the kernel refused.
    """

    def __init__(self, place: Place) -> None:
        self._version = place.version
        name = f"{_PREFIX}-{_own_name()}-{next(_numbers)}"
        self._memory = place.memory / name if place.memory else None
        self._pids = place.pids / name if place.pids else None
        self._folders = [folder / name for folder in place.folders]
        self._set: dict[Path, int] = {}
        self._kills = 0
        self._files: dict[Path, int] = {}
        try:
            for folder in self._folders:
                folder.mkdir()
        except OSError:
            self.close()
            raise

    def add(self, pid: int) -> None:
        """Put a process in; what it starts from now on is born there.

        Raises:
            OSError: it has ended, or may not be moved.
        """
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def set_limits(self, memory: int, tasks: int) -> None:
        """Set the limits, where they differ from those that hold.

        A memory limit below what is held would make the kernel kill what holds it, such as the zygote that a tree has
        just left; there it stays a little above, and the next call sets it right.

        Args:
            memory: bytes of all processes together, with files in memory and what the kernel holds for them.
            tasks: processes and threads.

        Raises:
            OSError: the kernel refused.
        """
        if self._pids is not None:
            self._write(self._pids / "pids.max", tasks)
        if self._memory is not None:
            self._set_memory(self._memory, -(-memory // _PAGE) * _PAGE)

    def _set_memory(self, folder: Path, memory: int) -> None:
        names = ("memory.max", "memory.swap.max") if self._version == 2 else _MEMORY_1
        before = self._set.get(folder / names[0])
        if before == memory:
            return
        if before is not None and memory < before:
            memory = min(before, max(memory, self.held() + _ROOM))
        if self._version == 2:
            self._write(folder / names[0], memory)
            self._write(folder / names[1], 0, is_optional=True)
            return
        # Memory alone may never be allowed more than memory with swap, so the order depends on the direction.
        order = names if before is None or memory < before else names[::-1]
        for name in order:
            self._write(folder / name, memory, is_optional=name == names[1])

    def _write(self, path: Path, value: int, *, is_optional: bool = False) -> None:
        """Write a limit unless it holds already; an optional one is missing where the kernel counts no swap."""
        if self._set.get(path) == value:
            return
        try:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._files[path], str(value).encode(), 0)
        except FileNotFoundError:
            if not is_optional:
                raise
        self._set[path] = value

    def limits(self) -> tuple[int, int]:
        """The limits that the kernel says hold: bytes and tasks; 0 for what is not counted."""
        memory = self._memory / ("memory.max" if self._version == 2 else _MEMORY_1[0]) if self._memory else None
        pids = self._pids / "pids.max" if self._pids else None
        return _number(memory), _number(pids)

    def held(self) -> int:
        """Bytes that the group holds and that cannot be dropped: all but the cache of files on disk; 0 if unknown."""
        if self._memory is None:
            return 0
        usage = _number(self._memory / ("memory.current" if self._version == 2 else "memory.usage_in_bytes"))
        cache = _fields(self._memory / "memory.stat")
        return max(0, usage - cache.get("inactive_file", 0) - cache.get("active_file", 0))

    def memory_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory; the last known number after `close`."""
        if self._folders and self._memory is not None:
            name = "memory.events" if self._version == 2 else "memory.oom_control"
            self._kills = self._read_fields(self._memory / name).get("oom_kill", self._kills)
        return self._kills

    def _read_fields(self, path: Path) -> dict[str, int]:
        """As `_fields`, of a file that stays open, since it is read with every call."""
        try:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return _pairs(os.pread(self._files[path], 4096, 0))
        except OSError:
            return {}

    def close(self) -> bool:
        """Kill what is left in it and remove it; False where something has not ended yet, and it has to be tried again.

        Whatever stays is removed by the next process that makes groups here.
        """
        self.memory_kills()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        self._folders = [folder for folder in self._folders if not _is_removed(folder)]
        return not self._folders


@functools.cache
def probe() -> Found:
    """Where groups can be made, tried with one that is thrown away and a process in it; holds for this process's life.

    What a killed process of ours left there is cleared away first.
    """
    found = cgroup_places.find()
    if found.place is None:
        return found
    try:
        place = _divided(found.place)
        _sweep(place)
        reason = _try(place)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    return Found(None, reason) if reason else Found(place, "")


def told() -> str:
    """One line for people: what is counted, or what is missing and how to get it."""
    found = probe()
    if found.place is None:
        return f"none: {found.reason}; {HOW_TO}"
    missing = [name for name in CONTROLLERS if getattr(found.place, name) is None]
    return found.place.text + (f"; {missing[0]} is not counted" if missing else "")


def _try(place: Place) -> str:
    """Why groups do not work here; "" where they do."""
    group = Group(place)
    try:
        wanted = (_TRIAL_BYTES if place.memory else 0, _TRIAL_TASKS if place.pids else 0)
        group.set_limits(_TRIAL_BYTES, _TRIAL_TASKS)
        if group.limits() != wanted:
            return f"limits of {wanted} were set in {place.folders[0]}, and {group.limits()} hold"
        with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            group.add(process.pid)
            are_in = all(process.pid in members(folder) for folder in group._folders)
            process.kill()
        return "" if are_in else "a process was put in a group and is not there"
    finally:
        _close(group)


def _close(group: Group) -> None:
    end = time.monotonic() + _EMPTYING_S
    while not group.close() and time.monotonic() < end:
        time.sleep(0.005)


def _divided(place: Place) -> Place:
    """The place ready for groups: in version 2 this process and its children move down into a leaf, if need be.

    That is done only in a group that was delegated to this process and holds nothing else (`cgroup_places`). The limits
    of the group go on to hold for all of it.
    """
    if not place.is_to_be_divided or place.memory is None:
        return place
    leaf, control = place.memory / _LEAF, place.memory / "cgroup.subtree_control"
    leaf.mkdir(exist_ok=True)
    for pid in members(place.memory):
        with contextlib.suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(str(pid), encoding="ascii")
    control.write_text(" ".join(f"+{name}" for name in CONTROLLERS), encoding="ascii")
    return place._replace(is_to_be_divided=False)


def _sweep(place: Place) -> None:
    """Clear away the groups of processes of ours that have ended without doing so."""
    namespace = _pid_namespace()
    for folder in place.folders:
        for path in folder.glob(f"{_PREFIX}-*"):
            match = _NAME.fullmatch(path.name)
            # Of another namespace we cannot see whether it runs.
            if match and int(match[1]) == namespace and parent_and_start(int(match[2]))[1] != int(match[3]):
                _is_removed(path)


def _is_removed(folder: Path) -> bool:
    """Kill what is in a group and remove it; False where it cannot be removed yet."""
    if (folder / "cgroup.kill").exists():
        with contextlib.suppress(OSError):
            (folder / "cgroup.kill").write_text("1", encoding="ascii")
    for pid in members(folder):
        with contextlib.suppress(OSError):
            _kill_member(folder, pid)
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill_member(folder: Path, pid: int) -> None:
    """Kill a process if it is in the group, not another that got its id meanwhile."""
    process = os.pidfd_open(pid)
    try:
        if pid in members(folder):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)


def _own_name() -> str:
    """What tells this process from all others, also from one that gets its id later."""
    pid = os.getpid()
    return f"{_pid_namespace()}-{pid}-{parent_and_start(pid)[1]}"


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _number(path: Path | None) -> int:
    try:
        return int(path.read_bytes()) if path else 0
    except (OSError, ValueError):  # "max" is no number
        return 0


def _fields(path: Path) -> dict[str, int]:
    try:
        return _pairs(path.read_bytes())
    except OSError:
        return {}


def _pairs(content: bytes) -> dict[str, int]:
    pairs = (line.split() for line in content.decode("ascii").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
