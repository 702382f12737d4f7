"""A household problem as PDDL and as the game data that TextWorld's engine loads.

Names in the PDDL are the problem's with their numbers padded ("mug 1" is `mug_01`): the engine lists everything in the
order of these names, which is then that of (type, number). The texts show the problem's own names, because the
worker gives them to the engine's entities after loading.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reward_kit.environments.household.domain import KNIVES, can_hold
from reward_kit.environments.household.problem import Problem, Receptacle, TaskType, Thing

AGENT = "agent1"
START = "loc_00"
_NAMED_BY_DOMAIN = ("sinkbasin", "microwave", "fridge")
_TASK_MARK = "UNKNOWN GOAL."
_FLAGS = ("cleanable", "heatable", "coolable", "sliceable", "toggleable", "pickupable")
_PROPERTY = {
    TaskType.CLEAN: ("cleanable", "isClean"),
    TaskType.HEAT: ("heatable", "isHot"),
    TaskType.COOL: ("coolable", "isCool"),
}


def pddl_name(name: str) -> str:
    """The PDDL name of "mug 1": `mug_01`. Its order is that of type and number, up to 99 of a type."""
    kind, number = name.split(" ")
    return f"{kind}_{int(number):02d}"


def pddl_problem(problem: Problem) -> str:
    """The PDDL problem text for ALFWorld's domain."""
    lines = ["(define (problem household)", "(:domain alfred)", "(:objects", *_objects(problem), ")"]
    lines += ["(:init", *_facts(problem), ")", "(:goal", _goal(problem), ")"]
    return "\n".join([*lines, "(:metric minimize (total-cost))", ")"])


def game_data(problem: Problem, domain: str, grammar: str) -> dict[str, Any]:
    """The content of a `game.tw-pddl` file.

    Args:
        problem: the problem.
        domain: the text of ALFWorld's `alfred.pddl`.
        grammar: the text of ALFWorld's `alfred.twl2`, in which the task stands for "UNKNOWN GOAL".
    """
    grammar = grammar.replace(_TASK_MARK, problem.goal)
    return {"pddl_domain": domain, "grammar": grammar, "pddl_problem": pddl_problem(problem), "solvable": True}


def entity_names(problem: Problem) -> dict[str, str]:
    """PDDL name -> name, for all receptacles and things."""
    names = [*(item.name for item in problem.receptacles), *(item.name for item in problem.things)]
    return {pddl_name(name): name for name in names}


def _objects(problem: Problem) -> list[str]:
    receptacles = [pddl_name(item.name) for item in problem.receptacles]
    things = [pddl_name(item.name) for item in problem.things]
    places = [START, *(_place(index) for index in range(len(receptacles)))]
    return [
        f"{AGENT} - agent",
        f"{' '.join(places)} - location",
        f"{' '.join(receptacles)} - receptacle",
        f"{' '.join(things)} - object",
        f"{' '.join(_types(_receptacle_types(problem)))} - rtype",
        f"{' '.join(_types(_object_types(problem)))} - otype",
    ]


def _facts(problem: Problem) -> list[str]:
    place_of = {item.name: _place(index) for index, item in enumerate(problem.receptacles)}
    facts = ["(= (total-cost) 0)", f"(atLocation {AGENT} {START})"]
    for receptacle in problem.receptacles:
        facts += _receptacle_facts(receptacle, place_of[receptacle.name])
    for thing in problem.things:
        facts += _thing_facts(thing, place_of[thing.at])
    for receptacle_type in _receptacle_types(problem):
        held = [kind for kind in _object_types(problem) if can_hold(receptacle_type, kind)]
        facts += [f"(canContain {_type(receptacle_type)} {_type(kind)})" for kind in held]
    return facts


def _receptacle_facts(receptacle: Receptacle, place: str) -> list[str]:
    name = pddl_name(receptacle.name)
    facts = [f"(receptacleAtLocation {name} {place})", f"(receptacleType {name} {_type(receptacle.type)})"]
    return [*facts, f"(openable {name})"] if receptacle.openable else facts


def _thing_facts(thing: Thing, place: str) -> list[str]:
    name = pddl_name(thing.name)
    facts = [f"(objectType {name} {_type(thing.type)})", f"(inReceptacle {name} {pddl_name(thing.at)})"]
    flags = [f"({flag} {name})" for flag in _FLAGS if getattr(thing, flag)]
    return [*facts, f"(objectAtLocation {name} {place})", *flags]


def _goal(problem: Problem) -> str:
    """ALFRED's goal for the task type: there are objects, and a receptacle, for which all of it holds."""
    target, destination = _type(problem.target), _type(problem.destination)
    if problem.task_type is TaskType.LOOK_IN_LIGHT:
        lit = f"(objectType ?t {destination}) (toggleable ?t) (isToggled ?t) (inReceptacle ?t ?r)"
        near = "(receptacleAtLocation ?r ?l) (atLocation ?a ?l)"
        lamp = f"(exists (?t - object ?r - receptacle ?a - agent ?l - location) (and {lit} {near}))"
        return f"(and {lamp} (exists (?o - object ?a - agent) (and (objectType ?o {target}) (holds ?a ?o))))"
    placed = f"(objectType ?o {target}) (receptacleType ?r {destination}) (inReceptacle ?o ?r)"
    if problem.task_type is TaskType.PICK_TWO:
        second = f"(not (= ?o ?p)) (objectType ?p {target}) (inReceptacle ?p ?r)"
        return f"(exists (?r - receptacle ?o - object ?p - object) (and {placed} {second}))"
    extra = " ".join(f"({word} ?o)" for word in _PROPERTY.get(problem.task_type, ()))
    return f"(exists (?r - receptacle ?o - object) (and {placed} {extra}))"


def _receptacle_types(problem: Problem) -> list[str]:
    return sorted({item.type for item in problem.receptacles} | set(_NAMED_BY_DOMAIN))


def _object_types(problem: Problem) -> list[str]:
    return sorted({item.type for item in problem.things} | KNIVES | {problem.target})


def _types(kinds: Iterable[str]) -> list[str]:
    return [_type(kind) for kind in kinds]


def _type(kind: str) -> str:
    return f"{kind}Type"


def _place(index: int) -> str:
    return f"loc_{index + 1:02d}"
