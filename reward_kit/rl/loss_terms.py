"""Parts shared by all losses: masked tokens, aggregation to a single number, and diagnostics that can be merged.

Losses are divided by counts over the whole batch (`GlobalBatch`), so the losses of micro-batches add up to the loss of
the batch regardless of how it is split. For the same reason, diagnostics are stored as sums and counts. The axis `_N`
contains the included tokens in order, and the axis `_Q` contains the sequences with at least one included token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from reward_kit.errors import ConfigError, type_name
from reward_kit.torch_cpu import float64_device
from reward_kit.validation import check_choice, check_number

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""The reduction of (N,) losses to one number.

This is the mean over tokens, or the mean over sequences of the sum, of the mean, or of the sum divided by a constant
length (`GlobalBatch.norm_length`).
"""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clipped to ±20: exp(20) is far outside any clip range, and its square is finite in float32."""
_LEAST = 1e-12
"""The smallest divisor, so that a loss without tokens is 0 / 1e-12 = 0. The count for one process may be below 1."""


def check_above_0(name: str, number: object) -> None:
    """Raise a `ConfigError` if the value is not a finite positive number."""
    check_number(name, number, 0.0)
    if number == 0.0:
        raise ConfigError(f"{name} must be above 0, got 0")


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The divisors of losses: counts over all rows of one optimizer step, across its micro-batches.

    If gradients are averaged over processes instead of summed, divide the counts of all processes by the number of
    processes.

    Attributes:
        tokens: the number of tokens in the loss.
        sequences: the number of sequences with a token in the loss. A sequence must not span multiple micro-batches.
        norm_length: the divisor for "seq-mean-token-sum-norm". It is constant during a run; for example, it is the
            maximum completion length.

    Raises:
        ConfigError: If a count is negative or not finite, or the length is not positive.
    """

    tokens: float
    sequences: float
    norm_length: float | None = None

    def __post_init__(self) -> None:
        check_number("tokens", self.tokens, 0.0)
        check_number("sequences", self.sequences, 0.0)
        if self.norm_length is not None:
            check_above_0("norm_length", self.norm_length)

    @classmethod
    def of(
        cls, loss_mask_BT: Tensor, sequence_ids_BT: Tensor | None = None, *, norm_length: float | None = None
    ) -> GlobalBatch:
        """Count the tokens in rows that are all in memory. See `MaskedTokens` and this class for the arguments."""
        tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
        return cls(tokens.count, tokens.sequences, norm_length)


