"""A fork server for the command line, started by `command_line`: it imports the program once and runs it in forks.

A fork has its own arguments, environment, working directory, output and exit code. It skips the imports, which take
most of the time of a short run.
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
    """Fork for each request and send its pid and exit code; return in a fork, and exit on end of file."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 2)
        if not request:
            sys.exit()
        pid = os.fork()
        if not pid:
            control.close()
            become(json.loads(request), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())
        control.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def become(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Set this process up like a new `python -m reward_kit.cli.main`."""
    for descriptor, target in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv = [command_line.__file__, *request["arguments"]]
    globals()["__package__"] = "reward_kit.cli"  # click derives the program name of the usage line from it


if __name__ == "__main__":
    for name in (
        *USED_BY_ALL,
        *IMPORTED_LATE,
        *map(command_line.module_of, command_line.VERBS),
    ):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page it visits
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
    command_line.main()
