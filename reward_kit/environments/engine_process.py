"""The client of `engine_worker`. The worker process runs a blocking engine and handles one request at a time.

If the worker dies, sends an invalid response or does not respond in time, the client raises an `EnvironmentFailure`
that contains the end of the worker's output. The worker runs in a private directory. When the client is closed, the
directory is removed, and all processes that the worker started are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from reward_kit.errors import ConfigError, EnvironmentFailure
from reward_kit.processes import LogLimit, child_environment, read_log_end, remove_folder, temporary_folder
from reward_kit.safe_input import ENGINE_ANSWER_BYTES, format_size

_ROOT = str(Path(__file__).resolve().parents[2])
_LOG_LINES = 10


def worker_command(module: str) -> list[str]:
    """Return the command that runs one of the package's worker modules with the current Python."""
    return [sys.executable, "-m", module]


class EngineProcess:
    """A worker process. Call `start` first, then send one request at a time, and call `close` last.

    Args:
        name: the name of the engine in messages, such as "household engine".
        command: the program and its arguments. The program can import this package.
        timeout: the number of seconds to wait for each response, including the first one.
        environment: environment variables to add for the worker.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, timeout: float = 60.0, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        program, *arguments = command
        # A relative path would be resolved in the worker's directory.
        self._command = [str(Path(program).absolute()) if os.sep in program else program, *arguments]
        self._timeout = timeout
        self._environment = dict(environment or {})
        self._process: Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._log: Path | None = None
        self._exits = contextlib.AsyncExitStack()
        self._answering = False

    async def start(self) -> Any:
        """Start the worker, and return its first response.

        Raises:
            ConfigError: a package that the worker needs is missing, or the program cannot be run.
            EnvironmentFailure: the worker does not start.
        """
        folder = temporary_folder("engine-")
        self._exits.callback(remove_folder, folder)
        self._log = folder / ".engine.log"
        path = os.pathsep.join(part for part in (_ROOT, os.environ.get("PYTHONPATH", "")) if part)
        extra = {"PYTHONPATH": path, "TMPDIR": str(folder), **self._environment}
        try:
            with self._log.open("ab") as errors:
                self._exits.callback(LogLimit(self._log).stop)
                environment = child_environment(extra)
                self._process = await anyio.open_process(
                    self._command, stderr=errors, cwd=folder, env=environment, start_new_session=True
                )
            self._exits.push_async_callback(self._kill)
            assert self._process.stdout is not None
            self._answers = BufferedByteReceiveStream(self._process.stdout)
            return await self._receive(self._timeout)
        except OSError as error:
            await self.close()
            raise ConfigError(f"{self._name}: {self._command[0]} cannot be started: {error.strerror}") from error
        except BaseException:
            await self.close()
            raise

    async def ask(self, request: Mapping[str, Any], timeout: float | None = None) -> Any:
        """Send one request, and wait at most `timeout` seconds for the response.

        The request's `op` names the operation.

        Raises:
            ConfigError: the request is invalid. The worker keeps running.
            EnvironmentFailure: the worker died, timed out or sent an invalid response. The worker is killed.
        """
        if self._process is None or self._process.stdin is None:
            raise EnvironmentFailure(f"{self._name}: not running, because it was closed or never set up")
        if self._answering:
            # The response to the cancelled request would be mistaken for the response to this one.
            await self._fail("an earlier request was cancelled before it received a response")
        try:
            await self._process.stdin.send(json.dumps(request).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._fail(await self._death())
        return await self._receive(self._timeout if timeout is None else timeout)

    async def close(self) -> None:
        """Stop the worker and the processes that it started. Calling this method again has no effect."""
        with anyio.CancelScope(shield=True):
            await self._exits.aclose()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.aclose()

    async def _receive(self, timeout: float) -> Any:
        assert self._answers is not None
        self._answering = True
        try:
            with anyio.fail_after(timeout):
                line = await self._answers.receive_until(b"\n", ENGINE_ANSWER_BYTES)
        except TimeoutError:
            await self._fail(f"no response within {timeout:g} s")
        except anyio.DelimiterNotFound:
            await self._fail(f"a response larger than the limit of {format_size(ENGINE_ANSWER_BYTES)}")
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            await self._fail(await self._death())
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not ("ok" in answer or "error" in answer):
            await self._fail(f"invalid response {line[:100]!r}")
        self._answering = False
        if "error" in answer:
            raise ConfigError(str(answer["error"]))
        return answer["ok"]

    async def _death(self) -> str:
        assert self._process is not None
        with anyio.move_on_after(1.0):
            return f"the worker died (exit code {await self._process.wait()})"
        return "the worker closed its pipe"

    async def _fail(self, what: str) -> NoReturn:
        """Stop the worker, and raise an `EnvironmentFailure` with the last lines of its output."""
        lines: list[str] = []
        if self._log is not None:
            lines = read_log_end(self._log).decode("utf-8", "replace").rstrip().splitlines()[-_LOG_LINES:]
        await self.close()
        raise EnvironmentFailure(": ".join([f"{self._name}: {what}", *(["\n".join(lines)] if lines else [])])) from None
