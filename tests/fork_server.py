"""Forks the command line: run as a script by `command_line`, it imports the program once and runs it in each fork.

A fork is a process like any other, with its own arguments, environment, folder, output and exit code; only what every
start imports is there already, which is most of the time that a short run takes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from typing import Any

from reward_kit.cli import main as command_line

USED_BY_ALL = ("anyio._backends._asyncio", "jinja2.sandbox", "rich.console", "rich.live", "rich.table")
IMPORTED_LATE = ("reward_kit.cli.training",)  # by the verbs that learn


def serve(control: socket.socket) -> None:
    """Fork for each request and tell how the fork ended; returns in a fork, and exits where no more are asked for."""
    while True:
        told, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 2)
        if not told:
            sys.exit()
        pid = os.fork()
        if not pid:
            control.close()
            become(json.loads(told), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())
        control.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def become(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Make this process what `python -m reward_kit.cli.main` is before it starts."""
    for descriptor, place in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv = [command_line.__file__, *request["arguments"]]
    globals()["__package__"] = "reward_kit.cli"  # by which click finds the name that the usage line shows


if __name__ == "__main__":
    for name in (
        *USED_BY_ALL,
        *IMPORTED_LATE,
        *map(command_line.module_of, command_line.VERBS),
    ):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page it looks at
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
    command_line.main()
