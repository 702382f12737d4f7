"""Test pairing, in any order and in order, against all possible pairings."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.rewards.tool_calls import best_in_order, best_pairs

weights_of = st.tuples(st.integers(0, 4), st.integers(0, 4)).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 0.0, 0.25, 0.5, 0.9, 1.0]), min_size=size[1], max_size=size[1]),
        min_size=size[0],
        max_size=size[0],
    )
)


def total(weights: list[list[float]], pairs: list[int | None]) -> float:
    return sum(weights[row][column] for row, column in enumerate(pairs) if column is not None)


def best_of_all(weights: list[list[float]], columns_of) -> float:
    height, width = len(weights), len(weights[0]) if weights else 0
    return max(
        sum(weights[row][column] for row, column in zip(rows, columns, strict=True))
        for count in range(min(height, width) + 1)
        for rows in combinations(range(height), count)
        for columns in columns_of(range(width), count)
    )


@given(weights_of)
def test_pairs_have_the_best_total_of_all_pairings(weights: list[list[float]]) -> None:
    pairs = best_pairs(weights)
    used = [column for column in pairs if column is not None]
    assert len(pairs) == len(weights)
    assert len(set(used)) == len(used)
    assert total(weights, pairs) == pytest.approx(best_of_all(weights, permutations))


@given(weights_of)
def test_pairs_in_order_have_the_best_total_of_all_alignments(weights: list[list[float]]) -> None:
    pairs = best_in_order(weights)
    used = [column for column in pairs if column is not None]
    assert len(pairs) == len(weights)
    assert used == sorted(set(used))
    assert total(weights, pairs) == pytest.approx(best_of_all(weights, combinations))


def test_pairing_is_globally_optimal_and_not_greedy() -> None:
    assert best_pairs([[1.0, 0.9], [1.0, 0.0]]) == [1, 0]
