"""Run `reward-kit` in a new process, or in a fork of a process that has imported it already."""

from __future__ import annotations

import atexit
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")
Done = subprocess.CompletedProcess[str]


def command(*arguments: str) -> list[str]:
    """Return the command of a new process."""
    return [sys.executable, "-m", "reward_kit.cli.main", *arguments]


def call_new_process(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> Done:
    """Run it in a new process, for tests of its startup."""
    return subprocess.run(command(*arguments), cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)


def call(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> Done:
    """Run it in a fork, or in a new process if the environment affects the interpreter's startup."""
    env = dict(os.environ if env is None else env)
    if any(env.get(name) != os.environ.get(name) for name in env.keys() | os.environ if name.startswith("PYTHON")):
        return call_new_process(*arguments, cwd=cwd, env=env, timeout_s=timeout_s)
    control = _fork_server()
    request = json.dumps({"arguments": arguments, "cwd": str(cwd), "env": env}).encode()
    output, errors = os.pipe(), os.pipe()
    try:
        socket.send_fds(control, [request], [output[1], errors[1]])
    finally:
        os.close(output[1])
        os.close(errors[1])
    pid = int(control.recv(32))
    try:
        output_and_errors = _read_to_the_end([output[0], errors[0]], time.monotonic() + timeout_s)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        control.recv(32)
        raise subprocess.TimeoutExpired(command(*arguments), timeout_s) from None
    return subprocess.CompletedProcess(command(*arguments), int(control.recv(32)), *map(_text, output_and_errors))


def _read_to_the_end(descriptors: list[int], deadline: float) -> list[bytes]:
    """Read each pipe until its end, and close it."""
    read = {descriptor: bytearray() for descriptor in descriptors}
    try:
        with selectors.DefaultSelector() as selector:
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    if data := os.read(key.fd, 1 << 16):
                        read[key.fd] += data
                    else:
                        selector.unregister(key.fd)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return [bytes(data) for data in read.values()]


def _text(data: bytes) -> str:
    """Decode like `text=True`."""
    return data.decode().replace("\r\n", "\n").replace("\r", "\n")


@functools.cache
def _fork_server() -> socket.socket:
    """Start the server of this process and return its socket; the server ends when it is closed."""
    control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        server = subprocess.Popen(
            [sys.executable, str(SERVER), str(far.fileno())], pass_fds=[far.fileno()], stdin=subprocess.DEVNULL
        )

    def end() -> None:
        control.close()
        server.wait(timeout=10)

    atexit.register(end)
    return control
