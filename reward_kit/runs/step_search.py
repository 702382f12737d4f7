"""`StepSearch`, which decides at which steps of an episode to measure the success probability.

Each step is measured with a fixed number of continuations, and only the results of other steps decide whether it is
measured. The continuations of different steps are independent, so each step's interval is valid even though the search
is adaptive. This requires that the number of a step's continuations never depends on their results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from reward_kit.runs.statistics import fisher_test, wilson_bounds

CONFIDENCE = 0.95
MIN_CHANGE = 0.25
"""The smallest difference of two success probabilities that is reported as a change."""
_MIN_PER_STEP, _MAX_PER_STEP = 8, 64


class StepValue(NamedTuple):
    """The success probability before a step, measured by continuations from there.

    Attributes:
        step: the index of the step, from 0. The number of steps of the episode stands for its end, where the outcome is
            known.
        passed: the number of continuations that passed.
        scored: the number of continuations with a score.
    """

    step: int
    passed: int
    scored: int

    @property
    def mean(self) -> float:
        """The share of the scored continuations that passed."""
        return self.passed / self.scored

    def bounds(self) -> tuple[float, float]:
        """Return Wilson's 95% confidence interval."""
        return wilson_bounds(self.mean, self.scored, CONFIDENCE)

    def to_json(self) -> dict[str, Any]:
        low, high = self.bounds()
        return {**self._asdict(), "mean": self.mean, "low": low, "high": high}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the success probability between two measured points of an episode.

    Attributes:
        before: the value before step `before.step`.
        after: the value before step `after.step`, which is the next step unless the search ended earlier.
        p_value: the probability of a difference this large if both values were equal (Fisher's exact test), multiplied
            by the number of compared pairs.
    """

    before: StepValue
    after: StepValue
    p_value: float

    @property
    def is_located(self) -> bool:
        """True if the change is attributed to a single step."""
        return self.after.step == self.before.step + 1

    @property
    def difference(self) -> float:
        return self.after.mean - self.before.mean


class StepSearch:
    """A search for the steps of an episode at which the success probability changes.

    It measures the first step, and then halves the parts of the episode over which the value changes. With the rest of
    the budget, it halves the longest parts, in which a change may be hidden by a later one. Parts whose ends both have
    the value 0, or both have the value 1, come last.

    Args:
        steps: the number of steps of the episode.
        is_passed: whether the episode passed.
        budget: the maximum number of continuations. Each measured step gets an equal share of 8 to 64 continuations,
            chosen so that two changes can be located.

    Attributes:
        per_step: the number of continuations per step.
        values: the measured values, keyed by step.
    """

    def __init__(self, steps: int, is_passed: bool, budget: int) -> None:
        share = budget // (2 + 2 * math.ceil(math.log2(max(steps, 2))))
        self.per_step = min(max(share, _MIN_PER_STEP), _MAX_PER_STEP, budget)
        self.values: dict[int, StepValue] = {}
        self._left = budget
        self._outcome = StepValue(steps, self.per_step if is_passed else 0, self.per_step)

    def next_step(self) -> int | None:
        """Return the step to measure next, or None if the search is over."""
        if self._left < self.per_step:
            return None
        if 0 not in self.values:
            return 0
        parts = []
        for before, after in pairwise(self._points()):
            if (length := after.step - before.step) > 1:
                is_flat = before.mean == after.mean and before.mean in (0.0, 1.0)
                is_changing = abs(after.mean - before.mean) >= MIN_CHANGE
                parts.append((is_changing, not is_flat, length, -before.step))
        if not parts:
            return None
        *_, length, start = max(parts)
        return length // 2 - start

    def add(self, value: StepValue) -> None:
        """Record the value of the step that `next_step` returned."""
        self.values[value.step] = value
        self._left -= self.per_step

    def changes(self) -> list[Change]:
        """Return the significant changes of at least `MIN_CHANGE`, in the order of the steps.

        The shortest changes are found first, and changes do not overlap. A gradual change is therefore reported over
        the shortest part of the episode in which it is significant.
        """
        points = self._points()
        count = len(points) * (len(points) - 1) // 2
        candidates = []
        for before, after in combinations(points, 2):
            if abs(after.mean - before.mean) >= MIN_CHANGE:
                p_value = min(fisher_test(before.passed, before.scored, after.passed, after.scored) * count, 1.0)
                if p_value <= 1 - CONFIDENCE:
                    candidates.append(Change(before, after, p_value))
        found: list[Change] = []
        for one in sorted(candidates, key=lambda one: (one.after.step - one.before.step, one.p_value)):
            if all(one.after.step <= other.before.step or one.before.step >= other.after.step for other in found):
                found.append(one)
        return sorted(found, key=lambda one: one.before.step)

    def _points(self) -> list[StepValue]:
        return [*(self.values[step] for step in sorted(self.values)), self._outcome]
