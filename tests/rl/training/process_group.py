"""The command line in several processes as started by `torchrun`: forks of a process that imported it.

Run as a script it is a server: for each line of JSON, with `arguments`, `cwd` and `processes`, it forks so many and
writes a line with their process ids, and, when all have ended, one with their exit codes. Like torchrun it sends
SIGTERM to the others when one has failed, and SIGKILL to those that are still there long after.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

GRACE_S = 30.0
ROOT = Path(__file__).parents[3]


class GroupResult(NamedTuple):
    """Exit codes of the processes, negative for signals, and their combined output."""

    codes: list[int]
    stdout: str
    stderr: str


class ProcessGroup:
    """The client of the fork server."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.rl.training.process_group"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *arguments: str, cwd: Path, processes: int = 2) -> list[int]:
        """Start this many processes of `reward-kit` with the arguments; return the process ids by rank."""
        self._cwd = cwd
        request = {"arguments": arguments, "cwd": str(cwd), "processes": processes}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def end(self) -> GroupResult:
        """Wait until all processes have ended."""
        codes = self._answer()
        return GroupResult(codes, (self._cwd / "stdout").read_text(), (self._cwd / "stderr").read_text())

    def call(self, *arguments: str, cwd: Path, processes: int = 2) -> GroupResult:
        """Start the processes and wait until all have ended."""
        self.start(*arguments, cwd=cwd, processes=processes)
        return self.end()

    def _answer(self) -> list[int]:
        assert self._server.stdout is not None
        answer: list[int] = json.loads(self._server.stdout.readline())
        return answer

    def close(self) -> None:
        """Stop the server."""
        self._server.communicate(timeout=60)


def serve() -> None:
    """Answer requests until the input ends; never returns in a fork."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as asked:
            asked.bind(("localhost", 0))
            port = asked.getsockname()[1]
        for name in ("stdout", "stderr"):
            (Path(request["cwd"]) / name).write_text("")
        count = request["processes"]
        pids = [fork(request, rank, {"WORLD_SIZE": str(count), "MASTER_PORT": str(port)}) for rank in range(count)]
        answers.write(f"{json.dumps(pids)}\n")
        answers.flush()
        answers.write(f"{json.dumps(codes_of(pids))}\n")
        answers.flush()


def fork(request: dict[str, Any], rank: int, environment: dict[str, str]) -> int:
    """Start a process that becomes `reward-kit`; return its id."""
    if not (pid := os.fork()):
        become(request, {**environment, "MASTER_ADDR": "localhost", "RANK": str(rank), "LOCAL_RANK": str(rank)})
    return pid


def become(request: dict[str, Any], environment: dict[str, str]) -> NoReturn:
    """Become one of the processes."""
    from reward_kit.cli.main import main

    os.chdir(request["cwd"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    sys.argv = ["reward-kit", *request["arguments"]]
    try:
        main()
    finally:  # not the server's cleaning up
        sys.stdout.flush()
        sys.stderr.flush()
        code = sys.exc_info()[1]
        os._exit(code.code if isinstance(code, SystemExit) and isinstance(code.code, int) else 70)


def codes_of(pids: Sequence[int]) -> list[int]:
    """Return the exit codes of processes; once one fails, the others are ended."""
    codes: dict[int, int] = {}
    kill_at = None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        left = [pid for pid in pids if pid not in codes]
        if any(codes.values()) and kill_at is None:
            kill_at = time.monotonic() + GRACE_S
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        if kill_at is not None and time.monotonic() > kill_at:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    import gc

    import reward_kit.agent.policies.hf_policy
    import reward_kit.cli.training
    import reward_kit.report.run_page  # noqa: F401

    gc.freeze()  # a collection in a fork would copy every page it looks at
    serve()
