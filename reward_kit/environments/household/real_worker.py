"""The worker process in which TextWorld's engine plays: it blocks, and its planner may take seconds or crash.

    python -m reward_kit.environments.household.real_worker

It reads one request as JSON per line from standard input and answers each with one line: `{"ok": ...}`, or
`{"error": message}` where the request is wrong. What the engine's libraries print goes to standard error.
Requests: `{"op": "load", "problem": {...}}`, `{"op": "load", "path": "game.tw-pddl"}`, `{"op": "step", "command"}`,
`{"op": "expert"}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from reward_kit.environments.household.pddl import entity_names, game_data
from reward_kit.environments.household.problem import Problem
from reward_kit.errors import ConfigError, RewardKitError

PACKAGES = ("textworld", "alfworld", "fast_downward")


def require_packages() -> None:
    """Check that the real engine is installed.

    Raises:
        ConfigError: a package is missing; the message says what to install.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the real household engine needs {', '.join(missing)}: pip install 'reward-kit[text-games]' "
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


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end. An error that is not ours ends the process, with its traceback on stderr."""
    try:
        game = Game()
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    operations: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "load": game.load,
        "step": game.step,
        "expert": game.expert,
    }
    print(json.dumps({"ok": "ready"}), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"ok": operations[request["op"]](request)}
        except RewardKitError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Keep the pipe to ourselves, so that nothing which prints can break the protocol."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
