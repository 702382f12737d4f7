"""Test that the recorded traces detect every changed rule of the native engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reward_kit.environments import household_engine as native
from reward_kit.environments.household_engine import HouseholdEngine as Engine
from reward_kit.environments.household_problems import TaskType
from tests.environments.household.test_traces import difference, traces

Patch = Callable[[Any, str, Any], None]


def after(name: str, change: Callable[[Engine, int, int], None]) -> Callable[[Patch], None]:
    """Return a mutant with an additional effect."""
    original = getattr(Engine, name)

    def effect(engine: Engine, one: int, two: int) -> str:
        text = original(engine, one, two)
        change(engine, one, two)
        engine.spot = engine._find_spot()
        return text

    return lambda patch: patch(Engine, name, effect)


def said(name: str, old: str, new: str) -> Callable[[Patch], None]:
    """Return a mutant with another text of an effect."""
    original = getattr(Engine, name)
    return lambda patch: patch(Engine, name, lambda *arguments: original(*arguments).replace(old, new))


def with_commands(change: Callable[[Engine, dict[str, Any]], None]) -> Callable[[Patch], None]:
    """Return a mutant with other admissible commands."""
    original = native._make_spot

    def make(engine: Engine) -> Any:
        actions = dict(original(engine).actions)
        change(engine, actions)
        return native._Spot(tuple(sorted(actions)), actions)

    return lambda patch: patch(native, "_make_spot", make)


def goal(changed: Callable[[Engine], bool]) -> Callable[[Patch], None]:
    """Return a mutant with another goal."""
    return lambda patch: patch(Engine, "won", changed)


def clear(field: str) -> Callable[[Engine, int, int], None]:
    return lambda engine, number, _: setattr(engine, field, getattr(engine, field) & ~(1 << number))


def mark(field: str) -> Callable[[Engine, int, int], None]:
    return lambda engine, number, _: setattr(engine, field, getattr(engine, field) | 1 << number)


def drop(verb: str, when: Callable[[Engine], bool]) -> Callable[[Engine, dict[str, Any]], None]:
    def change(engine: Engine, actions: dict[str, Any]) -> None:
        if engine.at >= 0 and when(engine):
            for command in [command for command in actions if command.startswith(verb)]:
                del actions[command]

    return change


def stay(engine: Engine, actions: dict[str, Any]) -> None:
    if engine.at >= 0:
        actions[engine.tables.go[engine.at]] = (Engine._go, engine.at, 0)


def examine_lying(engine: Engine, actions: dict[str, Any]) -> None:
    if engine.at >= 0 and engine.is_open(engine.at):
        for number in engine.tables.members(engine.contents[engine.at]):
            actions[f"examine {engine.tables.things[number].name}"] = (Engine._examine_thing, number, 0)


def take_from_closed(engine: Engine, actions: dict[str, Any]) -> None:
    if engine.at >= 0 and engine.holding < 0:
        place = engine.tables.receptacles[engine.at].name
        for number in engine.tables.members(engine.contents[engine.at]):
            if engine.tables.things[number].pickupable:
                actions[f"take {engine.tables.things[number].name} from {place}"] = (Engine._take, number, engine.at)


def two_anywhere(engine: Engine) -> bool:
    tables = engine.tables
    if tables.problem.task_type is not TaskType.PICK_TWO:
        return WON(engine)
    return sum((engine.contents[place] & tables.targets).bit_count() for place in tables.destinations) >= 2


def lit_from_afar(engine: Engine) -> bool:
    tables = engine.tables
    if tables.problem.task_type is not TaskType.LOOK_IN_LIGHT:
        return WON(engine)
    return bool(engine.toggled & tables.lamps) and engine.holding >= 0 and bool(tables.targets >> engine.holding & 1)


def an(names: Any) -> str:
    return LISTED(names).replace("a apple", "an apple")


WON, LISTED = Engine.won, native.enumeration

MUTANTS: dict[str, Callable[[Patch], None]] = {
    "going opens what is closed": after("_go", lambda engine, place, _: mark("opened")(engine, place, 0)),
    "a closed door stays open": after("_close", mark("opened")),
    "what is heated stays cool": after("_heat", mark("cool")),
    "what is cooled stays hot": after("_cool", mark("hot")),
    "what is taken is dirty again": after("_take", clear("clean")),
    "what is moved is cold again": after("_move", clear("hot")),
    "slicing leaves things whole": after("_slice", clear("sliced")),
    "using a lamp uses it not": after("_use", clear("toggled")),
    "a cold thing is called cool": said("_examine_thing", "cold", "cool"),
    "a closed receptacle shows nothing": said("_examine", "is closed.", "is open. In it, you see nothing."),
    "the hand looks empty": said("_inventory", "carrying: a", "carrying: an"),
    "the room is listed": said("_look", "you see nothing", "you see a fridge 1"),
    "an apple": lambda patch: patch(native, "enumeration", an),
    "one may go to where one is": with_commands(stay),
    "what lies there may be examined": with_commands(examine_lying),
    "closed doors do not matter": with_commands(take_from_closed),
    "a closed sink or microwave does not work": with_commands(
        drop("heat", lambda engine: not engine.is_open(engine.at))
    ),
    "a knife needs an open door": with_commands(drop("slice", lambda engine: not engine.is_open(engine.at))),
    "a full hand uses no lamp": with_commands(drop("use", lambda engine: engine.holding >= 0)),
    "the fridge does not cool": with_commands(drop("cool", lambda engine: True)),
    "a butterknife does not slice": lambda patch: patch(native, "KNIVES", frozenset({"knife"})),
    "everything fits everywhere": lambda patch: patch(native.Tables, "can_hold", lambda *_: True),
    "outer white space counts": lambda patch: patch(
        Engine,
        "step",
        lambda engine, command, step=Engine.step: step(engine, command if command.strip() == command else "?"),
    ),
    "dirty things are clean enough": lambda patch: patch(Engine, "ready", lambda engine: engine.tables.targets),
    "two in two places": goal(two_anywhere),
    "light from afar": goal(lit_from_afar),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch.setattr)
    assert any(difference(trace) for trace in traces())
