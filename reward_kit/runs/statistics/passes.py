"""pass@k and pass^k without bias, of one sample and as means over samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from reward_kit.runs.statistics.intervals import mean_of


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of `k` attempts passes: 1 − C(n−c, k)/C(n, k).

    Unbiased, from `c` passes in `n` attempts (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    eq. 1).

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n.
    """
    _check_counts(n, c, k)
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def pass_hat_k(n: int, c: int, k: int) -> float:
    """pass^k, the probability that all of `k` attempts pass: C(c, k)/C(n, k).

    Unbiased, from `c` passes in `n` attempts (Yao et al. 2024, "τ-bench", section 3).

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"{c} passes of {n} attempts cannot be")
    if not 1 <= k <= n:
        raise ValueError(f"k is between 1 and the {n} attempts, got {k}")


class SampleMean(NamedTuple):
    """A mean over samples: None where no sample counts; `left_out` had too few attempts."""

    mean: float | None
    n_samples: int
    left_out: int


def mean_pass_at_k(attempts: Iterable[tuple[int, int]], k: int) -> SampleMean:
    """The mean of `pass_at_k` over samples, each given as (scored attempts, passes)."""
    return _mean_over_samples(pass_at_k, attempts, k)


def mean_pass_hat_k(attempts: Iterable[tuple[int, int]], k: int) -> SampleMean:
    """The mean of `pass_hat_k` over samples, each given as (scored attempts, passes)."""
    return _mean_over_samples(pass_hat_k, attempts, k)


def _mean_over_samples(
    figure: Callable[[int, int, int], float], attempts: Iterable[tuple[int, int]], k: int
) -> SampleMean:
    counts = list(attempts)
    values = [figure(n, c, k) for n, c in counts if n >= k]
    mean = mean_of(values) if values else None
    return SampleMean(mean, len(values), len(counts) - len(values))
