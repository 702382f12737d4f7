"""A fast engine for household games, equal to TextWorld's on ALFWorld's domain: texts, commands, effects and goals.

What a state lets the agent do depends on little of it: where it stands, what it holds, what lies there, and whether the
receptacle there is open. That part is a `_Spot`, made once and kept in the tables of the problem, which all engines of
one problem share. A step is then two lookups and a few integer operations. Sets of objects are bit masks over the
things in the order in which the texts list them.

Some of the domain's facts never change what an agent can do or read, so they are not kept: what was checked, examined
or once in a receptacle, and whether a lamp is on at the moment (`isOn`; texts and goals ask whether it was ever used).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple, TypeAlias

from reward_kit.environments.base import canonical_json, hash_key
from reward_kit.environments.household import domain
from reward_kit.environments.household.pddl import pddl_name
from reward_kit.environments.household.problem import Problem, TaskType
from reward_kit.environments.household.view import View

NOTHING = "Nothing happens."
NOWHERE = -1
"""The agent's place before it first goes to a receptacle, and what it holds with empty hands."""

_START = (NOWHERE, NOWHERE, 0, 0)
_NOT_CONTENT = ("id", "split", "layout")

_ROOM = "You are in the middle of a room. Looking quickly around you, you see {}."
_HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


class _Spot(NamedTuple):
    """What the agent can do where it stands: the commands, sorted, and what each one calls with which number."""

    commands: tuple[str, ...]
    actions: dict[str, Action]


