"""Household problems: what stands where, what is asked, and the domain's constants. Shared by both engines.

The domain is ALFWorld's (`alfred.pddl` of the PyPI package `alfworld`): an agent in one room goes to receptacles,
opens and closes them, takes and moves objects, and cleans, heats, cools, slices or uses them. Names read as there:
"fridge 1".
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from reward_kit.errors import ConfigError, did_you_mean


class TaskType(StrEnum):
    """The six task types of ALFWorld, by the names its game files use."""

    PICK_AND_PLACE = "pick_and_place_simple"
    LOOK_IN_LIGHT = "look_at_obj_in_light"
    CLEAN = "pick_clean_then_place_in_recep"
    HEAT = "pick_heat_then_place_in_recep"
    COOL = "pick_cool_then_place_in_recep"
    PICK_TWO = "pick_two_obj_and_place"


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place that holds objects. `name` is "<type> <number>"; it stands at a location of its own."""

    name: str
    type: str
    openable: bool = False


@dataclass(frozen=True, slots=True)
class Thing:
    """An object. `name` is "<type> <number>", `at` the name of the receptacle it is in or on at the start."""

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
    """One household problem.

    Attributes:
        id: unique over all splits.
        split: "train", "development" or "held_out".
        task_type: what is asked.
        target: the type of the object asked for ("mug").
        destination: the type of the receptacle it belongs in; for `look_at_obj_in_light` the type of the lamp.
        receptacles: in the order of their names.
        things: in the order of their names.
        layout: names the layout; problems of different splits share none.
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
        """The task as the agent reads it."""
        what = f"a {_STATE_WORD.get(self.task_type, '')}{self.target}"
        if self.task_type is TaskType.LOOK_IN_LIGHT:
            return f"look at {self.target} under the {self.destination}."
        if self.task_type is TaskType.PICK_TWO:
            return f"put two {self.target} in {self.destination}."
        return f"put {what} in {self.destination}."

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self) | {"task_type": self.task_type.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """The inverse of `to_json`.

        Raises:
            ConfigError: a field is missing or unknown, or a name or type is not a plain word.
        """
        try:
            receptacles = tuple(Receptacle(**item) for item in data["receptacles"])
            things = tuple(Thing(**item) for item in data["things"])
            rest = {**data, "receptacles": receptacles, "things": things, "task_type": TaskType(data["task_type"])}
            made = cls(**rest)
            made._check_words()
            return made
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a household problem: {error}") from None

    def _check_words(self) -> None:
        """Types and names become parts of PDDL and of TextWorld's grammar, in which {…} is evaluated as Python."""
        types = [self.target, self.destination, *(one.type for one in self.receptacles)]
        names = [*(one.name for one in self.receptacles), *(one.at for one in self.things)]
        types += [one.type for one in self.things]
        names += [one.name for one in self.things]
        for word in types:
            if not re.fullmatch(r"[A-Za-z]+", word):
                raise ValueError(f"{word!r:.60} is not a type, which is one word of letters")
        for name in names:
            if not re.fullmatch(r"[A-Za-z]+ [0-9]{1,4}", name):
                raise ValueError(f'{name!r:.60} is not a name: names are "<type> <number>"')


_STATE_WORD = {TaskType.CLEAN: "clean ", TaskType.HEAT: "hot ", TaskType.COOL: "cool "}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPENABLE = _words("cabinet drawer fridge microwave safe")

CLEANABLE = _words(
    "apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug pan plate pot potato soapbar "
    "spatula spoon tomato"
)

HEATABLE = _words("apple bread cup egg mug plate potato tomato")

COOLABLE = _words("apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle")

SLICEABLE = _words("apple bread egg lettuce potato tomato")

KNIVES = _words("butterknife knife")

LAMPS = _words("desklamp floorlamp")

APPLIANCES = MappingProxyType({TaskType.CLEAN: "sinkbasin", TaskType.HEAT: "microwave", TaskType.COOL: "fridge"})

