"""Test that the expert's plans are as short as a breadth-first search finds them, from every state."""

from __future__ import annotations

import random
from collections import deque

import pytest

from reward_kit.environments import household_problems as generator
from reward_kit.environments.household_engine import HouseholdEngine, Tables, shortest_plan
from reward_kit.environments.household_problems import Problem, TaskType
from tests.environments.household.small import all_states, household, random_household, raw_state, thing


def distances(problem: Problem) -> dict[HouseholdEngine, int | None]:
    """Return the number of commands from every reachable state to the goal; None if unreachable."""
    states = all_states(Tables(problem))
    before: dict[object, list[object]] = {}
    for state, engine in states.items():
        for command in engine.admissible():
            following = engine.fork()
            following.step(command)
            before.setdefault(raw_state(following), []).append(state)
    far: dict[object, int] = {state: 0 for state, engine in states.items() if engine.won()}
    waiting = deque(far)
    while waiting:
        state = waiting.popleft()
        for earlier in before.get(state, ()):
            if earlier not in far:
                far[earlier] = far[state] + 1
                waiting.append(earlier)
    return {engine: far.get(state) for state, engine in states.items()}


def follow(engine: HouseholdEngine, plan: list[str]) -> bool:
    for command in plan:
        assert command in engine.admissible() and not engine.won()
        engine.step(command)
    return engine.won()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("task_type", TaskType)
def test_plans_are_shortest_from_every_state(task_type: TaskType, seed: int) -> None:
    found = distances(random_household(task_type, seed))
    chosen = random.Random(seed).sample(list(found.items()), min(len(found), 1_500))
    for engine, far in chosen:
        plan = shortest_plan(engine)
        assert (plan if plan is None else len(plan)) == far, (raw_state(engine), plan)
        assert plan is None or follow(engine.fork(), plan)


@pytest.mark.parametrize("task_type", TaskType)
def test_generated_problems_are_solvable_even_after_a_random_walk(task_type: TaskType) -> None:
    rng = random.Random(1)
    for index in range(40):
        engine = HouseholdEngine(generator.generate_problem("development", index, 7, task_type))
        plan = shortest_plan(engine)
        assert plan and follow(engine.fork(), plan)
        for _ in range(15):
            if not engine.won():
                engine.step(rng.choice(engine.admissible()))
        again = shortest_plan(engine)
        assert again is not None and follow(engine, again)


def test_plan_at_the_goal_is_empty() -> None:
    problem = household(TaskType.PICK_AND_PLACE, "shelf", ["shelf 1"], [thing("mug 1", "shelf 1")])
    assert shortest_plan(HouseholdEngine(problem)) == []


def test_unsolvable_problem_has_no_plan() -> None:
    things = [thing("mug 1", "shelf 1", "cleanable")]
    assert (
        shortest_plan(HouseholdEngine(household(TaskType.CLEAN, "cabinet", ["cabinet 1", "shelf 1"], things))) is None
    )
    fixed = [thing("mug 1", "shelf 1", fixed=True)]
    assert (
        shortest_plan(HouseholdEngine(household(TaskType.PICK_AND_PLACE, "cabinet", ["cabinet 1", "shelf 1"], fixed)))
        is None
    )


IDLE = ("look", "inventory", "help", "examine")
"""Commands that change nothing that a plan needs."""


def states_searched(problem: Problem, length: int) -> int | None:
    """Return the number of states that a plain search visits below `length`; None if it finds the goal."""
    start = HouseholdEngine(problem)
    seen, level = {start.state_key()}, [start]
    for _ in range(1, length):
        following = []
        for engine in level:
            for command in engine.admissible():
                if command.startswith(IDLE):
                    continue
                after = engine.fork()
                if after.step(command).won:
                    return None
                if (key := after.state_key()) not in seen:
                    seen.add(key)
                    following.append(after)
        level = following
    return len(seen)


def longest(per_type: int, most: int) -> list[tuple[int, Problem]]:
    """Return the held-out problems with the longest plans, of `per_type` solved ones of each task type."""
    found = []
    for task_type in TaskType:
        for index in range(per_type):
            problem = generator.generate_problem("held_out", index, 0, task_type)
            plan = shortest_plan(HouseholdEngine(problem))
            assert plan and follow(HouseholdEngine(problem), plan)
            found.append((len(plan), problem))
    return sorted(found, key=lambda entry: -entry[0])[:most]


def test_breadth_first_search_finds_no_shorter_plan_for_every_type() -> None:
    for task_type in TaskType:
        problem = generator.generate_problem("held_out", 4, 0, task_type)
        plan = shortest_plan(HouseholdEngine(problem))
        assert plan is not None and states_searched(problem, len(plan))


@pytest.mark.campaign
def test_plans_of_200_problems_per_type_are_shortest() -> None:
    for length, problem in longest(200, 50):
        assert states_searched(problem, length), problem.id
