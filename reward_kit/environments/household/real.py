"""TextWorld's engine for household problems and published games, played in a worker process of its own.

The engine blocks, its libraries print, and its planner is C++ that may hang or crash. None of it can harm this
process: a worker that dies or does not answer in time is one `EnvironmentFailure`, with the last lines it wrote.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from reward_kit.environments.household.problem import Problem
from reward_kit.environments.household.view import View
from reward_kit.errors import ConfigError, EnvironmentFailure

GAME_FILE = "game.tw-pddl"
_ROOT = str(Path(__file__).resolve().parents[3])
_WORKER = "reward_kit.environments.household.real_worker"
_LONGEST_ANSWER = 16_000_000
_LOG_LINES = 10
_UNPLAYABLE = ("movable", "Sliced")


def game_files(folder: str | Path | None = None) -> list[Path]:
    """The published games under a folder, by default under `ALFWORLD_DATA`, sorted; none where that is not set.

    Games with movable receptacles or sliced objects are left out: they ask for what the text domain cannot do.

    Raises:
        ConfigError: there is no such folder.
    """
    named = os.environ.get("ALFWORLD_DATA", "") if folder is None else folder
    if not named:
        return []
    root = Path(named).expanduser()
    if not root.is_dir():
        raise ConfigError(f"ALFWORLD_DATA: no folder {root}")
    found = sorted(root.rglob(GAME_FILE))
    return [path for path in found if not any(word in str(path.relative_to(root)) for word in _UNPLAYABLE)]


class RealEngine:
    """One game at a time on TextWorld's engine. `start` first, `close` last; one request at a time.

    Args:
        timeout: seconds the worker has for one answer.
        worker: the command that starts it; by default our own, with this Python.
    """

    def __init__(self, timeout: float = 60.0, worker: Sequence[str] | None = None) -> None:
        self._timeout = timeout
        self._worker = [sys.executable, "-m", _WORKER] if worker is None else list(worker)
        self._process: Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._log: IO[bytes] | None = None
        self._answering = False
        self._moved = False
        self._plan: list[str] | None = None

    async def start(self) -> None:
        """Start the worker.

        Raises:
            ConfigError: a package is missing.
            EnvironmentFailure: the worker does not start.
        """
        path = os.pathsep.join(part for part in (_ROOT, os.environ.get("PYTHONPATH", "")) if part)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = await anyio.open_process(
            self._worker,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._answers = BufferedByteReceiveStream(self._process.stdout)
        try:
            await self._receive()
        except ConfigError:
            await self.close()
            raise

    async def load(self, source: Problem | str | Path) -> View:
        """Start the game of a problem, or of a `game.tw-pddl` file; the view of its beginning.

        Raises:
            ConfigError: there is no such file, or it is no game.
            EnvironmentFailure: the worker died or does not answer.
        """
        self._plan, self._moved = None, False
        return _view(await self._ask(_load_request(source)))

    async def step(self, command: str) -> View:
        """Carry out one command; one that is not admissible changes nothing.

        Raises:
            EnvironmentFailure: the worker died or does not answer.
        """
        self._moved = True
        return _view(await self._ask({"op": "step", "command": command}))

    async def expert(self) -> list[str]:
        """The planner's commands from the beginning to the goal; none where it finds no plan.

        It is asked once a game, before the first step, because it may take seconds; later calls repeat the answer.

        Raises:
            EnvironmentFailure: a step was taken before it was asked, the worker died, or it does not answer.
        """
        if self._plan is None:
            if self._moved:
                raise EnvironmentFailure("household engine: the planner is asked before the first step")
            self._plan = list(await self._ask({"op": "expert"}))
        return list(self._plan)

    async def close(self) -> None:
        """End the worker, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.aclose()
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        if self._process is None or self._process.stdin is None:
            raise EnvironmentFailure("household engine: not running")
        if self._answering:
            # A call before this one was cancelled, and its answer would be taken for this one's.
            await self._fail("an answer was not waited for")
        try:
            await self._process.stdin.send(json.dumps(request).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._fail(await self._death())
        return await self._receive()

    async def _receive(self) -> Any:
        assert self._answers is not None
        self._answering = True
        try:
            with anyio.fail_after(self._timeout):
                line = await self._answers.receive_until(b"\n", _LONGEST_ANSWER)
        except TimeoutError:
            await self._fail(f"no answer in {self._timeout:g} s")
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            await self._fail(await self._death())
        self._answering = False
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["ok"]

    async def _death(self) -> str:
        assert self._process is not None
        with anyio.move_on_after(1.0):
            return f"the worker died (exit code {await self._process.wait()})"
        return "the worker closed its pipe"

    async def _fail(self, what: str) -> NoReturn:
        """End the worker and raise, with the last lines it wrote."""
        said = _last_lines(self._log)
        await self.close()
        raise EnvironmentFailure(f"household engine: {what}{': ' if said else ''}{said}") from None


def _load_request(source: Problem | str | Path) -> dict[str, Any]:
    if isinstance(source, Problem):
        return {"op": "load", "problem": source.to_json()}
    return {"op": "load", "path": str(Path(source).expanduser().absolute())}


def _last_lines(log: IO[bytes] | None) -> str:
    if log is None:
        return ""
    log.seek(0)
    return "\n".join(log.read().decode("utf-8", "replace").rstrip().splitlines()[-_LOG_LINES:])


def _view(answer: Mapping[str, Any]) -> View:
    commands = tuple(answer["commands"])
    return View(answer["observation"], commands, float(answer["reward"]), answer["done"], answer["won"])
