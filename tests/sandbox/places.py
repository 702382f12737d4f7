"""Places to reach a sandbox at, for tests: pipes to the real server, or to a program that only pretends to be one."""

from __future__ import annotations

import shlex
import stat
import sys
from pathlib import Path

from reward_kit.sandbox.back_ends import BackEnd, Launch

SERVE = (sys.executable, "-c", "from reward_kit.cli.main import main; main()", "sandbox-serve")
PRETEND = """
import json, struct, sys, time

def write(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()

def send(head, body=b""):
    head = head if isinstance(head, bytes) else json.dumps(head).encode()
    write(struct.pack("!4sII", b"RKS1", len(head), len(body)) + head + body)

def take():
    magic, head, body = struct.unpack("!4sII", sys.stdin.buffer.read(12))
    head = json.loads(sys.stdin.buffer.read(head))
    return head, sys.stdin.buffer.read(body)

def greet(version=None, protocol=1):
    import importlib.metadata
    send({"protocol": protocol, "reward_kit": version or importlib.metadata.version("reward-kit"), "processors": 2})
    take()
    send({"strength": "namespaces", "refusal": ""})

FINE = {"kind": "ok", "failure": None, "stdout": "", "stderr": "", "is_output_cut": False, "wall_s": 0.0, "cpu_s": 0.0,
        "peak_memory_mb": 0.0, "exit": 0}

"""
NO_WALLS = """
import errno, sys
from reward_kit.sandbox.kernel import bpf, libc, seccomp, syscalls
denied = {"x86_64": (272, 444), "aarch64": (97, 444)}[syscalls.machine()]
deny = bpf.answer(bpf.errno_action(errno.EPERM))
libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1, "")
seccomp.load(bpf.program(syscalls.audit_arch(syscalls.machine()), dict.fromkeys(denied, deny), bpf.answer(bpf.ALLOW)))
from reward_kit.cli.main import main
main()
"""
"""The command line where a filter refuses `unshare` and Landlock, as in a container that lets nobody confine."""


class Pipe(BackEnd):
    """The real server as a child of this process; with a script, a program that pretends to be one."""

    def __init__(self, script: str | None = None) -> None:
        self.name = "pipe:test"
        self.launches = 0
        self._command = SERVE if script is None else (sys.executable, "-S", "-c", PRETEND + script)
        if script is not None and "greet(" in script:
            self._command = (sys.executable, "-c", PRETEND + script)

    def launch(self, paths=(), limits=None) -> Launch:
        self.launches += 1
        return Launch(self._command)


def write_ssh(folder: Path) -> str:
    """A program that takes what `ssh` takes and runs the command here; the value of `REWARD_KIT_SSH`."""
    return _written(folder / "ssh", 'for last; do :; done\nexec sh -c "$last"\n')


def write_engine(folder: Path) -> str:
    """A program that takes what `docker` takes, notes it, and serves here, where nothing can be confined."""
    serve = shlex.join([sys.executable, "-c", NO_WALLS, "sandbox-serve"])
    return _written(folder / "docker", f'echo "$@" >> {folder}/calls\ntest "$1" = run || exit 0\nexec {serve}\n')


def _written(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
