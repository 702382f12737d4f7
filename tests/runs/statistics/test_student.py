"""Student's t against tables, closed forms and high-precision mpmath."""

import math
from statistics import NormalDist

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.runs.statistics import incomplete_beta, t_quantile, t_two_sided


class TestQuantileOfStudentsT:
    @pytest.mark.parametrize(
        ("p", "df", "published"),
        [
            (0.975, 1, 12.706204736),
            (0.975, 2, 4.302652730),
            (0.975, 4, 2.776445105),
            (0.975, 10, 2.228138852),
            (0.975, 30, 2.042272456),
            (0.975, 120, 1.979930405),
            (0.95, 5, 2.015048373),
            (0.90, 3, 1.637744354),
            (0.995, 9, 3.249835542),
            (0.9995, 1, 636.619248768),
            (0.9995, 20, 3.849516275),
            (0.75, 7, 0.711141778),
        ],
    )
    def test_t_quantile_matches_published_values(self, p, df, published):
        assert t_quantile(p, df) == pytest.approx(published, rel=0, abs=1e-6)

    @settings(deadline=None)
    @given(st.floats(0.51, 0.9999))
    def test_t_quantile_matches_closed_forms(self, p):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
        assert t_quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-9)

    @settings(deadline=None)
    @given(st.floats(0.001, 0.999), st.floats(0.2, 50_000))
    def test_t_quantile_is_odd_about_the_median(self, p, df):
        assert t_quantile(p, df) == pytest.approx(-t_quantile(1 - p, df), rel=1e-9, abs=1e-9)

    def test_t_quantile_is_continuous_between_algorithms(self):
        for p in (0.9, 0.975, 0.9999):
            below, above = t_quantile(p, 9_999.999), t_quantile(p, 10_000.001)
            assert below == pytest.approx(above, abs=1e-8)

    def test_t_quantile_with_many_degrees_of_freedom_is_normal(self):
        assert t_quantile(0.975, 1e12) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-9)

    @pytest.mark.parametrize(("p", "df"), [(0, 3), (1, 3), (math.nan, 3), (0.9, 0), (0.9, -1), (0.9, math.nan)])
    def test_undefined_quantile_is_rejected(self, p, df):
        with pytest.raises(ValueError, match=r"between 0 and 1|positive"):
            t_quantile(p, df)


@settings(deadline=None)
@given(st.floats(0.1, 30), st.floats(0.1, 30), st.floats(0.001, 0.999))
def test_the_beta_function_is_symmetric(a, b, x):
    assert incomplete_beta(a, b, x) == pytest.approx(1 - incomplete_beta(b, a, 1 - x), abs=1e-10)
    assert incomplete_beta(a, 1, x) == pytest.approx(x**a, rel=1e-9, abs=1e-12)


class TestTwoSidedP:
    @settings(deadline=None)
    @given(st.floats(1e-6, 60), st.sampled_from([1, 2, 3, 7, 49, 601, 9_999, 10**6, 10**8]))
    def test_t_two_sided_agrees_with_mpmath(self, t, df):
        with mpmath.workdps(40):
            x = mpmath.mpf(df) / (df + mpmath.mpf(t) ** 2)
            exact = float(mpmath.betainc(mpmath.mpf(df) / 2, 0.5, 0, x, regularized=True)) if df < 10**6 else None
        if exact is None:  # where mpmath's series takes minutes, and the normal is as good
            exact = math.erfc(t / math.sqrt(2))
            assert t_two_sided(t, df) == pytest.approx(exact, abs=1 / df)
        else:
            assert t_two_sided(t, df) == pytest.approx(exact, abs=1e-12)

    @settings(deadline=None)
    @given(st.floats(0.001, 0.999), st.floats(0.5, 20_000))
    def test_t_two_sided_is_inverse_of_the_quantile(self, p, df):
        assert t_two_sided(t_quantile(1 - p / 2, df), df) == pytest.approx(p, abs=1e-11)

    @settings(deadline=None)
    @given(st.floats(-50, 50), st.floats(0.5, 500))
    def test_t_two_sided_ignores_the_sign(self, t, df):
        assert t_two_sided(t, df) == t_two_sided(-t, df)

    @pytest.mark.parametrize(("t", "p"), [(0.0, 1.0), (1e200, 0.0), (-1e308, 0.0)])
    def test_t_two_sided_at_extremes(self, t, p):
        assert t_two_sided(t, 5) == pytest.approx(p, abs=1e-300)

    def test_zero_degrees_of_freedom_are_rejected(self):
        with pytest.raises(ValueError, match="positive"):
            t_two_sided(1.0, 0)
