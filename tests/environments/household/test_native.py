"""Test the native engine: texts, rules, forks and state keys."""

from __future__ import annotations

import random

import pytest

from reward_kit.environments import household_problems as generator
from reward_kit.environments.household_engine import NOTHING, HouseholdEngine, Tables
from reward_kit.environments.household_problems import Problem, TaskType
from tests.environments.household.small import all_states, household, random_household, raw_state, thing

KITCHEN = ["cabinet 1", "cabinet 2", "countertop 1", "fridge 1", "microwave 1", "sidetable 1", "sinkbasin 1"]
THINGS = [
    thing("apple 1", "countertop 1", "cleanable", "heatable", "coolable", "sliceable"),
    thing("apple 2", "fridge 1", "cleanable", "heatable", "coolable", "sliceable"),
    thing("desklamp 1", "sidetable 1", "toggleable", fixed=True),
    thing("knife 1", "countertop 1", "cleanable"),
    thing("mug 1", "countertop 1", "cleanable", "heatable", "coolable"),
    thing("mug 2", "cabinet 1", "cleanable", "heatable", "coolable"),
]


def kitchen() -> HouseholdEngine:
    return HouseholdEngine(household(TaskType.HEAT, "cabinet", KITCHEN, THINGS))


def play(engine: HouseholdEngine, *commands: str) -> list[str]:
    return [engine.step(command).observation for command in commands]


def test_introduction_lists_the_room_and_the_task() -> None:
    view = kitchen().reset()
    assert view.observation == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 1, a cabinet 2, a countertop 1, a fridge 1, a microwave 1, a sidetable 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a hot mug in cabinet."
    )
    assert view.admissible == tuple(sorted(["help", "inventory", "look", *(f"go to {name}" for name in KITCHEN)]))
    assert (view.reward, view.done, view.won) == (0.0, False, False)


def test_task_is_played_to_its_end() -> None:
    engine = kitchen()
    assert play(engine, "go to cabinet 1", "open cabinet 1", "take mug 2 from cabinet 1", "inventory") == [
        "You arrive at cabinet 1. The cabinet 1 is closed.",
        "You open the cabinet 1. The cabinet 1 is open. In it, you see a mug 2.",
        "You pick up the mug 2 from the cabinet 1.",
        "You are carrying: a mug 2.",
    ]
    assert play(engine, "go to microwave 1", "heat mug 2 with microwave 1", "examine mug 2", "go to cabinet 1") == [
        "You arrive at microwave 1. The microwave 1 is closed.",
        "You heat the mug 2 using the microwave 1.",
        "This is a hot mug 2.",
        "You arrive at cabinet 1. The cabinet 1 is open. In it, you see nothing.",
    ]
    view = engine.step("move mug 2 to cabinet 1")
    assert (view.observation, view.reward, view.done, view.won) == (
        "You move the mug 2 to the cabinet 1.",
        1.0,
        True,
        True,
    )
    taken = engine.step("take mug 2 from cabinet 1")
    assert (taken.reward, taken.done) == (0.0, False)


def test_knife_slices_in_a_closed_fridge_and_lamp_needs_no_free_hand() -> None:
    engine = kitchen()
    play(engine, "go to countertop 1", "take knife 1 from countertop 1")
    assert play(engine, "slice apple 1 with knife 1", "go to fridge 1", "slice apple 2 with knife 1") == [
        "You sliced the apple 1 with the knife 1.",
        "You arrive at fridge 1. The fridge 1 is closed.",
        "You sliced the apple 2 with the knife 1.",
    ]
    assert play(engine, "go to sidetable 1", "use desklamp 1", "use desklamp 1")[1:] == 2 * [
        "You turn on the desklamp 1."
    ]


def test_examine_lists_every_change_of_a_thing() -> None:
    engine = kitchen()
    play(engine, "go to countertop 1", "take knife 1 from countertop 1", "slice apple 1 with knife 1")
    play(engine, "move knife 1 to countertop 1", "take apple 1 from countertop 1")
    told = play(engine, "examine apple 1")
    for place, verb in (("sinkbasin 1", "clean"), ("fridge 1", "cool"), ("microwave 1", "heat")):
        told += play(engine, f"go to {place}", f"{verb} apple 1 with {place}", "examine apple 1")[2:]
    assert [text.removeprefix("This is a ") for text in told] == [
        "sliced apple 1.",
        "clean sliced apple 1.",
        "cool and clean sliced apple 1.",
        "hot and clean sliced apple 1.",
    ]


