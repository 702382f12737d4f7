"""Long-lived child processes and temporary directories that never outlive this process.

The code that uses a child or directory removes it, at the latest when the interpreter exits. After a crash or
`kill -9`, the guardian (`process_guardian`) removes it: every child and its descendants inherit the guardian's token in
the environment. Importing this module starts nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO

import anyio

from reward_kit import process_guardian
from reward_kit.errors import ConfigError
from reward_kit.private_files import FILE_MODE, make_private_folder
from reward_kit.process_guardian import MARK
from reward_kit.safe_input import MIB, PROCESS_LOG_BYTES

INHERITED_VARIABLES = re.compile(
    # Paths of programs, user files and temporary files; the user's name.
    r"PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TEMP|TMP|XDG_[A-Z_]+"
    # Language, encoding and terminal.
    r"|LANG|LANGUAGE|LC_[A-Z_]+|TZ|TERM|COLORTERM|NO_COLOR|FORCE_COLOR|COLUMNS|LINES"
    # Python and its libraries, since a child often runs in the same environment.
    r"|PYTHONPATH|PYTHONHOME|PYTHONHASHSEED|PYTHONUTF8|PYTHONIOENCODING|PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE"
    r"|PYTHONWARNINGS|PYTHONSAFEPATH|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV"
    r"|LD_LIBRARY_PATH|DYLD_LIBRARY_PATH|DYLD_FALLBACK_LIBRARY_PATH"
    # Paths of certificates.
    r"|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
    # Threads and devices.
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|VECLIB_MAXIMUM|RAYON)_NUM_THREADS|VECLIB_MAXIMUM_THREADS|TOKENIZERS_PARALLELISM"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NVIDIA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES"
    # Locations of model and game data, but not the token for private models.
    r"|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE|ALFWORLD_DATA"
    # Required to start any program on Windows.
    r"|SYSTEMROOT|SYSTEMDRIVE|WINDIR|COMSPEC|PATHEXT|APPDATA|LOCALAPPDATA|PROGRAMDATA|PROGRAMFILES|USERPROFILE"
    r"|USERNAME|HOMEDRIVE|HOMEPATH"
)
"""The environment variables that every child process inherits; a task can add others (`pass_env`, `env`)."""
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})
"""Variables that are also inherited, in upper or lower case, unless they contain a password."""
LOG_FOLDER: ContextVar[Path | None] = ContextVar("LOG_FOLDER", default=None)
"""The directory for the output of children, such as a run's `logs`. If unset, the output is deleted with the child."""
_SHARED = "shared"
_log_numbers: dict[Path, int] = {}
_LONGEST_LINE = 500


class _Guard:
    """The guardian of this process: its token, the temporary root, and the pipe that closes when this process ends."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.root = Path(tempfile.gettempdir()).resolve() / f"reward-kit-{secrets.token_hex(6)}"
        self.sessions: set[int] = set()
        self.commands: list[bytes] = []
        self._owner = os.getpid()
        command = [sys.executable, "-I", "-S", process_guardian.__file__, self.token, str(self.root)]
        # The guardian does not get the mark, since another guardian must not kill it before it has finished.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        reader, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(reader)
        # The guardian gets the path before the directory exists, so a kill in between leaves nothing behind.
        self.root.mkdir(mode=0o700)
        (self.root / _SHARED).mkdir(mode=0o700)
        os.register_at_fork(after_in_child=self._close_pipe_in_fork)
        atexit.register(self._clean_up)

    def mark(self) -> str:
        """Return the value of `MARK` for a child.

        It also contains the tokens of the guardians that watch this process.
        """
        return ":".join(token for token in (os.environ.get(MARK, ""), self.token) if token)

    def watch(self, session: int) -> None:
        """Register a child's session so that it can be ended even if its mark cannot be read."""
        self.sessions.add(session)
        self._send(f"+{session}")

    def forget(self, session: int) -> None:
        """Remove an ended session, since its id may be reused."""
        self.sessions.discard(session)
        self._send(f"-{session}")

    def add_command(self, command: Sequence[str]) -> None:
        """Register a command that removes what this process leaves behind."""
        line = json.dumps(list(command))
        self.commands.append(line.encode())
        self._send(f"!{line}")

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, f"{line}\n".encode())

    def _close_pipe_in_fork(self) -> None:
        # A fork that keeps the pipe open would hide the end of this process from the guardian.
        with contextlib.suppress(OSError):
            os.close(self._pipe)
        self._pipe = -1

    def _clean_up(self) -> None:
        if os.getpid() != self._owner:
            return
        process_guardian.kill_all(self.token, self.sessions)
        process_guardian.remove_tree(str(self.root))
        process_guardian.run_commands(self.commands)
        self._send("done")
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)


_guards: list[_Guard] = []
_lock = threading.Lock()


def _guard() -> _Guard:
    with _lock:
        if not _guards:
            _guards.append(_Guard())
        return _guards[0]


def child_environment(extra: Mapping[str, str] | None = None, *, pass_names: Sequence[str] = ()) -> dict[str, str]:
    """Return a child's environment: `extra`, the variables in `INHERITED_VARIABLES` and `pass_names`, and the mark.

    This keeps keys away from programs that do not need them, and thus out of the logs and crash reports of these
    programs. It is not a security boundary, because a program can read everything that its user can read.
    """
    for name in pass_names:
        if name not in os.environ:
            raise ConfigError(f"pass_env: the environment variable {name} is not set")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in pass_names or ("@" not in value if name.lower() in _PROXIES else INHERITED_VARIABLES.fullmatch(name))
    }
    return {**inherited, **(extra or {}), MARK: _guard().mark()}


def run_when_killed(command: Sequence[str]) -> None:
    """Register a command that runs when this process exits or is killed. It must do nothing if nothing is left."""
    _guard().add_command(command)


