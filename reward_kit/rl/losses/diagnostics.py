"""Diagnostics of a loss that add up: each is kept as sums and counts, so that micro-batches merge without an error.

A mean of means, weighted by nothing, depends on how a batch was split. Here a mean is its sum and its count, and only
what is read is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from reward_kit.errors import ConfigError

Kind = Literal["total", "mean", "min", "max", "effective"]


class Statistic(NamedTuple):
    """One diagnostic in a form that merges.

    Attributes:
        kind: what the parts are.
            total: (amount,), added.
            mean: (sum, count), each added.
            min, max: (extreme,), of which the lesser or the greater stays; +inf or -inf where there was nothing.
            effective: (sum of weights, sum of their squares), each added; the effective sample size of Kish,
                sum² / sum of squares, is the number of equal weights that would be as good.
        parts: detached.
    """

    kind: Kind
    parts: Tensor

    def value(self) -> Tensor:
        """A scalar; NaN where there was nothing to look at."""
        if self.kind == "mean":
            return self.parts[0] / self.parts[1]
        if self.kind == "effective":
            return self.parts[0].square() / self.parts[1]
        return self.parts[0] if self.is_known() else torch.full_like(self.parts[0], torch.nan)

    def is_known(self) -> bool:
        """Whether there was anything to look at. NaN that came of a NaN is known."""
        if self.kind in ("min", "max"):
            return self.parts[0].item() != (torch.inf if self.kind == "min" else -torch.inf)
        return self.kind == "total" or self.parts[1].item() != 0.0

    def merged_with(self, other: Statistic) -> Statistic:
        """What it would be over the tokens of both.

        Raises:
            ConfigError: they are of different kinds.
        """
        if self.kind != other.kind:
            raise ConfigError(f"a diagnostic is a {self.kind} here and a {other.kind} there; it cannot be merged")
        if self.kind == "min":
            return Statistic("min", torch.minimum(self.parts, other.parts))
        if self.kind == "max":
            return Statistic("max", torch.maximum(self.parts, other.parts))
        return Statistic(self.kind, self.parts + other.parts)


class Diagnostics(Mapping[str, Tensor]):
    """Scalars by name, NaN where there was nothing to look at.

    `a | b` has the names of both; where one is in both, the value is that of `b`.

    Args:
        statistics: each by its name.
    """

    def __init__(self, statistics: Mapping[str, Statistic]) -> None:
        self.statistics = dict(statistics)

    def __getitem__(self, name: str) -> Tensor:
        return self.statistics[name].value()

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)

    def __or__(self, other: Diagnostics) -> Diagnostics:
        return Diagnostics(self.statistics | other.statistics)

    def __repr__(self) -> str:
        return f"Diagnostics({self.floats()})"

    def floats(self) -> dict[str, float]:
        """Those for which there was something to look at, for a log."""
        return {name: found.value().item() for name, found in self.statistics.items() if found.is_known()}


class Loss(NamedTuple):
    """A scalar to minimise, and what describes it."""

    loss: Tensor
    diagnostics: Diagnostics


def merge_diagnostics(parts: Sequence[Diagnostics]) -> Diagnostics:
    """The diagnostics of all rows together, from those of micro-batches or processes.

    Args:
        parts: one per micro-batch; what only some have is merged over those.

    Raises:
        ConfigError: one name stands for diagnostics of different kinds.
    """
    merged: dict[str, Statistic] = {}
    for part in parts:
        for name, found in part.statistics.items():
            merged[name] = merged[name].merged_with(found) if name in merged else found
    return Diagnostics(merged)


def mean_of(values_N: Tensor) -> Statistic:
    """The mean of numbers, or the share of what is true."""
    values_N = values_N.detach()
    values_N = values_N if values_N.is_floating_point() else values_N.float()
    return Statistic("mean", torch.stack([values_N.sum(), values_N.new_tensor(len(values_N))]))


def spread_of(name: str, values_N: Tensor) -> dict[str, Statistic]:
    """`<name>_min`, `<name>_max` and `<name>_mean`."""
    values_N = values_N.detach()
    least = values_N.amin().reshape(1) if len(values_N) else values_N.new_tensor([torch.inf])
    greatest = values_N.amax().reshape(1) if len(values_N) else values_N.new_tensor([-torch.inf])
    return {
        f"{name}_min": Statistic("min", least),
        f"{name}_max": Statistic("max", greatest),
        f"{name}_mean": mean_of(values_N),
    }


def effective_size_of(weights_N: Tensor) -> Statistic:
    """How many equal weights would be as good (Kish 1965)."""
    weights_N = weights_N.detach()
    return Statistic("effective", torch.stack([weights_N.sum(), weights_N.square().sum()]))
