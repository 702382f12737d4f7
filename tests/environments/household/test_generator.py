"""Test generated problems: reproducible, solvable, unsolved at the start, and with disjoint splits."""

from collections import Counter
from functools import cache

import pytest

from reward_kit.environments import household_problems as domain
from reward_kit.environments.household_problems import (
    SPLITS,
    Problem,
    TaskType,
    generate_problem,
    split_of_layout,
)
from reward_kit.errors import ConfigError

COUNT = 3_000


@cache
def problems(split: str) -> tuple[Problem, ...]:
    return tuple(generate_problem(split, index) for index in range(COUNT))


def everything() -> list[Problem]:
    return [drawn for split in SPLITS for drawn in problems(split)]


def content(drawn: Problem) -> tuple:
    return drawn.task_type, drawn.target, drawn.destination, drawn.receptacles, drawn.things


def homes_of_targets(drawn: Problem) -> list[str]:
    return [thing.at for thing in drawn.things if thing.type == drawn.target]


def type_of(name: str) -> str:
    return name.split(" ")[0]


def test_equal_arguments_give_equal_problems():
    assert problems("train")[:30] == tuple(generate_problem("train", index) for index in range(30))
    assert generate_problem("train", 8, seed=4) == generate_problem("train", 8, 4, "pick_clean_then_place_in_recep")
    assert content(generate_problem("train", 8, seed=4)) != content(generate_problem("train", 8, seed=5))


def test_known_problem_is_unchanged():
    """Recorded results name problems by id: a change of the generator changes the benchmark."""
    drawn = generate_problem("held_out", 3)
    assert drawn.id == "held_out-pick_heat_then_place_in_recep-0-3"
    assert drawn.goal == "put a hot cup in diningtable."
    assert drawn.layout == (
        "kitchen: 1 cabinet, 1 coffeemachine, 2 countertop, 1 diningtable, 1 fridge, 1 microwave, 1 shelf, "
        "1 sinkbasin, 2 stoveburner"
    )
    assert {thing.name: thing.at for thing in drawn.things} == {
        "bread 1": "countertop 1",
        "cup 1": "diningtable 1",
        "mug 1": "microwave 1",
        "potato 1": "countertop 2",
        "spoon 1": "diningtable 1",
        "vase 1": "cabinet 1",
    }


def test_splits_share_no_layout_and_no_problem():
    layouts = [{drawn.layout for drawn in problems(split)} for split in SPLITS]
    assert not layouts[0] & layouts[1] and not layouts[0] & layouts[2] and not layouts[1] & layouts[2]
    assert min(len(found) for found in layouts) > 500
    assert max(Counter(map(content, everything())).values()) == 1
    assert max(Counter(drawn.id for drawn in everything()).values()) == 1


def test_layout_lists_the_receptacles_and_decides_the_split():
    for drawn in everything():
        counts = Counter(item.type for item in drawn.receptacles)
        room, _, listed = drawn.layout.partition(": ")
        assert listed == ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
        assert room in domain.TASK_ROOMS[drawn.task_type]
        assert split_of_layout(drawn.layout) == drawn.split


def test_sizes_and_names_are_within_range():
    sizes = {len(drawn.receptacles) for drawn in everything()}
    assert sizes == set(range(6, 17))
    for drawn in everything():
        assert 6 <= len(drawn.things) <= 14
        for items in (drawn.receptacles, drawn.things):
            order = [(item.type, int(item.name.split(" ")[1])) for item in items]
            assert order == sorted(set(order))
            highest = Counter(kind for kind, _ in order)
            assert all(number <= highest[kind] for kind, number in order)
            assert all(item.name == f"{item.type} {number}" for item, (_, number) in zip(items, order, strict=True))


def test_things_have_allowed_places_and_properties():
    for drawn in everything():
        places = {item.name: item for item in drawn.receptacles}
        assert all(item.openable == (item.type in domain.OPENABLE) for item in drawn.receptacles)
        for thing in drawn.things:
            home = places[thing.at].type
            if thing.toggleable:
                assert home in domain.LAMP_PLACES[thing.type] and not thing.pickupable
            else:
                assert domain.can_hold(home, thing.type) and thing.pickupable
            assert thing.heatable == (thing.type in domain.HEATABLE)
            assert thing.coolable == (thing.type in domain.COOLABLE)
            assert thing.cleanable == (thing.type in domain.CLEANABLE)
            assert thing.sliceable == (thing.type in domain.SLICEABLE)


@pytest.mark.parametrize("task_type", list(TaskType))
def test_every_problem_is_solvable_and_unsolved_at_the_start(task_type):
    asked = [drawn for drawn in everything() if drawn.task_type is task_type]
    assert len(asked) == COUNT / 6 * len(SPLITS)
    for drawn in asked:
        types = {item.type for item in drawn.receptacles}
        homes = homes_of_targets(drawn)
        assert len(homes) >= (2 if task_type is TaskType.PICK_TWO else 1)
        assert task_type not in domain.APPLIANCES or domain.APPLIANCES[task_type] in types
        if task_type is TaskType.LOOK_IN_LIGHT:
            assert any(thing.type == drawn.destination and thing.toggleable for thing in drawn.things)
            continue
        assert drawn.destination in types and domain.can_hold(drawn.destination, drawn.target)
        there = Counter(home for home in homes if type_of(home) == drawn.destination)
        if task_type is TaskType.PICK_AND_PLACE:
            assert not there
        if task_type is TaskType.PICK_TWO:
            assert max(there.values(), default=0) <= 1


def test_targets_have_the_property_of_their_task():
    needed = {TaskType.CLEAN: "cleanable", TaskType.HEAT: "heatable", TaskType.COOL: "coolable"}
    for drawn in everything():
        if drawn.task_type in needed:
            targets = [thing for thing in drawn.things if thing.type == drawn.target]
            assert all(getattr(thing, needed[drawn.task_type]) for thing in targets)


def test_rooms_vary_and_some_problems_have_spare_targets():
    for split in SPLITS:
        assert {drawn.layout.partition(":")[0] for drawn in problems(split)} == set(domain.ROOMS)
        spare = [drawn for drawn in problems(split) if len(homes_of_targets(drawn)) > 2]
        assert len(spare) > 50
        assert len({(drawn.target, drawn.destination) for drawn in problems(split)}) > 300


def test_problems_survive_json():
    for drawn in problems("train")[:60]:
        assert Problem.from_json(drawn.to_json()) == drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("test", 0), "unknown split 'test'"),
        (("trian", 0), "did you mean 'train'"),
        (("train", 0, 0, "pick_heat"), "unknown task type 'pick_heat'"),
    ],
)
def test_unknown_names_are_rejected(arguments, said):
    with pytest.raises(ConfigError, match=said):
        generate_problem(*arguments)
