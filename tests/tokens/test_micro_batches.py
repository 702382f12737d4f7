"""Micro-batches hold every row once within the token budget, and their order can be restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.errors import ConfigError
from reward_kit.tokens import build_rows, micro_batches, restored_order
from tests.tokens.episode_strategies import PAD, play

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def cost(lengths: np.ndarray, padded: bool) -> int:
    return int(len(lengths) * lengths.max() if padded else lengths.sum())


@given(lengths=LENGTHS, budget=st.integers(50, 200), padded=st.booleans())
def test_every_row_is_in_exactly_one_part_within_the_budget(lengths: list[int], budget: int, padded: bool) -> None:
    parts = micro_batches(lengths, budget, padded=padded)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert all(len(part) and np.array_equal(part, np.sort(part)) for part in parts)
    assert all(cost(np.array(lengths)[part], padded) <= budget for part in parts)


@given(lengths=LENGTHS, budget=st.integers(50, 200), padded=st.booleans())
def test_restored_order_undoes_the_partition(lengths: list[int], budget: int, padded: bool) -> None:
    parts = micro_batches(lengths, budget, padded=padded)
    results = np.concatenate([np.zeros(0, dtype=int), *(np.array(lengths, dtype=int)[part] for part in parts)])
    assert results[restored_order(parts)].tolist() == lengths


@given(lengths=LENGTHS, budget=st.integers(50, 200))
def test_number_of_parts_equals_first_fit_decreasing(lengths: list[int], budget: int) -> None:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, left in enumerate(room) if left >= length]
        if fitting:
            room[fitting[0]] -= length
        else:
            room.append(budget - length)
    assert len(micro_batches(lengths, budget)) == len(room)


@given(lengths=st.lists(st.integers(1, 50), min_size=8, max_size=40), budget=st.integers(50, 200), padded=st.booleans())
def test_number_of_parts_is_a_multiple_of_multiple_of(lengths: list[int], budget: int, padded: bool) -> None:
    try:
        parts = micro_batches(lengths, budget, padded=padded, multiple_of=4)
    except ConfigError as error:
        assert "rows cannot be split into" in str(error)
        assert -(-len(micro_batches(lengths, budget, padded=padded)) // 4) * 4 > len(lengths)
        return
    assert len(parts) % 4 == 0
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert all(len(part) and cost(np.array(lengths)[part], padded) <= budget for part in parts)


def test_parts_are_balanced() -> None:
    """First fit alone makes 20 and 2, 66 and 33."""
    assert [part.tolist() for part in micro_batches([6, 4, 10, 2], 20)] == [[2, 3], [0, 1]]
    loads = [sum([30, 30, 30, 3, 3, 3][row] for row in part) for part in micro_batches([30, 30, 30, 3, 3, 3], 66)]
    assert sorted(loads) == [39, 60]


def test_balanced_parts_over_the_budget_are_not_used() -> None:
    """3+3+2+2+2: the lightest-first form makes 7 and 5 in two parts of 6; first fit makes 6 and 6."""
    parts = micro_batches([3, 3, 2, 2, 2], 6)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4]]


def test_batch_rows_are_split_and_restored() -> None:
    turns = [([1] * n, [2]) for n in (5, 1, 3, 1)]
    rows = build_rows([play(f"r{i}", [turn]).episode for i, turn in enumerate(turns)], pad_token_id=PAD)
    parts = micro_batches(rows.lengths(), 8)
    batches = [rows[part].trim() for part in parts]
    assert [batch.batch["input_ids"].shape for batch in batches] == [(2, 6), (2, 4)]
    ids = [item.non_tensor_batch["rollout_id"] for batch in batches for item in batch]
    assert [ids[place] for place in restored_order(parts)] == ["r0", "r1", "r2", "r3"]


def test_no_rows_make_no_parts() -> None:
    assert micro_batches([], 10) == []
    assert restored_order([]).tolist() == []


def test_impossible_budgets_and_multiples_are_rejected() -> None:
    with pytest.raises(ConfigError, match="row 1 has 11 tokens, but max_tokens is 10; raise max_tokens"):
        micro_batches([3, 11], 10)
    with pytest.raises(ConfigError, match="multiple_of must be at least 1, got 0"):
        micro_batches([3], 10, multiple_of=0)
    with pytest.raises(
        ConfigError, match="2 rows cannot be split into 4 parts, the number that multiple_of=4 requires"
    ):
        micro_batches([3, 3], 10, multiple_of=4)


@pytest.mark.parametrize("lengths", [[-3, 2], [1.5], [[1, 2]], [True]])
def test_invalid_lengths_are_rejected(lengths: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"lengths must be a \(B,\) array of integers, the number of tokens"):
        micro_batches(lengths, 5)
