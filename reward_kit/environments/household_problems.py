"""Household problems in ALFWorld's domain (`alfred.pddl` in the PyPI package `alfworld`), and a seeded generator.

The containment table in `data/household.json` follows ALFRED's table. A layout consists of a room and the number of
receptacles of each type. The hash of a layout determines its split, so no layout occurs in two splits. Every problem is
solvable, and none is already solved at the start.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError, did_you_mean


class TaskType(StrEnum):
    """ALFWorld's six task types. The values are the names used in its game files."""

    PICK_AND_PLACE = "pick_and_place_simple"
    LOOK_IN_LIGHT = "look_at_obj_in_light"
    CLEAN = "pick_clean_then_place_in_recep"
    HEAT = "pick_heat_then_place_in_recep"
    COOL = "pick_cool_then_place_in_recep"
    PICK_TWO = "pick_two_obj_and_place"


SPLITS = ("train", "development", "held_out")
SMALLEST_ROOM, LARGEST_ROOM = 6, 16
FEWEST_THINGS, MOST_THINGS = 6, 14
_DATA: dict[str, Any] = json.loads(
    Path(__file__).with_name("data").joinpath("household.json").read_text(encoding="utf-8")
)
OPENABLE, CLEANABLE, HEATABLE, COOLABLE, SLICEABLE, KNIVES, LAMPS = (
    frozenset(_DATA[name].split())
    for name in ("openable", "cleanable", "heatable", "coolable", "sliceable", "knives", "lamps")
)
HOLDS = {receptacle: frozenset(objects.split()) for receptacle, objects in _DATA["holds"].items()}
"""The object types that can be moved to a receptacle, keyed by receptacle type."""
LAMP_PLACES = {lamp: tuple(places) for lamp, places in _DATA["lamp_places"].items()}
"""Receptacle types on which a lamp may stand. Lamps are never moved, so `HOLDS` does not list them."""
ROOMS = {room: tuple((kind, *bounds) for kind, bounds in kinds.items()) for room, kinds in _DATA["rooms"].items()}
"""The receptacle types of each room, and the minimum and maximum number of receptacles of each type."""
ROOM_OBJECTS = {room: frozenset(objects.split()) for room, objects in _DATA["room_objects"].items()}
TASK_ROOMS = {
    TaskType.PICK_AND_PLACE: ("bathroom", "bedroom", "kitchen", "livingroom"),
    TaskType.LOOK_IN_LIGHT: ("bedroom", "livingroom"),
    TaskType.CLEAN: ("bathroom", "kitchen"),
    TaskType.HEAT: ("kitchen",),
    TaskType.COOL: ("kitchen",),
    TaskType.PICK_TWO: ("bathroom", "bedroom", "kitchen", "livingroom"),
}
APPLIANCES = {TaskType.CLEAN: "sinkbasin", TaskType.HEAT: "microwave", TaskType.COOL: "fridge"}
"""The receptacle type that a task type needs in addition to its destination."""
_SUITABLE = {TaskType.CLEAN: CLEANABLE, TaskType.HEAT: HEATABLE, TaskType.COOL: COOLABLE}
_STATE_WORD = {TaskType.CLEAN: "clean ", TaskType.HEAT: "hot ", TaskType.COOL: "cool "}
_SPLIT_OF_TENTH = ("train",) * 6 + ("development",) * 2 + ("held_out",) * 2
_MOST_OF_A_TYPE = 3
_SECOND_TARGET = 0.3
_SECOND_LAMP = 0.2
_ALREADY_THERE = 0.15


def can_hold(receptacle_type: str, object_type: str) -> bool:
    """Return True if an object of type `object_type` can be moved to a receptacle of type `receptacle_type`."""
    return object_type in HOLDS.get(receptacle_type, ())


def pddl_name(name: str) -> str:
    """Return a PDDL name, such as `mug_01` for "mug 1".

    The names sort by type and then by number if there are at most 99 objects of each type.
    """
    kind, number = name.split(" ")
    return f"{kind}_{int(number):02d}"


