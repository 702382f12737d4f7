"""A fast engine for household games, equivalent to TextWorld's engine in ALFWorld's domain, and an exact expert.

The possible actions depend only on the receptacle at which the agent stands, the object in its hand, the receptacle's
contents, and whether the receptacle is open. For each combination of these, the actions are collected in a `_Spot`,
which is created once and stored in the problem's tables. All engines for a problem share the tables, so a step consists
of two lookups and a few integer operations. A set of objects is a bit mask over the things in text order. Facts that
never affect the agent's actions or texts, such as whether a lamp is on, are not stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import count
from typing import NamedTuple, TypeAlias

from reward_kit.environments.base import canonical_json, hash_key
from reward_kit.environments.household_problems import APPLIANCES, KNIVES, Problem, TaskType, Thing, can_hold, pddl_name

NOTHING = "Nothing happens."
NOWHERE = -1
"""The agent's location before it first goes to a receptacle, and the value of `holding` if the hand is empty."""
MILESTONES = ("found", "taken", "transformed", "placed")
"""The milestones of a task in their usual order: an object of the target type was seen, was held, is clean, hot or cool
as required (or the lamp was used), and is at its destination. Not every task has all of them. If the task requires two
objects, the first one placed counts.
"""
_START = (NOWHERE, NOWHERE, 0, 0)
_NOT_CONTENT = ("id", "split", "layout")
_VERB = {TaskType.CLEAN: "clean", TaskType.HEAT: "heat", TaskType.COOL: "cool"}
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


class HouseholdView(NamedTuple):
    """An observation from a household game, and the commands that are admissible in that state."""

    observation: str
    admissible: tuple[str, ...]
    reward: float
    done: bool
    won: bool


class _Spot(NamedTuple):
    """The actions at the agent's location.

    It contains the sorted commands and, for each command, the function and arguments that execute it.
    """

    commands: tuple[str, ...]
    actions: dict[str, Action]