class Tables:
    """What never changes in a problem, and what was once computed of it. Shared by all engines of the problem.

    Attributes:
        receptacles: in the order in which the texts list them; engines name them by their index here.
        things: likewise.
        key: names the problem by its content.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.receptacles = tuple(sorted(problem.receptacles, key=lambda item: pddl_name(item.name)))
        self.things = tuple(sorted(problem.things, key=lambda item: pddl_name(item.name)))
        places = {item.name: index for index, item in enumerate(self.receptacles)}
        self.start = [0] * len(self.receptacles)
        for number, thing in enumerate(self.things):
            self.start[places[thing.at]] |= 1 << number
        self.go = [f"go to {item.name}" for item in self.receptacles]
        self.anywhere = _actions_anywhere(self.go)
        self.targets = self._mask(lambda number: self.things[number].type == problem.target)
        self.destinations = [index for index, item in enumerate(self.receptacles) if item.type == problem.destination]
        self.lamps = self._mask(
            lambda number: self.things[number].toggleable and self.things[number].type == problem.destination
        )
        self.lit_counts = problem.task_type is TaskType.LOOK_IN_LIGHT
        self.pickupable = self._mask(lambda number: self.things[number].pickupable)
        self.transformable = self._mask(lambda number: self._can_transform(number))
        self.spots: dict[tuple[int, int, int, int], _Spot] = {}
        self.lists: dict[int, str] = {}

    @cached_property
    def introduction(self) -> str:
        """The first observation."""
        room = _ROOM.format(enumeration(item.name for item in self.receptacles))
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {self.problem.goal}"

    @cached_property
    def key(self) -> str:
        content = self.problem.to_json()
        return hash_key(canonical_json({name: content[name] for name in sorted(content) if name not in _NOT_CONTENT}))

    def members(self, mask: int) -> list[int]:
        """The numbers of the things in a mask, in the order of the texts."""
        found = []
        while mask:
            low = mask & -mask
            found.append(low.bit_length() - 1)
            mask ^= low
        return found

    def can_hold(self, receptacle: int, thing: int) -> bool:
        """Whether the thing can be moved to the receptacle."""
        return domain.can_hold(self.receptacles[receptacle].type, self.things[thing].type)

    def listed(self, mask: int) -> str:
        """A mask as the texts list it."""
        text = self.lists.get(mask)
        if text is None:
            text = self.lists[mask] = enumeration(self.things[number].name for number in self.members(mask))
        return text

    def _mask(self, chosen: Callable[[int], bool]) -> int:
        return sum(1 << number for number in range(len(self.things)) if chosen(number))

    def _can_transform(self, number: int) -> bool:
        thing = self.things[number]
        flags = {TaskType.CLEAN: thing.cleanable, TaskType.HEAT: thing.heatable, TaskType.COOL: thing.coolable}
        return flags.get(self.problem.task_type, False)


def enumeration(names: Iterable[str]) -> str:
    """ "a mug 1, a mug 2, and a pan 1": as the texts list things, "nothing" where there is none."""
    items = [f"a {name}" for name in names]
    if len(items) < 2:
        return items[0] if items else "nothing"
    return f"{', '.join(items[:-1])}, and {items[-1]}"


class HouseholdEngine:
    """One household game.

    Attributes:
        tables: what never changes.
        at: the receptacle where the agent stands, `NOWHERE` at the start.
        holding: the thing it holds, or `NOWHERE`.
        contents: for each receptacle the mask of the things in or on it.
        opened: the mask of the open receptacles.
        clean, hot, cool, sliced, toggled: masks of things.
    """

    __slots__ = ("at", "clean", "contents", "cool", "holding", "hot", "opened", "sliced", "spot", "tables", "toggled")

    def __init__(self, problem: Problem | Tables) -> None:
        self.tables = problem if isinstance(problem, Tables) else Tables(problem)
        self.reset()

    def reset(self) -> View:
        """Go to the start of the problem."""
        self.at = self.holding = NOWHERE
        self.contents = list(self.tables.start)
        self.opened = self.clean = self.hot = self.cool = self.sliced = self.toggled = 0
        self.spot = self._find_spot()
        return self._view(self.tables.introduction)

    def step(self, command: str) -> View:
        """Carry out one command; one that is not admissible changes nothing."""
        action = self.spot.actions.get(command.strip())
        if action is None:
            return self._view(NOTHING)
        effect, one, two = action
        text = effect(self, one, two)
        return self._view(text)

    def admissible(self) -> list[str]:
        """The commands that do something now, sorted."""
        return list(self.spot.commands)

    def fork(self) -> HouseholdEngine:
        """An independent engine in this state."""
        twin = object.__new__(HouseholdEngine)
        twin.tables, twin.spot = self.tables, self.spot
        twin.at, twin.holding, twin.contents, twin.opened = self.at, self.holding, self.contents.copy(), self.opened
        twin.clean, twin.hot, twin.cool = self.clean, self.hot, self.cool
        twin.sliced, twin.toggled = self.sliced, self.toggled
        return twin

    def state_key(self) -> str:
        """The name of this state of this problem: two states have one name exactly where they have the same futures.

        Whether a thing that is never held is sliced or on is seen nowhere; of a lamp it counts where it stands.
        """
        held = self.tables.pickupable
        flags = (self.at, self.holding, self.opened, self.clean, self.hot, self.cool)
        marks = (self.sliced & held, self.toggled & held, self._lit() if self.tables.lit_counts else ())
        return hash_key(self.tables.key, repr((flags, marks, self.contents)))

    def won(self) -> bool:
        """Whether the goal holds now."""
        tables, task_type = self.tables, self.tables.problem.task_type
        if task_type is TaskType.LOOK_IN_LIGHT:
            lit = self.at >= 0 and self.contents[self.at] & tables.lamps & self.toggled
            return bool(lit) and self.holding >= 0 and bool(tables.targets >> self.holding & 1)
        if task_type is TaskType.PICK_TWO:
            return any((self.contents[place] & tables.targets).bit_count() >= 2 for place in tables.destinations)
        placed = 0
        for place in tables.destinations:
            placed |= self.contents[place]
        return bool(placed & self.ready())

    def ready(self) -> int:
        """The mask of the things that are what the goal asks for, wherever they are."""
        tables, task_type = self.tables, self.tables.problem.task_type
        if task_type is TaskType.CLEAN:
            return tables.targets & tables.transformable & self.clean
        if task_type is TaskType.HEAT:
            return tables.targets & tables.transformable & self.hot
        if task_type is TaskType.COOL:
            return tables.targets & tables.transformable & self.cool
        return tables.targets

    def is_open(self, receptacle: int) -> bool:
        """Whether the agent can see into it and reach what is there."""
        return not self.tables.receptacles[receptacle].openable or bool(self.opened >> receptacle & 1)

    def _lit(self) -> list[int]:
        """The receptacles that have light."""
        lit = self.toggled & self.tables.lamps
        return [place for place, content in enumerate(self.contents) if content & lit] if lit else []

    def _view(self, text: str) -> View:
        won = self.won()
        return View(text, self.spot.commands, 1.0 if won else 0.0, won, won)

    def _find_spot(self) -> _Spot:
        at = self.at
        key = (at, self.holding, self.contents[at], self.opened >> at & 1) if at >= 0 else _START
        spot = self.tables.spots.get(key)
        if spot is None:
            spot = self.tables.spots[key] = _make_spot(self)
        return spot

    # The effects. Each carries out one command and returns what the agent reads.

    def _look(self, _one: int = 0, _two: int = 0) -> str:
        if self.at < 0:
            # Only the introduction lists the receptacles; this is how ALFWorld's grammar answers from then on.
            return _ROOM.format("nothing")
        # What is in the receptacle is not listed, and nothing ever lies beside one.
        return f"You are facing the {self.tables.receptacles[self.at].name}. Next to it, you see nothing."

    def _inventory(self, _one: int, _two: int) -> str:
        if self.holding < 0:
            return "You are not carrying anything."
        return f"You are carrying: a {self.tables.things[self.holding].name}."

    def _help(self, _one: int, _two: int) -> str:
        return _HELP

    def _examine(self, place: int, _two: int = 0) -> str:
        receptacle = self.tables.receptacles[place]
        listed = self.tables.listed
        if not receptacle.openable:
            return f"On the {receptacle.name}, you see {listed(self.contents[place])}."
        if self.opened >> place & 1:
            return f"The {receptacle.name} is open. In it, you see {listed(self.contents[place])}."
        return f"The {receptacle.name} is closed."

    def _examine_thing(self, number: int, _two: int) -> str:
        thing = self.tables.things[number]
        clean, hot, cool = self.clean >> number & 1, self.hot >> number & 1, self.cool >> number & 1
        sliced = self.sliced >> number & 1
        words = ["hot"] if hot else ["cool"] if cool else []
        words += ["clean"] if clean else []
        if words:
            # A thing that is cool and nothing else is called cold.
            words = ["cold"] if words == ["cool"] and not sliced else words
            return f"This is a {' and '.join(words)} {'sliced ' if sliced else ''}{thing.name}."
        if thing.toggleable and self.toggled >> number & 1:
            return f"This {thing.name} is on."
        if sliced:
            return f"This is a sliced {thing.name}."
        return f"There's nothing special about {thing.name}."

    def _go(self, place: int, _two: int) -> str:
        self.at = place
        self.spot = self._find_spot()
        return f"You arrive at {self.tables.receptacles[place].name}. {self._examine(place)}"

    def _open(self, place: int, _two: int) -> str:
        self.opened |= 1 << place
        self.spot = self._find_spot()
        return f"You open the {self.tables.receptacles[place].name}. {self._examine(place)}"

    def _close(self, place: int, _two: int) -> str:
        self.opened &= ~(1 << place)
        self.spot = self._find_spot()
        return f"You close the {self.tables.receptacles[place].name}."

    def _take(self, number: int, place: int) -> str:
        self.contents[place] &= ~(1 << number)
        self.holding = number
        self.spot = self._find_spot()
        return f"You pick up the {self.tables.things[number].name} from the {self.tables.receptacles[place].name}."

    def _move(self, number: int, place: int) -> str:
        self.contents[place] |= 1 << number
        self.holding = NOWHERE
        self.spot = self._find_spot()
        return f"You move the {self.tables.things[number].name} to the {self.tables.receptacles[place].name}."

    def _clean(self, number: int, place: int) -> str:
        self.clean |= 1 << number
        return f"You clean the {self.tables.things[number].name} using the {self.tables.receptacles[place].name}."

    def _heat(self, number: int, place: int) -> str:
        self.hot |= 1 << number
        self.cool &= ~(1 << number)
        return f"You heat the {self.tables.things[number].name} using the {self.tables.receptacles[place].name}."

    def _cool(self, number: int, place: int) -> str:
        self.cool |= 1 << number
        self.hot &= ~(1 << number)
        return f"You cool the {self.tables.things[number].name} using the {self.tables.receptacles[place].name}."

    def _use(self, number: int, _two: int) -> str:
        self.toggled |= 1 << number
        return f"You turn on the {self.tables.things[number].name}."

    def _slice(self, number: int, knife: int) -> str:
        self.sliced |= 1 << number
        return f"You sliced the {self.tables.things[number].name} with the {self.tables.things[knife].name}."


Effect: TypeAlias = Callable[[HouseholdEngine, int, int], str]
Action: TypeAlias = tuple[Effect, int, int]


def _actions_anywhere(go: list[str]) -> dict[str, Action]:
    engine = HouseholdEngine
    actions: dict[str, Action] = {command: (engine._go, place, 0) for place, command in enumerate(go)}
    actions["look"] = (engine._look, 0, 0)
    actions["inventory"] = (engine._inventory, 0, 0)
    actions["help"] = (engine._help, 0, 0)
    return actions


def _make_spot(engine: HouseholdEngine) -> _Spot:
    """Everything that can be done where the engine's agent stands, by the preconditions of the domain."""
    tables, at = engine.tables, engine.at
    actions = dict(tables.anywhere)
    if at >= 0:
        del actions[tables.go[at]]
        name = tables.receptacles[at].name
        actions[f"examine {name}"] = (HouseholdEngine._examine, at, 0)
        if not engine.is_open(at):
            actions[f"open {name}"] = (HouseholdEngine._open, at, 0)
        elif tables.receptacles[at].openable:
            actions[f"close {name}"] = (HouseholdEngine._close, at, 0)
        for number in tables.members(engine.contents[at]):
            _add_lying(engine, actions, number)
    if engine.holding >= 0:
        _add_held(engine, actions, engine.holding)
    return _Spot(tuple(sorted(actions)), actions)


