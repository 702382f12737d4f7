"""The host side of the sandbox. It starts and controls zygotes and their children.

A zygote is started with one socket, starts one child at a time on request, and ends when the socket is closed. A child
has a channel for frames, and stdout and stderr. All bytes that a child sends are untrusted.
"""

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
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

from reward_kit.processes import remove_folder, temporary_folder, temporary_root
from reward_kit.sandbox import zygote
from reward_kit.sandbox.frames import HEADER, NONCE_BYTES, READY, FrameError, answer_end, pack, read_answer
from reward_kit.sandbox.linux import MEBIBYTE, SetupError
from reward_kit.sandbox.outcome import Evidence, Strength
from reward_kit.sandbox.program import Limits, Program, ZygoteSpec
from reward_kit.sandbox.zygote import BY_ITSELF, ENDED, KILL, SPAWN, TOO_MUCH_DISK, Ended, Spawn

_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "TMPDIR": "/tmp",
    "USER": "sandbox",
    # A zygote that forks must have only one thread, and memory limits count address space.
    "MALLOC_ARENA_MAX": "2",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_PASSED_ON = ("LD_LIBRARY_PATH", "TZ")
_BOOT_S = 120.0
BACKSTOP_S = 2.0
"""The number of seconds that a zygote has to end a child before the zygote is killed."""
_FIRST_UNUSED_ID = 1_900_000_000


