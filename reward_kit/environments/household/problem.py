"""Household problems: what stands where, what is asked, and the domain's constants. Shared by both engines.

The domain is ALFWorld's (`alfred.pddl` of the PyPI package `alfworld`): an agent in one room goes to receptacles,
opens and closes them, takes and moves objects, and cleans, heats, cools, slices or uses them. Names read as there:
"fridge 1".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from reward_kit.errors import ConfigError


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
