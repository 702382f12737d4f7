"""The exact expert of household games: a shortest list of commands to the goal, from any state.

It knows the whole state, as a planner does. A uniform-cost search over *errands* finds the plan: an errand goes to a
receptacle, opens it where it must, and takes, puts, treats or uses one thing there. That loses nothing:

- Going and opening serve only what is next done at that receptacle, so they can wait until just before it; closing,
  looking and slicing serve no goal.
- Only the things asked for need to be taken, and one in the hand that can still serve the goal is put down only where
  the goal wants it: every way that puts it down elsewhere is at least as long as one that uses it.
- Receptacles of one type, with one door state, that hold nothing the goal speaks of and at which the agent does not
  stand, are interchangeable. So are all of these, whatever their type, for getting rid of a thing, but for the door.

`tests/environments/household/test_expert.py` compares the lengths with those of a plain breadth-first search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple, TypeAlias

from reward_kit.environments.household import domain
from reward_kit.environments.household.native import NOWHERE, HouseholdEngine
from reward_kit.environments.household.problem import TaskType

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
        appliance = domain.APPLIANCES.get(self.task_type)
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
