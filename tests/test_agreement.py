"""Kappa, ranks and correlations against published examples, scikit-learn, SciPy and reference loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agreement import (
    cohens_kappa,
    inversions,
    kendall_tau_b,
    midranks,
    pearson,
    spearman,
)

ONE = np.array([1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 1, 3, 5, 2, 4])
OTHER = np.array([1, 2, 2, 4, 5, 4, 4, 3, 1, 1, 2, 3, 5, 3, 5])
SCORES = np.array([0.1, 0.4, 0.35, 0.8, 0.9, 0.05, 0.4, 0.7])
LABELS = np.array([1.0, 2, 2, 4, 5, 1, 3, 3])
floats = st.lists(st.integers(-4, 4), min_size=2, max_size=40)


def test_kappa_matches_scikit_learn():
    """`cohen_kappa_score` of scikit-learn 1.9.1, without weights and with weights="quadratic"."""
    assert cohens_kappa(ONE - 1, OTHER - 1, 5) == pytest.approx(0.5)
    assert cohens_kappa(ONE - 1, OTHER - 1, 5, quadratic=True) == pytest.approx(0.9)
    one, other = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1]), np.array([0, 1, 1, 1, 0, 0, 1, 1, 0, 1])
    assert cohens_kappa(one, other, 2) == pytest.approx(0.5833333333333333)
    assert cohens_kappa(one, other, 2, quadratic=True) == pytest.approx(0.5833333333333333)


def test_kappa_counts_a_level_that_a_rater_never_used():
    one, other = np.array([0, 4, 4, 0, 4]), np.array([0, 4, 2, 0, 4])
    assert cohens_kappa(one, other, 5) == pytest.approx(0.6666666666666667)  # scikit-learn 1.9.1, labels=[1..5]
    assert cohens_kappa(one, other, 5, quadratic=True) == pytest.approx(0.8888888888888888)


def test_kappa_matches_a_published_table():
    """Fleiss, Levin and Paik 2003, "Statistical Methods for Rates and Proportions", table 18.1: kappa is 0.68."""
    table = [[75, 1, 4], [5, 4, 1], [0, 0, 10]]
    pairs = [(i, j) for i, j in itertools.product(range(3), range(3)) for _ in range(table[i][j])]
    one, other = np.array(pairs).T
    assert cohens_kappa(one, other, 3) == pytest.approx(0.676, abs=0.0005)


def test_correlations_match_scipy():
    """`spearmanr`, `kendalltau` (tau-b) and `pearsonr` of SciPy 1.17.1."""
    assert spearman(ONE.astype(float), OTHER.astype(float)) == pytest.approx(0.9)
    assert kendall_tau_b(ONE.astype(float), OTHER.astype(float)) == pytest.approx(0.8111111111111111)
    assert spearman(SCORES, LABELS) == pytest.approx(0.9634862821317263)
    assert kendall_tau_b(SCORES, LABELS) == pytest.approx(0.9237604307034012)
    assert pearson(SCORES, LABELS) == pytest.approx(0.9537020358410256)


def test_correlations_match_scipy_with_many_ties():
    chance = np.random.default_rng(7)
    x = chance.normal(size=300).round(1)
    y = (x + chance.normal(size=300)).round(0)
    assert spearman(x, y) == pytest.approx(0.6551684527636491)
    assert kendall_tau_b(x, y) == pytest.approx(0.5266837436896877)


def test_tau_matches_a_count_by_hand():
    """Of 45 pairs, 25 are concordant and 20 discordant."""
    one = np.arange(1.0, 11.0)
    other = np.array([4.0, 7, 2, 10, 3, 6, 8, 1, 5, 9])
    assert kendall_tau_b(one, other) == pytest.approx(5 / 45)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
def test_tau_agrees_with_a_loop_over_all_pairs(pairs):
    x, y = np.array(pairs, float).T
    both = list(itertools.combinations(range(len(x)), 2))
    balance = sum(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in both)
    untied_x, untied_y = sum(x[i] != x[j] for i, j in both), sum(y[i] != y[j] for i, j in both)
    found = kendall_tau_b(x, y)
    if not untied_x or not untied_y:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(balance / math.sqrt(untied_x * untied_y))


@given(st.lists(st.integers(0, 50), max_size=600))
def test_inversions_agree_with_a_loop(values):
    array = np.array(values, float)
    assert inversions(array) == sum(int((array[:i] > array[i]).sum()) for i in range(len(array)))


@given(floats)
def test_midranks_keep_the_order_and_the_rank_sum(values):
    ranks = midranks(np.array(values, float))
    assert ranks.sum() == pytest.approx(len(values) * (len(values) + 1) / 2)
    for i, j in itertools.combinations(range(len(values)), 2):
        assert np.sign(values[i] - values[j]) == np.sign(ranks[i] - ranks[j])


@given(floats, st.randoms())
def test_rank_correlations_depend_only_on_order_and_are_symmetric(values, chance):
    x = np.array(values, float)
    y = np.array([chance.choice([-1.0, 0.0, 1.0, 2.0]) for _ in values])
    for figure in (spearman, kendall_tau_b):
        found = figure(x, y)
        if math.isnan(found):
            continue
        assert -1 <= found <= 1
        assert figure(np.exp(x), 3 * y + 1) == pytest.approx(found)
        assert figure(y, x) == pytest.approx(found)
        assert figure(-x, y) == pytest.approx(-found)
        order = np.array(chance.sample(range(len(x)), len(x)))
        assert figure(x[order], y[order]) == pytest.approx(found)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_kappa_agrees_with_a_loop(pairs):
    one, other = np.array(pairs).T
    n = len(pairs)
    for quadratic in (False, True):
        weigh = (lambda i, j: (i - j) ** 2) if quadratic else (lambda i, j: float(i != j))
        seen = sum(weigh(i, j) for i, j in pairs) / n
        chance = sum(weigh(i, j) for i, _ in pairs for _, j in pairs) / n**2
        found = cohens_kappa(one, other, 4, quadratic=quadratic)
        assert math.isnan(found) if chance == 0 else found == pytest.approx(1 - seen / chance)


def test_undefined_values_are_nan():
    same, some = np.ones(4), np.array([1.0, 2, 3, 4])
    for figure in (pearson, spearman, kendall_tau_b):
        assert (
            math.isnan(figure(same, some)) and math.isnan(figure(some, same)) and math.isnan(figure(some[:1], some[:1]))
        )
    assert math.isnan(cohens_kappa(np.zeros(3, int), np.zeros(3, int), 2))
    assert cohens_kappa(np.array([0, 1, 0]), np.array([0, 1, 0]), 2) == 1.0


def test_tau_of_fifty_thousand_rows_is_fast():
    chance = np.random.default_rng(0)
    x = chance.normal(size=50_000)
    assert kendall_tau_b(x, -x) == pytest.approx(-1.0)
    assert abs(kendall_tau_b(x, chance.normal(size=50_000))) < 0.02