def _add_lying(engine: HouseholdEngine, actions: dict[str, Action], number: int) -> None:
    """What can be done to a thing in the receptacle before the agent. A closed door stops neither lamp nor knife.

    Not that it is examined: a misspelt type in ALFWorld's domain leaves that to the thing in the agent's hand.
    """
    tables, at = engine.tables, engine.at
    thing, holding = tables.things[number], engine.holding
    if thing.pickupable and holding < 0 and engine.is_open(at):
        actions[f"take {thing.name} from {tables.receptacles[at].name}"] = (HouseholdEngine._take, number, at)
    if thing.toggleable:
        actions[f"use {thing.name}"] = (HouseholdEngine._use, number, 0)
    if thing.sliceable and holding >= 0 and tables.things[holding].type in domain.KNIVES:
        knife = tables.things[holding].name
        actions[f"slice {thing.name} with {knife}"] = (HouseholdEngine._slice, number, holding)


def _add_held(engine: HouseholdEngine, actions: dict[str, Action], number: int) -> None:
    """What can be done with the thing in the agent's hand. A sink, a microwave or a fridge works closed or open."""
    tables, at = engine.tables, engine.at
    thing = tables.things[number]
    actions[f"examine {thing.name}"] = (HouseholdEngine._examine_thing, number, 0)
    if at < 0:
        return
    place = tables.receptacles[at]
    if engine.is_open(at) and tables.can_hold(at, number):
        actions[f"move {thing.name} to {place.name}"] = (HouseholdEngine._move, number, at)
    if thing.cleanable and place.type == "sinkbasin":
        actions[f"clean {thing.name} with {place.name}"] = (HouseholdEngine._clean, number, at)
    if thing.heatable and place.type == "microwave":
        actions[f"heat {thing.name} with {place.name}"] = (HouseholdEngine._heat, number, at)
    if thing.coolable and place.type == "fridge":
        actions[f"cool {thing.name} with {place.name}"] = (HouseholdEngine._cool, number, at)