"""The receptacle type that a task needs beside its destination."""

_SURFACE = _words(
    "alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone cloth creditcard cup "
    "dishsponge egg fork glassbottle handtowel kettle keychain knife ladle laptop lettuce mug newspaper pan papertowel "
    "pen pencil peppershaker plate pot potato remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle "
    "statue tennisracket tissuebox toiletpaper tomato vase watch wateringcan winebottle"
)

_SEAT = _words("basketball book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol")

_FURNITURE = _words(
    "alarmclock basketball book bowl box candle cd cellphone cloth creditcard cup glassbottle keychain laptop mug "
    "newspaper pen pencil plate remotecontrol spraybottle statue tennisracket tissuebox toiletpaper vase watch "
    "wateringcan winebottle"
)

HOLDS = MappingProxyType(
    {
        "armchair": _SEAT,
        "bathtubbasin": _words("cloth dishsponge handtowel soapbar"),
        "bed": _words("baseballbat basketball book cellphone laptop newspaper pillow tennisracket"),
        "cabinet": _words(
            "book bowl box candle cd cloth cup dishsponge glassbottle handtowel kettle ladle mug newspaper pan "
            "peppershaker plate pot saltshaker soapbar soapbottle spraybottle tissuebox toiletpaper vase wateringcan "
            "winebottle"
        ),
        "coffeemachine": _words("mug"),
        "coffeetable": _SURFACE,
        "countertop": _SURFACE,
        "desk": _FURNITURE | {"soapbottle"},
        "diningtable": _SURFACE,
        "drawer": _words(
            "book butterknife candle cd cellphone cloth creditcard dishsponge fork handtowel keychain knife ladle "
            "newspaper pen pencil peppershaker remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle "
            "tissuebox toiletpaper watch wateringcan"
        ),
        "dresser": _FURNITURE,
        "fridge": _words("apple bowl bread cup egg glassbottle lettuce mug pan plate pot potato tomato winebottle"),
        "garbagecan": _words(
            "apple bread cd cloth dishsponge egg handtowel lettuce newspaper papertowel pen pencil potato soapbar "
            "soapbottle spraybottle tissuebox toiletpaper tomato winebottle"
        ),
        "handtowelholder": _words("handtowel"),
        "microwave": _words("apple bowl bread cup egg glassbottle mug plate potato tomato"),
        "ottoman": _SEAT,
        "safe": _words("cd cellphone creditcard keychain statue vase watch"),
        "shelf": _words(
            "alarmclock book bowl box candle cd cellphone cloth creditcard cup dishsponge glassbottle handtowel kettle "
            "keychain mug newspaper papertowel pen pencil peppershaker plate pot remotecontrol saltshaker soapbar "
            "soapbottle spraybottle statue tissuebox toiletpaper vase watch wateringcan winebottle"
        ),
        "sidetable": _SURFACE,
        "sinkbasin": _words(
            "apple bowl butterknife cloth cup dishsponge egg fork glassbottle handtowel kettle knife ladle lettuce mug "
            "pan plate pot potato soapbar spatula spoon tomato"
        ),
        "sofa": _SEAT,
        "stoveburner": _words("kettle pan pot"),
        "toilet": _words(
            "candle cloth dishsponge handtowel newspaper papertowel soapbar soapbottle spraybottle tissuebox "
            "toiletpaper"
        ),
        "toiletpaperhanger": _words("toiletpaper"),
    }
)

"""Receptacle type -> the object types that can be moved to it."""

LAMP_PLACES = MappingProxyType(
    {"desklamp": ("desk", "dresser", "shelf", "sidetable"), "floorlamp": ("coffeetable", "dresser", "sidetable")}
)

"""Where a lamp may stand. Lamps are never moved, so this is no matter of `HOLDS`."""

