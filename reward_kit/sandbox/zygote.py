"""The zygote, a program that imports the modules that all calls need, confines itself, and forks a child for each call.

It is started as `python -I -S zygote.py CONTROL`, with an empty environment and one socket. It never receives any part
of a program, a request or a result, so a child cannot inherit data from other calls in its memory. It runs one call at
a time. When the socket is closed, it ends along with all its children.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120

import _socket
import array
import builtins
import json
import select
import signal
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from reward_kit.sandbox import harness, landlock, linux, namespaces, seccomp
from reward_kit.sandbox.frames import READY

SETUP_EXIT: Final = 97
CHANNEL: Final = 3
SPAWN: Final = struct.Struct("!IQIIQQB")
ENDED: Final = struct.Struct("!iddQB")
KILL: Final = b"K"
BY_ITSELF, KILLED, TOO_MUCH_DISK = 0, 1, 2
_FILES_PER_MEBIBYTE = 256
_DISK_LOOK_MS = 20
"""The interval in ms at which the size of a work directory on a real disk is measured.

In a namespace, the work directory is a file system with a size limit instead.
"""
_DEVICE_READ = ("random", "urandom")


class Spawn(NamedTuple):
    """A request to start a child. It is sent with three descriptors: the channel, stdout and stderr."""

    cpu_s: int
    memory: int  # bytes
    processes: int
    open_files: int
    disk: int  # bytes
    max_result: int  # bytes
    is_single: int


class Ended(NamedTuple):
    """A report that a child has ended."""

    status: int  # from `waitpid`
    user_s: float
    system_s: float
    peak_memory: int  # bytes
    how: int  # BY_ITSELF, KILLED or TOO_MUCH_DISK


class Zygote:
    """The zygote after it has confined itself."""

    def __init__(self, control: _socket.socket, config: dict[str, Any], pid_namespace: int, statm: int) -> None:
        self._control = control
        self._config = config
        self._pid_namespace = pid_namespace
        self._strength: str = config["strength"]
        self._may_start: bool = config["may_start_processes"]
        self._filter = b""
        if self._strength != "process":
            self._filter = seccomp.build(
                linux.machine(),
                may_start_processes=self._may_start,
                has_own_root=self._strength == "namespaces",
            )
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._landlock = landlock.abi() if self._strength != "process" else 0
        self._mapped = linux.address_space_in_use(statm) if statm >= 0 else 0
        self._calls = 0
        self._others: int = config["others"]
        if self._strength == "namespaces":
            work = namespaces.WORK_FOLDER + "/"
            self._keep = [path for path, _ in config["read_paths"] if path.startswith(work) and os.path.exists(path)]  # noqa: PTH110

    def serve(self) -> None:
        """Start a child for each request, until the socket is closed."""
        descriptors = array.array("i")
        room = _socket.CMSG_SPACE(3 * descriptors.itemsize)
        while True:
            record, ancillary, _, _ = self._control.recvmsg(SPAWN.size, room)
            if not record:
                return
            if record == KILL:  # too late, because the child has already ended
                continue
            descriptors = array.array("i")
            for _, _, data in ancillary:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
            ended = self._one_call(Spawn(*SPAWN.unpack(record)), list(descriptors))
            self._control.send(ENDED.pack(*ended))

    def _one_call(self, spawn: Spawn, descriptors: Sequence[int]) -> Ended:
        folder = ""
        if root := self._config["work_root"]:
            self._calls += 1
            folder = f"{root}/{self._calls}"
            os.mkdir(folder, 0o700)  # noqa: PTH102
        if self._strength == "namespaces":
            namespaces.send_next_child_away(self._pid_namespace)
        parent = os.getpid()
        child = linux.fork()
        if child == 0:
            self._be_child(spawn, descriptors, folder, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        how = self._watch(child, folder, spawn.disk)
        _, status, usage = os.wait4(child, 0)
        ended = Ended(status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss << 10, how)
        if folder:
            remove_folder(folder)
        return ended

    def _watch(self, child: int, folder: str, disk: int) -> int:
        """Wait until the child ends.

        Kill the child if the host requests it, if the disk limit is reached, or if the host has ended.
        """
        ending = os.pidfd_open(child)
        poll = select.poll()
        poll.register(ending, select.POLLIN)
        poll.register(self._control.fileno(), select.POLLIN)
        how = BY_ITSELF
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll(_DISK_LOOK_MS if folder else None)]
                if ending in ready:
                    return how
                if not ready and not uses_more(folder, disk):
                    continue
                how, folder = (KILLED if ready else TOO_MUCH_DISK), ""
                gone = bool(ready) and not self._control.recv(len(KILL))
                signal.pidfd_send_signal(ending, signal.SIGKILL)
                if gone:
                    os.waitpid(child, 0)
                    os._exit(0)
        finally:
            os.close(ending)

    def _be_child(self, spawn: Spawn, descriptors: Sequence[int], folder: str, parent: int) -> None:
        """Confine the child, and then answer its calls. This function never returns."""
        try:
            _take_descriptors(self._null, descriptors)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL, "end with the zygote")
            if self._strength != "namespaces" and os.getppid() != parent:
                os._exit(SETUP_EXIT)
            self._confine_child(spawn, folder)
            os.write(CHANNEL, READY)
        except BaseException as error:  # noqa: BLE001 - whatever it is, nothing may run half confined
            os.write(2, f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace"))
            os._exit(SETUP_EXIT)
        harness.serve(CHANNEL, spawn.max_result, is_single=bool(spawn.is_single))

    def _confine_child(self, spawn: Spawn, folder: str) -> None:
        is_confined = self._strength != "process"
        work = folder or namespaces.WORK_FOLDER
        if self._strength == "namespaces":
            namespaces.enter_work_folder(spawn.disk, files_in(spawn.disk), may_execute=self._may_start, keep=self._keep)
        else:
            os.chdir(folder)
        os.environ.update(HOME=work, TMPDIR=work)
        if is_confined:
            rules = shared_rules(self._config)
            if self._strength == "namespaces":
                rules.append(("/", landlock.READ | (landlock.EXECUTE if self._may_start else 0)))
            rules.append((work, landlock.work_folder_rights(self._landlock, may_execute=self._may_start)))
            landlock.restrict(self._landlock, rules)
        # The tasks of this user id are the zygote, its parent, the child, and the tasks that the child may start.
        tasks = (3 if self._strength == "namespaces" else 2) + (spawn.processes or linux.THREADS)
        if self._config["shares_user"]:
            tasks = self._others + linux.SPARE_TASKS if self._others else 0
        linux.limit_resources(
            cpu_s=spawn.cpu_s,
            address_space=self._mapped + spawn.memory,
            file_size=spawn.disk,
            open_files=spawn.open_files,
            tasks=tasks,
        )
        if is_confined:
            linux.keep_capabilities(*([linux.CAP_DAC_READ_SEARCH] if self._config["keep_read_search"] else []))
            seccomp.load(seccomp.for_process(self._filter, os.getpid()))


def files_in(disk: int) -> int:
    """Return the maximum number of files and directories in a work directory of this size in bytes."""
    return max(16, _FILES_PER_MEBIBYTE * disk // linux.MEBIBYTE)


def uses_more(folder: str, disk: int) -> bool:
    """Return True if a work directory on disk exceeds its limits or cannot be measured."""
    pending, files, size = [folder], 0, 0
    try:
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if files > files_in(disk) or size > disk:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    except FileNotFoundError:  # the directory changed while being measured
        return False
    except OSError:
        return True
    return False


def _take_descriptors(null: int, descriptors: Sequence[int]) -> None:
    """Make stdin, stdout, stderr and the channel the descriptors 0 to 3, and close all others."""
    channel, output, errors = (os.dup(descriptor) for descriptor in descriptors)
    for number, descriptor in enumerate((null, output, errors, channel)):
        os.dup2(descriptor, number, inheritable=False)
    os.closerange(CHANNEL + 1, 1 << 16)
    os.setsid()


def remove_folder(path: str) -> None:
    """Remove the files of a call without following links.

    Directories are moved up before they are emptied, so paths stay short.
    """
    pending, number, token = [path], 0, os.urandom(8).hex()
    while pending:
        folder = pending.pop()
        os.chmod(folder, 0o700)  # noqa: PTH101
        with os.scandir(folder) as entries:
            inside = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for inner, is_folder in inside:
            if is_folder:
                number += 1
                os.chmod(inner, 0o700)  # noqa: PTH101
                os.rename(inner, f"{path}.{token}.{number}")  # noqa: PTH104
                pending.append(f"{path}.{token}.{number}")
            else:
                os.unlink(inner)  # noqa: PTH108
        os.rmdir(folder)  # noqa: PTH106


def _enter(config: dict[str, Any]) -> tuple[int, int]:
    """Confine the zygote. Return descriptors of its PID namespace and of its `statm`. A missing descriptor is -1."""
    strength, user = config["strength"], config["outer_user"]
    if strength == "namespaces":
        proc = namespaces.enter(config["read_paths"], outer_user=user)
        inner = os.fork()
        if inner:
            os.closerange(0, 1 << 16)
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL, "end with the parent")
        pid_namespace = namespaces.proc_file(proc, "ns/pid")
        statm = namespaces.proc_file(proc, "statm")
        os.close(proc)
        linux.empty_bounding_set()
    else:
        pid_namespace = -1
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if os.path.exists("/proc/self/statm") else -1  # noqa: PTH110
        if user is not None:
            linux.become_user(user, keep_read_search=config["keep_read_search"])
    config["others"] = linux.count_tasks(os.getuid()) if config["shares_user"] else 0
    if strength != "process":
        linux.prctl(linux.PR_SET_DUMPABLE, 0, "make this process inaccessible to others")
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, "disable privilege escalation")
        if not landlock.abi():
            raise linux.SetupError(
                "confine files with Landlock", "Landlock is missing from this kernel or was disabled at boot"
            )
    if strength == "landlock":
        # Without namespaces, imports have the same file access as calls and no network access.
        version = landlock.abi()
        if version >= 2:  # Version 1 forbids moving files between directories, which removing directories requires.
            work = (config["work_root"], landlock.work_folder_rights(version, may_execute=False))
            landlock.restrict(version, [*shared_rules(config), work])
        seccomp.load(seccomp.build_for_zygote(linux.machine()))
    return pid_namespace, statm


def shared_rules(config: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the Landlock rules for devices and for the paths that every call may read.

    The rules are needed if the call does not have a separate root directory.
    """
    rules = [(real, landlock.READ) for _, real in config["read_paths"]]
    for device in namespaces.DEVICES:
        rights = landlock.READ_DEVICE if device in _DEVICE_READ else landlock.WRITE_DEVICE
        rules.append((f"/dev/{device}", rights))
    return rules


