"""What a comparison could have found."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.runs.statistics import minimum_detectable_difference, t_quantile, t_test_power, t_two_sided
from tests.profiles import examples


def exact_power(effect: float, n: int, alpha: float) -> float:
    """The tails of the noncentral t, by mpmath's own integration over the normal that T is made of."""
    df, shift = n - 1, mpmath.mpf(effect) * mpmath.sqrt(n)
    critical = mpmath.mpf(t_quantile(1 - alpha / 2, df))

    def inside(z):  # P(|T| < t | Z = z) = P(chi² > df (z + shift)² / t²)
        return mpmath.npdf(z) * mpmath.gammainc(
            mpmath.mpf(df) / 2, df * ((z + shift) / critical) ** 2 / 2, mpmath.inf, regularized=True
        )

    return float(1 - mpmath.quad(inside, [-12, -shift - 1, -shift, -shift + 1, 12]))


@pytest.mark.parametrize(("effect", "n", "alpha"), [(0.5, 10, 0.05), (1.5, 4, 0.01), (4.0, 2, 0.05), (0.2, 200, 0.05)])
def test_it_agrees_with_many_digits(effect, n, alpha):
    with mpmath.workdps(20):
        assert t_test_power(effect, n, alpha) == pytest.approx(exact_power(effect, n, alpha), abs=1e-10)


def test_a_published_value():
    """The "actual power" that G*Power 3.1 gives for a medium effect, where 34 pairs are the first with 0.8 or more."""
    assert t_test_power(0.5, 34) == pytest.approx(0.8077775, abs=1e-6)
    assert t_test_power(0.5, 33) < 0.8


@settings(deadline=None)
@given(st.integers(2, 5_000), st.sampled_from([0.001, 0.05, 0.2]))
def test_without_a_difference_it_is_alpha(n, alpha):
    assert t_test_power(0.0, n, alpha) == pytest.approx(alpha, abs=1e-11)


@settings(deadline=None)
@given(st.floats(0, 3), st.floats(0.01, 1), st.integers(2, 200))
def test_more_of_a_difference_and_more_samples_are_found_more_often(effect, more, n):
    power = t_test_power(effect, n)
    assert t_test_power(-effect, n) == power
    assert t_test_power(effect + more, n) >= power - 1e-12
    assert t_test_power(effect, n + 1) >= power - 1e-12


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(2, 3_000), st.floats(0.01, 100), st.sampled_from([0.5, 0.8, 0.99]))
def test_the_detectable_difference_is_found_as_often_as_was_asked(n, deviation, power):
    least = minimum_detectable_difference(deviation, n, power=power)
    assert t_test_power(least / deviation, n) == pytest.approx(power, abs=1e-10)


def test_many_samples_are_the_normal_formula():
    """(z₀.₉₇₅ + z₀.₈) σ/√n, as in any textbook."""
    assert minimum_detectable_difference(2.0, 1_000_000) == pytest.approx(2.8015852 * 2.0 / 1_000, rel=1e-5)


def test_a_simulation_finds_it_four_times_in_five():
    rng, n, found = np.random.default_rng(5), 12, 0
    least = minimum_detectable_difference(1.0, n)
    drawn = rng.normal(least, 1.0, (4_000, n))
    for row in drawn:
        found += t_two_sided(row.mean() / row.std(ddof=1) * math.sqrt(n), n - 1) <= 0.05
    assert found / 4_000 == pytest.approx(0.8, abs=0.02)


def test_no_spread_needs_no_difference():
    assert minimum_detectable_difference(0.0, 10) == 0.0


@pytest.mark.parametrize(
    ("deviation", "n", "alpha", "power"),
    [(-1.0, 5, 0.05, 0.8), (1.0, 1, 0.05, 0.8), (1.0, 5, 0.0, 0.8), (1.0, 5, 0.05, 1.0), (1.0, 5, 0.3, 0.2)],
)
def test_what_cannot_be_is_refused(deviation, n, alpha, power):
    with pytest.raises(ValueError, match=r"cannot be|between 0 and 1|two differences"):
        minimum_detectable_difference(deviation, n, alpha, power)