ROOMS = MappingProxyType(
    {
        "kitchen": (
            ("fridge", 1, 1),
            ("microwave", 1, 1),
            ("sinkbasin", 1, 1),
            ("countertop", 1, 3),
            ("cabinet", 1, 6),
            ("coffeemachine", 0, 1),
            ("diningtable", 0, 2),
            ("drawer", 0, 4),
            ("garbagecan", 0, 1),
            ("shelf", 0, 3),
            ("stoveburner", 0, 4),
        ),
        "bathroom": (
            ("sinkbasin", 1, 2),
            ("toilet", 1, 1),
            ("countertop", 0, 1),
            ("bathtubbasin", 0, 1),
            ("cabinet", 1, 5),
            ("drawer", 0, 4),
            ("garbagecan", 0, 1),
            ("handtowelholder", 0, 2),
            ("shelf", 0, 3),
            ("sidetable", 0, 1),
            ("toiletpaperhanger", 0, 1),
        ),
        "bedroom": (
            ("bed", 1, 1),
            ("desk", 1, 2),
            ("drawer", 1, 6),
            ("armchair", 0, 1),
            ("dresser", 0, 1),
            ("garbagecan", 0, 1),
            ("safe", 0, 1),
            ("shelf", 0, 5),
            ("sidetable", 0, 2),
        ),
        "livingroom": (
            ("sofa", 1, 1),
            ("coffeetable", 1, 2),
            ("sidetable", 1, 3),
            ("armchair", 0, 2),
            ("cabinet", 0, 3),
            ("diningtable", 0, 1),
            ("drawer", 0, 4),
            ("dresser", 0, 1),
            ("garbagecan", 0, 1),
            ("ottoman", 0, 1),
            ("safe", 0, 1),
            ("shelf", 0, 4),
        ),
    }
)

"""Room -> its receptacle types, each with the least and the greatest number of them."""

ROOM_OBJECTS = MappingProxyType(
    {
        "kitchen": _words(
            "apple bowl bread butterknife cup dishsponge egg fork glassbottle kettle knife ladle lettuce mug pan "
            "papertowel peppershaker plate pot potato saltshaker soapbottle spatula spoon statue tomato vase "
            "winebottle"
        ),
        "bathroom": _words(
            "candle cloth dishsponge handtowel newspaper papertowel soapbar soapbottle spraybottle tissuebox "
            "toiletpaper"
        ),
        "bedroom": _words(
            "alarmclock baseballbat basketball book bowl box cd cellphone cloth creditcard keychain laptop mug "
            "newspaper pen pencil pillow remotecontrol statue tennisracket tissuebox vase watch"
        ),
        "livingroom": _words(
            "book bowl box candle cellphone creditcard keychain laptop newspaper pen pencil pillow plate remotecontrol "
            "statue tissuebox vase watch wateringcan"
        ),
    }
)

TASK_ROOMS = MappingProxyType(
    {
        TaskType.PICK_AND_PLACE: ("bathroom", "bedroom", "kitchen", "livingroom"),
        TaskType.LOOK_IN_LIGHT: ("bedroom", "livingroom"),
        TaskType.CLEAN: ("bathroom", "kitchen"),
        TaskType.HEAT: ("kitchen",),
        TaskType.COOL: ("kitchen",),
        TaskType.PICK_TWO: ("bathroom", "bedroom", "kitchen", "livingroom"),
    }
)


def can_hold(receptacle_type: str, object_type: str) -> bool:
    """Whether an object of one type can be moved to a receptacle of the other."""
    return object_type in HOLDS.get(receptacle_type, ())


SPLITS = ("train", "development", "held_out")

SMALLEST_ROOM, LARGEST_ROOM = 6, 16

FEWEST_THINGS, MOST_THINGS = 6, 14

_SPLIT_OF_TENTH = ("train",) * 6 + ("development",) * 2 + ("held_out",) * 2

_MOST_OF_A_TYPE = 3

_SECOND_TARGET = 0.3

