"""The common parts of losses: which tokens take part, how their losses become one number, and diagnostics that merge.

Tokens whose mask is 1 are picked out before anything is computed. Values elsewhere are never read, NaN included, and
padded and packed rows come down to the same tensors. `_N` counts the tokens that take part, in order, and `_Q` the
sequences that have such a token.

A diagnostic is kept as sums and counts, since a mean of means would depend on how a batch was split into micro-batches;
only what is read is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from reward_kit.credit.options import check_choice, check_number
from reward_kit.errors import ConfigError, kind_of

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How (N,) losses become one: the mean over tokens, or the mean over sequences of each one's sum, mean, or sum divided
by a constant length (`GlobalBatch.norm_length`)."""
_LEAST = 1e-12
"""A divisor for when nothing takes part: 0 / 1e-12 is 0. Counts per process may well be below 1."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The divisors of losses: counts over all rows of one optimizer step, however many micro-batches they lie on.

    The losses of the micro-batches then add up to the loss of the whole, and so do their gradients. If gradients are
    averaged over processes instead of summed, give the counts of all processes divided by the number of processes.

    Attributes:
        tokens: how many take part.
        sequences: how many have a token that takes part. A sequence lies in one micro-batch.
        norm_length: what "seq-mean-token-sum-norm" divides each sum by: a constant of the run, such as the longest
            completion allowed.

    Raises:
        ConfigError: a count is negative or not finite, or the length is not above 0.
    """

    tokens: float
    sequences: float
    norm_length: float | None = None

    def __post_init__(self) -> None:
        check_number("tokens", self.tokens, 0.0)
        check_number("sequences", self.sequences, 0.0)
        if self.norm_length is not None:
            check_number("norm_length", self.norm_length, 0.0)
        if self.norm_length == 0.0:
            raise ConfigError("norm_length is what 'seq-mean-token-sum-norm' divides by; got 0")

    @classmethod
    def of(
        cls, loss_mask_BT: Tensor, sequence_ids_BT: Tensor | None = None, *, norm_length: float | None = None
    ) -> GlobalBatch:
        """Count rows that are at hand as a whole; for the arguments see `Participants` and the class."""
        found = Participants(loss_mask_BT, sequence_ids_BT)
        return cls(found.count, found.sequences, norm_length)


class Participants:
    """The tokens that take part in a loss.

    Args:
        loss_mask_BT: 1 where a token takes part.
        sequence_ids_BT: integers; tokens of one id are one sequence, in whichever rows they stand, as with `row_ids` of
            a packed batch. None: each row is a sequence.

    Raises:
        ConfigError: the two differ in shape, the mask has not two axes or holds something besides 0 and 1, or ids are
            not integers.
    """

    def __init__(self, loss_mask_BT: Tensor, sequence_ids_BT: Tensor | None = None) -> None:
        _check_tensor("loss_mask", loss_mask_BT)
        if loss_mask_BT.dim() != 2:
            raise ConfigError(f"loss_mask has the axes row and token; got the shape {tuple(loss_mask_BT.shape)}")
        self.shape = loss_mask_BT.shape
        self.places_N = loss_mask_BT.reshape(-1).nonzero().squeeze(1)
        self.count = len(self.places_N)
        if loss_mask_BT.is_floating_point() and (loss_mask_BT.reshape(-1)[self.places_N] != 1.0).any():
            raise ConfigError("loss_mask is 0 or 1; factors of tokens are weights_BT")
        self._sequence_ids_BT = sequence_ids_BT
        if sequence_ids_BT is not None:
            self._check_shape("sequence_ids", sequence_ids_BT)
            if sequence_ids_BT.is_floating_point():
                raise ConfigError(f"sequence_ids are integers; got {sequence_ids_BT.dtype}")

    def _check_shape(self, name: str, values: Tensor) -> None:
        # A (B,) or (B,1) tensor would be broadcast silently.
        _check_tensor(name, values)
        if values.shape != self.shape:
            raise ConfigError(
                f"{name} has the shape {tuple(values.shape)}, loss_mask {tuple(self.shape)}; give one each"
            )

    def pick(self, name: str, values_BT: Tensor) -> Tensor:
        """(N,) values of the tokens that take part, in float32 or wider; `name` is for errors.

        Raises:
            ConfigError: the shape is not that of the mask.
        """
        self._check_shape(name, values_BT)
        values_N = values_BT.reshape(-1).index_select(0, self.places_N)
        # In bfloat16 a ratio of 1.001 is 1.
        return values_N.to(torch.promote_types(values_N.dtype, torch.float32))

    def weighted(self, values_N: Tensor, weights_BT: Tensor | None) -> Tensor:
        """(N,) values times a factor per token, which gets no gradient; None: 1."""
        return values_N if weights_BT is None else values_N * self.pick("weights", weights_BT).detach()

    def total(self) -> Statistic:
        """The number of tokens that take part, as a diagnostic."""
        return Statistic("total", torch.tensor([self.count], device=self.places_N.device))

    def lay(self, values_N: Tensor) -> Tensor:
        """(B,T) tensor with these values in their places and 0 elsewhere."""
        flat = values_N.new_zeros(self.shape.numel())
        return flat.index_put((self.places_N,), values_N).view(self.shape)

    @cached_property
    def sequence_N(self) -> Tensor:
        """The number of each token's sequence, from 0."""
        if self._sequence_ids_BT is None:
            ids_N = self.places_N // max(self.shape[1], 1)
        else:
            ids_N = self._sequence_ids_BT.reshape(-1).index_select(0, self.places_N)
        found: Tensor = torch.unique(ids_N, return_inverse=True)[1]
        return found

    @cached_property
    def sequences(self) -> int:
        """How many sequences have a token that takes part."""
        return int(self.sequence_N.max()) + 1 if self.count else 0

    def sequence_sums(self, values_N: Tensor) -> Tensor:
        """(Q,) sum of each sequence."""
        return values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)

    def sequence_means(self, values_N: Tensor) -> Tensor:
        """(Q,) mean of each sequence over its tokens that take part."""
        return self.sequence_sums(values_N) / self.sequence_sums(torch.ones_like(values_N))

    def aggregate(self, values_N: Tensor, aggregation: Aggregation, whole: GlobalBatch | None) -> Tensor:
        """The share of these tokens in the loss of the whole batch; 0 if no token takes part.

        Args:
            values_N: the loss of each token.
            aggregation: how they become one number.
            whole: the counts of the whole batch; None: these rows are all.

        Raises:
            ConfigError: the aggregation is unknown or lacks its length, or the whole counts nothing and these do.
        """
        check_choice("aggregation", aggregation, get_args(Aggregation))
        if whole is not None and self.count and not (whole.tokens and whole.sequences):
            raise ConfigError(f"global_batch counts all rows of the step, and here {self.count} tokens; got {whole}")
        if aggregation == "token-mean":
            return values_N.sum() / max(whole.tokens if whole else self.count, _LEAST)
        summands = self.sequence_means(values_N) if aggregation == "seq-mean-token-mean" else values_N
        share = summands.sum() / max(whole.sequences if whole else self.sequences, _LEAST)
        if aggregation != "seq-mean-token-sum-norm":
            return share
        if whole is None or whole.norm_length is None:
            raise ConfigError(f"{aggregation!r} needs global_batch=GlobalBatch.of(…, norm_length=…), a constant length")
        return share / whole.norm_length