@pytest.mark.parametrize(
    "command",
    [
        "",
        "dance",
        "Look",
        "go to countertop 1",
        "go to fridge 9",
        "take mug 2 from cabinet 1",
        "take  mug 1 from countertop 1",
    ],
)
def test_inadmissible_action_changes_nothing(command: str) -> None:
    engine = kitchen()
    before = engine.step("go to countertop 1").admissible
    key = engine.state_key()
    view = engine.step(command)
    assert (view.observation, view.admissible, engine.state_key()) == (NOTHING, before, key)


def test_whitespace_around_a_command_is_ignored() -> None:
    assert play(kitchen(), " go to sidetable 1\n") == [
        "You arrive at sidetable 1. On the sidetable 1, you see a desklamp 1."
    ]


def test_forks_share_no_state() -> None:
    engine = kitchen()
    engine.step("go to countertop 1")
    twin, key = engine.fork(), engine.state_key()
    assert twin.state_key() == key and twin.tables is engine.tables
    play(twin, "take mug 1 from countertop 1", "go to fridge 1", "open fridge 1", "cool mug 1 with fridge 1")
    assert engine.state_key() == key
    assert play(engine, "examine countertop 1") == ["On the countertop 1, you see a apple 1, a knife 1, and a mug 1."]


def test_state_keys_of_one_problem_are_equal_and_other_problems_differ() -> None:
    one, two = kitchen(), kitchen()
    assert one.state_key() == two.state_key()
    other = HouseholdEngine(household(TaskType.COOL, "cabinet", KITCHEN, THINGS))
    assert other.state_key() != one.state_key()


@pytest.mark.parametrize("seed", range(30))
def test_admissible_commands_are_those_with_an_effect(seed: int) -> None:
    """`admissible` is cached by situation; a new engine in the same state computes the same list."""
    rng = random.Random(seed)
    problem = generator.generate_problem("train", seed)
    engine, taken = HouseholdEngine(problem), []
    for _ in range(30):
        taken.append(rng.choice(engine.admissible()))
        engine.step(taken[-1])
    fresh = HouseholdEngine(problem)
    for command in taken:
        view = fresh.step(command)
        assert view.observation != NOTHING and list(view.admissible) == sorted(set(view.admissible))
    assert fresh.admissible() == engine.admissible() and fresh.state_key() == engine.state_key()


def bisimulation(problem: Problem) -> tuple[int, int, int]:
    """Return the numbers of raw states, keys, and bisimulation classes; keys must be the classes."""
    states = list(all_states(Tables(problem)).values())
    number = {raw_state(engine): index for index, engine in enumerate(states)}
    edges = []
    for engine in states:
        answers = []
        for command in engine.admissible():
            following = engine.fork()
            view = following.step(command)
            answers.append((command, view.observation, view.won, number[raw_state(following)]))
        edges.append(answers)
    label = [hash(engine.won()) for engine in states]
    while True:
        signs = [
            (old, tuple((*edge[:3], label[edge[3]]) for edge in out)) for old, out in zip(label, edges, strict=True)
        ]
        names = {sign: index for index, sign in enumerate(dict.fromkeys(signs))}
        if len(names) == len(set(label)):
            break
        label = [names[sign] for sign in signs]
    keys = [engine.state_key() for engine in states]
    assert len(set(zip(keys, label, strict=True))) == len(set(keys)) == len(set(label))
    return len(states), len(set(keys)), len(set(label))


@pytest.mark.parametrize("task_type", TaskType)
def test_state_keys_are_equal_exactly_if_futures_are_equal(task_type: TaskType) -> None:
    states, _, _ = bisimulation(random_household(task_type, 3))
    assert states > 20


def test_unobservable_state_is_not_in_the_key() -> None:
    things = [
        thing("apple 1", "shelf 1", "sliceable", fixed=True),
        thing("desklamp 1", "shelf 1", "toggleable", fixed=True),
        thing("knife 1", "shelf 1"),
    ]
    unseen = bisimulation(household(TaskType.PICK_AND_PLACE, "cabinet", ["countertop 1", "shelf 1"], things))
    assert unseen[1] < unseen[0]
    lamps = [thing(f"desklamp {number}", "shelf 1", "toggleable", fixed=True) for number in (1, 2)]
    two = [*lamps, thing("mug 1", "countertop 1"), thing("vase 1", "shelf 1", "toggleable")]
    lit = bisimulation(household(TaskType.LOOK_IN_LIGHT, "desklamp", ["countertop 1", "shelf 1"], two))
    assert lit[1] < lit[0]
