"""Records a few more episodes of the real engine: those that rules need which the others hardly ever come to.

    python tests/environments/household/record_directed.py

Needs `reward-kit[text-games]`. They are two objects put apart before they are put together, and an object that is
cooled and heated, or heated and cooled, before it is put where it belongs; a lamp that is used before the object is
taken, and a clean object that is put down and taken again. The format is that of `record_traces.py`.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from reward_kit.environments.household.generator import problem
from reward_kit.environments.household.problem import Problem, TaskType, Thing
from reward_kit.environments.household.real_worker import Game
from tests.environments.household.record_traces import SMALL, _change, _reach

OUT = Path(__file__).with_name("traces_directed.jsonl.xz")
EACH = 10


def apart_then_together(drawn: Problem) -> Iterator[str]:
    """The first object to one destination, the second to another, and then to the first."""
    one, two = (thing for thing in drawn.things if thing.type == drawn.target)
    here, there = [place.name for place in drawn.receptacles if place.type == drawn.destination][:2]
    for thing, place in ((one, here), (two, there)):
        yield from [
            *_reach(thing.at),
            f"take {thing.name} from {thing.at}",
            *_reach(place),
            f"move {thing.name} to {place}",
        ]
    yield from [f"take {two.name} from {there}", f"go to {here}", f"move {two.name} to {here}"]


def undone(drawn: Problem) -> Iterator[str]:
    """What is asked, the opposite, and the object to its place; then what is asked again, and to its place."""
    thing = target(drawn)
    place = next(place.name for place in drawn.receptacles if place.type == drawn.destination)
    heat, cool = (f"heat {thing.name} with microwave 1", f"cool {thing.name} with fridge 1")
    first, second = (heat, cool) if drawn.task_type is TaskType.HEAT else (cool, heat)
    yield from [*_reach(thing.at), f"take {thing.name} from {thing.at}"]
    for command in (first, second):
        yield from [f"go to {command.split(' with ')[1]}", command, f"examine {thing.name}"]
    yield from [*_reach(place), f"move {thing.name} to {place}", f"take {thing.name} from {place}"]
    yield from [f"go to {first.split(' with ')[1]}", first, f"go to {place}", f"move {thing.name} to {place}"]


def light_first(drawn: Problem) -> Iterator[str]:
    """The lamp is used, the object fetched, and brought to the lamp."""
    lamp = next(thing for thing in drawn.things if thing.type == drawn.destination)
    thing = target(drawn)
    yield from [f"go to {lamp.at}", f"use {lamp.name}", *_reach(thing.at), f"take {thing.name} from {thing.at}"]
    yield from ["look", f"go to {lamp.at}"]


def put_down_clean(drawn: Problem) -> Iterator[str]:
    """The object is cleaned, left in the sink, taken again and looked at."""
    thing, place = target(drawn), next(place.name for place in drawn.receptacles if place.type == drawn.destination)
    yield from [*_reach(thing.at), f"take {thing.name} from {thing.at}", "go to sinkbasin 1"]
    yield from [f"clean {thing.name} with sinkbasin 1", f"move {thing.name} to sinkbasin 1"]
    yield from [f"take {thing.name} from sinkbasin 1", f"examine {thing.name}"]
    yield from [*_reach(place), f"move {thing.name} to {place}"]


def target(drawn: Problem) -> Thing:
    """The one object of the asked type."""
    (thing,) = (thing for thing in drawn.things if thing.type == drawn.target)
    return thing


def is_for_one(drawn: Problem) -> bool:
    things = [thing for thing in drawn.things if thing.type == drawn.target]
    lamps = [thing.at for thing in drawn.things if thing.type == drawn.destination]
    return len(things) == 1 and things[0].at not in lamps and not things[0].at.startswith("sinkbasin")


def is_for_two(drawn: Problem) -> bool:
    places = [place for place in drawn.receptacles if place.type == drawn.destination]
    things = [thing for thing in drawn.things if thing.type == drawn.target]
    return (
        len(places) > 1
        and len(things) == 2
        and not any(thing.at in {place.name for place in places} for thing in things)
    )


def is_for_both(drawn: Problem) -> bool:
    things = [thing for thing in drawn.things if thing.type == drawn.target]
    return len(things) == 1 and things[0].heatable and things[0].coolable


SCRIPTS: dict[TaskType, tuple[Callable[[Problem], Iterator[str]], Callable[[Problem], bool]]] = {
    TaskType.PICK_TWO: (apart_then_together, is_for_two),
    TaskType.HEAT: (undone, is_for_both),
    TaskType.COOL: (undone, is_for_both),
    TaskType.LOOK_IN_LIGHT: (light_first, is_for_one),
    TaskType.CLEAN: (put_down_clean, is_for_one),
}


def problems(task_type: TaskType) -> Iterator[Problem]:
    suitable = SCRIPTS[task_type][1]
    drawn = (problem("train", index, 5_000, task_type) for index in count())
    return islice((one for one in drawn if suitable(one) and len(one.receptacles) <= SMALL), EACH)


def record(game: Game, drawn: Problem) -> dict[str, Any]:
    """Play one episode by its script."""
    view = game.load({"problem": drawn.to_json()})
    start = [view["observation"], view["commands"], view["reward"], view["done"]]
    steps: list[list[Any]] = []
    for command in SCRIPTS[drawn.task_type][0](drawn):
        before, view = view["commands"], game.step({"command": command})
        steps.append([command, view["observation"], _change(before, view["commands"]), view["reward"], view["done"]])
    assert view["done"], drawn.id
    return {"kind": "directed", "problem": drawn.to_json(), "plan": None, "start": start, "steps": steps}


def main() -> None:
    """Record them all."""
    game = Game()
    lines = [
        json.dumps(record(game, drawn), separators=(",", ":")) + "\n"
        for task_type in SCRIPTS
        for drawn in problems(task_type)
    ]
    OUT.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(lines)} episodes in {OUT}")


if __name__ == "__main__":
    main()
