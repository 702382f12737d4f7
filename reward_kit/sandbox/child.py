"""The host's end of one confined child: what it is sent, and every byte that comes from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Literal

from reward_kit.sandbox.frames import HEADER, NONCE_BYTES, READY, FrameError, answer_end, pack, read_answer
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.outcome import Evidence
from reward_kit.sandbox.program import Program
from reward_kit.sandbox.zygote import BY_ITSELF, TOO_MUCH_DISK, Ended, Spawn

_CHUNK = 1 << 18
_CREDENTIALS = struct.Struct("iII")
_CPU_OF_PROCESS = 2
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Capture:
    """One of the child's outputs: read as it comes, so that the child never waits, and kept up to a limit."""

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
        """What was kept since the last time, all that is waiting included, and whether more had come."""
        for _ in range(8):  # what one full pipe may hold; whoever writes on has its time for it, not ours
            if not self._read():
                break
        if not self._kept:
            return b"", self._is_cut
        taken = bytes(self._kept), self._is_cut
        self._kept, self._is_cut = bytearray(), False
        return taken

    def close(self) -> None:
        """Let go of the descriptors."""
        self._loop.remove_reader(self._reader)
        os.close(self._reader)


class Child:
    """A confined child as the host sees it: a channel for frames, two outputs, and its end.

    Attributes:
        limits: of its calls.
        is_ready: it said that its walls stand.
        pid: its id as this process sees it, which the kernel told with its first word; 0 before.
        answered: resolves when an answer is complete, or cannot become one any more; made anew for each call.
        ended: resolves with the zygote's record of its end; None where the zygote died.
    """

    def __init__(self, limits: Limits, spawn: Spawn) -> None:
        self._loop = asyncio.get_running_loop()
        self._spawn = spawn
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
        self.is_ready = False
        self.pid = 0
        self.answered: asyncio.Future[None] | None = None
        self.ended: asyncio.Future[Ended | None] = self._loop.create_future()
        self._loop.add_reader(self._channel.fileno(), self._read)

    def may_run(self, limits: Limits, program: Program | None) -> bool:
        """It was made with these limits, and has been sent no other program."""
        return self.limits == limits and self._program in (None, program)

    def is_as(self, limits: Limits, spawn: Spawn, program: Program | None) -> bool:
        """It may run the program, was made by this record, and has neither ended nor said anything since."""
        fits = self._spawn == spawn and self.may_run(limits, program)
        return fits and not self.ended.done() and not self.has_extra

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The child's ends: channel, output, errors. `handed_over` closes them here."""
        return self._far.fileno(), self._output.writer, self._errors.writer

    def handed_over(self) -> None:
        """The child has its ends now."""
        self._far.close()
        os.close(self._output.writer)
        os.close(self._errors.writer)

    def load(self, program: Program) -> None:
        """Send the program, once."""
        if self._program is None:
            self._program = program
            self._push(pack(secrets.token_bytes(NONCE_BYTES), program.payload()))

    def send(self, program: Program, call: bytes) -> None:
        """Send a call, with the program before the first one."""
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
        except OSError:  # it has ended, which is told elsewhere
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
            data = self._channel.recv(_CHUNK) if self.is_ready else self._first_word()
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

    def _first_word(self) -> bytes:
        """The ready byte, with which the kernel sends the id of who wrote it."""
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
        """Seconds of CPU time it has used, by the kernel's own count; 0.0 where it cannot be asked."""
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_OF_PROCESS) if self.pid else 0.0
        except OSError:
            return 0.0

    def resident_mb(self) -> float:
        """MiB it holds in memory; 0.0 where that cannot be read."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * _PAGE / (1 << 20)

    def _look(self) -> None:
        """Resolve `answered` as soon as the answer is complete, or cannot become one."""
        try:
            end = answer_end(self._received, self._nonce, self._max_result)
            if end is not None and len(self._received) > end:
                raise FrameError("extra_frame", "more came on the result channel after the result")
        except FrameError as error:
            self._fault = self._fault or error
            # Nothing more is believed, or stored.
            del self._received[HEADER.size :]
            end = 0
        if end is not None and self.answered is not None and not self.answered.done():
            self.answered.set_result(None)

    @property
    def has_fault(self) -> bool:
        """What came is no answer."""
        return self._fault is not None

    @property
    def has_extra(self) -> bool:
        """Something came although nothing was asked."""
        self._read()
        return bool(self._received) or self.has_fault

    def take_answer(self, evidence: Evidence) -> None:
        """Put what came, the outputs too, into `evidence`, and make room for the next answer."""
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
        """Put how it ended, and all that is still waiting to be read, into `evidence`."""
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
        evidence.peak_memory_mb = ended.peak_memory / (1 << 20)

    def close(self) -> None:
        """Let go of every descriptor. The child sees its channel close."""
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._output.close()
        self._errors.close()
        with contextlib.suppress(OSError):
            self._far.close()
