"""pass@k and pass^k against enumeration of all choices of k attempts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.runs.statistics import mean_pass_at_k, mean_pass_hat_k, pass_at_k, pass_hat_k

counts = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


class TestPasses:
    @pytest.mark.parametrize(
        ("n", "c", "k", "at_least_one", "all_of_them"),
        [
            (5, 5, 3, 1.0, 1.0),
            (5, 0, 3, 0.0, 0.0),
            (4, 2, 1, 0.5, 0.5),
            (4, 2, 2, 5 / 6, 1 / 6),
            (10, 3, 4, 5 / 6, 0.0),
        ],
    )
    def test_pass_rates_match_values_by_hand(self, n, c, k, at_least_one, all_of_them):
        assert pass_at_k(n, c, k) == pytest.approx(at_least_one)
        assert pass_hat_k(n, c, k) == pytest.approx(all_of_them)

    @given(counts)
    def test_pass_rates_equal_enumeration_of_choices(self, count):
        n, c, k = count
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
        assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, choices)) / len(choices))

    @given(counts)
    def test_pass_at_k_complements_pass_hat_k_of_failures(self, count):
        n, c, k = count
        assert pass_at_k(n, c, k) == pytest.approx(1 - pass_hat_k(n, n - c, k))

    @pytest.mark.parametrize("figure", [pass_at_k, pass_hat_k])
    @pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)])
    def test_impossible_counts_are_rejected(self, figure, n, c, k):
        with pytest.raises(ValueError, match=r"[ck] must be between"):
            figure(n, c, k)

    def test_large_counts_are_exact(self):
        assert pass_at_k(10_000, 1, 5_000) == 0.5

    def test_mean_pass_at_k_excludes_and_counts_samples_with_too_few_attempts(self):
        attempts = [(4, 2), (4, 4), (1, 1), (0, 0)]
        assert mean_pass_at_k(attempts, 2) == (pytest.approx((5 / 6 + 1) / 2), 2, 2)
        assert mean_pass_hat_k(attempts, 2) == (pytest.approx((1 / 6 + 1) / 2), 2, 2)
        assert mean_pass_at_k([(1, 1)], 2) == (None, 0, 1)