@dataclass(frozen=True, slots=True)
class Receptacle:
    """An object that can hold other objects and has its own location. `name` is "<type> <number>"."""

    name: str
    type: str
    openable: bool = False


@dataclass(frozen=True, slots=True)
class Thing:
    """An object. `name` is "<type> <number>"; `at` is the name of the receptacle that initially contains it."""

    name: str
    type: str
    at: str
    cleanable: bool = False
    heatable: bool = False
    coolable: bool = False
    sliceable: bool = False
    toggleable: bool = False
    pickupable: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """A household problem.

    `target` is the type of the requested object. `destination` is the type of the receptacle to put the object in or,
    for `look_at_obj_in_light`, the type of the lamp. `receptacles` and `things` are sorted by name. `id` is unique
    across all splits.
    """

    id: str
    split: str
    task_type: TaskType
    target: str
    destination: str
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    layout: str

    @property
    def goal(self) -> str:
        """The task as the agent sees it."""
        if self.task_type is TaskType.LOOK_IN_LIGHT:
            return f"look at {self.target} under the {self.destination}."
        if self.task_type is TaskType.PICK_TWO:
            return f"put two {self.target} in {self.destination}."
        return f"put a {_STATE_WORD.get(self.task_type, '')}{self.target} in {self.destination}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"task_type": self.task_type.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Parse the result of `to_json`.

        Raises:
            ConfigError: a field is missing or unknown, or a name or type is not in the required form.
        """
        try:
            receptacles = tuple(Receptacle(**item) for item in data["receptacles"])
            things = tuple(Thing(**item) for item in data["things"])
            rest = {**data, "receptacles": receptacles, "things": things, "task_type": TaskType(data["task_type"])}
            problem = cls(**rest)
            # Types and names become parts of PDDL and of TextWorld's grammar, in which {…} is evaluated as Python.
            items: list[Receptacle | Thing] = [*receptacles, *things]
            for word in (problem.target, problem.destination, *(item.type for item in items)):
                if not re.fullmatch(r"[A-Za-z]+", word):
                    raise ValueError(f"{word!r:.60} is not a type; a type is one word of letters")
            for name in (*(item.name for item in items), *(item.at for item in things)):
                if not re.fullmatch(r"[A-Za-z]+ [0-9]{1,4}", name):
                    raise ValueError(f'{name!r:.60} is not a valid name; expected "<type> <number>"')
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a household problem: {error}") from None
        return problem


def generate_problem(split: str, index: int, seed: int = 0, task_type: TaskType | str | None = None) -> Problem:
    """Generate the problem determined by the arguments.

    By default, the task types alternate with `index`.

    Raises:
        ConfigError: the split or the task type is unknown.
    """
    if split not in SPLITS:
        raise ConfigError(f"household problems: unknown split {split!r}{did_you_mean(split, SPLITS)}")
    try:
        kind = list(TaskType)[index % len(TaskType)] if task_type is None else TaskType(task_type)
    except ValueError:
        hint = did_you_mean(str(task_type), TaskType)
        raise ConfigError(f"household problems: unknown task type {task_type!r}{hint}") from None
    name = f"{split}-{kind.value}-{seed}-{index}"
    rng = random.Random(_hash(name))
    room, counts, layout = _draw_layout(rng, split, TASK_ROOMS[kind])
    target, destination = _draw_task(rng, kind, room, sorted(counts))
    receptacles = tuple(
        Receptacle(f"{type_} {number}", type_, type_ in OPENABLE)
        for type_, total in sorted(counts.items())
        for number in range(1, total + 1)
    )
    placed = _place_things(rng, kind, target, destination, room, receptacles)
    numbers: Counter[str] = Counter()
    things = []
    for type_, place in placed:
        numbers[type_] += 1
        things.append((type_, numbers[type_], place))
    numbered = tuple(
        Thing(
            name=f"{type_} {number}",
            type=type_,
            at=place,
            cleanable=type_ in CLEANABLE,
            heatable=type_ in HEATABLE,
            coolable=type_ in COOLABLE,
            sliceable=type_ in SLICEABLE,
            toggleable=type_ in LAMPS,
            pickupable=type_ not in LAMPS,
        )
        for type_, number, place in sorted(things)
    )
    return Problem(name, split, kind, target, destination, receptacles, numbered, layout)


def split_of_layout(layout: str) -> str:
    """Return the split to which a layout belongs."""
    return _SPLIT_OF_TENTH[_hash(f"layout {layout}") % len(_SPLIT_OF_TENTH)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _draw_layout(rng: random.Random, split: str, rooms: Sequence[str]) -> tuple[str, dict[str, int], str]:
    """Draw layouts until one belongs to the split.

    Return its room, the number of receptacles of each type, and its name.
    """
    while True:
        room = rng.choice(rooms)
        size = rng.randint(SMALLEST_ROOM, LARGEST_ROOM)
        counts = {kind: least for kind, least, _ in ROOMS[room]}
        spare = [kind for kind, least, most in ROOMS[room] for _ in range(most - least)]
        for kind in rng.sample(spare, min(len(spare), size - sum(counts.values()))):
            counts[kind] += 1
        present = {kind: number for kind, number in counts.items() if number}
        layout = f"{room}: " + ", ".join(f"{number} {kind}" for kind, number in sorted(present.items()))
        if split_of_layout(layout) == split:
            return room, present, layout


def _draw_task(rng: random.Random, task_type: TaskType, room: str, present: Sequence[str]) -> tuple[str, str]:
    """Draw the target and the destination.

    The destination is drawn first, because otherwise most destinations would be countertops.
    """
    objects = sorted(ROOM_OBJECTS[room])
    if task_type is TaskType.LOOK_IN_LIGHT:
        lamps = [lamp for lamp, places in LAMP_PLACES.items() if any(kind in places for kind in present)]
        targets = [kind for kind in objects if any(can_hold(home, kind) for home in present)]
        return rng.choice(targets), rng.choice(lamps)
    suitable = _SUITABLE.get(task_type)
    options = {
        destination: [
            kind
            for kind in objects
            if can_hold(destination, kind)
            and (suitable is None or kind in suitable)
            and any(home != destination and can_hold(home, kind) for home in present)
        ]
        for destination in present
        if destination != APPLIANCES.get(task_type)
    }
    destination = rng.choice([kind for kind, targets in options.items() if targets])
    return rng.choice(options[destination]), destination


def _place_things(
    rng: random.Random,
    task_type: TaskType,
    target: str,
    destination: str,
    room: str,
    receptacles: Sequence[Receptacle],
) -> list[tuple[str, str]]:
    """Return the targets, the lamps and the distractors, each with the receptacle in which it starts."""
    wanted = rng.randint(FEWEST_THINGS, MOST_THINGS)
    homes = [item for item in receptacles if can_hold(item.type, target)]
    away = [item.name for item in homes if item.type != destination]
    there = [item.name for item in homes if item.type == destination]
    count = (2 if task_type is TaskType.PICK_TWO else 1) + (rng.random() < _SECOND_TARGET)
    places = [rng.choice(away) for _ in range(count)]
    # One target may be at its destination already, unless that solves the task.
    if there and task_type is not TaskType.PICK_AND_PLACE and rng.random() < _ALREADY_THERE:
        places[0] = rng.choice(there)
    placed = [(target, place) for place in places]
    types = {item.type for item in receptacles}
    if task_type is TaskType.LOOK_IN_LIGHT:
        lamps = [destination]
        if rng.random() < _SECOND_LAMP:
            lamps.append(rng.choice([lamp for lamp, stands in LAMP_PLACES.items() if types & set(stands)]))
        for lamp in lamps:
            placed.append((lamp, rng.choice([item.name for item in receptacles if item.type in LAMP_PLACES[lamp]])))
    others = [kind for kind in sorted(ROOM_OBJECTS[room] - {target}) if any(can_hold(home, kind) for home in types)]
    numbers: Counter[str] = Counter()
    while len(placed) < wanted:
        kind = rng.choice(others)
        if numbers[kind] < _MOST_OF_A_TYPE:
            numbers[kind] += 1
            placed.append((kind, rng.choice([item.name for item in receptacles if can_hold(item.type, kind)])))
    return placed
