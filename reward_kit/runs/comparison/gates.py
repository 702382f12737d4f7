"""Where a comparison fails a CI job: a regression that is shown, or a mean that is too low."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reward_kit.runs.comparison.comparing import Comparison, Difference
from reward_kit.runs.comparison.sides import Side
from reward_kit.runs.display import figure, signed


class Gate(NamedTuple):
    """One gate on one run; `told` says in words why it stands or falls."""

    gate: str
    run: str
    failed: bool
    told: str


def regression_gates(comparison: Comparison, margin: float) -> list[Gate]:
    """For each run but the baseline whether its interval shows a loss of more than `margin`.

    It does where the upper bound of the difference (run less baseline, 95%) is below -`margin`. Without such a loss
    that comes about once in forty times. A difference without an interval fails, since it cannot be told.
    """
    return [_regression(difference, comparison.baseline, margin) for difference in comparison.differences]


def _regression(difference: Difference, baseline: Side, margin: float) -> Gate:
    label, high = difference.side.label, difference.figures.interval.high
    beyond = f" by more than {margin:g}" if margin else ""
    if high is None:
        told = f"one common sample gives no interval, so whether {label} is worse than {baseline.label} is not known"
        return Gate("fail-on-regression", label, True, told)
    is_worse = high < -margin
    found = f"the difference is {signed(difference.figures.interval.mean)}, and at most {signed(high)}"
    told = f"{label} is {'' if is_worse else 'not shown to be '}worse than {baseline.label}{beyond}: {found}"
    return Gate("fail-on-regression", label, is_worse, told)


def under_gate(side: Side, least: float, *, by_lower_bound: bool = False) -> Gate:
    """Whether the mean score of a run is below `least`, or the lower bound of its interval; unscored is below."""
    interval = side.summary.score
    what = "lower bound of the mean score" if by_lower_bound else "mean score"
    value = None if interval is None else interval.low if by_lower_bound else interval.mean
    if value is None:
        return Gate("fail-under", side.label, True, f"the {what} of {side.label} is not known")
    told = f"the {what} of {side.label} is {figure(value)}, {'below' if value < least else 'not below'} {least:g}"
    return Gate("fail-under", side.label, value < least, told)


def failed(gates: Sequence[Gate]) -> list[Gate]:
    """Those that fell."""
    return [gate for gate in gates if gate.failed]
