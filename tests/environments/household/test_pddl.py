"""Test the PDDL of a problem: names, facts and goals."""

import re

import pytest

from reward_kit.environments import household_problems as domain
from reward_kit.environments.household_problems import SPLITS, Problem, Receptacle, TaskType, Thing, generate_problem
from reward_kit.environments.household_worker import entity_names, game_data, pddl_name, pddl_problem

DRAWN = [drawn for split in SPLITS for drawn in (generate_problem(split, index) for index in range(120))]


def small(task_type: TaskType, target: str = "mug", destination: str = "cabinet") -> Problem:
    receptacles = (Receptacle("cabinet 1", "cabinet", True), Receptacle("desk 1", "desk"))
    things = (
        Thing("desklamp 1", "desklamp", "desk 1", toggleable=True, pickupable=False),
        Thing("mug 1", "mug", "desk 1", cleanable=True, heatable=True, coolable=True),
        Thing("mug 2", "mug", "cabinet 1", cleanable=True, heatable=True, coolable=True),
    )
    return Problem("p", "train", task_type, target, destination, receptacles, things, "layout")


def facts(drawn: Problem) -> set[str]:
    text = pddl_problem(drawn).partition("(:init")[2].partition("(:goal")[0]
    return set(re.findall(r"\(([^()]+)\)", text))


def goal(drawn: Problem) -> str:
    return pddl_problem(drawn).partition("(:goal")[2].partition("(:metric")[0]


def test_pddl_names_sort_by_type_and_number():
    assert [pddl_name(name) for name in ("mug 2", "mug 10")] == ["mug_02", "mug_10"]
    for drawn in DRAWN:
        for items in (drawn.receptacles, drawn.things):
            names = [pddl_name(item.name) for item in items]
            assert names == sorted(names)


def test_small_problem_has_the_expected_facts():
    assert facts(small(TaskType.HEAT)) == {
        "atLocation agent1 loc_00",
        "receptacleAtLocation cabinet_01 loc_01",
        "receptacleType cabinet_01 cabinetType",
        "openable cabinet_01",
        "receptacleAtLocation desk_01 loc_02",
        "receptacleType desk_01 deskType",
        "objectType desklamp_01 desklampType",
        "inReceptacle desklamp_01 desk_01",
        "objectAtLocation desklamp_01 loc_02",
        "toggleable desklamp_01",
        *_mug("mug_01", "desk_01", "loc_02"),
        *_mug("mug_02", "cabinet_01", "loc_01"),
        "canContain cabinetType mugType",
        "canContain deskType mugType",
        "canContain fridgeType mugType",
        "canContain microwaveType mugType",
        "canContain sinkbasinType butterknifeType",
        "canContain sinkbasinType knifeType",
        "canContain sinkbasinType mugType",
        "total-cost",
    }


def _mug(name: str, receptacle: str, place: str) -> set[str]:
    flags = {f"{flag} {name}" for flag in ("cleanable", "heatable", "coolable", "pickupable")}
    at = {f"inReceptacle {name} {receptacle}", f"objectAtLocation {name} {place}"}
    return flags | at | {f"objectType {name} mugType"}


@pytest.mark.parametrize(
    ("task_type", "words"),
    [
        (TaskType.PICK_AND_PLACE, ["(inReceptacle ?o ?r)"]),
        (TaskType.CLEAN, ["(inReceptacle ?o ?r)", "(cleanable ?o)", "(isClean ?o)"]),
        (TaskType.HEAT, ["(inReceptacle ?o ?r)", "(heatable ?o)", "(isHot ?o)"]),
        (TaskType.COOL, ["(inReceptacle ?o ?r)", "(coolable ?o)", "(isCool ?o)"]),
        (TaskType.PICK_TWO, ["(inReceptacle ?o ?r)", "(inReceptacle ?p ?r)", "(not (= ?o ?p))"]),
    ],
)
def test_receptacle_goals_match_the_task_type(task_type, words):
    text = goal(small(task_type))
    states = {"isClean", "isHot", "isCool"}
    assert all(word in text for word in ["(objectType ?o mugType)", "(receptacleType ?r cabinetType)", *words])
    assert {word for word in states if word in text} == {word for word in states if any(word in part for part in words)}


def test_look_in_light_goal_needs_a_lit_lamp_and_the_held_object():
    text = goal(small(TaskType.LOOK_IN_LIGHT, destination="desklamp"))
    lit = "(objectType ?t desklampType) (toggleable ?t) (isToggled ?t) (inReceptacle ?t ?r)"
    assert f"{lit} (receptacleAtLocation ?r ?l) (atLocation ?a ?l)" in text
    assert "(objectType ?o mugType) (holds ?a ?o)" in text


def test_used_names_are_declared_and_parentheses_balanced():
    for drawn in DRAWN:
        text = pddl_problem(drawn)
        assert text.count("(") == text.count(")")
        declared = set(re.findall(r"[\w]+", text.partition("(:objects")[2].partition("(:init")[0]))
        used = {word for fact in facts(drawn) if fact != "total-cost" for word in fact.split(" ")[1:]}
        assert used <= declared
        assert {f"{kind}Type" for kind in ("fridge", "microwave", "sinkbasin", *domain.KNIVES)} <= declared


def test_game_contains_the_task_and_the_names():
    drawn = small(TaskType.COOL)
    data = game_data(drawn, "DOMAIN", "Your task is to: UNKNOWN GOAL.")
    assert data["grammar"] == "Your task is to: put a cool mug in cabinet."
    assert data["pddl_domain"] == "DOMAIN" and data["pddl_problem"] == pddl_problem(drawn)
    assert entity_names(drawn)["mug_02"] == "mug 2" and len(entity_names(drawn)) == 5
