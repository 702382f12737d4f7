"""A seeded generator of household problems, in three splits that share no layout.

A layout is a room and how many receptacles of each type stand in it. A hash of the layout says which split it belongs
to, so that no problem, and no room, of one split is ever seen in another, whatever the seeds. Every problem can be
solved, and none is solved at the start.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reward_kit.environments.household import domain
from reward_kit.environments.household.problem import Problem, Receptacle, TaskType, Thing
from reward_kit.errors import ConfigError, did_you_mean

SPLITS = ("train", "development", "held_out")
SMALLEST_ROOM, LARGEST_ROOM = 6, 16
FEWEST_THINGS, MOST_THINGS = 6, 14

_SPLIT_OF_TENTH = ("train",) * 6 + ("development",) * 2 + ("held_out",) * 2
_MOST_OF_A_TYPE = 3
_SECOND_TARGET = 0.3
_SECOND_LAMP = 0.2
_ALREADY_THERE = 0.15
_PROPERTY = {TaskType.CLEAN: domain.CLEANABLE, TaskType.HEAT: domain.HEATABLE, TaskType.COOL: domain.COOLABLE}


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
        yield problem(split, index, seed, types[index % len(types)])


def problem(split: str, index: int, seed: int = 0, task_type: TaskType | str | None = None) -> Problem:
    """One problem; the same arguments always give the same. By default the task types take turns with `index`.

    Raises:
        ConfigError: an unknown split or task type.
    """
    if split not in SPLITS:
        raise ConfigError(f"household problems: unknown split {split!r}{did_you_mean(split, SPLITS)}")
    asked = list(TaskType)[index % len(TaskType)] if task_type is None else _task_type(task_type)
    name = f"{split}-{asked.value}-{seed}-{index}"
    rng = random.Random(_hash(name))
    room, counts = _layout(rng, split, domain.TASK_ROOMS[asked])
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
        counts = {kind: least for kind, least, _ in domain.ROOMS[room]}
        spare = [kind for kind, least, most in domain.ROOMS[room] for _ in range(most - least)]
        for kind in rng.sample(spare, min(len(spare), size - sum(counts.values()))):
            counts[kind] += 1
        present = {kind: number for kind, number in counts.items() if number}
        if split_of_layout(_layout_name(room, present)) == split:
            return room, present


def _layout_name(room: str, counts: dict[str, int]) -> str:
    return f"{room}: " + ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))


def _receptacles(counts: dict[str, int]) -> tuple[Receptacle, ...]:
    return tuple(
        Receptacle(f"{kind} {number}", kind, kind in domain.OPENABLE)
        for kind, total in sorted(counts.items())
        for number in range(1, total + 1)
    )


def _task(rng: random.Random, task_type: TaskType, room: str, present: Sequence[str]) -> _Task:
    """What is asked; the destination is drawn first, so that a countertop, which holds everything, is not the rule."""
    objects = sorted(domain.ROOM_OBJECTS[room])
    if task_type is TaskType.LOOK_IN_LIGHT:
        lamps = [lamp for lamp, places in domain.LAMP_PLACES.items() if any(kind in places for kind in present)]
        targets = [kind for kind in objects if _homes(kind, present)]
        return _Task(task_type, rng.choice(targets), rng.choice(lamps))
    suitable = _PROPERTY.get(task_type)
    options = {
        destination: [
            kind
            for kind in objects
            if domain.can_hold(destination, kind)
            and (suitable is None or kind in suitable)
            and any(home != destination for home in _homes(kind, present))
        ]
        for destination in present
        if destination != domain.APPLIANCES.get(task_type)
    }
    destination = rng.choice([kind for kind, targets in options.items() if targets])
    return _Task(task_type, rng.choice(options[destination]), destination)


def _homes(kind: str, present: Sequence[str]) -> list[str]:
    return [home for home in present if domain.can_hold(home, kind)]


def _things(rng: random.Random, task: _Task, room: str, receptacles: Sequence[Receptacle]) -> tuple[Thing, ...]:
    """The targets, the lamps and the distractors, each in a place that can hold it."""
    wanted = rng.randint(FEWEST_THINGS, MOST_THINGS)
    placed = [(task.target, place) for place in _target_places(rng, task, receptacles)]
    if task.type is TaskType.LOOK_IN_LIGHT:
        placed += [(lamp, _lamp_place(rng, lamp, receptacles)) for lamp in _lamps(rng, task, receptacles)]
    types = {item.type for item in receptacles}
    others = [kind for kind in sorted(domain.ROOM_OBJECTS[room] - {task.target}) if _homes(kind, sorted(types))]
    numbers: Counter[str] = Counter()
    while len(placed) < wanted:
        kind = rng.choice(others)
        if numbers[kind] < _MOST_OF_A_TYPE:
            numbers[kind] += 1
            placed.append((kind, rng.choice([item.name for item in receptacles if domain.can_hold(item.type, kind)])))
    return _named(placed)


def _target_places(rng: random.Random, task: _Task, receptacles: Sequence[Receptacle]) -> list[str]:
    """Where the targets start: away from the destination, but for one that may lie there where this solves nothing."""
    homes = [item for item in receptacles if domain.can_hold(item.type, task.target)]
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
    possible = [lamp for lamp, places in domain.LAMP_PLACES.items() if types & set(places)]
    return [task.destination, rng.choice(possible)]


def _lamp_place(rng: random.Random, lamp: str, receptacles: Sequence[Receptacle]) -> str:
    return rng.choice([item.name for item in receptacles if item.type in domain.LAMP_PLACES[lamp]])


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
        cleanable=kind in domain.CLEANABLE,
        heatable=kind in domain.HEATABLE,
        coolable=kind in domain.COOLABLE,
        sliceable=kind in domain.SLICEABLE,
        toggleable=kind in domain.LAMPS,
        pickupable=kind not in domain.LAMPS,
    )
