"""Bootstrap intervals: agreement with SciPy, coverage and undefined cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reward_kit.agreement import spearman
from reward_kit.runs.statistics import Bounds, bootstrap_bounds, bootstrap_mean

SKEWED = np.array([0.1, 0.4, 0.35, 0.8, 0.9, 0.05, 0.4, 0.7, 2.5, 3.1, 0.2, 0.15, 0.6, 0.5, 1.2, 0.3])
ONE = np.array([1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 1, 3, 5, 2, 4], float)
OTHER = np.array([1, 2, 2, 4, 5, 4, 4, 3, 1, 1, 2, 3, 5, 3, 5], float)


def mean_of(values):
    return lambda at: np.array([values[at].mean()])


def test_bca_interval_matches_scipy():
    """`scipy.stats.bootstrap` of SciPy 1.17.1, method="BCa", 100,000 resamples: (0.4625, 1.3562) for the mean.

    Its percentile interval is (0.4094, 1.2125): the correction is what is tested.
    """
    (found,) = bootstrap_bounds(mean_of(SKEWED), range(16), resamples=20_000)
    assert found.low == pytest.approx(0.4625, abs=0.01)
    assert found.high == pytest.approx(1.3562, abs=0.03)


def test_bca_interval_of_a_rank_correlation_matches_scipy():
    """The same of spearmanr, paired, 20,000 resamples: (0.7493, 0.9705)."""
    (found,) = bootstrap_bounds(lambda at: np.array([spearman(ONE[at], OTHER[at])]), range(15), resamples=4_000)
    assert found.low == pytest.approx(0.7493, abs=0.02)
    assert found.high == pytest.approx(0.9705, abs=0.005)


def test_bootstrap_is_determined_by_the_seed():
    one, again = (bootstrap_bounds(mean_of(SKEWED), range(16), seed=3, resamples=200) for _ in range(2))
    assert one == again != bootstrap_bounds(mean_of(SKEWED), range(16), seed=4, resamples=200)


def test_higher_confidence_gives_a_wider_interval():
    narrow, wide = (bootstrap_bounds(mean_of(SKEWED), range(16), confidence=c)[0] for c in (0.8, 0.99))
    assert wide.low < narrow.low < SKEWED.mean() < narrow.high < wide.high


def test_rows_of_one_sample_are_drawn_together():
    values = np.repeat(SKEWED, 20)
    (apart,) = bootstrap_bounds(mean_of(values), range(320), resamples=2_000)
    (together,) = bootstrap_bounds(mean_of(values), np.repeat(np.arange(16), 20).tolist(), resamples=20_000)
    assert together.high - together.low > 3 * (apart.high - apart.low)
    assert together.low == pytest.approx(0.4625, abs=0.01)


@pytest.mark.parametrize(
    ("values", "clusters"),
    [([1.0] * 9, range(9)), ([0.2, 0.8], ["a", "a"]), ([0.5], ["a"]), ([float("nan")] * 9, range(9))],
    ids=["no draw differs", "one sample", "one row", "not defined"],
)
def test_undefined_rows_have_no_interval(values, clusters):
    assert bootstrap_bounds(mean_of(np.array(values)), clusters)[0] == (None, None)


def test_undefined_resamples_are_ignored_if_a_minority():
    values = np.array([0.0] * 3 + [1.0])

    def figure(at):
        both = len(set(values[at])) == 2
        return np.array([values[at].mean() if both else np.nan, values[at].mean() if at[0] == 0 else np.nan])

    often, seldom = bootstrap_bounds(figure, range(4))
    assert often.low is not None and 0.25 <= often.low < often.high <= 0.75
    assert seldom.low is None


def test_several_statistics_share_the_same_resamples():
    one, other = bootstrap_bounds(lambda at: np.array([SKEWED[at].mean(), 2 * SKEWED[at].mean()]), range(16))
    assert other == pytest.approx((2 * one.low, 2 * one.high))


def test_interval_has_the_nominal_coverage():
    chance, covered = np.random.default_rng(11), 0
    for trial in range(100):
        values = chance.exponential(size=40)
        (found,) = bootstrap_bounds(mean_of(values), range(40), seed=trial, resamples=200, confidence=0.9)
        covered += found.low <= 1.0 <= found.high
    assert 0.83 <= covered / 100 <= 0.95


class TestMeans:
    @pytest.mark.parametrize("method", ["bca", "percentile"])
    def test_bootstrap_mean_equals_the_general_bootstrap(self, method):
        """If each value is its own cluster, the draws and the bounds are equal."""
        (one,) = bootstrap_bounds(mean_of(SKEWED), range(16), seed=5, resamples=500, method=method)
        assert bootstrap_mean(SKEWED, seed=5, resamples=500, method=method) == pytest.approx(one, abs=1e-12)

    def test_clusters_of_unequal_size_are_resampled_whole(self):
        values, clusters = np.repeat(SKEWED, 2)[:27], np.repeat(np.arange(16), 2)[:27].tolist()
        (one,) = bootstrap_bounds(mean_of(values), clusters, seed=5, resamples=500)
        assert bootstrap_mean(values, clusters, seed=5, resamples=500) == pytest.approx(one, abs=1e-12)

    def test_row_order_within_clusters_does_not_matter(self):
        clusters = ["a", "b", "a", "c", "b"]
        one = bootstrap_mean([1.0, 2.0, 3.0, 4.0, 5.0], clusters)
        assert bootstrap_mean([3.0, 5.0, 1.0, 4.0, 2.0], clusters) == one

    @settings(deadline=None)
    @given(st.lists(st.floats(-10, 10), min_size=3, max_size=20), st.floats(-5, 5), st.floats(0.1, 5))
    def test_interval_is_equivariant_under_shift_and_scale(self, values, shift, factor):
        assume(np.ptp(values) > 1e-3)
        one = bootstrap_mean(values, resamples=200)
        other = bootstrap_mean(np.array(values) * factor + shift, resamples=200)
        assume(one.low is not None)
        assert other == pytest.approx((one.low * factor + shift, one.high * factor + shift), abs=1e-6)

    def test_chunked_resampling_equals_unchunked_resampling(self):
        values = np.random.default_rng(1).normal(size=400)
        drawn = np.random.default_rng(2).integers(0, 400, (1_500, 400))
        means = values[drawn].mean(axis=1)
        found = bootstrap_mean(values, seed=2, resamples=1_500, method="percentile")
        assert found == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=1e-12)

    @pytest.mark.parametrize("values", [[0.5], [0.25] * 9], ids=["one", "all alike"])
    def test_equal_values_have_no_interval(self, values):
        assert bootstrap_mean(values) == Bounds(None, None)

    def test_undefined_mean_is_rejected(self):
        with pytest.raises(ValueError, match="not finite"):
            bootstrap_mean([1.0, math.inf])
        with pytest.raises(ValueError, match="got 2 values and 1 clusters"):
            bootstrap_mean([1.0, 2.0], ["a"])
