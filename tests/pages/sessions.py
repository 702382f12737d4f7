"""A bash and a Python process for each page, which keep their state between blocks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_LOOK_S = 0.02

# Executes what it is sent, one JSON line a block, and says what that printed or how it failed.
_PYTHON = """
import contextlib, io, json, linecache, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, "")
names = {"__name__": "__main__", "__builtins__": __builtins__}
for line in sys.stdin:
    block = json.loads(line)
    linecache.cache[block["name"]] = (len(block["code"]), None, block["code"].splitlines(True), block["name"])
    printed, failure = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], block["name"], "exec"), names)
    except BaseException:
        failure = traceback.format_exc()
    print(json.dumps([printed.getvalue(), failure]), file=answers, flush=True)
"""


class Output(NamedTuple):
    """The output of a command, and its exit status."""

    stdout: str
    stderr: str
    status: int


class Bash:
    """A shell in its own process group, which is killed with it."""

    def __init__(self, folder: Path, environment: Mapping[str, str], scratch: Path) -> None:
        self._scratch = scratch
        self._calls = 0
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, timeout_s: float, until: str | None = None) -> Output:
        """Run a command, and wait until it has printed a text if one is given.

        Raises:
            TimeoutError: it did not end, or did not print that.
        """
        self._calls += 1
        out, err, status = (self._scratch / f"{self._calls}.{kind}" for kind in ("out", "err", "status"))
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{{ {command}\n}} >{out} 2>{err} </dev/null; echo $? >{status}.part\n")
        self._shell.stdin.write(f"mv {status}.part {status}\n")
        self._shell.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while not status.exists() or (until is not None and until not in _output(out) + _output(err)):
            if time.monotonic() > deadline or self._shell.poll() is not None:
                waited = f"to say {until!r}" if until and status.exists() else "to end"
                raise TimeoutError(f"waited {timeout_s:.0f} s for `{command}` {waited}\n{_output(out)}\n{_output(err)}")
            time.sleep(_LOOK_S)
        return Output(_output(out), _output(err), int(status.read_text()))

    def close(self) -> None:
        """Kill the shell and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGTERM)
        try:
            self._shell.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()


class Python:
    """An interpreter that executes blocks in one namespace."""

    def __init__(self, folder: Path, environment: Mapping[str, str], executable: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [executable, "-W", "error", "-c", _PYTHON],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, code: str, name: str) -> tuple[str, str | None]:
        """Run a block; return its output, and its traceback if it failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"code": code, "name": name}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            return "", f"the interpreter ended, with status {self._process.wait()}"
        printed, failure = json.loads(line)
        return printed, failure

    def close(self) -> None:
        """Kill the interpreter and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _output(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