_SECOND_LAMP = 0.2

_ALREADY_THERE = 0.15

_PROPERTY = {TaskType.CLEAN: CLEANABLE, TaskType.HEAT: HEATABLE, TaskType.COOL: COOLABLE}


class _Task(NamedTuple):
    type: TaskType
    target: str
    destination: str


def generate(
    split: str, count: int, seed: int = 0, task_types: Sequence[TaskType | str] | None = None
) -> Iterator[Problem]:
    """The first `count` problems of a split, the task types in turn.

    Args:
        split: "train", "development" or "held_out".
        count: how many.
        seed: other seeds give other problems of the same split.
        task_types: which to ask, by default all six.

    Raises:
        ConfigError: an unknown split or task type.
    """
    types = list(TaskType) if task_types is None else [_task_type(name) for name in task_types]
    if not types:
        raise ConfigError("household problems: task_types: none given")
    for index in range(count):
        yield generate_problem(split, index, seed, types[index % len(types)])


def generate_problem(split: str, index: int, seed: int = 0, task_type: TaskType | str | None = None) -> Problem:
    """One problem; the same arguments always give the same. By default the task types take turns with `index`.

    Raises:
        ConfigError: an unknown split or task type.
    """
    if split not in SPLITS:
        raise ConfigError(f"household problems: unknown split {split!r}{did_you_mean(split, SPLITS)}")
    asked = list(TaskType)[index % len(TaskType)] if task_type is None else _task_type(task_type)
    name = f"{split}-{asked.value}-{seed}-{index}"
    rng = random.Random(_hash(name))
    room, counts = _layout(rng, split, TASK_ROOMS[asked])
    task = _task(rng, asked, room, sorted(counts))
    receptacles = _receptacles(counts)
    return Problem(
        id=name,
        split=split,
        task_type=asked,
        target=task.target,
        destination=task.destination,
        receptacles=receptacles,
        things=_things(rng, task, room, receptacles),
        layout=_layout_name(room, counts),
    )


def split_of_layout(layout: str) -> str:
    """The split to which a layout belongs."""
    return _SPLIT_OF_TENTH[_hash(f"layout {layout}") % len(_SPLIT_OF_TENTH)]


def _task_type(name: TaskType | str) -> TaskType:
    try:
        return TaskType(name)
    except ValueError:
        raise ConfigError(f"household problems: unknown task type {name!r}{did_you_mean(name, TaskType)}") from None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _layout(rng: random.Random, split: str, rooms: Sequence[str]) -> tuple[str, dict[str, int]]:
    """A room and its receptacles; drawn until the layout is one of the split."""
    while True:
        room = rng.choice(rooms)
        size = rng.randint(SMALLEST_ROOM, LARGEST_ROOM)
        counts = {kind: least for kind, least, _ in ROOMS[room]}
        spare = [kind for kind, least, most in ROOMS[room] for _ in range(most - least)]
        for kind in rng.sample(spare, min(len(spare), size - sum(counts.values()))):
            counts[kind] += 1
        present = {kind: number for kind, number in counts.items() if number}
        if split_of_layout(_layout_name(room, present)) == split:
            return room, present


def _layout_name(room: str, counts: dict[str, int]) -> str:
    return f"{room}: " + ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))


def _receptacles(counts: dict[str, int]) -> tuple[Receptacle, ...]:
    return tuple(
        Receptacle(f"{kind} {number}", kind, kind in OPENABLE)
        for kind, total in sorted(counts.items())
        for number in range(1, total + 1)
    )


