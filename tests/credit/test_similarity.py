"""Test similarity grouping: the ratio, the partition, and known defects of other implementations."""

from __future__ import annotations

import difflib
import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.credit.similarity import TextSketches, components, indel_distance, similar_groups

texts = st.text("ab#\U0001f6aa", max_size=12)
longer = st.text("abcd ", max_size=200)


def similarity(a: str, b: str) -> float:
    total = len(a) + len(b)
    distance = indel_distance(a, b, total)
    assert distance is not None
    return (total - distance) / total if total else 1.0


@cache
def slow_ratio(a: str, b: str) -> float:
    """Return the ratio from the table of all prefixes."""
    row = [0] * (len(b) + 1)
    for symbol in a:
        before = row
        row = [0]
        for j, other in enumerate(b):
            row.append(before[j] + 1 if symbol == other else max(before[j + 1], row[j]))
    return 2 * row[-1] / (len(a) + len(b)) if a or b else 1.0


def slow_partition(items: list[str], groups: list[int], threshold: float) -> list[set[int]]:
    parts = [{i} for i in range(len(items))]
    for i, j in combinations(range(len(items)), 2):
        if groups[i] == groups[j] and slow_ratio(items[i], items[j]) >= threshold:
            one, two = (next(part for part in parts if k in part) for k in (i, j))
            if one is not two:
                parts.remove(two)
                one |= two
    return sorted(parts, key=min)


def partition(items: list[str], groups: list[int], threshold: float) -> list[set[int]]:
    codes = similar_groups(items, np.array(groups, dtype=np.int64), threshold).tolist()
    return sorted(({i for i, code in enumerate(codes) if code == each} for each in set(codes)), key=min)


def noisy(text: str, rng: random.Random, changes: int) -> str:
    symbols = list(text)
    for _ in range(changes):
        at = rng.randrange(len(symbols) + 1)
        symbols[at : at + rng.randrange(3)] = rng.choices("abcdefgh", k=rng.randrange(3))
    return "".join(symbols)


# The ratio


@given(texts, texts)
def test_similarity_is_the_longest_common_subsequence_ratio(a, b):
    assert similarity(a, b) == similarity(b, a) == slow_ratio(a, b)


@given(longer, longer, st.integers(0, 60))
def test_indel_distance_is_exact_up_to_its_limit_and_none_above(a, b, limit):
    distance = round((1 - slow_ratio(a, b)) * (len(a) + len(b)))
    assert indel_distance(a, b, limit) == (distance if distance <= limit else None)


def test_similarity_equals_difflib_on_simple_texts():
    for a, b in [("abcd", "bcde"), ("private", "privates"), ("the hall", "the  hall"), ("", ""), ("a", "")]:
        assert similarity(a, b) == difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


@given(texts, texts)
def test_similarity_is_never_below_difflib(a, b):
    assert difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() <= similarity(a, b)


@given(st.lists(longer, min_size=2, max_size=4))
def test_sketches_bound_the_distance_from_below(items):
    sketches = TextSketches.of(items)
    bounds = sketches.least_distances(0, np.arange(len(items)))
    for bound, item in zip(bounds.tolist(), items, strict=True):
        assert bound <= indel_distance(items[0], item, 10**6)


@given(st.lists(longer, min_size=2, max_size=4), st.integers(0, 60))
def test_near_pairs_include_every_pair_within_reach(items, reach):
    indices, reaches = np.arange(len(items)), np.full(len(items), reach / 2)
    near = {(row, other) for row, others in TextSketches.of(items).near_pairs(indices, reaches) for other in others}
    for row, other in combinations(range(len(items)), 2):
        assert (row, other) in near or indel_distance(items[row], items[other], reach) is None


def test_frequent_symbols_are_not_ignored():
    items = ", ".join(f"item {n % 7} on shelf {n % 5}" for n in range(24))[:434]
    changed = items[:100] + "9" + items[101:]
    assert difflib.SequenceMatcher(None, items, changed).ratio() < 0.4  # autojunk
    assert similarity(items, changed) == 1 - 2 / 868
    assert partition([items, changed], [0, 0], 0.95) == [{0, 1}]