class ZygoteProcess:
    """A zygote process, as the host sees it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, work_root: Path | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._control = control
        self._work_root = work_root
        self._child: Child | None = None
        self._prepared: Child | None = None
        self._ending: asyncio.Task[None] | None = None
        self.is_alive = True  # True if it can start a child
        self.facts: dict[str, Any] = {}  # the facts that the zygote reported when it was ready

    @classmethod
    async def start(cls, spec: ZygoteSpec, strength: Strength) -> ZygoteProcess:
        """Start a zygote, and wait until it has imported all modules.

        Raises:
            SetupError: If the zygote does not start or cannot confine itself.
        """
        config, work_root = _configuration(spec, strength)
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
            raise SetupError("start the zygote", f"no response from the process: {error}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if "ready" not in reply:
            await self.close()
            raise SetupError(
                reply.get("step", "start the zygote"), reply.get("reason", "the process ended immediately")
            )
        self.facts = reply
        self._loop.add_reader(control.fileno(), self._on_record)
        return self

    async def spawn(self, limits: Limits, *, is_single: bool, cpu_s: float, program: Program | None = None) -> Child:
        """Return a child that waits for a call. The child may have been prepared in advance.

        `ended` is `None` if the zygote has died.
        """
        wanted = spawn_record(limits, is_single=is_single, cpu_s=cpu_s)
        child, self._prepared = self._prepared, None
        if child is not None:
            # The child has neither ended nor written anything since its creation.
            if child.spawn == wanted and child.may_run(limits, program) and not (child.ended.done() or child.has_extra):
                return child
            try:
                await self.end_child(child)
            finally:
                child.close()
        return self._spawn(limits, wanted)

    def prepare(self, limits: Limits, *, is_single: bool, cpu_s: float, program: Program | None = None) -> None:
        """Start and confine the next child, and load a program into it, before there is a call for it."""
        if self.is_alive and self._prepared is None:
            self._prepared = self._spawn(limits, spawn_record(limits, is_single=is_single, cpu_s=cpu_s))
            if program is not None:
                self._prepared.load(program)

    def is_prepared(self, limits: Limits, program: Program) -> bool:
        """Return True if a child with these limits is ready and has loaded either this program or no program."""
        return self._prepared is not None and self._prepared.is_ready and self._prepared.may_run(limits, program)

    @property
    def prepared_pid(self) -> int:
        """The process id of the prepared child, or 0 if there is none."""
        return self._prepared.pid if self._prepared is not None else 0

    @property
    def is_settled(self) -> bool:
        """True if no child is being prepared."""
        child = self._prepared
        return child is None or child.is_ready or child.ended.done()

    def _spawn(self, limits: Limits, spawn: Spawn) -> Child:
        child = self._child = Child(limits, spawn)
        descriptors = array.array("i", child.descriptors)
        try:
            self._control.sendmsg([SPAWN.pack(*spawn)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        except OSError:
            self._died()
        child.close_child_ends()
        return child

    def kill_child(self, child: Child) -> None:
        """Kill the child and all its processes if it is still running. `ended` resolves afterwards."""
        if child is self._child and not child.ended.done():
            try:
                self._control.send(KILL)
            except OSError:
                self._died()

    async def end_child(self, child: Child) -> Ended | None:
        """Kill the child and wait until it has ended, which takes about a millisecond.

        After a timeout, end the zygote.
        """
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
        """End the zygote and all processes that it has started, and wait for them, even if this task is cancelled."""
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
        """Return True if the zygote ends within this time."""
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


def spawn_record(limits: Limits, *, is_single: bool, cpu_s: float) -> Spawn:
    """Return the request to start a child with these limits."""
    return Spawn(
        math.ceil(cpu_s),
        limits.memory_mb * MEBIBYTE,
        limits.processes,
        limits.open_files,
        limits.disk_mb * MEBIBYTE,
        limits.result_bytes,
        int(is_single),
    )


def _configuration(spec: ZygoteSpec, strength: Strength) -> tuple[dict[str, Any], Path | None]:
    """Return the configuration of a zygote and, without namespaces, the parent of its work directories."""
    user, work_root, has_namespaces = None, None, strength == "namespaces"
    if os.geteuid() == 0 and strength != "process":
        user = _FIRST_UNUSED_ID + secrets.randbelow(1 << 24)
    if not has_namespaces:
        work_root = temporary_folder("sandbox-")
        if user is not None:
            try:
                os.chown(work_root, user, user)
            except OSError as error:  # for example in a user namespace with a single user
                remove_folder(work_root)
                raise SetupError("give a work directory to an unused user id", str(error)) from error
            # Other users may only pass through. The other entries stay closed to them.
            temporary_root().chmod(0o711)
    ways = {parent for _, real in spec.read_paths for parent in Path(real).parents}
    kernel = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2] if number.isdigit())
    config = {
        "strength": strength,
        "imports": spec.imports,
        "sys_path": spec.sys_path,
        "read_paths": spec.read_paths,
        "may_start_processes": spec.may_start_processes,
        "outer_user": user,
        "work_root": str(work_root or ""),
        # This is needed unless every directory on the way to the visible paths is open to all users.
        "keep_read_search": user is not None
        and not has_namespaces
        and not all(stat.S_IMODE(parent.stat().st_mode) & 0o001 for parent in ways),
        # Before Linux 5.14, tasks are counted only per user id, across namespaces.
        "shares_user": user is None and not (has_namespaces and kernel >= (5, 14)),
    }
    return config, work_root


_CHUNK = 1 << 18
_CREDENTIALS = struct.Struct("iII")
_CPU_OF_PROCESS = 2
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Capture:
    """The stdout or stderr of a child.

    It is read continuously, so the child never blocks. It is stored up to a limit.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop, self._limit = loop, limit
        self._kept = bytearray()
        self._is_cut = False
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        loop.add_reader(self._reader, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._reader)
            return False
        room = self._limit - len(self._kept)
        self._kept += data[:room] if room > 0 else b""
        self._is_cut = self._is_cut or len(data) > room
        return True

    def take(self) -> tuple[bytes, bool]:
        """Return the output since the last call, and whether further output was dropped."""
        for _ in range(8):  # enough to empty a full pipe, without waiting for more
            if not self._read():
                break
        if not self._kept:
            return b"", self._is_cut
        taken = bytes(self._kept), self._is_cut
        self._kept, self._is_cut = bytearray(), False
        return taken

    def close(self) -> None:
        self._loop.remove_reader(self._reader)
        os.close(self._reader)