def _preload(config: dict[str, Any]) -> None:
    sys.path[:] = config["sys_path"]
    sys.argv[:] = [""]
    sys.dont_write_bytecode = True
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    for name in config["imports"]:
        try:
            import_module(name)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise linux.SetupError(f"import {name}, which the program declares", reason) from error
    # On its first use, SymPy spends a hundred milliseconds on tables.
    if (sympy := sys.modules.get("sympy")) is not None:
        symbol = sympy.Symbol("x")
        str(sympy.simplify(symbol + symbol - sympy.sympify("x/2 + 1")))


def main(descriptor: int) -> None:
    """Read the configuration, confine this process, import the modules, report that it is ready, and serve requests."""
    control = _socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)  # the new root is used by a user other than its creator
    # Only the host and the zygote have the socket open, so each of them notices when the other exits.
    os.closerange(descriptor + 1, 1 << 16)
    config = json.loads(control.recv(1 << 20))
    try:
        pid_namespace, statm = _enter(config)
        _preload(config)
        zygote = Zygote(control, config, pid_namespace, statm)
    except (linux.SetupError, OSError) as error:
        step, reason = (error.step, error.reason) if isinstance(error, linux.SetupError) else ("start", str(error))
        control.send(json.dumps({"step": step, "reason": reason}).encode())
        os._exit(SETUP_EXIT)
    if statm >= 0:
        os.close(statm)
    harness.prepare()
    control.send(json.dumps({"ready": True, "landlock": landlock.abi()}).encode())
    zygote.serve()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
