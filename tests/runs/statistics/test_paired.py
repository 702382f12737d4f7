"""Paired differences of samples: values by hand, enumeration of all signs, and simulation."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reward_kit.runs.statistics import (
    bootstrap_mean,
    cohens_dz,
    difference_interval,
    mcnemar_test,
    mean_interval,
    paired_cliffs_delta,
    paired_figures,
    paired_t_test,
    sign_flip_test,
    wilson_bounds,
)

hundredths = st.integers(-500, 500).map(lambda count: count / 100)
differences = st.lists(hundredths, min_size=2, max_size=12)
# Student (1908), "The probable error of a mean": hours of sleep gained by ten patients from one drug more than another.
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


def spread_out(values):
    assume(np.ptp(values) > 1e-3)
    return values


class TestInterval:
    def test_student_sleep_data(self):
        found = difference_interval(SLEEP)
        assert found.mean == pytest.approx(1.58)
        assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
        assert paired_t_test(SLEEP) == pytest.approx(0.00283289, abs=1e-8)

    @settings(deadline=None)
    @given(differences.map(spread_out))
    def test_difference_interval_equals_the_mean_interval(self, values):
        assume(not set(values) <= {0.0, 1.0})
        one, other = difference_interval(values), mean_interval(values, range(len(values)))
        assert (one.mean, one.low, one.high) == pytest.approx((other.mean, other.low, other.high), abs=1e-9)

    @settings(deadline=None)
    @given(differences.map(spread_out))
    def test_negated_differences_mirror_the_interval(self, values):
        one, other = difference_interval(values), difference_interval([-value for value in values])
        assert (one.low, one.high) == pytest.approx((-other.high, -other.low))

    @settings(deadline=None)
    @given(differences.map(spread_out))
    def test_interval_excludes_zero_iff_the_t_test_is_significant(self, values):
        found, p = difference_interval(values), paired_t_test(values)
        assume(abs(p - 0.05) > 1e-9)
        assert (found.low > 0 or found.high < 0) == (p < 0.05)

    def test_interval_stays_within_the_reach(self):
        found = difference_interval([-1.0, -1.0, -1.0, 0.5], reach=1.0)
        assert found.low == -1.0 and found.high > 0

    def test_one_difference_has_no_interval(self):
        found = difference_interval([0.5], reach=1.0)
        assert (found.mean, found.low, found.high, found.standard_error) == (0.5, None, None, None)

    @pytest.mark.parametrize("size", [2, 5, 100])
    def test_equal_runs_have_a_non_degenerate_interval(self, size):
        unseen = 1 - wilson_bounds(1.0, size)[0]
        found = difference_interval([0.0] * size, reach=1.0)
        assert (found.low, found.mean, found.high) == pytest.approx((-unseen, 0.0, unseen))

    def test_five_of_five_wins_have_a_non_degenerate_interval(self):
        unseen = 1 - wilson_bounds(1.0, 5)[0]
        won, half = difference_interval([1.0] * 5, reach=1.0), difference_interval([0.5] * 5, reach=1.0)
        assert (won.low, won.high) == pytest.approx((1 - 2 * unseen, 1.0))
        assert (half.low, half.high) == pytest.approx((0.5 - 1.5 * unseen, 0.5 + 0.5 * unseen))

    def test_values_equal_up_to_rounding_are_equal(self):
        noisy = [0.1 + 0.2, 0.3, 0.3, 0.15 + 0.15]
        assert difference_interval(noisy, reach=1.0).low == pytest.approx(difference_interval([0.3] * 4, reach=1.0).low)
        assert cohens_dz(noisy) is None and paired_t_test(noisy) is None

    def test_equal_differences_without_a_reach_have_zero_width(self):
        found = difference_interval([7.0] * 4)
        assert (found.low, found.high, found.standard_error) == (7.0, 7.0, 0.0)


class TestSignFlips:
    def test_student_sleep_data(self):
        # Of 2^9 signs (one difference is 0) none but all alike gives so large a sum, either way.
        assert sign_flip_test(SLEEP) == (2 / 2**9, True)

    @settings(deadline=None)
    @given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
    def test_sign_flip_test_enumerates_all_signs(self, counts):
        values = [count / 3 for count in counts]
        sums = [abs(sum(s * c for s, c in zip(signs, counts, strict=True)))
                for signs in itertools.product((-1, 1), repeat=len(counts))]  # fmt: skip
        expected = Fraction(sum(one >= abs(sum(counts)) for one in sums), len(sums))
        assert sign_flip_test(values) == (pytest.approx(float(expected), abs=1e-12), True)

    @settings(deadline=None)
    @given(st.lists(hundredths, min_size=1, max_size=20), st.floats(0.01, 100), st.integers(0, 3))
    def test_scale_sign_and_zeros_do_not_matter(self, values, factor, zeros):
        p = sign_flip_test(values).p
        assert sign_flip_test([-value * factor for value in values] + [0.0] * zeros).p == pytest.approx(p, abs=1e-12)

    @settings(deadline=None)
    @given(st.integers(1, 32))
    def test_differences_of_equal_sign_have_the_smallest_p_value(self, size):
        assert sign_flip_test([0.25] * size) == (pytest.approx(2.0 ** (1 - size)), True)

    def test_sign_flip_test_is_exact_up_to_32_differences(self):
        values = np.random.default_rng(3).normal(0.3, 1.0, 33)
        exact, drawn = sign_flip_test(values[:32]), sign_flip_test(values)
        assert exact.is_exact and not drawn.is_exact
        # Differences that are zero have no sign.
        assert sign_flip_test([*values[:32], 0.0, 0.0]) == exact

    def test_drawing_agrees_with_the_exact_binomial(self):
        """With 40 equal differences the sum depends only on the number of heads."""
        values = [1.0] * 26 + [-1.0] * 14
        exact = 2 * sum(math.comb(40, k) for k in range(15)) / 2**40
        found = sign_flip_test(values, draws=200_000)
        assert found.p == pytest.approx(exact, abs=4 * math.sqrt(exact / 200_000)) and not found.is_exact

    def test_sampled_p_values_are_positive_and_determined_by_the_seed(self):
        assert sign_flip_test([1.0] * 60, draws=99) == (1 / 100, False)
        values = np.random.default_rng(4).normal(0.2, 1.0, 50)
        one, again, other = (sign_flip_test(values, seed=seed, draws=500).p for seed in (1, 1, 2))
        assert one == again != other

    @pytest.mark.parametrize("values", [[0.0], [0.0] * 50, [1.0, -1.0], [0.1, 0.2, -0.3]])
    def test_zero_mean_difference_has_p_value_1(self, values):
        assert sign_flip_test(values).p == 1.0


class TestPassAndFail:
    @settings(deadline=None)
    @given(st.integers(0, 60), st.integers(0, 60))
    def test_mcnemar_test_is_the_binomial_test(self, won, lost):
        size = won + lost
        tail = sum(Fraction(math.comb(size, k), 2**size) for k in range(min(won, lost) + 1))
        assert mcnemar_test(won, lost) == pytest.approx(float(min(Fraction(1), 2 * tail)), rel=1e-14)
        assert mcnemar_test(lost, won) == mcnemar_test(won, lost)

    @settings(deadline=None)
    @given(st.integers(0, 16), st.integers(0, 16))
    def test_sign_flip_test_equals_mcnemar_for_binary_outcomes(self, won, lost):
        assume(won + lost)
        assert sign_flip_test([1.0] * won + [-1.0] * lost).p == pytest.approx(mcnemar_test(won, lost), abs=1e-12)

    def test_mcnemar_test_of_large_counts(self):
        assert mcnemar_test(6_000, 5_000) == pytest.approx(1.4e-21, rel=0.1)
        assert mcnemar_test(0, 0) == 1.0

    def test_negative_counts_are_rejected(self):
        with pytest.raises(ValueError, match="must not be negative"):
            mcnemar_test(-1, 2)


class TestEffects:
    def test_student_sleep_data(self):
        assert cohens_dz(SLEEP) == pytest.approx(1.2845582, abs=1e-6)
        assert paired_cliffs_delta(SLEEP) == 0.9

    @settings(deadline=None)
    @given(differences.map(spread_out), st.floats(0.1, 50))
    def test_scale_does_not_matter(self, values, factor):
        scaled = [value * factor for value in values]
        assert cohens_dz(scaled) == pytest.approx(cohens_dz(values))
        assert paired_cliffs_delta(scaled) == paired_cliffs_delta(values)

    def test_cliffs_delta_is_share_better_minus_share_worse(self):
        assert paired_cliffs_delta([0.1, 0.9, -0.5, 0.0]) == 0.25


class TestPairedFigures:
    def test_student_sleep_data(self):
        found = paired_figures(SLEEP)
        assert found.interval == difference_interval(SLEEP)
        assert (found.permutation, found.p_t) == (sign_flip_test(SLEEP), paired_t_test(SLEEP))
        assert found.bootstrap == bootstrap_mean(SLEEP, resamples=10_000)
        # `scipy.stats.bootstrap` of SciPy 1.17.1, BCa, 200,000 draws.
        assert found.bootstrap == pytest.approx((1.05, 2.62), abs=0.08)

    def test_equal_differences_have_no_figures_requiring_a_spread(self):
        found = paired_figures([0.0] * 8, reach=1.0)
        assert (found.p_t, found.cohens_dz) == (None, None)
        assert found.bootstrap == (None, None) and found.permutation.p == 1.0

    @settings(max_examples=20, deadline=None)
    @given(differences.map(spread_out), st.randoms(use_true_random=False))
    def test_sample_order_does_not_affect_exact_figures(self, values, rng):
        one = paired_figures(values, resamples=50)
        rng.shuffle(values)
        other = paired_figures(values, resamples=50)
        assert one.interval.low == pytest.approx(other.interval.low)
        assert one.permutation.p == pytest.approx(other.permutation.p, abs=1e-12)

    @pytest.mark.parametrize(
        ("values", "why"), [([], "no sample"), ([1.0, math.nan], "not finite"), ([1e200], "1e100")]
    )
    @pytest.mark.parametrize("figure", [paired_figures, difference_interval, sign_flip_test, paired_t_test, cohens_dz])
    def test_undefined_figures_are_rejected(self, figure, values, why):
        with pytest.raises(ValueError, match=why):
            figure(values)


def test_paired_interval_is_narrower_than_separate_intervals():
    """Difficulties vary widely, so the interval of the difference is far narrower."""
    rng = np.random.default_rng(8)
    hard = rng.random(60)
    one, other = (np.clip(hard + rng.normal(shift, 0.05, 60), 0, 1) for shift in (0.0, 0.05))
    apart = [mean_interval(scores.tolist(), range(60)) for scores in (one, other)]
    together = difference_interval(other - one, reach=1.0)
    assert apart[0].high > apart[1].low, "the two means alone do not tell"
    assert together.low > 0
