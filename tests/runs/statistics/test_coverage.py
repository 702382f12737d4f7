"""Coverage of intervals and error rates of tests by simulation; slow, `-s` shows the shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reward_kit.runs.statistics import (
    bootstrap_mean,
    bounded_interval,
    difference_interval,
    mean_interval,
    paired_t_test,
    sign_flip_test,
)

pytestmark = pytest.mark.campaign
DRAWS = 10_000
ROLLOUTS = 4
Draw = Callable[[Any, int], tuple[Any, float]]


def normal_scores(rng: Any, samples: int) -> tuple[Any, float]:
    """Return (G, R) scores that are strongly correlated within a sample."""
    return 0.3 + rng.normal(size=(samples, 1)) + 0.5 * rng.normal(size=(samples, ROLLOUTS)), 0.3


def shares(rng: Any, samples: int) -> tuple[Any, float]:
    """Return scores between 0 and 1 with a different difficulty per sample."""
    hard = rng.uniform(size=(samples, 1))
    return 0.7 * hard + 0.3 * rng.uniform(size=(samples, ROLLOUTS)), 0.5


def passes(rng: Any, samples: int) -> tuple[Any, float]:
    """Return passes and failures with a different pass probability per sample."""
    return (rng.uniform(size=(samples, ROLLOUTS)) < rng.beta(2, 3, size=(samples, 1))).astype(float), 0.4


def paired(draw: Callable[[Any, int], tuple[Any, Any, float]]) -> Draw:
    """Return the differences of samples between two runs, each from the means of their rollouts."""

    def differences(rng: Any, samples: int) -> tuple[Any, float]:
        one, other, truth = draw(rng, samples)
        return other.mean(axis=1) - one.mean(axis=1), truth

    return differences


def paired_shares(rng: Any, samples: int) -> tuple[Any, Any, float]:
    hard, gain = rng.uniform(0, 0.6, size=(samples, 1)), rng.uniform(0.0, 0.2, size=(samples, 1))
    one, other = (place + 0.2 * rng.uniform(size=(samples, ROLLOUTS)) for place in (hard, hard + gain))
    return one, other, 0.1


def paired_passes(rng: Any, samples: int) -> tuple[Any, Any, float]:
    chance = rng.beta(2, 3, size=(samples, 1))
    better = chance + (1 - chance) * rng.uniform(0.0, 0.3, size=(samples, 1))
    one, other = ((rng.uniform(size=(samples, ROLLOUTS)) < p).astype(float) for p in (chance, better))
    return one, other, 0.6 * 0.15


def covered(draw: Draw, samples: int, bounds: Callable[[Any, int], Any], draws: int) -> float:
    rng, hits = np.random.default_rng(samples), 0
    for number in range(draws):
        values, truth = draw(rng, samples)
        low, high = bounds(values, number)
        hits += low <= truth <= high
    return hits / draws


def clustered(values: Any, number: int) -> tuple[float | None, float | None]:
    samples = len(values)
    found = mean_interval(values.ravel().tolist(), np.repeat(np.arange(samples), values.size // samples).tolist())
    return found.low, found.high


def of_differences(values: Any, number: int) -> tuple[float | None, float | None]:
    found = difference_interval(values, reach=1.0)
    return found.low, found.high


@pytest.mark.parametrize("samples", [10, 20, 49, 50, 200])
@pytest.mark.parametrize("draw", [normal_scores, shares, passes], ids=lambda draw: draw.__name__)
def test_clustered_mean_interval_has_nominal_coverage(draw, samples):
    share = covered(draw, samples, clustered, DRAWS)
    print(f"\nmean, {draw.__name__}, {samples} samples of {ROLLOUTS}: {share:.2%}")
    assert 0.94 <= share <= 0.96


@pytest.mark.parametrize("samples", [10, 20, 49, 50, 200])
@pytest.mark.parametrize("draw", [paired_shares, paired_passes], ids=lambda draw: draw.__name__)
def test_difference_interval_has_nominal_coverage(draw, samples):
    share = covered(paired(draw), samples, of_differences, DRAWS)
    print(f"\ndifference, {draw.__name__}, {samples} samples of {ROLLOUTS}: {share:.2%}")
    assert 0.94 <= share <= 0.96


@pytest.mark.parametrize("method", ["bca", "percentile"])
@pytest.mark.parametrize("samples", [50, 100, 200])
@pytest.mark.parametrize("draw", [paired_shares, paired_passes], ids=lambda draw: draw.__name__)
def test_bootstrap_interval_of_50_or_more_samples_has_nominal_coverage(draw, samples, method):
    def bounds(values: Any, number: int) -> tuple[float | None, float | None]:
        return bootstrap_mean(values, seed=number, resamples=2_000, method=method)

    share = covered(paired(draw), samples, bounds, 5_000)
    print(f"\n{method}, {draw.__name__}, {samples} samples of {ROLLOUTS}: {share:.2%}")
    assert 0.94 <= share <= 0.96


@pytest.mark.parametrize("samples", [8, 16, 32, 60])
@pytest.mark.parametrize("kind", ["shares", "passes", "skewed"])
def test_permutation_test_has_the_nominal_error_rate(kind, samples):
    """For two equal runs, p <= 0.05 at most once in twenty."""
    rng, found, found_t = np.random.default_rng(samples), 0, 0
    for number in range(5_000):
        if kind == "skewed":
            values = rng.exponential(size=samples) * rng.choice([-1.0, 1.0], samples)
        else:
            draw = shares if kind == "shares" else passes
            hard = draw(rng, samples)[0].mean(axis=1)
            one, other = (rng.binomial(ROLLOUTS, hard) / ROLLOUTS for _ in range(2))
            values = other - one
        found += sign_flip_test(values, draws=999, seed=number).p <= 0.05
        found_t += (paired_t_test(values) or 1.0) <= 0.05
    print(f"\nfalse findings, {kind}, {samples} samples: permutation {found / 5_000:.2%}, t {found_t / 5_000:.2%}")
    assert found / 5_000 <= 0.05 + 3 * (0.05 * 0.95 / 5_000) ** 0.5


FEW_DRAWS = 2_000
FEW = {
    "coin 0.5": lambda rng, size: ((rng.uniform(size=size) < 0.5).astype(float), 0.5),
    "coin 0.8": lambda rng, size: ((rng.uniform(size=size) < 0.8).astype(float), 0.8),
    "coin 0.97": lambda rng, size: ((rng.uniform(size=size) < 0.97).astype(float), 0.97),
    "uniform": lambda rng, size: (rng.uniform(size=size), 0.5),
    "beta(5, 2)": lambda rng, size: (rng.beta(5, 2, size=size), 5 / 7),
    "beta(0.2, 0.8)": lambda rng, size: (rng.beta(0.2, 0.8, size=size), 0.2),
    "beta(0.1, 2)": lambda rng, size: (rng.beta(0.1, 2, size=size), 1 / 21),
    "0.9, or 0 in one of ten": lambda rng, size: (0.9 * (rng.uniform(size=size) < 0.9), 0.81),
    "4 rollouts": lambda rng, size: (passes(rng, size)[0], 0.4),
}


@pytest.mark.parametrize("samples", [3, 5, 10, 30])
@pytest.mark.parametrize("name", FEW)
def test_bounded_interval_of_few_samples_has_at_least_nominal_coverage(name, samples):
    widths = []

    def bounds(values: Any, number: int) -> Any:
        rollouts = values.size // samples
        interval = bounded_interval(values.ravel().tolist(), np.repeat(np.arange(samples), rollouts).tolist())
        widths.append(interval.high - interval.low)
        return interval.low, interval.high

    share = covered(FEW[name], samples, bounds, FEW_DRAWS)
    plain = covered(FEW[name], samples, clustered, FEW_DRAWS)
    print(f"\nfew, {name}, {samples} samples: {share:.1%}, mean width {np.mean(widths):.2f} (t or Wilson: {plain:.1%})")
    assert share >= 0.94
