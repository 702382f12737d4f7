"""Two runs on the same samples: by how much they differ, how sure that is, and whether chance alone would do it.

Everything here takes the differences of samples, each the mean score of one run less that of the other, so that what
samples have in common falls out, and a sample counts once however many rollouts it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reward_kit.runs.statistics.bootstrap import Bounds, Floats, bootstrap_mean
from reward_kit.runs.statistics.intervals import Interval, mean_of, wilson_bounds
from reward_kit.runs.statistics.power import minimum_detectable_difference
from reward_kit.runs.statistics.student import t_quantile, t_two_sided

_MOST_ENUMERATED = 32
_ALIKE = 1e-12
_SQUARABLE = 1e100
_DRAWN_AT_ONCE = 200_000


class SignFlipTest(NamedTuple):
    """The p-value; `is_exact` where all signs were tried, and not some that chance drew."""

    p: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class PairedFigures:
    """What the differences of samples come to.

    Attributes:
        interval: their mean, with Student's t.
        bootstrap: of the same mean, BCa; None where all differences are alike.
        permutation: the sign-flip test.
        p_t: of the paired t-test; None where the differences have no spread.
        cohens_dz: the mean in standard deviations of the differences; None as `p_t`.
        cliffs_delta: the share of samples that are better less that of those that are worse.
        detectable: the true difference that so many samples show four times in five; None as `p_t`.
    """

    interval: Interval
    bootstrap: Bounds
    permutation: SignFlipTest
    p_t: float | None
    cohens_dz: float | None
    cliffs_delta: float
    detectable: float | None


def paired_figures(
    differences: Sequence[float] | Floats,
    *,
    reach: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = 10_000,
) -> PairedFigures:
    """Everything that is said of the differences of samples.

    Args:
        differences: (G,) one for each sample.
        reach: how large a difference can be at most: 1 where scores lie between 0 and 1; None where nobody knows.
        confidence: of the intervals; the detectable difference is that of a test at one less this.
        seed: of the bootstrap, and of the permutations where there are too many to try all.
        resamples: draws of the bootstrap.

    Raises:
        ValueError: there is no difference, or one is not finite.
    """
    difference_G = _checked(differences)
    interval = difference_interval(difference_G, reach=reach, confidence=confidence)
    deviation = _deviation(difference_G)
    return PairedFigures(
        interval=interval,
        bootstrap=bootstrap_mean(difference_G, seed=seed, resamples=resamples, confidence=confidence)
        if deviation
        else Bounds(None, None),
        permutation=sign_flip_test(difference_G, seed=seed),
        p_t=paired_t_test(difference_G),
        cohens_dz=cohens_dz(difference_G),
        cliffs_delta=paired_cliffs_delta(difference_G),
        detectable=minimum_detectable_difference(deviation, len(difference_G), 1.0 - confidence) if deviation else None,
    )


def difference_interval(
    differences: Sequence[float] | Floats, *, reach: float | None = None, confidence: float = 0.95
) -> Interval:
    """The mean difference with its interval: m ± t · s/√G, with Student's t for G − 1 degrees of freedom.

    Where all differences are alike there is no spread to go by. Where `reach` is known the interval is then that of
    what was not seen: with confidence no more than a share u = z²/(G + z²) of the samples is otherwise (Wilson 1927),
    and those can be off by `reach` either way, which makes m(1 − u) ± u · reach.

    Raises:
        ValueError: there is no difference, or one is not finite.
    """
    difference_G = _checked(differences)
    size, mean = len(difference_G), mean_of(difference_G)
    if size < 2:
        return Interval(mean, None, None, None, size, size)
    deviation = _deviation(difference_G)
    if deviation is None and reach is not None:
        unseen = 1.0 - wilson_bounds(1.0, size, confidence)[0]
        middle, half, error = mean * (1.0 - unseen), unseen * reach, 0.0
    else:
        middle, error = mean, (deviation or 0.0) / math.sqrt(size)
        half = t_quantile((1.0 + confidence) / 2.0, size - 1) * error
    found = Interval(mean, middle - half, middle + half, error, size, size)
    return found if reach is None else found.clipped(-reach, reach)


def sign_flip_test(differences: Sequence[float] | Floats, *, draws: int = 19_999, seed: int = 0) -> SignFlipTest:
    """How often differences as large on the average come about where it is chance which run has which score.

    Under that hypothesis each difference has either sign with the same chance (Fisher 1935, "The Design of
    Experiments", section 21). Two-sided. Of up to 32 differences that are not zero all signs are tried, by the sums of
    the two halves. Of more, m = `draws` are made, and p is (b + 1)/(m + 1) for b of them at least as large, which is
    never 0 (Phipson and Smyth 2010).

    Raises:
        ValueError: there is no difference, or one is not finite.
    """
    difference_G = _checked(differences)
    moved_G = difference_G[difference_G != 0.0]
    least = abs(math.fsum(moved_G)) - _ALIKE * float(np.abs(moved_G).sum())
    if least <= 0.0:
        return SignFlipTest(1.0, True)
    if len(moved_G) <= _MOST_ENUMERATED:
        return SignFlipTest(_share_as_large(moved_G, least), True)
    as_large = sum(int((np.abs(sums) >= least).sum()) for sums in _drawn_sums(moved_G, draws, seed))
    return SignFlipTest((as_large + 1) / (draws + 1), False)


def _share_as_large(moved_G: Floats, least: float) -> float:
    """The share of all choices of signs whose sum is `least` > 0 or more, or -`least` or less."""
    half = len(moved_G) // 2
    one, other = np.sort(_signed_sums(moved_G[:half])), _signed_sums(moved_G[half:])
    as_large = int((len(one) - np.searchsorted(one, least - other)).sum())
    return min(1.0, 2.0 * as_large / 2.0 ** len(moved_G))


def _signed_sums(values: Floats) -> Floats:
    """(2^G,) the sum of the values under each choice of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def _drawn_sums(moved_G: Floats, draws: int, seed: int) -> Iterator[Floats]:
    """The sums under signs by chance; in parts, so that memory does not grow with the number of samples."""
    chance, at_once, total = np.random.default_rng(seed), max(1, _DRAWN_AT_ONCE // len(moved_G)), float(moved_G.sum())
    for begin in range(0, draws, at_once):
        heads = chance.integers(0, 2, (min(at_once, draws - begin), len(moved_G)), dtype=np.int8)
        yield 2.0 * (heads.astype(np.float64) @ moved_G) - total


def paired_t_test(differences: Sequence[float] | Floats) -> float | None:
    """The two-sided p-value of Student's paired t-test; None where fewer than two differ.

    Raises:
        ValueError: there is no difference, or one is not finite.
    """
    difference_G = _checked(differences)
    deviation = _deviation(difference_G)
    if deviation is None:
        return None
    return t_two_sided(mean_of(difference_G) / deviation * math.sqrt(len(difference_G)), len(difference_G) - 1)


def cohens_dz(differences: Sequence[float] | Floats) -> float | None:
    """The mean difference in standard deviations of the differences (Cohen 1988, section 2.3.5).

    It says how plain a difference is among those of samples. It is not the d of two separate groups.

    Raises:
        ValueError: there is no difference, or one is not finite.
    """
    difference_G = _checked(differences)
    deviation = _deviation(difference_G)
    return None if deviation is None else mean_of(difference_G) / deviation


def paired_cliffs_delta(differences: Sequence[float] | Floats) -> float:
    """The share of differences above zero less that of those below (Cliff 1993, the within-pairs d).

    Raises:
        ValueError: there is no difference, or one is not finite.
    """
    difference_G = _checked(differences)
    return float(np.sign(difference_G).mean())


def mcnemar_test(won: int, lost: int) -> float:
    """The two-sided p-value of McNemar's test (1947), exact: of `won` + `lost` tosses of a fair coin.

    Raises:
        ValueError: a count is negative.
    """
    if won < 0 or lost < 0:
        raise ValueError(f"{won} won and {lost} lost cannot be")
    size, tail, ways = won + lost, 0, 1
    for count in range(min(won, lost) + 1):
        tail += ways
        ways = ways * (size - count) // (count + 1)
    return min(1.0, 2 * tail / (1 << size))


def _checked(differences: Sequence[float] | Floats) -> Floats:
    difference_G = np.asarray(differences, dtype=np.float64)
    if not len(difference_G):
        raise ValueError("no sample is scored in both, so there is no difference")
    if not (np.abs(difference_G) <= _SQUARABLE).all():
        raise ValueError("a difference is not finite, or beyond 1e100")
    return difference_G


def _deviation(difference_G: Floats) -> float | None:
    """The standard deviation; None where it is that of rounding alone, or of fewer than two."""
    if len(difference_G) < 2 or np.ptp(difference_G) <= _ALIKE * float(np.abs(difference_G).max()):
        return None
    return float(np.std(difference_G, ddof=1))