def test_grid_of_two_symbols_is_compared():
    rng = random.Random(4)
    grid = "".join(rng.choices("#.", k=300))
    changed = ("." if grid[0] == "#" else "#") + grid[1:]
    assert difflib.SequenceMatcher(None, grid, changed).ratio() == 0.0  # autojunk
    assert similarity(grid, changed) > 0.99
    assert partition([grid, changed], [0, 0], 0.95) == [{0, 1}]


# The partition


@given(st.lists(st.tuples(texts, st.integers(0, 1)), max_size=9), st.sampled_from([0.3, 0.5, 2 / 3, 0.8, 0.9, 1.0]))
def test_parts_are_connected_components_of_similar_pairs(rows, threshold):
    items, groups = [text for text, _ in rows], [group for _, group in rows]
    assert partition(items, groups, threshold) == slow_partition(items, groups, threshold)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 0.95])
def test_long_texts_agree_with_all_pairs_comparison(threshold):
    rng = random.Random(1)
    pool = ["".join(rng.choices("abcdefgh", k=80)) for _ in range(3)]
    items = [noisy(rng.choice(pool), rng, rng.choice((0, 1, 3, 8, 20))) for _ in range(24)]
    assert partition(items, [0] * 24, threshold) == slow_partition(items, [0] * 24, threshold)


def test_clusters_with_distant_leaders_are_linked_by_members():
    # Each is similar to the next only; leaders are chosen by the way, links between members must still be found.
    rng = random.Random(2)
    chain = ["".join(rng.choices("abcdefgh", k=100))]
    for _ in range(9):
        at = rng.randrange(90)
        chain.append(chain[-1][:at] + "".join(rng.choices("ijkl", k=4)) + chain[-1][at + 4 :])
    rng.shuffle(chain)
    assert partition(chain, [0] * 10, 0.955) == slow_partition(chain, [0] * 10, 0.955)


@given(st.lists(texts, max_size=8, unique=True), st.integers(0, 10**6))
def test_order_of_texts_does_not_matter(items, seed):
    shuffled = items[:]
    random.Random(seed).shuffle(shuffled)
    found = {frozenset(items[i] for i in part) for part in components(items, 0.6)}
    assert found == {frozenset(shuffled[i] for i in part) for part in components(shuffled, 0.6)}


def test_chains_are_grouped_for_every_first_text():
    # A greedy grouping gives {a, b}, {c} in one order and {b, a, c} in the other: a and c are both near b only.
    a, b, c = "0123456789", "01234567ab", "012345cdab"
    for order in ([a, b, c], [b, a, c], [c, a, b]):
        assert partition(order, [0] * 3, 0.8) == [{0, 1, 2}]
    assert similarity(a, c) < 0.8  # the price: a chain holds what is not similar itself


def test_texts_of_different_groups_are_never_joined():
    assert partition(["same", "same", "same", "sane"], [0, 1, 0, 1], 0.7) == [{0, 2}, {1, 3}]


def test_short_texts_that_differ_in_a_word_can_be_similar():
    room, other = "You are in the kitchen. There is a table here.", "You are in the bedroom. There is a table here."
    assert 0.85 < similarity(room, other) < 0.9
    assert partition([room, other], [0, 0], 0.85) == [{0, 1}]
    assert partition([room, other], [0, 0], 0.95) == [{0}, {1}]


def test_noisy_copies_of_states_are_grouped():
    rng = random.Random(3)
    pool = [" ".join(rng.choices(["key", "door", "lamp", "stone", "river", "gate"], k=120)) for _ in range(8)]
    picks = [rng.randrange(8) for _ in range(120)]
    stamps = [f"12:{rng.randrange(60):02d}:{rng.randrange(60):02d} turn {rng.randrange(10_000)} " for _ in picks]
    codes = similar_groups(
        [stamp + pool[pick] for stamp, pick in zip(stamps, picks, strict=True)], np.zeros(120, dtype=np.int64), 0.95
    )
    assert len(set(codes.tolist())) == len(set(zip(codes.tolist(), picks, strict=True))) == 8


def test_sketches_separate_texts_with_the_same_vocabulary():
    # Counts of symbols, pairs and triples hardly differ here; every pair would be compared in full.
    rng = random.Random(7)
    words = [f"w{n}" for n in range(500)]
    items = [" ".join(rng.choices(words, k=400)) for _ in range(30)]
    reaches = np.array([0.05 * len(text) for text in items])
    assert list(TextSketches.of(items).near_pairs(np.arange(30), reaches)) == []