class MaskedTokens:
    """The tokens included in a loss.

    The included tokens are selected first so that the values of other tokens are never read, even if they are NaN. If
    the mask and the ids are on the CPU, losses of values on a GPU are computed without waiting for the GPU.

    Args:
        loss_mask_BT: 1 for tokens included in the loss.
        sequence_ids_BT: an integer for each token, such as the `row_ids` of a packed batch. Tokens with the same id
            form a sequence, even if they are in different rows. If None, each row is a sequence.

    Raises:
        ConfigError: If shapes differ, if the mask does not have two axes or contains numbers other than 0 and 1, or if
            ids are not integers.
    """

    def __init__(self, loss_mask_BT: Tensor, sequence_ids_BT: Tensor | None = None) -> None:
        _check_tensor("loss_mask", loss_mask_BT)
        if loss_mask_BT.dim() != 2:
            raise ConfigError(
                f"loss_mask must have two axes, row and token, but its shape is {tuple(loss_mask_BT.shape)}"
            )
        if sequence_ids_BT is not None:
            _check_tensor("sequence_ids", sequence_ids_BT)
            loss_mask_BT = loss_mask_BT.to(sequence_ids_BT.device)
        self.shape = loss_mask_BT.shape
        self.indices_N = loss_mask_BT.reshape(-1).nonzero().squeeze(1)
        self._used_N = self.indices_N  # on the device of the values
        self.count = len(self.indices_N)
        if loss_mask_BT.dtype != torch.bool and (loss_mask_BT.reshape(-1)[self.indices_N] != 1).any():
            raise ConfigError("loss_mask must contain only 0 and 1; pass a factor for each token as weights_BT")
        self._sequence_ids_BT = sequence_ids_BT
        if sequence_ids_BT is not None:
            self._check_shape("sequence_ids", sequence_ids_BT)
            if sequence_ids_BT.is_floating_point():
                raise ConfigError(f"sequence_ids must be integers, got {sequence_ids_BT.dtype}")

    def _check_shape(self, name: str, values: Tensor) -> None:
        # A (B,) or (B,1) tensor would be broadcast silently.
        _check_tensor(name, values)
        if values.shape != self.shape:
            raise ConfigError(
                f"{name} has shape {tuple(values.shape)}, but loss_mask has shape {tuple(self.shape)}; "
                "pass tensors of the same shape"
            )

    def divided(self, name: str, ids_BT: Tensor) -> MaskedTokens:
        """Return these tokens, with each sequence divided into parts with equal ids."""
        self._check_shape(name, ids_BT)
        if ids_BT.is_floating_point():
            raise ConfigError(f"{name} must be integers, got {ids_BT.dtype}")
        pairs_2N = torch.stack([self.sequence_N, ids_BT.reshape(-1).index_select(0, self.indices_N)])
        parts = copy.copy(self)
        parts.sequence_N = torch.unique(pairs_2N, dim=1, return_inverse=True)[1]
        parts.__dict__.pop("sequences", None)
        return parts

    def pick(self, name: str, values_BT: Tensor) -> Tensor:
        """Return the values of the included tokens (N,), in float32 or wider. `name` is used in messages."""
        self._check_shape(name, values_BT)
        values = values_BT.reshape(-1)
        return widened(values if self.count == len(values) else values.index_select(0, self._indices_on(values.device)))

    def weighted(self, values_N: Tensor, weights_BT: Tensor | None) -> Tensor:
        """Multiply each value by the weight of its token. Weights have no gradient.

        If `weights_BT` is `None`, all weights are 1.
        """
        return values_N if weights_BT is None else values_N * self.pick("weights", weights_BT).detach()

    def total(self, values_N: Tensor) -> Statistic:
        """Return the number of included tokens as a diagnostic on the device of their values."""
        return Statistic("total", values_N.new_full((1,), self.count, dtype=torch.long))

    def lay(self, values_N: Tensor) -> Tensor:
        """Return a (B,T) tensor that contains these values for the included tokens and 0 elsewhere."""
        flat = values_N.new_zeros(self.shape.numel())
        return flat.index_put((self._indices_on(values_N.device),), values_N).view(self.shape)

    def spread(self, values_Q: Tensor) -> Tensor:
        """Return the value of each token's sequence (N,)."""
        return values_Q.index_select(0, on_device(self.sequence_N, values_Q.device))

    def _indices_on(self, device: torch.device) -> Tensor:
        if self._used_N.device != device:
            self._used_N = on_device(self.indices_N, device)
        return self._used_N

    @cached_property
    def sequence_N(self) -> Tensor:
        """The sequence index of each token."""
        if self._sequence_ids_BT is None:
            ids_N = self.indices_N // max(self.shape[1], 1)
        else:
            ids_N = self._sequence_ids_BT.reshape(-1).index_select(0, self.indices_N)
        numbers_N: Tensor = torch.unique(ids_N, return_inverse=True)[1]
        return numbers_N

    @cached_property
    def sequences(self) -> int:
        """The number of sequences with a token in the loss."""
        return int(self.sequence_N.max()) + 1 if self.count else 0

    def sequence_sums(self, values_N: Tensor) -> Tensor:
        """Return the sum over each sequence (Q,)."""
        # `index_add` adds one value after the other. In float32, the error of a sum of 100,000 values would reach 1%.
        device = float64_device(values_N.device)
        sums_Q = torch.zeros(self.sequences, dtype=torch.float64, device=device)
        sums_Q = sums_Q.index_add(0, on_device(self.sequence_N, device), values_N.to(device).double())
        return sums_Q.to(values_N.dtype).to(values_N.device)

    def sequence_means(self, values_N: Tensor) -> Tensor:
        """Return the mean over the included tokens in each sequence (Q,)."""
        return self.sequence_sums(values_N) / self.sequence_sums(torch.ones_like(values_N))

    def aggregate(self, values_N: Tensor, aggregation: Aggregation, whole: GlobalBatch | None) -> Tensor:
        """Return the contribution of these tokens to the loss of the whole batch, or 0 without tokens."""
        check_choice("aggregation", aggregation, get_args(Aggregation))
        if whole is not None and self.count and not (whole.tokens and whole.sequences):
            raise ConfigError(f"global_batch must also count the {self.count} tokens in these rows, got {whole}")
        if aggregation == "token-mean":
            return values_N.sum() / max(whole.tokens if whole else self.count, _LEAST)
        summands = self.sequence_means(values_N) if aggregation == "seq-mean-token-mean" else values_N
        share = summands.sum() / max(whole.sequences if whole else self.sequences, _LEAST)
        if aggregation != "seq-mean-token-sum-norm":
            return share
        if whole is None or whole.norm_length is None:
            raise ConfigError(
                f"{aggregation!r} requires a constant length; pass global_batch=GlobalBatch.of(…, norm_length=…)"
            )
        return share / whole.norm_length


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. A copy from the CPU to a GPU waits for nothing."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type != "cpu")


