"""What an agent sees after a command of a household game, the same for the native and the real engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from reward_kit.environments.base import canonical_json, hash_key
from reward_kit.environments.household_problems import (
    APPLIANCES,
    KNIVES,
    Problem,
    Receptacle,
    TaskType,
    Thing,
    can_hold,
)


class View(NamedTuple):
    """One observation of a household game, with the commands that are open next."""

    observation: str
    admissible: tuple[str, ...]
    reward: float
    done: bool
    won: bool


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
        return can_hold(self.receptacles[receptacle].type, self.things[thing].type)

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
    if thing.sliceable and holding >= 0 and tables.things[holding].type in KNIVES:
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


_VERB = {TaskType.CLEAN: "clean", TaskType.HEAT: "heat", TaskType.COOL: "cool"}


class _State(NamedTuple):
    """What matters of a state. `holding` and the bits of `ready` count the tracked things.

    `ready` marks those that are clean, hot or cool where the task asks for it, and the lamps that have been used.
    """

    at: int
    holding: int
    places: tuple[int, ...]
    opened: int
    ready: int


_Errand: TypeAlias = tuple[list[str], _State]


def shortest_plan(engine: HouseholdEngine) -> list[str] | None:
    """The commands of a shortest way to the goal; [] where it holds already, None where no way leads there."""
    search = _Search(engine)
    order = count()
    frontier: list[tuple[int, int, _State, tuple[str, ...]]] = [(0, next(order), search.start, ())]
    closed: set[_State] = set()
    while frontier:
        cost, _, state, commands = heapq.heappop(frontier)
        if search.is_goal(state):
            return list(commands)
        if state in closed:
            continue
        closed.add(state)
        for errand, following in search.errands(state):
            if following not in closed:
                heapq.heappush(frontier, (cost + len(errand), next(order), following, (*commands, *errand)))
    return None


class _Search:
    """The errands of one problem, and where they start."""

    def __init__(self, engine: HouseholdEngine) -> None:
        self.tables = tables = engine.tables
        self.task_type = tables.problem.task_type
        looks = self.task_type is TaskType.LOOK_IN_LIGHT
        held = 1 << engine.holding if engine.holding >= 0 else 0
        self.tracked = tables.members(tables.targets | held | (tables.lamps if looks else 0))
        self.is_target = [bool(tables.targets >> number & 1) for number in self.tracked]
        self.is_lamp = [looks and bool(tables.lamps >> number & 1) for number in self.tracked]
        appliance = APPLIANCES.get(self.task_type)
        self.appliances = [place for place, item in enumerate(tables.receptacles) if item.type == appliance]
        self.start = self._start(engine)

    def is_goal(self, state: _State) -> bool:
        """Whether the goal holds."""
        things = range(len(self.tracked))
        if self.task_type is TaskType.LOOK_IN_LIGHT:
            lit = any(self.is_lamp[k] and state.ready >> k & 1 and state.places[k] == state.at for k in things)
            return lit and state.holding >= 0 and self.is_target[state.holding]
        if self.task_type is TaskType.PICK_TWO:
            found = [state.places[k] for k in things if self.is_target[k]]
            return any(found.count(place) >= 2 for place in self.tables.destinations)
        return any(self.is_target[k] and self._is_ready(state, k) for k in things if self._is_delivered(state, k))

    def errands(self, state: _State) -> Iterator[_Errand]:
        """What can sensibly be done next."""
        if state.holding < 0:
            for k, number in enumerate(self.tracked):
                if self.is_target[k] and self.tables.things[number].pickupable:
                    yield self._take(state, k)
        else:
            yield from self._treat(state)
            yield from self._put(state)
        if self.task_type is TaskType.LOOK_IN_LIGHT:
            yield from self._light(state)

    def _start(self, engine: HouseholdEngine) -> _State:
        place_of = {
            number: place for place, content in enumerate(engine.contents) for number in self.tables.members(content)
        }
        marks = engine.toggled if self.task_type is TaskType.LOOK_IN_LIGHT else engine.ready()
        return _State(
            at=engine.at,
            holding=self.tracked.index(engine.holding) if engine.holding >= 0 else NOWHERE,
            places=tuple(place_of.get(number, NOWHERE) for number in self.tracked),
            opened=engine.opened,
            ready=sum((marks >> number & 1) << k for k, number in enumerate(self.tracked)),
        )

    def _is_ready(self, state: _State, k: int) -> bool:
        return self.task_type is TaskType.PICK_AND_PLACE or bool(state.ready >> k & 1)

    def _is_delivered(self, state: _State, k: int) -> bool:
        return state.places[k] in self.tables.destinations

    def _reach(self, state: _State, place: int, *, inside: bool) -> tuple[list[str], int]:
        """The commands that bring the agent before a receptacle, and open it, and which are open then."""
        commands = [] if state.at == place else [self.tables.go[place]]
        receptacle = self.tables.receptacles[place]
        if not inside or not receptacle.openable or state.opened >> place & 1:
            return commands, state.opened
        return [*commands, f"open {receptacle.name}"], state.opened | 1 << place

    def _name(self, k: int) -> str:
        return self.tables.things[self.tracked[k]].name

    def _take(self, state: _State, k: int) -> _Errand:
        place = state.places[k]
        commands, opened = self._reach(state, place, inside=True)
        places = (*state.places[:k], NOWHERE, *state.places[k + 1 :])
        command = f"take {self._name(k)} from {self.tables.receptacles[place].name}"
        return [*commands, command], _State(place, k, places, opened, state.ready)

    def _treat(self, state: _State) -> Iterator[_Errand]:
        """Clean, heat or cool what is held, where the task asks for it."""
        k = state.holding
        if not self.tables.transformable >> self.tracked[k] & 1 or not self.is_target[k] or self._is_ready(state, k):
            return
        for place in self.appliances:
            commands, opened = self._reach(state, place, inside=False)
            command = f"{_VERB[self.task_type]} {self._name(k)} with {self.tables.receptacles[place].name}"
            yield [*commands, command], state._replace(at=place, opened=opened, ready=state.ready | 1 << k)

    def _put(self, state: _State) -> Iterator[_Errand]:
        k = state.holding
        for place in self._places_to_put(state, k):
            commands, opened = self._reach(state, place, inside=True)
            places = (*state.places[:k], place, *state.places[k + 1 :])
            command = f"move {self._name(k)} to {self.tables.receptacles[place].name}"
            yield [*commands, command], _State(place, NOWHERE, places, opened, state.ready)

    def _places_to_put(self, state: _State, k: int) -> list[int]:
        possible = [place for place in range(len(self.tables.receptacles)) if self._accepts(place, k)]
        special = {state.at, *state.places}
        if self._serves(state, k):
            wanted = self.tables.destinations if self._may_deliver(state, k) else []
            return self._distinct(state, [place for place in possible if place in wanted], special)
        # Whatever the next errand is, it leads to one of these places or is as far from all others.
        special |= {*self.tables.destinations, *self.appliances}
        return self._distinct(state, possible, special)

    def _distinct(self, state: _State, places: list[int], special: set[int]) -> list[int]:
        """One of all places that are interchangeable."""
        chosen: dict[tuple[int, bool], int] = {}
        for place in places:
            shut = self.tables.receptacles[place].openable and not state.opened >> place & 1
            chosen.setdefault((place if place in special else NOWHERE, shut), place)
        return list(chosen.values())

    def _accepts(self, place: int, k: int) -> bool:
        return self.tables.can_hold(place, self.tracked[k])

    def _serves(self, state: _State, k: int) -> bool:
        """Whether the held thing can still be the one that the goal asks for."""
        if not self.is_target[k] or self.task_type not in _VERB:
            return self.is_target[k]
        treatable = bool(self.tables.transformable >> self.tracked[k] & 1) and bool(self.appliances)
        return self._is_ready(state, k) or treatable

    def _may_deliver(self, state: _State, k: int) -> bool:
        if self.task_type is TaskType.LOOK_IN_LIGHT:
            return False
        return self.task_type is TaskType.PICK_TWO or self._is_ready(state, k)

    def _light(self, state: _State) -> Iterator[_Errand]:
        """Use a lamp, or only go to one that has been used."""
        for k, place in enumerate(state.places):
            if not self.is_lamp[k] or place < 0:
                continue
            commands, opened = self._reach(state, place, inside=False)
            if not state.ready >> k & 1:
                commands = [*commands, f"use {self._name(k)}"]
            if commands:
                yield commands, state._replace(at=place, opened=opened, ready=state.ready | 1 << k)
