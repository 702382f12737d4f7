"""Household problems small enough to enumerate every state."""

from __future__ import annotations

import random

from reward_kit.environments.household_engine import HouseholdEngine, Tables
from reward_kit.environments.household_problems import OPENABLE, Problem, Receptacle, TaskType, Thing, can_hold

APPLIANCE = {TaskType.CLEAN: "sinkbasin", TaskType.HEAT: "microwave", TaskType.COOL: "fridge"}
FLAG = {TaskType.CLEAN: "cleanable", TaskType.HEAT: "heatable", TaskType.COOL: "coolable"}


def receptacle(name: str) -> Receptacle:
    return Receptacle(name, name.split()[0], name.split()[0] in OPENABLE)


def thing(name: str, at: str, *flags: str, fixed: bool = False) -> Thing:
    return Thing(name, name.split()[0], at, **dict.fromkeys(flags, True), pickupable=not fixed)


def household(
    task_type: TaskType, destination: str, receptacles: list[str], things: list[Thing], target: str = "mug"
) -> Problem:
    made = tuple(receptacle(name) for name in sorted(receptacles))
    return Problem("small", "train", task_type, target, destination, made, tuple(things), "small")


def random_household(task_type: TaskType, seed: int) -> Problem:
    """Return four receptacles, some with doors, and two or three mugs and cups; solvable or not."""
    rng = random.Random(f"{task_type} {seed}")
    appliance = APPLIANCE.get(task_type, "")
    names = ["cabinet 1", rng.choice(["cabinet 2", "countertop 1"]), "shelf 1"] + (
        [f"{appliance} 1"] if appliance else []
    )
    destination = rng.choice(["cabinet", "shelf", "cabinet", appliance or "shelf"])
    places = [name for name in names if can_hold(name.split()[0], "mug")]
    flags = [FLAG[task_type]] if task_type in FLAG else []
    kinds = ["mug 1", "mug 2", "cup 1"][: rng.randint(2, 3)] if rng.random() < 0.7 else ["cup 1", "mug 1"]
    things = [thing(name, rng.choice(places), *(flags if rng.random() < 0.8 else [])) for name in kinds]
    if task_type is TaskType.LOOK_IN_LIGHT:
        destination = "desklamp"
        lamps = [thing(f"desklamp {number}", rng.choice(places), "toggleable", fixed=True) for number in (1, 2)]
        things += lamps[: rng.randint(1, 2)]
    return household(task_type, destination, names, things)


def raw_state(engine: HouseholdEngine) -> tuple[object, ...]:
    """Return the complete state of an engine."""
    marks = (engine.clean, engine.hot, engine.cool, engine.sliced, engine.toggled)
    return (engine.at, engine.holding, tuple(engine.contents), engine.opened, *marks)


def all_states(problem: Problem | Tables) -> dict[tuple[object, ...], HouseholdEngine]:
    """Return every reachable state."""
    first = HouseholdEngine(problem)
    found = {raw_state(first): first}
    waiting = [first]
    while waiting:
        engine = waiting.pop()
        for command in engine.admissible():
            following = engine.fork()
            following.step(command)
            if (state := raw_state(following)) not in found:
                found[state] = following
                waiting.append(following)
    return found
