"""Mean intervals: values by hand, a reference loop and simulation."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reward_kit.runs.statistics import bounded_interval, incomplete_beta, mean_interval, wilson_bounds

finite = st.floats(-100, 100)
pairs = st.lists(st.tuples(finite, st.integers(0, 5)), min_size=2, max_size=30)


class TestMeanInterval:
    def test_interval_matches_values_by_hand(self):
        # Cluster sums about the mean 0.5 are 0.5 and -0.5; SE² = 2/1 · (0.25 + 0.25) / 3².
        interval = mean_interval([1.0, 0.5, 0.0], ["a", "a", "b"])
        assert interval.mean == 0.5
        assert interval.standard_error == pytest.approx(1 / 3)
        assert interval.high - interval.mean == pytest.approx(12.706204736 / 3)
        assert interval.mean - interval.low == pytest.approx(12.706204736 / 3)
        assert (interval.n, interval.n_clusters, interval.n_unscored) == (3, 2, 0)

    @settings(deadline=None)
    @given(st.lists(finite, min_size=2, max_size=20))
    def test_clusters_of_one_give_the_textbook_interval(self, scores):
        assume(np.ptp(scores) > 1e-3)
        interval = mean_interval(scores, range(len(scores)))
        assert interval.mean == pytest.approx(np.mean(scores), abs=1e-9)
        assert interval.standard_error == pytest.approx(np.std(scores, ddof=1) / math.sqrt(len(scores)), rel=1e-6)

    @settings(deadline=None)
    @given(pairs)
    def test_standard_error_agrees_with_a_reference_loop(self, given_pairs):
        scores, clusters = zip(*given_pairs, strict=True)
        groups = set(clusters)
        assume(len(groups) > 1)
        assume(np.ptp(scores) > 1e-3)
        mean = sum(scores) / len(scores)
        total = 0.0
        for group in groups:
            total += sum(score - mean for score, cluster in given_pairs if cluster == group) ** 2
        expected = math.sqrt(len(groups) / (len(groups) - 1) * total) / len(scores)
        assert mean_interval(scores, clusters).standard_error == pytest.approx(expected, abs=1e-9)

    @settings(deadline=None)
    @given(pairs, finite, st.randoms(use_true_random=False))
    def test_interval_shifts_with_the_scores_and_ignores_order(self, given_pairs, shift, rng):
        assume(len({cluster for _, cluster in given_pairs}) > 1)
        assume(len({round(score, 3) for score, _ in given_pairs}) > 2)
        before = mean_interval(*zip(*given_pairs, strict=True))
        rng.shuffle(given_pairs)
        after = mean_interval([score + shift for score, _ in given_pairs], [cluster for _, cluster in given_pairs])
        assert after.mean == pytest.approx(before.mean + shift, abs=1e-6)
        assert after.high - after.low == pytest.approx(before.high - before.low, abs=1e-6)

    def test_repeating_a_rollout_does_not_make_a_sample_count_twice(self):
        once = mean_interval([0.0, 0.5, 1.0], "abc")
        again = mean_interval([0.0, 0.5, 1.0] * 10, "abc" * 10)
        assert (again.low, again.high) == pytest.approx((once.low, once.high))

    @settings(deadline=None)
    @given(pairs, st.sampled_from([1e120, 1e300]))
    def test_huge_scores_have_an_interval_without_overflow(self, given_pairs, factor):
        scores, clusters = zip(*given_pairs, strict=True)
        assume(len(set(scores)) > 1 and not set(scores) <= {0.0, 1.0} and max(map(abs, scores)) >= 1.0)
        small, large = (mean_interval([score * by for score in scores], clusters) for by in (1.0, factor))
        size = max(map(abs, scores)) * factor
        assert large.mean == pytest.approx(small.mean * factor, rel=1e-9, abs=1e-12 * size)
        if large.low is not None:
            assert large.low == pytest.approx(small.low * factor, rel=1e-9, abs=1e-9 * size)
            assert large.high == pytest.approx(small.high * factor, rel=1e-9, abs=1e-9 * size)

    def test_overflowing_bound_is_none(self):
        interval = mean_interval([-1e308, 1e308, 1e308], "abc")
        assert interval.mean == pytest.approx(1e308 / 3) and (interval.low, interval.high) == (None, None)
        equal = mean_interval([1e308] * 3, "abc")
        assert (equal.mean, equal.low, equal.high) == (1e308, 1e308, 1e308)

    def test_higher_confidence_gives_a_wider_interval(self):
        narrow, wide = (mean_interval([0.0, 0.5, 1.0], "abc", confidence) for confidence in (0.5, 0.99))
        assert wide.low < narrow.low < narrow.high < wide.high

    @pytest.mark.parametrize(("scores", "clusters"), [([0.7], "a"), ([0.0, 1.0, 0.5], "aaa"), ([1.0, 1.0], "aa")])
    def test_single_sample_has_no_bounds(self, scores, clusters):
        interval = mean_interval(scores, clusters)
        assert (interval.low, interval.high, interval.standard_error) == (None, None, None)
        assert interval.mean == pytest.approx(sum(scores) / len(scores))

    @pytest.mark.parametrize("value", [0.1, 0.3, -7.0])
    def test_equal_scores_have_no_width_and_no_rounding(self, value):
        interval = mean_interval([value] * 7, "abcdefg")
        assert (interval.low, interval.mean, interval.high, interval.standard_error) == (value, value, value, 0.0)

    def test_five_of_five_passes_have_a_non_degenerate_interval(self):
        won = mean_interval([1.0] * 5, "abcde")
        assert (won.low, won.high) == (pytest.approx(0.565517535, abs=1e-8), 1.0)
        lost = mean_interval([0.0] * 5, "abcde")
        assert (lost.low, lost.high) == (0.0, pytest.approx(1 - 0.565517535, abs=1e-8))

    def test_bound_for_all_passes_counts_samples_and_not_rollouts(self):
        assert mean_interval([1.0] * 50, "abcde" * 10).low == mean_interval([1.0] * 5, "abcde").low

    @pytest.mark.parametrize("rollouts", [[0.0, 1.0], [0.0, 0.0, 1.0]])
    def test_identical_samples_with_mixed_outcomes_have_a_wide_interval(self, rollouts):
        interval = mean_interval(rollouts * 4, [sample for sample in "abcd" for _ in rollouts])
        assert interval.high - interval.low > 0.5

    def test_unscored_values_are_left_out_and_counted(self):
        with_gaps = mean_interval([1.0, None, 0.0, 0.5, None], "aabcd")
        without = mean_interval([1.0, 0.0, 0.5], "abc")
        assert (with_gaps.mean, with_gaps.low, with_gaps.high) == (without.mean, without.low, without.high)
        assert (with_gaps.n, with_gaps.n_clusters, with_gaps.n_unscored) == (3, 3, 2)

    @pytest.mark.parametrize(
        ("scores", "clusters", "confidence", "why"),
        [
            ([], [], 0.95, "no value is scored"),
            ([None], ["a"], 0.95, "no value is scored"),
            ([1.0], [], 0.95, "argument 2 is shorter"),
            ([math.nan, 1.0], "ab", 0.95, "not finite"),
            ([1.0], ["a"], 1.0, "confidence must be between 0 and 1"),
        ],
    )
    def test_undefined_mean_is_rejected(self, scores, clusters, confidence, why):
        with pytest.raises(ValueError, match=why):
            mean_interval(scores, clusters, confidence)

    def test_interval_has_the_nominal_coverage(self):
        # 20 samples of 4 rollouts that share most of their luck; ignoring the clusters would cover about 65%.
        rng = np.random.default_rng(7)
        clusters = np.repeat(np.arange(20), 4).tolist()
        covered = naive = 0
        for _ in range(1_000):
            scores = (np.repeat(rng.normal(size=20), 4) + 0.3 * rng.normal(size=80)).tolist()
            interval = mean_interval(scores, clusters)
            covered += interval.low <= 0.0 <= interval.high
            alone = mean_interval(scores, range(80))
            naive += alone.low <= 0.0 <= alone.high
        assert 0.93 <= covered / 1_000 <= 0.97
        assert naive / 1_000 < 0.80


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 40))
def test_wilson_bounds_contain_the_share_and_stay_in_range(passes, trials):
    assume(passes <= trials)
    low, high = wilson_bounds(passes / trials, trials)
    assert 0.0 <= low <= passes / trials <= high <= 1.0


def test_wilson_bounds_solve_the_score_equation():
    z = NormalDist().inv_cdf(0.975)
    for bound in wilson_bounds(0.3, 10):
        assert abs(0.3 - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / 10))


class TestBoundedInterval:
    @pytest.mark.parametrize(("passes", "trials"), [(3, 3), (0, 3), (2, 3), (4, 5), (5, 10), (29, 30), (50, 100)])
    def test_passes_and_failures_have_the_exact_binomial_bounds(self, passes, trials):
        """Clopper-Pearson: each bound leaves 2.5% of the binomial distribution in its tail."""
        interval = bounded_interval([1.0] * passes + [0.0] * (trials - passes), range(trials))
        assert interval.method == "gaffke"
        at_least = incomplete_beta(passes, trials - passes + 1, interval.low) if passes else 0.025
        at_most = 1 - incomplete_beta(passes + 1, trials - passes, interval.high) if passes < trials else 0.025
        assert (at_least, at_most) == (pytest.approx(0.025, abs=1e-5), pytest.approx(0.025, abs=1e-5))

    @pytest.mark.parametrize("sizes", [[1] * 5, [3, 1, 2, 1, 3]])
    def test_bounds_match_a_simulation_of_the_weights(self, sizes):
        rng = np.random.default_rng(3)
        mean_G, size_G = rng.beta(0.5, 0.5, size=len(sizes)), np.array(sizes, dtype=float)
        clusters = np.repeat(np.arange(len(sizes)), sizes)
        interval = bounded_interval(mean_G[clusters].tolist(), clusters.tolist())
        weight_DG = rng.exponential(size=(400_000, len(sizes) + 1)) * np.append(size_G, size_G.mean())
        for added, tail, bound in ((0.0, 0.025, interval.low), (1.0, 0.975, interval.high)):
            drawn_D = weight_DG @ np.append(mean_G, added) / weight_DG.sum(axis=1)
            assert bound == pytest.approx(np.quantile(drawn_D, tail), abs=0.003)

    def test_three_equal_scores_have_a_wide_interval(self):
        interval = bounded_interval([0.5] * 3, "abc")
        assert (interval.low, interval.high) == (pytest.approx(0.1462, abs=1e-4), pytest.approx(0.8538, abs=1e-4))

    @given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), min_size=2, max_size=30))
    def test_bounds_enclose_the_mean_within_0_and_1(self, given_pairs):
        scores, clusters = zip(*given_pairs, strict=True)
        assume(len(set(clusters)) > 1)
        interval = bounded_interval(scores, clusters)
        assert 0.0 <= interval.low <= interval.mean <= interval.high <= 1.0
        assert interval.high - interval.low > 0.1
        mirrored = bounded_interval([1 - score for score in scores], clusters)
        assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((interval.low, interval.high), abs=1e-6)

    def test_more_than_100_samples_have_the_t_interval(self):
        scores = np.random.default_rng(0).uniform(size=101).tolist()
        bounded, plain = bounded_interval(scores, range(101)), mean_interval(scores, range(101))
        assert (bounded.low, bounded.high, bounded.method) == (plain.low, plain.high, "t")
        narrower = bounded_interval(scores[:100], range(100))
        assert narrower.method == "gaffke"
        assert narrower.high - narrower.low == pytest.approx(plain.high - plain.low, rel=0.1)

    def test_scores_outside_0_and_1_have_the_t_interval(self):
        interval = bounded_interval([5.0, -5.0], ["a", "b"])
        assert interval.method == "t" and interval.low < -5.0 and interval.high > 5.0

    def test_equal_scores_outside_0_and_1_have_no_bounds(self):
        interval = bounded_interval([7.0] * 4, "abcd")
        assert (interval.mean, interval.low, interval.high) == (7.0, None, None)

    def test_single_sample_has_no_bounds(self):
        assert bounded_interval([1.0, 0.0], "aa").low is None