class Tables:
    """The constant part of a problem.

    All engines for the problem share this object and refer to receptacles and things by index.
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
        self.anywhere: dict[str, Action] = {
            **{command: (HouseholdEngine._go, place, 0) for place, command in enumerate(self.go)},
            "look": (HouseholdEngine._look, 0, 0),
            "inventory": (HouseholdEngine._inventory, 0, 0),
            "help": (lambda _engine, _one, _two: _HELP, 0, 0),
        }
        self.targets = self._mask(lambda thing: thing.type == problem.target)
        self.destinations = [index for index, item in enumerate(self.receptacles) if item.type == problem.destination]
        self.lamps = self._mask(lambda thing: thing.toggleable and thing.type == problem.destination)
        self.pickupable = self._mask(lambda thing: thing.pickupable)
        flags = {TaskType.CLEAN: "cleanable", TaskType.HEAT: "heatable", TaskType.COOL: "coolable"}
        flag = flags.get(problem.task_type)
        self.transformable = self._mask(lambda thing: flag is not None and getattr(thing, flag))
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
        """Return the indices of the things in a mask, in text order."""
        numbers = []
        while mask:
            low = mask & -mask
            numbers.append(low.bit_length() - 1)
            mask ^= low
        return numbers

    def can_hold(self, receptacle: int, thing: int) -> bool:
        return can_hold(self.receptacles[receptacle].type, self.things[thing].type)

    def listed(self, mask: int) -> str:
        text = self.lists.get(mask)
        if text is None:
            text = self.lists[mask] = enumeration(self.things[number].name for number in self.members(mask))
        return text

    def _mask(self, chosen: Callable[[Thing], bool]) -> int:
        return sum(1 << number for number, thing in enumerate(self.things) if chosen(thing))


def enumeration(names: Iterable[str]) -> str:
    """Return names as an English list, such as "a mug 1, a mug 2, and a pan 1", or "nothing"."""
    items = [f"a {name}" for name in names]
    if len(items) < 2:
        return items[0] if items else "nothing"
    return f"{', '.join(items[:-1])}, and {items[-1]}"


class HouseholdEngine:
    """The state of a household game.

    Attributes:
        tables: the constant part of the problem.
        at: the receptacle at which the agent stands, initially `NOWHERE`.
        holding: the thing in the agent's hand, or `NOWHERE`.
        contents: for each receptacle, the mask of the things in or on it.
        opened: the mask of the open receptacles.
        clean, hot, cool, sliced, toggled: the masks of the things in these states.
    """

    __slots__ = ("at", "clean", "contents", "cool", "holding", "hot", "opened", "sliced", "spot", "tables", "toggled")

    def __init__(self, problem: Problem | Tables) -> None:
        self.tables = problem if isinstance(problem, Tables) else Tables(problem)
        self.reset()

    def reset(self) -> HouseholdView:
        """Return to the start of the problem."""
        self.at = self.holding = NOWHERE
        self.contents = list(self.tables.start)
        self.opened = self.clean = self.hot = self.cool = self.sliced = self.toggled = 0
        self.spot = self._find_spot()
        return self._view(self.tables.introduction)

    def step(self, command: str) -> HouseholdView:
        """Execute one command. A command that is not admissible changes nothing."""
        action = self.spot.actions.get(command.strip())
        if action is None:
            return self._view(NOTHING)
        effect, one, two = action
        return self._view(effect(self, one, two))

    def admissible(self) -> list[str]:
        """Return the sorted list of commands that are currently admissible."""
        return list(self.spot.commands)

    def fork(self) -> HouseholdEngine:
        """Return an independent engine in the same state."""
        twin = object.__new__(HouseholdEngine)
        twin.tables, twin.spot = self.tables, self.spot
        twin.at, twin.holding, twin.contents, twin.opened = self.at, self.holding, self.contents.copy(), self.opened
        twin.clean, twin.hot, twin.cool = self.clean, self.hot, self.cool
        twin.sliced, twin.toggled = self.sliced, self.toggled
        return twin

    def state_key(self) -> str:
        """Return the state key. Two states of a problem have equal keys if and only if their futures are equal.

        Whether a thing is sliced or on matters only if the thing can be held, because otherwise no text shows it. For a
        used lamp, only its location matters.
        """
        held = self.tables.pickupable
        flags = (self.at, self.holding, self.opened, self.clean, self.hot, self.cool)
        lit: list[int] | tuple[()] = ()
        if self.tables.problem.task_type is TaskType.LOOK_IN_LIGHT:
            used = self.toggled & self.tables.lamps
            lit = [place for place, content in enumerate(self.contents) if content & used] if used else []
        marks = (self.sliced & held, self.toggled & held, lit)
        return hash_key(self.tables.key, repr((flags, marks, self.contents)))

    def won(self) -> bool:
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
        """Return the mask of the things that are in the state required by the task, regardless of their location."""
        tables, task_type = self.tables, self.tables.problem.task_type
        if task_type is TaskType.CLEAN:
            return tables.targets & tables.transformable & self.clean
        if task_type is TaskType.HEAT:
            return tables.targets & tables.transformable & self.hot
        if task_type is TaskType.COOL:
            return tables.targets & tables.transformable & self.cool
        return tables.targets

    def milestones(self, held_before: int) -> list[str]:
        """Return the milestones reached by a command.

        `held_before` is the thing that the agent held before the command.
        """
        tables, at, ready = self.tables, self.at, self.ready()
        held = self.holding >= 0 and bool(tables.targets >> self.holding & 1)
        seen = at >= 0 and self.is_open(at) and bool(self.contents[at] & tables.targets)
        put_down = held_before >= 0 > self.holding and at in tables.destinations
        # Only tasks that require a change have things to transform.
        transformed = ready & tables.transformable
        if tables.problem.task_type is TaskType.LOOK_IN_LIGHT:
            transformed = self.toggled & tables.lamps
        holds = {
            "found": held or seen,
            "taken": held,
            "transformed": bool(transformed),
            "placed": put_down and bool(ready >> held_before & 1),
        }
        return [name for name in MILESTONES if holds[name]]

    def is_open(self, receptacle: int) -> bool:
        """Return True if the agent can see into a receptacle and reach its contents."""
        return not self.tables.receptacles[receptacle].openable or bool(self.opened >> receptacle & 1)

    def _view(self, text: str) -> HouseholdView:
        won = self.won()
        return HouseholdView(text, self.spot.commands, 1.0 if won else 0.0, won, won)

    def _find_spot(self) -> _Spot:
        at = self.at
        key = (at, self.holding, self.contents[at], self.opened >> at & 1) if at >= 0 else _START
        spot = self.tables.spots.get(key)
        if spot is None:
            spot = self.tables.spots[key] = _make_spot(self)
        return spot

    # Effects: each function executes one command and returns the text for the agent.

    def _look(self, _one: int = 0, _two: int = 0) -> str:
        if self.at < 0:
            # Only the introduction lists the receptacles. After it, ALFWorld's grammar returns this text.
            return _ROOM.format("nothing")
        # ALFWorld does not list the contents here, and nothing ever lies next to a receptacle.
        return f"You are facing the {self.tables.receptacles[self.at].name}. Next to it, you see nothing."

    def _inventory(self, _one: int, _two: int) -> str:
        if self.holding < 0:
            return "You are not carrying anything."
        return f"You are carrying: a {self.tables.things[self.holding].name}."

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
            # A thing that is only cool is called cold.
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


def _make_spot(engine: HouseholdEngine) -> _Spot:
    """Collect the possible actions at the agent's location, according to the preconditions of the domain."""
    tables, at, holding = engine.tables, engine.at, engine.holding
    actions = dict(tables.anywhere)
    if holding >= 0:
        actions[f"examine {tables.things[holding].name}"] = (HouseholdEngine._examine_thing, holding, 0)
    if at < 0:
        return _Spot(tuple(sorted(actions)), actions)
    place, is_open = tables.receptacles[at], engine.is_open(at)
    del actions[tables.go[at]]
    actions[f"examine {place.name}"] = (HouseholdEngine._examine, at, 0)
    if not is_open:
        actions[f"open {place.name}"] = (HouseholdEngine._open, at, 0)
    elif place.openable:
        actions[f"close {place.name}"] = (HouseholdEngine._close, at, 0)
    # A closed door does not prevent the agent from using a lamp or slicing. A thing in a receptacle cannot be examined,
    # because a misspelled type in ALFWorld's domain restricts `examine` to the thing in the agent's hand.
    for number in tables.members(engine.contents[at]):
        thing = tables.things[number]
        if thing.pickupable and holding < 0 and is_open:
            actions[f"take {thing.name} from {place.name}"] = (HouseholdEngine._take, number, at)
        if thing.toggleable:
            actions[f"use {thing.name}"] = (HouseholdEngine._use, number, 0)
        if thing.sliceable and holding >= 0 and tables.things[holding].type in KNIVES:
            knife = tables.things[holding].name
            actions[f"slice {thing.name} with {knife}"] = (HouseholdEngine._slice, number, holding)
    # A sink, microwave or fridge works regardless of whether it is open.
    if holding >= 0:
        thing = tables.things[holding]
        if is_open and tables.can_hold(at, holding):
            actions[f"move {thing.name} to {place.name}"] = (HouseholdEngine._move, holding, at)
        if thing.cleanable and place.type == "sinkbasin":
            actions[f"clean {thing.name} with {place.name}"] = (HouseholdEngine._clean, holding, at)
        if thing.heatable and place.type == "microwave":
            actions[f"heat {thing.name} with {place.name}"] = (HouseholdEngine._heat, holding, at)
        if thing.coolable and place.type == "fridge":
            actions[f"cool {thing.name} with {place.name}"] = (HouseholdEngine._cool, holding, at)
    return _Spot(tuple(sorted(actions)), actions)


