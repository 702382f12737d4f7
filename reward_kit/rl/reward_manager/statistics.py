"""Running mean and deviation of the scores seen so far, for `normalization_type="variance"`."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reward_kit.errors import ConfigError
from reward_kit.rl.reward_manager.batches import Floats

EPSILON = 1e-8
"""Added to the deviation that scores are divided by."""


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Of all numbers seen so far. It is never changed; `including` gives another.

    Attributes:
        count: how many there were.
        mean: theirs.
        m2: the sum of their squared distances from the mean.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """The deviation over all of them (divided by n); 0 where there are none."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def including(self, numbers: Floats) -> RunningStatistics:
        """With these numbers as well; the order in which they come makes no difference but for rounding.

        Welford's recurrence, for a whole batch at once (Chan, Golub and LeVeque 1983, eq. 2.1).
        """
        if not len(numbers):
            return self
        mean = float(np.mean(numbers))
        m2 = float(np.sum((numbers - mean) ** 2))
        count = self.count + len(numbers)
        apart = mean - self.mean
        return RunningStatistics(
            count,
            self.mean + apart * len(numbers) / count,
            self.m2 + m2 + apart**2 * self.count * len(numbers) / count,
        )

    def normalized(self, numbers: Floats) -> Floats:
        """(x - mean) / (std + 1e-8): 0 for a first and only number, and for numbers that are all the same."""
        return (numbers - self.mean) / (self.std + EPSILON)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunningStatistics:
        """What `asdict` gave.

        Raises:
            ConfigError: a number is missing, or cannot be one of these.
        """
        try:
            found = cls(operator.index(data["count"]), float(data["mean"]), float(data["m2"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no running statistics: {dict(data)!r:.200}; wanted: count, mean, m2") from error
        if found.count < 0 or not math.isfinite(found.mean) or not 0 <= found.m2 < math.inf:
            raise ConfigError(f"no running statistics: {found}; count and m2 are at least 0, and all are finite")
        if found.count == 0 and found != cls():
            raise ConfigError(f"no running statistics: {found}; of no numbers, mean and m2 are 0")
        return found
