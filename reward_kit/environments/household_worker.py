"""TextWorld's engine for household problems: the PDDL of the problems, and the worker process that runs the engine.

The requests (see `engine_worker`) are `{"op": "load", "problem": {...}}`, `{"op": "load", "path": "game.tw-pddl"}`,
`{"op": "step", "command"}` and `{"op": "expert"}`. The engine lists everything in the order of the PDDL names, which
are the problem's names with padded numbers. The texts show the problem's names, which are assigned to the engine's
entities after loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reward_kit.environments.engine_worker import Operations, run
from reward_kit.environments.household_problems import KNIVES, Problem, TaskType, can_hold, pddl_name
from reward_kit.errors import ConfigError, install_hint

PACKAGES = ("textworld", "alfworld", "fast_downward")
_AGENT, _START = "agent1", "loc_00"
_NAMED_BY_DOMAIN = {"sinkbasin", "microwave", "fridge"}
_FLAGS = ("cleanable", "heatable", "coolable", "sliceable", "toggleable", "pickupable")
_TRANSFORMED = {
    TaskType.CLEAN: " (cleanable ?o) (isClean ?o)",
    TaskType.HEAT: " (heatable ?o) (isHot ?o)",
    TaskType.COOL: " (coolable ?o) (isCool ?o)",
}


def game_data(problem: Problem, domain: str, grammar: str) -> dict[str, Any]:
    """Return the content of a `game.tw-pddl` file.

    The file contains the text of ALFWorld's `alfred.pddl` and `alfred.twl2`.
    """
    grammar = grammar.replace("UNKNOWN GOAL.", problem.goal)
    return {"pddl_domain": domain, "grammar": grammar, "pddl_problem": pddl_problem(problem), "solvable": True}


def entity_names(problem: Problem) -> dict[str, str]:
    """Return a mapping from the PDDL names of all receptacles and things to their names in the problem."""
    names = [*(item.name for item in problem.receptacles), *(item.name for item in problem.things)]
    return {pddl_name(name): name for name in names}


def pddl_problem(problem: Problem) -> str:
    """Return the problem in PDDL for ALFWorld's domain."""
    place_of = {item.name: f"loc_{number:02d}" for number, item in enumerate(problem.receptacles, 1)}
    receptacle_types = sorted({item.type for item in problem.receptacles} | _NAMED_BY_DOMAIN)
    object_types = sorted({item.type for item in problem.things} | KNIVES | {problem.target})
    objects = [
        f"{_AGENT} - agent",
        f"{' '.join([_START, *place_of.values()])} - location",
        f"{' '.join(pddl_name(item.name) for item in problem.receptacles)} - receptacle",
        f"{' '.join(pddl_name(item.name) for item in problem.things)} - object",
        f"{' '.join(f'{kind}Type' for kind in receptacle_types)} - rtype",
        f"{' '.join(f'{kind}Type' for kind in object_types)} - otype",
    ]
    facts = ["(= (total-cost) 0)", f"(atLocation {_AGENT} {_START})"]
    for receptacle in problem.receptacles:
        name = pddl_name(receptacle.name)
        facts.append(f"(receptacleAtLocation {name} {place_of[receptacle.name]})")
        facts.append(f"(receptacleType {name} {receptacle.type}Type)")
        if receptacle.openable:
            facts.append(f"(openable {name})")
    for thing in problem.things:
        name = pddl_name(thing.name)
        facts.append(f"(objectType {name} {thing.type}Type)")
        facts.append(f"(inReceptacle {name} {pddl_name(thing.at)})")
        facts.append(f"(objectAtLocation {name} {place_of[thing.at]})")
        facts += [f"({flag} {name})" for flag in _FLAGS if getattr(thing, flag)]
    for receptacle_type in receptacle_types:
        held = [kind for kind in object_types if can_hold(receptacle_type, kind)]
        facts += [f"(canContain {receptacle_type}Type {kind}Type)" for kind in held]
    lines = ["(define (problem household)", "(:domain alfred)", "(:objects", *objects, ")"]
    lines += ["(:init", *facts, ")", "(:goal", _goal(problem), ")"]
    return "\n".join([*lines, "(:metric minimize (total-cost))", ")"])


def _goal(problem: Problem) -> str:
    """Return ALFRED's goal for the task type, as a PDDL formula with existential quantifiers."""
    target, destination = f"{problem.target}Type", f"{problem.destination}Type"
    if problem.task_type is TaskType.LOOK_IN_LIGHT:
        lit = f"(objectType ?t {destination}) (toggleable ?t) (isToggled ?t) (inReceptacle ?t ?r)"
        near = "(receptacleAtLocation ?r ?l) (atLocation ?a ?l)"
        lamp = f"(exists (?t - object ?r - receptacle ?a - agent ?l - location) (and {lit} {near}))"
        return f"(and {lamp} (exists (?o - object ?a - agent) (and (objectType ?o {target}) (holds ?a ?o))))"
    placed = f"(objectType ?o {target}) (receptacleType ?r {destination}) (inReceptacle ?o ?r)"
    if problem.task_type is TaskType.PICK_TWO:
        second = f"(not (= ?o ?p)) (objectType ?p {target}) (inReceptacle ?p ?r)"
        return f"(exists (?r - receptacle ?o - object ?p - object) (and {placed} {second}))"
    return f"(exists (?r - receptacle ?o - object) (and {placed}{_TRANSFORMED.get(problem.task_type, '')}))"


class Game:
    """An engine that plays one game at a time."""

    def __init__(self) -> None:
        missing = [name for name in PACKAGES if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"alfworld_real needs {', '.join(missing)}; {install_hint('text-games')}. TextWorld requires "
                "Python 3.11 or 3.12. The resource alfworld works without these packages on any version of Python"
            )
        infos = import_module("textworld").EnvInfos(won=True, admissible_commands=True)
        self._env = import_module("textworld.envs.pddl").PddlEnv(infos)
        # The demangler assigns the names in published games. Generated problems define their own names.
        demangler = import_module("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
        self._published = demangler(self._env)
        data = resources.files("alfworld.data")
        self._domain = data.joinpath("alfred.pddl").read_text()
        self._grammar = data.joinpath("alfred.twl2").read_text()

    def operations(self) -> Operations:
        return {"load": self.load, "step": self.step, "expert": self.expert}

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "path" in request:
            self._published.load(str(_game_file(request["path"])))
        else:
            problem = Problem.from_json(request["problem"])
            self._env.load(game_data(problem, self._domain, self._grammar))
            for key, name in entity_names(problem).items():
                self._env._entity_infos[key].name = name
        return _view(self._env.reset())

    def step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return _view(self._env.step(request["command"])[0])

    def expert(self, request: Mapping[str, Any]) -> list[str]:
        """Return the planner's commands from the current state, or [] if it finds no plan."""
        return list(self._env._pddl_state.replan(self._env._entity_infos))


def _game_file(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no such game file: {path}")
    try:
        missing = {"pddl_domain", "grammar", "pddl_problem"} - set(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"not a game file: {path}: {error}") from None
    if missing:
        raise ConfigError(f"not a game file: {path}: missing {', '.join(sorted(missing))}")
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