class _State(NamedTuple):
    """The part of a state that affects a plan. `holding` and the bits of `ready` are indices into the tracked things.

    `ready` marks the things that are clean, hot or cool as the task requires, and the lamps that have been used.
    """

    at: int
    holding: int
    places: tuple[int, ...]
    opened: int
    ready: int


_Errand: TypeAlias = tuple[list[str], _State]


def shortest_plan(engine: HouseholdEngine) -> list[str] | None:
    """Return the commands of a shortest path to the goal.

    The result is [] if the goal has already been reached, and None if it is unreachable.

    The algorithm is a uniform-cost search over *errands*. In an errand, the agent goes to a receptacle, opens it if
    necessary, and takes, puts, treats or uses one thing there. The search is exact for these reasons:

    - Going to a receptacle and opening it serve only the next action there, so they can be delayed until just before
      it. Closing, looking and slicing never serve the goal.
    - Only things that the goal requires need to be taken. A held thing that can still serve the goal is put down only
      at its destination, because putting it down elsewhere never shortens a plan.
    - Receptacles of the same type and door state are interchangeable if they contain nothing relevant to the goal and
      the agent is not at any of them. When an unneeded thing is put down, their type does not matter either.
    """
    search = _PlanSearch(engine)
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


class _PlanSearch:
    """The errands in one problem, and the initial state of the search."""

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
        place_of = {
            number: place for place, content in enumerate(engine.contents) for number in tables.members(content)
        }
        marks = engine.toggled if looks else engine.ready()
        self.start = _State(
            at=engine.at,
            holding=self.tracked.index(engine.holding) if engine.holding >= 0 else NOWHERE,
            places=tuple(place_of.get(number, NOWHERE) for number in self.tracked),
            opened=engine.opened,
            ready=sum((marks >> number & 1) << k for k, number in enumerate(self.tracked)),
        )

    def is_goal(self, state: _State) -> bool:
        things = range(len(self.tracked))
        if self.task_type is TaskType.LOOK_IN_LIGHT:
            lit = any(self.is_lamp[k] and state.ready >> k & 1 and state.places[k] == state.at for k in things)
            return lit and state.holding >= 0 and self.is_target[state.holding]
        if self.task_type is TaskType.PICK_TWO:
            targets = [state.places[k] for k in things if self.is_target[k]]
            return any(targets.count(place) >= 2 for place in self.tables.destinations)
        delivered = [k for k in things if state.places[k] in self.tables.destinations]
        return any(self.is_target[k] and self._is_ready(state, k) for k in delivered)

    def errands(self, state: _State) -> Iterator[_Errand]:
        """Yield the useful errands, each with the resulting state."""
        tables, k = self.tables, state.holding
        if k < 0:
            for k, number in enumerate(self.tracked):
                if self.is_target[k] and tables.things[number].pickupable:
                    place = state.places[k]
                    commands, opened = self._reach(state, place, inside=True)
                    places = (*state.places[:k], NOWHERE, *state.places[k + 1 :])
                    command = f"take {tables.things[number].name} from {tables.receptacles[place].name}"
                    yield [*commands, command], _State(place, k, places, opened, state.ready)
        else:
            name = tables.things[self.tracked[k]].name
            if self._can_transform(k) and self.is_target[k] and not self._is_ready(state, k):
                for place in self.appliances:
                    commands, opened = self._reach(state, place, inside=False)
                    command = f"{_VERB[self.task_type]} {name} with {tables.receptacles[place].name}"
                    yield [*commands, command], state._replace(at=place, opened=opened, ready=state.ready | 1 << k)
            for place in self._places_to_put(state, k):
                commands, opened = self._reach(state, place, inside=True)
                places = (*state.places[:k], place, *state.places[k + 1 :])
                command = f"move {name} to {tables.receptacles[place].name}"
                yield [*commands, command], _State(place, NOWHERE, places, opened, state.ready)
        # Use a lamp, or just go to one that has been used.
        for k, place in enumerate(state.places):
            if self.is_lamp[k] and place >= 0:
                commands, opened = self._reach(state, place, inside=False)
                if not state.ready >> k & 1:
                    commands = [*commands, f"use {tables.things[self.tracked[k]].name}"]
                if commands:
                    yield commands, state._replace(at=place, opened=opened, ready=state.ready | 1 << k)

    def _is_ready(self, state: _State, k: int) -> bool:
        return self.task_type is TaskType.PICK_AND_PLACE or bool(state.ready >> k & 1)

    def _can_transform(self, k: int) -> bool:
        return bool(self.tables.transformable >> self.tracked[k] & 1)

    def _reach(self, state: _State, place: int, *, inside: bool) -> tuple[list[str], int]:
        """Return the commands that lead to a receptacle, and the mask of open receptacles after these commands.

        If `inside` is true, the commands also open the receptacle.
        """
        commands = [] if state.at == place else [self.tables.go[place]]
        receptacle = self.tables.receptacles[place]
        if not inside or not receptacle.openable or state.opened >> place & 1:
            return commands, state.opened
        return [*commands, f"open {receptacle.name}"], state.opened | 1 << place

    def _places_to_put(self, state: _State, k: int) -> list[int]:
        """Return the receptacles in which to put the held thing, one from each set of interchangeable receptacles."""
        tables = self.tables
        possible = [place for place in range(len(tables.receptacles)) if tables.can_hold(place, self.tracked[k])]
        special = {state.at, *state.places}
        # True if the held thing can still be the one that the goal requires.
        serves = self.is_target[k]
        if serves and self.task_type in _VERB:
            serves = self._is_ready(state, k) or (self._can_transform(k) and bool(self.appliances))
        if serves:
            may_deliver = self.task_type is not TaskType.LOOK_IN_LIGHT and (
                self.task_type is TaskType.PICK_TWO or self._is_ready(state, k)
            )
            possible = [place for place in possible if may_deliver and place in tables.destinations]
        else:
            # The next errand leads to one of these receptacles, or is equally far from all others.
            special |= {*tables.destinations, *self.appliances}
        chosen: dict[tuple[int, bool], int] = {}
        for place in possible:
            shut = tables.receptacles[place].openable and not state.opened >> place & 1
            chosen.setdefault((place if place in special else NOWHERE, shut), place)
        return list(chosen.values())
