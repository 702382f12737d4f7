"""Long curves with few points that look like all of them: of each stretch the mean, the least and the greatest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reward_kit.runs.report.training.reading import Series

MOST_POINTS = 320
STRETCHES = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """What is drawn of a series.

    Attributes:
        updates_M: after which updates; of a stretch its last one.
        values_M: what was measured, of a stretch the mean; NaN parts the line.
        low_M, high_M: of each stretch the extremes; None where every point of the series is there.
    """

    updates_M: NDArray[np.int64]
    values_M: NDArray[np.float64]
    low_M: NDArray[np.float64] | None = None
    high_M: NDArray[np.float64] | None = None

    @property
    def all_values(self) -> NDArray[np.float64]:
        """Every finite value that is drawn, the extremes among them."""
        parts = [part for part in (self.values_M, self.low_M, self.high_M) if part is not None]
        values = np.concatenate(parts)
        return values[np.isfinite(values)]


def curve_of(series: Series, most: int = MOST_POINTS) -> Curve:
    """The series itself, or where it is long, equal stretches of it, so that no peak is lost.

    Args:
        series: N points.
        most: a series of more is parted into stretches.
    """
    count = len(series.values_N)
    if count <= most:
        return Curve(series.updates_N, series.values_N)
    rows: list[tuple[int, float, float, float]] = []
    for stretch in np.array_split(np.arange(count), STRETCHES):
        last, values = int(series.updates_N[stretch[-1]]), series.values_N[stretch]
        finite = values[np.isfinite(values)]
        if len(finite):
            rows.append((last, float(finite.mean()), float(finite.min()), float(finite.max())))
        if len(finite) < len(values):
            rows.append((last, math.nan, math.nan, math.nan))
    updates, means, low, high = (np.array(column) for column in zip(*rows, strict=True))
    return Curve(updates.astype(np.int64), means, low, high)


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """The series with about `most` of its points, evenly chosen, the first and the last among them."""
    count = len(series.values_N)
    if count <= most:
        return series
    places = np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
    return Series(series.updates_N[places], series.values_N[places])
