"""Which parts of a household task an agent has done: facts for reward functions, and no rewards themselves."""

from __future__ import annotations

from reward_kit.environments.household.native import HouseholdEngine
from reward_kit.environments.household.problem import TaskType

MILESTONES = ("found", "taken", "transformed", "placed")
"""In their usual order: an object of the asked type was seen; held; clean, hot or cool as asked (or the lamp was
used); and put where it belongs. Each is reached at most once. Not every task has all: nothing is placed under a lamp,
nothing is transformed where a thing is only moved. Of two objects, the first one that is put in its place counts."""


def milestones(engine: HouseholdEngine, held_before: int) -> list[str]:
    """The milestones whose condition holds after a command; `held_before` is what was held before it."""
    tables, at = engine.tables, engine.at
    held = engine.holding >= 0 and bool(tables.targets >> engine.holding & 1)
    seen = at >= 0 and engine.is_open(at) and bool(engine.contents[at] & tables.targets)
    put_down = held_before >= 0 > engine.holding and at in tables.destinations
    holds = {
        "found": held or seen,
        "taken": held,
        "transformed": _is_transformed(engine),
        "placed": put_down and bool(engine.ready() >> held_before & 1),
    }
    return [name for name in MILESTONES if holds[name]]


def _is_transformed(engine: HouseholdEngine) -> bool:
    if engine.tables.problem.task_type is TaskType.LOOK_IN_LIGHT:
        return bool(engine.toggled & engine.tables.lamps)
    # Only the tasks that ask for a change have things to transform.
    return bool(engine.ready() & engine.tables.transformable)