class Child:
    """A sandboxed child, as the host sees it.

    It has a channel for frames, stdout and stderr, and a record of its end.
    """

    def __init__(self, limits: Limits, spawn: Spawn) -> None:
        self._loop = asyncio.get_running_loop()
        self.spawn = spawn
        self._program: Program | None = None
        self.limits = limits
        self._max_result = limits.result_bytes
        self._channel, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel.setblocking(False)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._output = Capture(self._loop, limits.output_bytes)
        self._errors = Capture(self._loop, limits.output_bytes)
        self._received = bytearray()
        self._unsent = b""
        self._nonce = b""
        self._fault: FrameError | None = None
        self.is_ready = False  # whether the child reported that it is confined
        self.pid = 0  # its id in the namespace of this process, which the kernel sends with its first byte
        # This future resolves when an answer is complete or invalid. It is replaced for each call.
        self.answered: asyncio.Future[None] | None = None
        # This future resolves with the zygote's record of the end of the child, or with None if the zygote died.
        self.ended: asyncio.Future[Ended | None] = self._loop.create_future()
        self._loop.add_reader(self._channel.fileno(), self._read)

    def may_run(self, limits: Limits, program: Program | None) -> bool:
        """Return True if the child has these limits and has not received a different program."""
        return self.limits == limits and self._program in (None, program)

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The descriptors of the child: channel, stdout and stderr. `close_child_ends` closes them in this process."""
        return self._far.fileno(), self._output.writer, self._errors.writer

    def close_child_ends(self) -> None:
        """Close the descriptors of the child in this process."""
        self._far.close()
        os.close(self._output.writer)
        os.close(self._errors.writer)

    def load(self, program: Program) -> None:
        """Send the program if it has not been sent."""
        if self._program is None:
            self._program = program
            self._push(pack(secrets.token_bytes(NONCE_BYTES), program.payload()))

    def send(self, program: Program, call: bytes) -> None:
        """Send a call. Before the first call, send the program."""
        self.load(program)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._push(pack(self._nonce, call))

    def _push(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._channel.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # the child has ended, which is reported elsewhere
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.add_writer(self._channel.fileno(), self._push_rest)

    def _push_rest(self) -> None:
        self._loop.remove_writer(self._channel.fileno())
        data, self._unsent = self._unsent, b""
        self._push(data)

    def _read(self) -> bool:
        was_ready = self.is_ready
        try:
            data = self._channel.recv(_CHUNK) if self.is_ready else self._ready_byte()
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            if self.is_ready and not was_ready:
                return True
            self._loop.remove_reader(self._channel.fileno())
            return False
        self._received += data
        self._look()
        return True

    def _ready_byte(self) -> bytes:
        """Read the ready byte. Along with it, the kernel also delivers the process id of the sender."""
        data, ancillary, _, _ = self._channel.recvmsg(len(READY), socket.CMSG_SPACE(_CREDENTIALS.size))
        if data != READY:
            return b""
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        for _, kind, content in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                self.pid = _CREDENTIALS.unpack(content)[0]
        self.is_ready = True
        return b""

    def cpu_s(self) -> float:
        """Return the CPU time of the child in seconds, as counted by the kernel, or 0.0 if it is unknown."""
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_OF_PROCESS) if self.pid else 0.0
        except OSError:
            return 0.0

    def resident_mb(self) -> float:
        """Return the resident memory of the child in MiB, or 0.0 if it is unknown."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * _PAGE / MEBIBYTE

    def _look(self) -> None:
        """Resolve `answered` as soon as the answer is complete or invalid."""
        try:
            end = answer_end(self._received, self._nonce, self._max_result)
            if end is not None and len(self._received) > end:
                raise FrameError("extra_frame", "there is more data on the result channel after the result")
        except FrameError as error:
            self._fault = self._fault or error
            # Ignore everything after a fault.
            del self._received[HEADER.size :]
            end = 0
        if end is not None and self.answered is not None and not self.answered.done():
            self.answered.set_result(None)

    @property
    def has_fault(self) -> bool:
        """True if the received bytes are not a valid answer."""
        return self._fault is not None

    @property
    def has_extra(self) -> bool:
        """True if the child sent data although there was no call."""
        self._read()
        return bool(self._received) or self.has_fault

    def take_answer(self, evidence: Evidence) -> None:
        """Move the answer and the output to `evidence`, and reset the state for the next answer."""
        evidence.is_ready = self.is_ready
        try:
            if self._fault is not None:
                raise self._fault
            evidence.answer = read_answer(self._received, self._nonce, self._max_result)
        except FrameError as error:
            evidence.fault = error
        self._received = bytearray()
        evidence.stdout, is_output_cut = self._output.take()
        evidence.stderr, are_errors_cut = self._errors.take()
        evidence.is_output_cut = is_output_cut or are_errors_cut

    def take_end(self, evidence: Evidence, ended: Ended | None) -> None:
        """Store in `evidence` how the child ended, and its unread bytes."""
        for _ in range(2 + (self._max_result + HEADER.size) // _CHUNK):
            if not self._read():
                break
        self.take_answer(evidence)
        if ended is None:
            evidence.how = "lost"
            return
        hows: dict[int, Literal["ended", "disk"]] = {BY_ITSELF: "ended", TOO_MUCH_DISK: "disk"}
        evidence.how = hows.get(ended.how, "fault" if self.has_fault else "killed")
        evidence.exit = os.waitstatus_to_exitcode(ended.status)
        evidence.cpu_s = ended.user_s + ended.system_s
        evidence.peak_memory_mb = ended.peak_memory / MEBIBYTE

    def close(self) -> None:
        """Close all descriptors, including the channel to the child."""
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._output.close()
        self._errors.close()
        with contextlib.suppress(OSError):
            self._far.close()