def temporary_folder(prefix: str) -> Path:
    """Create a private temporary directory, which is removed by `remove_folder` or when this process exits."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_guard().root))


def shared_folder(name: str) -> Path:
    """Return this process's shared temporary directory with this name. It is removed when this process exits."""
    folder = _guard().root / _SHARED / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def remove_folder(path: Path) -> None:
    """Remove a temporary directory, even if parts of it are read-only; do nothing if it does not exist."""
    process_guardian.remove_tree(str(path))


def temporary_root() -> Path:
    """Return the directory that contains all temporary directories of this process."""
    return _guard().root


_LOG_CHECK_S = 0.1
_LOG_KEPT_BYTES = MIB
_LOG_NOTICE = b"[reward-kit: the log was cut here; it had more than %d MiB]\n"
_LOG_TAIL_BYTES = 32_768


class LogLimit:
    """Limits the size of a log file while another process writes it.

    If the file is larger than `PROCESS_LOG_BYTES`, only its last MiB is kept. The check runs in a thread, so it works
    even if the event loop is blocked. The writer must have opened the file for appending, so that it continues at the
    new end.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name=f"log of {log.name}").start()

    def stop(self) -> None:
        """Stop watching after the writer has ended. A second call has no effect."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_LOG_CHECK_S):
            with contextlib.suppress(OSError):
                if self._log.stat().st_size > PROCESS_LOG_BYTES:
                    tail = read_log_end(self._log, _LOG_KEPT_BYTES)
                    os.truncate(self._log, 0)
                    with self._log.open("ab") as file:
                        file.write(_LOG_NOTICE % (PROCESS_LOG_BYTES // MIB) + tail.partition(b"\n")[2])


def read_log_end(log: Path, size: int = _LOG_TAIL_BYTES) -> bytes:
    """Return the last bytes of a log, or b"" if the log cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)
    except OSError:
        return b""


class ChildProcess:
    """A child process in its own session, created by `start_process`. The caller must end it."""

    def __init__(self, process: subprocess.Popen[bytes], token: str, log: Path, keep_log: bool) -> None:
        self._process = process
        self._token = token
        self._log = log
        self._log_limit = LogLimit(log)
        self._keep_log = keep_log
        self._ended = False
        self._last_output: bytes | None = None

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the child's session and process group."""
        return self._process.pid

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """The standard input and output of a child that was started with `piped`. The caller must close them."""
        assert self._process.stdin is not None and self._process.stdout is not None, (
            "the process was not started with piped=True"
        )
        return self._process.stdin, self._process.stdout

    @property
    def returncode(self) -> int | None:
        """The exit status, which is negative for a signal; None while the child is running."""
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        try:
            # Inspect the child without reaping it: until `end`, its id cannot be reused, so signals reach no other
            # process.
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._process.poll()
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def log_tail(self, lines: int = 10) -> str:
        """Return the last lines of the output. Each line is cut to 500 characters."""
        output = read_log_end(self._log) if self._last_output is None else self._last_output
        written = output.decode("utf-8", "replace").replace("\0", "").rstrip().splitlines()
        return "\n".join(
            line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in written[-lines:]
        )

    async def end(self, grace_s: float = 3.0) -> None:
        """End the child and its descendants with SIGTERM, and after `grace_s` seconds with SIGKILL.

        A second call has no effect.
        """
        if self._ended:
            return
        self._ended = True
        with anyio.CancelScope(shield=True):
            for pid in self._running_pids():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
            end = time.monotonic() + grace_s
            while time.monotonic() < end and (self.returncode is None or self._running_pids()):  # noqa: ASYNC110
                await anyio.sleep(0.02)
            await anyio.to_thread.run_sync(process_guardian.kill_all, self._token, (self.pid,))
            _guard().forget(self.pid)
            await anyio.to_thread.run_sync(self._process.wait)
        self._log_limit.stop()
        self._last_output = read_log_end(self._log)
        if not self._keep_log:
            remove_folder(self._log.parent)
        elif not self._last_output:
            self._log.unlink(missing_ok=True)

    def _running_pids(self) -> list[int]:
        """Return the pids of the child and its descendants that are still running."""
        return process_guardian.find_processes(self._token, (self.pid,))


async def start_process(
    command: Sequence[str], *, cwd: Path | None, env: Mapping[str, str], log_name: str, piped: bool = False
) -> ChildProcess:
    """Start a child in its own session.

    By default, its input is empty and its output goes to a log file. With `piped`, both are pipes.
    """
    guard, token, log_folder = _guard(), secrets.token_hex(8), LOG_FOLDER.get()
    log = _new_log(log_folder or temporary_folder("log-"), log_name)
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: ASYNC220 - with no await in it, no cancellation can lose the child
                list(command),
                cwd=cwd,
                env={**env, MARK: f"{guard.mark()}:{token}"},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        log.unlink() if log_folder else remove_folder(log.parent)
        problem = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{shlex.join(command):.200} cannot be started: {problem}") from error
    guard.watch(process.pid)
    return ChildProcess(process, token, log, keep_log=log_folder is not None)


def _new_log(folder: Path, name: str) -> Path:
    """Create a log file. A number is added to its name if the name is taken."""
    make_private_folder(folder, parents=True, exist_ok=True)
    while True:
        number = _log_numbers[folder / name] = _log_numbers.get(folder / name, 0) + 1
        path = folder / (f"{name}.log" if number == 1 else f"{name}-{number}.log")
        try:
            path.touch(FILE_MODE, exist_ok=False)
        except FileExistsError:
            continue  # created by an earlier process of the same run
        return path


def lock_file(descriptor: int) -> None:
    """Lock an open file until it is closed or this process ends; raise an OSError if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
