"""A watchdog process that kills leftover children of an ended process and removes their files.

`processes` runs this file by its path (`python -I -S process_guardian.py TOKEN FOLDER`), so the file imports only the
standard library. Its standard input is a pipe from the watched process. The lines are `+ID` and `-ID` for sessions that
began and ended, `!` followed by a command as JSON, and `done` if nothing is left to clean up. The commands remove what
is not a process of this machine, such as containers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

MARK = "REWARD_KIT_GUARD"
"""The environment variable that every child inherits. It contains the tokens of its guardians, joined by colons."""
_QUIET_CHECKS = 5
_COMMAND_S = 60.0
_LONGEST_S = 60.0


def main() -> None:
    """Wait until the pipe is closed, then clean up."""
    token, folder = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Do not keep the working directory in use.
    os.chdir("/")
    sessions: set[int] = set()
    commands: list[bytes] = []
    with open(0, "rb") as pipe:
        for line in pipe:
            if line == b"done\n":
                return
            if line.endswith(b"\n") and line[:1] == b"!":
                commands.append(line[1:])
            elif line.endswith(b"\n"):
                (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
    kill_all(token, sessions, quiet_checks=_QUIET_CHECKS)
    remove_tree(folder)
    if commands:
        run_commands(commands)
        # A service may complete a request whose sender was killed.
        time.sleep(_QUIET_CHECKS)
        run_commands(commands)


def run_commands(commands: Collection[bytes]) -> None:
    """Run commands, each a list of words as JSON. Failures are ignored."""
    import json
    import subprocess

    for command in commands:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                json.loads(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_COMMAND_S,
                check=False,
            )


def kill_all(token: str, sessions: Collection[int] = (), *, quiet_checks: int = 1) -> None:
    """Kill every process that has the token or belongs to one of the sessions, until no such process is left."""
    quiet, end = 0, time.monotonic() + _LONGEST_S
    forbidden: set[int] = set()
    while time.monotonic() < end:
        pids = set(find_processes(token, sessions)) - forbidden
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                forbidden.add(pid)
        quiet = 0 if pids else quiet + 1
        if quiet >= quiet_checks:
            return
        time.sleep(0.01 if pids else 0.05)


def find_processes(token: str, sessions: Collection[int] = ()) -> list[int]:
    """Return the pids of other processes that have the token or belong to a session, except zombies."""
    if not os.path.isdir("/proc/self"):  # noqa: PTH112
        return [-session for session in sessions if _has_members(session)]
    mark, own_pid = token.encode(), os.getpid()
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [pid for pid in numbers if pid != own_pid and (_session(pid) in sessions or mark in _read(pid, "environ"))]


def _session(pid: int) -> int:
    """Return the session of a process, or 0 if the process has ended."""
    # The name in parentheses may contain any character; state, parent, group and session follow the last parenthesis.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[3]) if len(fields) > 3 and fields[0] not in (b"Z", b"X") else 0


def _read(pid: int, name: str) -> bytes:
    # The environment of a zombie is empty, and the environment of another user's process cannot be read.
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def _has_members(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except OSError:
        return False
    return True


def remove_tree(path: str) -> None:
    """Remove a directory, even if parts of it are read-only; do nothing if it does not exist."""
    # Imported here because this halves the start time of a guardian.
    import shutil

    try:
        shutil.rmtree(path)
    except OSError:
        for folder, names, _ in os.walk(path):
            for name in names:
                inner = os.path.join(folder, name)  # noqa: PTH118
                if not os.path.islink(inner):  # noqa: PTH114
                    with contextlib.suppress(OSError):
                        os.chmod(inner, 0o700)  # noqa: PTH101
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