def _task(rng: random.Random, task_type: TaskType, room: str, present: Sequence[str]) -> _Task:
    """What is asked; the destination is drawn first, so that a countertop, which holds everything, is not the rule."""
    objects = sorted(ROOM_OBJECTS[room])
    if task_type is TaskType.LOOK_IN_LIGHT:
        lamps = [lamp for lamp, places in LAMP_PLACES.items() if any(kind in places for kind in present)]
        targets = [kind for kind in objects if _homes(kind, present)]
        return _Task(task_type, rng.choice(targets), rng.choice(lamps))
    suitable = _PROPERTY.get(task_type)
    options = {
        destination: [
            kind
            for kind in objects
            if can_hold(destination, kind)
            and (suitable is None or kind in suitable)
            and any(home != destination for home in _homes(kind, present))
        ]
        for destination in present
        if destination != APPLIANCES.get(task_type)
    }
    destination = rng.choice([kind for kind, targets in options.items() if targets])
    return _Task(task_type, rng.choice(options[destination]), destination)


def _homes(kind: str, present: Sequence[str]) -> list[str]:
    return [home for home in present if can_hold(home, kind)]


def _things(rng: random.Random, task: _Task, room: str, receptacles: Sequence[Receptacle]) -> tuple[Thing, ...]:
    """The targets, the lamps and the distractors, each in a place that can hold it."""
    wanted = rng.randint(FEWEST_THINGS, MOST_THINGS)
    placed = [(task.target, place) for place in _target_places(rng, task, receptacles)]
    if task.type is TaskType.LOOK_IN_LIGHT:
        placed += [(lamp, _lamp_place(rng, lamp, receptacles)) for lamp in _lamps(rng, task, receptacles)]
    types = {item.type for item in receptacles}
    others = [kind for kind in sorted(ROOM_OBJECTS[room] - {task.target}) if _homes(kind, sorted(types))]
    numbers: Counter[str] = Counter()
    while len(placed) < wanted:
        kind = rng.choice(others)
        if numbers[kind] < _MOST_OF_A_TYPE:
            numbers[kind] += 1
            placed.append((kind, rng.choice([item.name for item in receptacles if can_hold(item.type, kind)])))
    return _named(placed)


def _target_places(rng: random.Random, task: _Task, receptacles: Sequence[Receptacle]) -> list[str]:
    """Where the targets start: away from the destination, but for one that may lie there where this solves nothing."""
    homes = [item for item in receptacles if can_hold(item.type, task.target)]
    away = [item.name for item in homes if item.type != task.destination]
    there = [item.name for item in homes if item.type == task.destination]
    count = (2 if task.type is TaskType.PICK_TWO else 1) + (rng.random() < _SECOND_TARGET)
    places = [rng.choice(away) for _ in range(count)]
    if there and task.type is not TaskType.PICK_AND_PLACE and rng.random() < _ALREADY_THERE:
        places[0] = rng.choice(there)
    return places


def _lamps(rng: random.Random, task: _Task, receptacles: Sequence[Receptacle]) -> list[str]:
    if rng.random() >= _SECOND_LAMP:
        return [task.destination]
    types = {item.type for item in receptacles}
    possible = [lamp for lamp, places in LAMP_PLACES.items() if types & set(places)]
    return [task.destination, rng.choice(possible)]


def _lamp_place(rng: random.Random, lamp: str, receptacles: Sequence[Receptacle]) -> str:
    return rng.choice([item.name for item in receptacles if item.type in LAMP_PLACES[lamp]])


def _named(placed: Sequence[tuple[str, str]]) -> tuple[Thing, ...]:
    """Number the objects of each type, and list them by type and number."""
    numbers: Counter[str] = Counter()
    things = []
    for kind, place in placed:
        numbers[kind] += 1
        things.append((kind, numbers[kind], place))
    return tuple(_thing(f"{kind} {number}", kind, place) for kind, number, place in sorted(things))


def _thing(name: str, kind: str, place: str) -> Thing:
    return Thing(
        name=name,
        type=kind,
        at=place,
        cleanable=kind in CLEANABLE,
        heatable=kind in HEATABLE,
        coolable=kind in COOLABLE,
        sliceable=kind in SLICEABLE,
        toggleable=kind in LAMPS,
        pickupable=kind not in LAMPS,
    )
