"""A zygote as the host holds it: started with one socket, asked for one child at a time, ended by closing it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from reward_kit.processes import remove_folder, temporary_folder, temporary_root
from reward_kit.sandbox import zygote
from reward_kit.sandbox.child import Child
from reward_kit.sandbox.kernel.libc import SetupError
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.outcome import Strength
from reward_kit.sandbox.program import Program, World
from reward_kit.sandbox.zygote import ENDED, KILL, Ended, Spawn

_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "TMPDIR": "/tmp",
    "USER": "sandbox",
    # A zygote that forks must have one thread, and address space is what memory limits count.
    "MALLOC_ARENA_MAX": "2",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_PASSED_ON = ("LD_LIBRARY_PATH", "TZ")
_BOOT_S = 120.0
BACKSTOP_S = 2.0
"""A zygote that has not ended a child this long after it was told to is ended itself."""
_FIRST_UNUSED_ID = 1_900_000_000
_MEBIBYTE = 1 << 20


class ZygoteProcess:
    """One zygote.

    Attributes:
        is_alive: it can be asked for a child.
        facts: what it said of itself when it was ready.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, work_root: Path | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._control = control
        self._work_root = work_root
        self._child: Child | None = None
        self._prepared: Child | None = None
        self._ending: asyncio.Task[None] | None = None
        self.is_alive = True
        self.facts: dict[str, Any] = {}

    @classmethod
    async def start(cls, world: World, strength: Strength) -> ZygoteProcess:
        """Start one and wait until it has imported everything.

        Raises:
            SetupError: its walls cannot be put up here, or an import failed.
        """
        config, work_root = _configuration(world, strength)
        control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            control.setblocking(False)
            environment = _ENVIRONMENT | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            process = subprocess.Popen(  # noqa: ASYNC220 - with no await in it, no cancellation can lose the child
                [sys.executable, "-I", "-S", zygote.__file__, str(far.fileno())],
                env=environment,
                cwd="/",
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self = cls(process, control, work_root)
        try:
            control.send(json.dumps(config).encode())
            async with asyncio.timeout(_BOOT_S):
                reply = json.loads(await self._loop.sock_recv(control, 1 << 16) or b"{}")
        except (OSError, TimeoutError) as error:
            await self.close()
            raise SetupError("start the zygote", f"it gave no sign of life: {error}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if "ready" not in reply:
            await self.close()
            raise SetupError(reply.get("step", "start the zygote"), reply.get("reason", "it ended at once"))
        self.facts = reply
        self._loop.add_reader(control.fileno(), self._on_record)
        return self

    async def spawn(self, limits: Limits, *, is_single: bool, cpu_s: float, program: Program | None = None) -> Child:
        """A child that waits for a call, the one made ready if it fits; one of a dead zygote has `ended` with None.

        Args:
            limits: of its calls.
            is_single: it leaves after one answer.
            cpu_s: until the kernel ends it.
            program: what it may have loaded already; by default nothing.
        """
        wanted = spawn_of(limits, is_single=is_single, cpu_s=cpu_s)
        child, self._prepared = self._prepared, None
        if child is not None:
            if child.is_as(limits, wanted, program):
                return child
            try:
                await self.end_child(child)
            finally:
                child.close()
        return self._spawn(limits, wanted)

    def prepare(self, limits: Limits, *, is_single: bool, cpu_s: float, program: Program | None = None) -> None:
        """Have the next child put up its walls, and load a program, before anyone asks for it."""
        if self.is_alive and self._prepared is None:
            self._prepared = self._spawn(limits, spawn_of(limits, is_single=is_single, cpu_s=cpu_s))
            if program is not None:
                self._prepared.load(program)

    def is_prepared(self, limits: Limits, program: Program) -> bool:
        """A child with these limits stands ready, with this program or none."""
        return self._prepared is not None and self._prepared.is_ready and self._prepared.may_run(limits, program)

    @property
    def prepared_pid(self) -> int:
        """The id of the child that waits for its program; 0 where none stands ready."""
        return self._prepared.pid if self._prepared is not None else 0

    @property
    def is_settled(self) -> bool:
        """No child is being made ready."""
        child = self._prepared
        return child is None or child.is_ready or child.ended.done()

    def _spawn(self, limits: Limits, spawn: Spawn) -> Child:
        child = self._child = Child(limits, spawn)
        descriptors = array.array("i", child.descriptors)
        try:
            self._control.sendmsg([spawn.packed()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        except OSError:
            self._died()
        child.handed_over()
        return child

    def kill_child(self, child: Child) -> None:
        """Kill this child, and with it its tree, unless it has ended; `ended` resolves when it is gone."""
        if child is self._child and not child.ended.done():
            try:
                self._control.send(KILL)
            except OSError:
                self._died()

    async def end_child(self, child: Child) -> Ended | None:
        """Kill the child and wait for its end, which takes a millisecond; where it does not come, end the zygote."""
        self.kill_child(child)
        waiting = self._loop.create_task(asyncio.wait({child.ended}, timeout=BACKSTOP_S))
        try:
            await asyncio.shield(waiting)
        finally:
            if not child.ended.done():
                await waiting
        if not child.ended.done():
            await self.close()
        return child.ended.result()

    def _on_record(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if len(data) != ENDED.size:
            self._died()
        elif self._child is not None and not self._child.ended.done():
            self._child.ended.set_result(Ended(*ENDED.unpack(data)))

    def _died(self) -> None:
        self.is_alive = False
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
        if self._child is not None and not self._child.ended.done():
            self._child.ended.set_result(None)

    async def close(self) -> None:
        """End it and everything it started, and wait until they are gone. Also where the caller is being cancelled."""
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._died()
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None
        self._control.close()
        if not await self._is_gone(2.0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._is_gone(2.0)
        self._process.wait()
        if self._work_root is not None:
            remove_folder(self._work_root)

    async def _is_gone(self, timeout_s: float) -> bool:
        """Whether it has ended, after at most this time."""
        if self._process.poll() is not None:
            return True
        ending = os.pidfd_open(self._process.pid)
        gone = asyncio.Event()
        self._loop.add_reader(ending, gone.set)
        try:
            async with asyncio.timeout(timeout_s):
                await gone.wait()
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(ending)
            os.close(ending)
        return True


def spawn_of(limits: Limits, *, is_single: bool, cpu_s: float) -> Spawn:
    """The record that asks for a child with these limits."""
    return Spawn(
        math.ceil(cpu_s),
        limits.memory_mb * _MEBIBYTE,
        limits.processes,
        limits.open_files,
        limits.disk_mb * _MEBIBYTE,
        limits.result_bytes,
        int(is_single),
    )


def _configuration(world: World, strength: Strength) -> tuple[dict[str, Any], Path | None]:
    is_root = os.geteuid() == 0
    user = _FIRST_UNUSED_ID + secrets.randbelow(1 << 24) if is_root and strength != "process" else None
    work_root = None if strength == "namespaces" else _work_root(user)
    has_namespaces = strength == "namespaces"
    config = {
        "strength": strength,
        "imports": world.imports,
        "sys_path": world.sys_path,
        "read_paths": world.read_paths,
        "may_start_processes": world.may_start_processes,
        "outer_user": user,
        "work_root": str(work_root or ""),
        "keep_read_search": user is not None and not has_namespaces and not _is_open_to_all(world),
        # Before Linux 5.14 tasks are counted by user id alone, the same inside a namespace and outside.
        "shares_user": user is None and not (has_namespaces and _kernel() >= (5, 14)),
    }
    return config, work_root


def _work_root(user: int | None) -> Path:
    folder = temporary_folder("sandbox-")
    if user is not None:
        try:
            os.chown(folder, user, user)
        except OSError as error:  # such as in a user namespace that knows this one user only
            remove_folder(folder)
            raise SetupError("give a work folder to a user id that is free", str(error)) from error
        # What lies beside it is closed to others; only the way through is opened.
        temporary_root().chmod(0o711)
    return folder


def _is_open_to_all(world: World) -> bool:
    """Whether any user may read what the world shows, by the folders on the way to it."""
    ways = {parent for _, real in world.read_paths for parent in Path(real).parents}
    return all(stat.S_IMODE(parent.stat().st_mode) & 0o001 for parent in ways)


def _kernel() -> tuple[int, ...]:
    numbers = os.uname().release.split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())
