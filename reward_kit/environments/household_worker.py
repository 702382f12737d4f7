"""The worker process in which TextWorld's engine plays: it blocks, and its planner may take seconds or crash.

    python -m reward_kit.environments.household_worker

Requests, as `engine_worker` has them: `{"op": "load", "problem": {...}}`, `{"op": "load", "path": "game.tw-pddl"}`,
`{"op": "step", "command"}`, `{"op": "expert"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reward_kit.environments.engine_worker import Operations, run
from reward_kit.environments.household_engine import entity_names, game_data
from reward_kit.environments.household_problems import Problem
from reward_kit.errors import ConfigError, how_to_install

PACKAGES = ("textworld", "alfworld", "fast_downward")


def require_packages() -> None:
    """Check that the real engine is installed.

    Raises:
        ConfigError: a package is missing; the message says what to install.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the real household engine needs {', '.join(missing)}; {how_to_install('text-games')}, "
            "with Python 3.11 or 3.12, where TextWorld runs (the resource alfworld needs nothing)"
        )


class Game:
    """One engine with one game at a time."""

    def __init__(self) -> None:
        require_packages()
        infos = import_module("textworld").EnvInfos(won=True, admissible_commands=True)
        self._env = import_module("textworld.envs.pddl").PddlEnv(infos)
        # The demangler names the published games; a problem of ours brings its own names.
        demangler = import_module("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
        self._published = demangler(self._env)
        data = resources.files("alfworld.data")
        self._domain = data.joinpath("alfred.pddl").read_text()
        self._grammar = data.joinpath("alfred.twl2").read_text()

    def operations(self) -> Operations:
        """What can be asked of it."""
        return {"load": self.load, "step": self.step, "expert": self.expert}

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start the game of a problem or of a file."""
        if "path" in request:
            self._published.load(str(_game_file(request["path"])))
        else:
            problem = Problem.from_json(request["problem"])
            self._env.load(game_data(problem, self._domain, self._grammar))
            for key, name in entity_names(problem).items():
                self._env._entity_infos[key].name = name
        return _view(self._env.reset())

    def step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        return _view(self._env.step(request["command"])[0])

    def expert(self, request: Mapping[str, Any]) -> list[str]:
        """The planner's commands from the present state; none where it finds no plan."""
        return list(self._env._pddl_state.replan(self._env._entity_infos))


def _game_file(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no game file: {path}")
    try:
        missing = {"pddl_domain", "grammar", "pddl_problem"} - set(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"not a game file: {path}: {error}") from None
    if missing:
        raise ConfigError(f"not a game file: {path}: {', '.join(sorted(missing))} missing")
    return file


def _view(state: Mapping[str, Any]) -> dict[str, Any]:
    won = bool(state["won"])
    return {
        "observation": state["feedback"],
        "commands": state["admissible_commands"],
        "reward": int(won),
        "done": won or bool(state["lost"]),
        "won": won,
    }


if __name__ == "__main__":
    run(lambda: Game().operations())
