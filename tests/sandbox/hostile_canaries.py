"""Canaries that detect access by hostile code, and leftovers of a call."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

_LISTENS = {"tcp": "0A", "tcp6": "0A"}
_CANARY = """
import signal, sys, time
def note(number, frame):
    with open(sys.argv[1], "a") as log:
        log.write(f"{number} ")
for number in range(1, 65):
    try:
        signal.signal(number, note)
    except (OSError, ValueError):
        continue
print("up", flush=True)
while True:
    time.sleep(10)
"""


class Canaries:
    """A secret file, a secret variable, listeners of four kinds, and a process that records every signal.

    Attributes:
        folder: anyone may write in it; it holds the secret file and the socket.
        values: what the placeholders of case files stand for.
        secrets: texts that no output may hold.
    """

    def __enter__(self) -> Canaries:
        self._base = Path(tempfile.mkdtemp(prefix="canaries-"))
        self._base.chmod(0o755)
        self.folder = self._base / "canary"
        self.folder.mkdir()
        self.folder.chmod(0o777)
        mark, secret, key = (f"{name}-{secrets.token_hex(8)}" for name in ("mark", "CANARY-FILE", "CANARY-KEY"))
        mark = mark.replace("-", "_")
        self._secret = secret
        self._put_file()
        os.environ["CANARY_API_KEY"] = key
        self.secrets = (secret, key)
        self._listen(mark)
        self._signals = self._base / "signals"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CANARY, str(self._signals)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"
        self.values = {
            "MARK": mark,
            "CANARYFILE": str(self.folder / "secret.txt"),
            "CANARYDIR": str(self.folder),
            "PORT": str(self._tcp.getsockname()[1]),
            "UDPPORT": str(self._udp.getsockname()[1]),
            "UNIX": str(self.folder / "socket"),
            "ABSTRACT": mark,
            "HOSTPID": str(os.getpid()),
            "CANARYPID": str(self._process.pid),
        }
        return self

    def _put_file(self) -> None:
        self.folder.chmod(0o777)
        file = self.folder / "secret.txt"
        file.unlink(missing_ok=True)
        file.write_text(self._secret)
        self._untouched = self._file()

    def _file(self) -> tuple[object, ...]:
        """Return the metadata and content of the secret file and the mode of its folder, without changing it."""
        file = self.folder / "secret.txt"
        if not file.exists():
            return ()
        found = file.stat()
        known = found.st_ino, found.st_mode, found.st_uid, found.st_nlink, found.st_mtime_ns
        return file.read_text(), *known, self.folder.stat().st_mode

    def _listen(self, mark: str) -> None:
        self._tcp, self._udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self._unix, self._abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self._tcp.bind(("127.0.0.1", 0))
        self._udp.bind(("127.0.0.1", 0))
        self._unix.bind(str(self.folder / "socket"))
        self._abstract.bind(f"\0{mark}")
        (self.folder / "socket").chmod(0o777)
        for listener in (self._tcp, self._unix, self._abstract):
            listener.listen()
        for one in (self._tcp, self._udp, self._unix, self._abstract):
            one.setblocking(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        for one in (self._tcp, self._udp, self._unix, self._abstract):
            one.close()
        shutil.rmtree(self._base)
        os.environ.pop("CANARY_API_KEY")

    def touched(self) -> list[str]:
        """Return what was touched since the last call."""
        found = []
        for name, listener in (("TCP", self._tcp), ("unix", self._unix), ("abstract", self._abstract)):
            try:
                listener.accept()[0].close()
                found.append(f"canary: the {name} listener was reached")
            except BlockingIOError:
                continue
        try:
            self._udp.recv(1)
            found.append("canary: the UDP listener was reached")
        except BlockingIOError:
            found += []
        if self._signals.exists():
            found.append(f"canary: the process got signals {self._signals.read_text()}")
            self._signals.unlink()
        if self._process.poll() is not None:
            found.append("canary: the process was ended")
        if self._file() != self._untouched:
            found.append("canary: the secret file, or the folder it is in, was changed")
            self._put_file()
        return found


class Surroundings:
    """Processes, files, listening sockets and IPC objects, to detect leftovers of a call."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self.processes = set(processes())
        self._files, self._sockets, self._ipc = self._find_files(), _sockets(), _ipc()

    def left(self, is_expected: Expectation) -> list[str]:
        """Return what is new since the last call, after a second for processes that are ending."""
        deadline = time.monotonic() + 1.0
        while True:
            found = [
                *(f"left: process {_name(pid)}" for pid in self._new_processes() if not is_expected.process(pid)),
                *(f"left: file {path}" for path in self._find_files() - self._files if not is_expected.file(path)),
                *(f"left: socket {one}" for one in _sockets() - self._sockets),
                *(f"left: IPC object {one}" for one in _ipc() - self._ipc),
            ]
            if not found:
                return []
            if time.monotonic() > deadline:
                self.processes |= {pid for pid in self._new_processes() if not is_expected.process(pid)}
                self._files, self._sockets, self._ipc = self._find_files(), _sockets(), _ipc()
                return found
            time.sleep(0.02)

    def _new_processes(self) -> list[int]:
        return [pid for pid in processes() if pid not in self.processes]

    def _find_files(self) -> set[str]:
        found = set()
        for folder in self._folders:
            for base, folders, files in os.walk(folder):
                found |= {f"{base}/{name}" for name in (*folders, *files)}
        return found


class Expectation:
    """The objects allowed after a call; by default nothing new."""

    def process(self, pid: int) -> bool:
        """Return whether this process belongs to the runner."""
        return False

    def file(self, path: str) -> bool:
        """Return whether this file belongs to the runner."""
        return False


def processes() -> dict[int, int]:
    """Return the running processes with their parents."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            found[int(folder.name)] = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (ValueError, OSError):
            continue
    return found


def resident_mb() -> float:
    """Return the MiB of memory that this process holds."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _name(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:80]!r}"
    except OSError:
        return str(pid)


def _sockets() -> set[str]:
    found = set()
    for name, state in _LISTENS.items():
        lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        found |= {f"{name} {line.split()[1]}" for line in lines if line.split()[3] == state}
    names = [line.split()[7:] for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return found | {f"unix {name[0]}" for name in names if name}


def _ipc() -> set[str]:
    return {
        f"{kind} {line.split()[1]}"
        for kind in ("shm", "sem", "msg")
        if Path(f"/proc/sysvipc/{kind}").exists()
        for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    }
