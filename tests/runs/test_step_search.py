"""The search for steps at which the success probability changes, without episodes."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.runs.statistics import fisher_test
from reward_kit.runs.step_search import StepSearch, StepValue


def search(values, is_passed, budget=160, seed=0):
    """Search the steps of an episode with these true success probabilities."""
    generator = random.Random(seed)
    found = StepSearch(len(values), is_passed, budget)
    while (step := found.next_step()) is not None:
        passed = sum(generator.random() < values[step] for _ in range(found.per_step))
        found.add(StepValue(step, passed, found.per_step))
    return found


def located(found):
    return [(change.before.step, change.is_located) for change in found.changes()]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20, 50, 200])
def test_step_that_makes_success_impossible_is_located(steps):
    for lost_at in range(0, steps, max(steps // 10, 1)):
        found = search([1.0] * (lost_at + 1) + [0.0] * (steps - lost_at - 1), is_passed=False)
        assert located(found) == [(lost_at, True)]


def test_two_changes_are_located():
    found = search([0.1] * 4 + [0.9] * 9 + [0.0] * 7, is_passed=False)
    assert located(found) == [(3, True), (12, True)]


def test_gradual_change_is_reported_over_the_shortest_significant_part():
    found = search([0.95 - 0.1 * step for step in range(10)], is_passed=False, budget=640)
    (change, *_) = found.changes()
    assert not change.is_located and change.difference < -0.25
    spans = [(one.before.step, one.after.step) for one in found.changes()]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_equal_values_have_no_change():
    alarms = [len(search([value] * 20, value > 0.5, seed=seed).changes()) for value in (0.0, 1.0) for seed in range(20)]
    assert not any(alarms)
    # With a value of 0.5, the last step to the known outcome is a change of 0.5.
    assert located(search([0.5] * 20, True))[:-1] == []


def test_number_of_continuations_is_within_the_budget_and_fixed_per_step():
    for steps, budget in itertools.product((1, 5, 30), (8, 40, 160, 1000)):
        found = search([0.5] * steps, False, budget)
        assert len(found.values) * found.per_step <= budget
        assert {value.scored for value in found.values.values()} == {found.per_step}
        assert 8 <= found.per_step <= 64


def test_steps_are_chosen_without_their_own_results():
    # Whatever the results of a step are, the same steps were chosen before it.
    def order(flip):
        found, chosen = StepSearch(20, False, 160), []
        while (step := found.next_step()) is not None and len(chosen) < 4:
            chosen.append(step)
            found.add(StepValue(step, found.per_step if step < 10 and step != flip else 0, found.per_step))
        return chosen

    chosen = order(None)
    for position, step in enumerate(chosen):
        assert order(step)[: position + 1] == chosen[: position + 1]


@pytest.mark.parametrize("n", [8, 16, 20, 32, 64])
def test_mean_coverage_of_the_interval_is_near_its_level(n):
    bounds = [StepValue(0, passed, n).bounds() for passed in range(n + 1)]

    def coverage(p):
        weights = (math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1))
        return sum(weight for weight, (low, high) in zip(weights, bounds, strict=True) if low <= p <= high)

    mean = sum(coverage((i + 0.5) / 500) for i in range(500)) / 500
    assert 0.945 < mean < 0.96


@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_fisher_test_equals_the_share_of_permutations(n_a, n_b, data):
    a, b = data.draw(st.integers(0, n_a)), data.draw(st.integers(0, n_b))
    outcomes = [1] * (a + b) + [0] * (n_a + n_b - a - b)
    counts = [sum(outcomes[i] for i in chosen) for chosen in itertools.combinations(range(n_a + n_b), n_a)]
    weight = {k: counts.count(k) for k in set(counts)}
    expected = sum(number for number in weight.values() if number <= weight[a]) / len(counts)
    assert math.isclose(fisher_test(a, n_a, b, n_b), expected)