def _check_tensor(name: str, values: object) -> None:
    if not isinstance(values, Tensor):
        raise ConfigError(f"{name} is a tensor; got {kind_of(values)}")


Kind = Literal["total", "mean", "min", "max", "effective"]


class Statistic(NamedTuple):
    """One diagnostic in a form that merges.

    Attributes:
        kind: of the parts.
            total: (amount,), added.
            mean: (sum, count), each added.
            min, max: (extreme,); +inf or -inf without values.
            effective: (sum of weights, sum of their squares), each added; the effective sample size of Kish,
                sum² / sum of squares, is the number of equal weights that would be as good.
        parts: detached.
    """

    kind: Kind
    parts: Tensor

    def value(self) -> Tensor:
        """A scalar; NaN without values."""
        if self.kind == "mean":
            return self.parts[0] / self.parts[1]
        if self.kind == "effective":
            return self.parts[0].square() / self.parts[1]
        return self.parts[0] if self.is_known() else torch.full_like(self.parts[0], torch.nan)

    def is_known(self) -> bool:
        """Whether there were any values. NaN that came from a NaN is known."""
        if self.kind in ("min", "max"):
            return self.parts[0].item() != (torch.inf if self.kind == "min" else -torch.inf)
        return self.kind == "total" or self.parts[1].item() != 0.0

    def merged_with(self, other: Statistic) -> Statistic:
        """The statistic over the tokens of both.

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
    """Scalars by name, NaN without values. `a | b` has the names of both; of one in both the value is that of `b`.

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
        """The known ones as numbers, for a log."""
        return {name: found.value().item() for name, found in self.statistics.items() if found.is_known()}


class Loss(NamedTuple):
    """A scalar to minimise and its diagnostics."""

    loss: Tensor
    diagnostics: Diagnostics


def merge_diagnostics(parts: Sequence[Diagnostics]) -> Diagnostics:
    """Merge the diagnostics of micro-batches or processes into those of all rows; a name may be missing in some.

    Raises:
        ConfigError: one name stands for diagnostics of different kinds.
    """
    merged: dict[str, Statistic] = {}
    for part in parts:
        for name, found in part.statistics.items():
            merged[name] = merged[name].merged_with(found) if name in merged else found
    return Diagnostics(merged)


def mean_of(values_N: Tensor) -> Statistic:
    """The mean of numbers, or the share of true values."""
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
