"""TextWorld's engine for household problems and published games, played in a worker process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.environments.engine_process import EngineProcess, worker_command
from reward_kit.environments.household.problem import Problem
from reward_kit.environments.household.view import View
from reward_kit.errors import ConfigError, EnvironmentFailure

GAME_FILE = "game.tw-pddl"
_WORKER = "reward_kit.environments.household.real_worker"
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
        self._engine = EngineProcess("household engine", worker or worker_command(_WORKER), timeout=timeout)
        self._moved = False
        self._plan: list[str] | None = None

    async def start(self) -> None:
        """Start the worker.

        Raises:
            ConfigError: a package is missing.
            EnvironmentFailure: the worker does not start.
        """
        await self._engine.start()

    async def load(self, source: Problem | str | Path) -> View:
        """Start the game of a problem, or of a `game.tw-pddl` file; the view of its beginning.

        Raises:
            ConfigError: there is no such file, or it is no game.
            EnvironmentFailure: the worker died or does not answer.
        """
        self._plan, self._moved = None, False
        return _view(await self._engine.ask(_load_request(source)))

    async def step(self, command: str) -> View:
        """Carry out one command; one that is not admissible changes nothing.

        Raises:
            EnvironmentFailure: the worker died or does not answer.
        """
        self._moved = True
        return _view(await self._engine.ask({"op": "step", "command": command}))

    async def expert(self) -> list[str]:
        """The planner's commands from the beginning to the goal; none where it finds no plan.

        It is asked once a game, before the first step, because it may take seconds; later calls repeat the answer.

        Raises:
            EnvironmentFailure: a step was taken before it was asked, the worker died, or it does not answer.
        """
        if self._plan is None:
            if self._moved:
                raise EnvironmentFailure("household engine: the planner is asked before the first step")
            self._plan = list(await self._engine.ask({"op": "expert"}))
        return list(self._plan)

    async def close(self) -> None:
        """End the worker, whatever it is doing."""
        await self._engine.close()


def _load_request(source: Problem | str | Path) -> dict[str, Any]:
    if isinstance(source, Problem):
        return {"op": "load", "problem": source.to_json()}
    return {"op": "load", "path": str(Path(source).expanduser().absolute())}


def _view(answer: Mapping[str, Any]) -> View:
    commands = tuple(answer["commands"])
    return View(answer["observation"], commands, float(answer["reward"]), answer["done"], answer["won"])