def widened(values: Tensor) -> Tensor:
    """Return the values in float32 or wider. In bfloat16, a ratio of 1.001 would round to 1."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return the log-ratios clipped to ±`MAX_LOG_RATIO`. They have no gradient beyond this range."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _check_tensor(name: str, values: object) -> None:
    if not isinstance(values, Tensor):
        raise ConfigError(f"{name} must be a tensor, got {type_name(values)}")


Kind = Literal["total", "mean", "min", "max", "effective"]


class Statistic(NamedTuple):
    """A diagnostic in a form that can be merged.

    The parts, which depend on the kind, have no gradient:

        total: (amount,), which is added up
        mean: (sum, count), which are both added up
        min, max: (extreme,), which is inf or -inf if there were no values
        effective: (sum of weights, sum of squared weights), which are both added up. The effective sample size (Kish)
            is sum² / sum of squares, the number of equal weights that would have the same variance.
    """

    kind: Kind
    parts: Tensor

    def value(self) -> Tensor:
        """Return the diagnostic as a scalar, which is NaN if there were no values."""
        if self.kind == "mean":
            return self.parts[0] / self.parts[1]
        if self.kind == "effective":
            return self.parts[0].square() / self.parts[1]
        return self.parts[0] if self.is_known() else torch.full_like(self.parts[0], torch.nan)

    def is_known(self) -> bool:
        """Return True if there were any values, even if the result is NaN."""
        if self.kind in ("min", "max"):
            return self.parts[0].item() != (torch.inf if self.kind == "min" else -torch.inf)
        return self.kind == "total" or self.parts[1].item() != 0.0


class Diagnostics(Mapping[str, Tensor]):
    """A mapping from names to scalars. A scalar is NaN if there were no values.

    `a | b` combines two sets of diagnostics. For a name in both, the value in `b` is used.
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
        """Return the diagnostics that have values as floats for a log."""
        return {name: one.value().item() for name, one in self.statistics.items() if one.is_known()}


class Loss(NamedTuple):
    """A scalar to minimize, and its diagnostics."""

    loss: Tensor
    diagnostics: Diagnostics


def merge_diagnostics(parts: Sequence[Diagnostics]) -> Diagnostics:
    """Merge the diagnostics of micro-batches or processes. A name may be missing from some of them.

    Raises:
        ConfigError: If diagnostics with the same name are of different kinds.
    """
    merged: dict[str, Statistic] = {}
    for part in parts:
        for name, one in part.statistics.items():
            if (earlier := merged.get(name)) is None:
                merged[name] = one
                continue
            if one.kind != earlier.kind:
                raise ConfigError(
                    f"{name} is a {earlier.kind} statistic in one part but a {one.kind} statistic in another"
                )
            combine = {"min": torch.minimum, "max": torch.maximum}.get(one.kind, torch.add)
            merged[name] = Statistic(one.kind, combine(earlier.parts, one.parts))
    return Diagnostics(merged)


def mean_statistic(values_N: Tensor) -> Statistic:
    """Return the mean of the numbers, or the fraction of booleans that are true."""
    values_N = values_N.detach()
    values_N = values_N if values_N.is_floating_point() else values_N.float()
    return Statistic("mean", torch.stack([values_N.sum(), values_N.new_full((), len(values_N))]))


def spread_statistics(name: str, values_N: Tensor) -> dict[str, Statistic]:
    """Return `<name>_min`, `<name>_max` and `<name>_mean`."""
    values_N = values_N.detach()
    least = values_N.amin().reshape(1) if len(values_N) else values_N.new_full((1,), torch.inf)
    greatest = values_N.amax().reshape(1) if len(values_N) else values_N.new_full((1,), -torch.inf)
    return {
        f"{name}_min": Statistic("min", least),
        f"{name}_max": Statistic("max", greatest),
        f"{name}_mean": mean_statistic(values_N),
    }


def effective_size_statistic(weights_N: Tensor) -> Statistic:
    """Return the effective sample size (Kish 1965)."""
    weights_N = weights_N.detach()
    return Statistic("effective", torch.stack([weights_N.sum(), weights_N.square().sum()]))
