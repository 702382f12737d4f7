"""Rows in the form that the learner uses: unpadded, divided into parts, and with loss tokens selected.

Each part is either packed into one row, or padded on the right to the length of its longest row. With causal attention,
no other token attends to this padding, so no attention mask is needed. The axis `_N` contains the tokens in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from reward_kit.errors import ConfigError, TrainingError, did_you_mean, type_name
from reward_kit.rl.loss_terms import on_device
from reward_kit.tokens import PackedBatch, TokenBatch
from reward_kit.tokens.columns import Array, Ints, ranges

CHOICE = "is_choice"
"""The column that is 1 for tokens at which the policy had a choice.

Without this column, it had a choice at every token.
"""
_COLUMNS = ("logprobs", "advantages", "returns", "policy_versions", "values", "value_mask")


class Restriction(NamedTuple):
    """The tokens in a part that were sampled under a constraint, and the ids that the constraint allowed."""

    tokens_K: Tensor  # The tokens' indices on the axis N, ascending
    sets_K: Tensor  # The index of each token's set of allowed ids; multiple tokens may share a set
    owners_A: Tensor  # The index of the set, for each id of each set
    ids_A: Tensor
    sets: int


class Packing(NamedTuple):
    """The boundaries of rows that are concatenated into one row of L tokens."""

    cu_seqlens: Tensor  # (B+1,) int32: the index at which each row begins, and L
    longest: int  # The length of the longest row
    positions_1L: Tensor  # The position of each token in its own row

    @classmethod
    def of(cls, lengths_B: Ints, device: torch.device) -> Packing:
        """Return the boundaries of rows of these lengths, which are at least 1."""
        ends = np.cumsum([0, *lengths_B], dtype=np.int32)
        positions = ranges(np.zeros_like(lengths_B), lengths_B)[None]
        return cls(_moved(ends, device), int(lengths_B.max()), _moved(positions, device))


class MicroBatch(NamedTuple):
    """Rows that pass through the module together.

    If the rows are packed, B is 1, and T is the number of all tokens.
    """

    ids_BT: Tensor  # padded on the right
    mask_BT: Tensor  # 1 on tokens
    before_N: Tensor  # the index on the flat axis (B·T) whose logits predict each token
    targets_N: Tensor  # the tokens
    rows_N: Tensor  # The row of each token, on the CPU
    turns_N: Tensor  # A number for each token, on the CPU, which is equal for the tokens of an action
    firsts_M: Tensor  # The indices of the first tokens of actions, at which the critic predicts a value
    first_rows_M: Tensor  # The rows of these tokens, on the CPU
    choices_N: Tensor | None  # True at tokens at which the policy had a choice, on the CPU; None if at all of them
    columns: dict[str, Tensor]  # (N,) real numbers by name
    restriction: Restriction | None  # None if no token was sampled under a constraint
    allowed_U: Tensor | None = None  # The ids that any set allows, ascending; None if some token is unconstrained
    packing: Packing | None = None  # The rows in `ids_BT`, if they are packed


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The rows of a batch, concatenated."""

    ids: Ints  # (L,) the ids of all tokens
    starts_B: Ints  # the index in `ids` at which each row begins
    lengths_B: Ints  # the number of tokens in each row
    counts_B: Ints  # The number of each row's tokens in the loss
    flat_N: Ints  # The index of each token in the loss on the batch's flat axis (B·T)
    positions_N: Ints  # The index of each token within its row
    is_first_N: Array  # True at the first token of an action
    turns_N: Ints  # The number of the action of each token
    columns: Mapping[str, Array]  # (N,) arrays of the batch by name
    sets_N: Ints  # The index of the set of ids that a constraint allowed; -1 without a constraint
    sets: tuple[Array, ...]  # The ids of each set
    forced: int = 0  # The number of tokens removed because a constraint left no alternative

    @classmethod
    def of(cls, rows: TokenBatch, mask: str = "loss_mask") -> TrainingRows:
        """Convert rows returned by `build_rows` with any padding. `mask` is the name of the mask of tokens in the loss.

        Raises:
            ConfigError: If an array is missing.
            TrainingError: If the first token of a row is in the loss, because no token predicts it.
        """
        if not isinstance(rows, TokenBatch):
            raise ConfigError(f"expected rows from build_rows, got {type_name(rows)}")
        for key in ("input_ids", "attention_mask", mask):
            if key not in rows.batch:
                raise ConfigError(f"the rows have no {key!r}, which the learner requires; create them with build_rows")
        is_token, takes_part = rows.batch["attention_mask"] != 0, rows.batch[mask] != 0
        lengths = np.count_nonzero(is_token, axis=1).astype(np.int64)
        flat = np.flatnonzero(takes_part & is_token)
        rows_N, columns_N = np.divmod(flat, max(is_token.shape[1], 1))
        # Real tokens are contiguous, and rows without real tokens have no token in the loss.
        places = columns_N - (is_token.argmax(axis=1)[rows_N] if len(flat) else 0)
        if len(places) and places.min() == 0:
            raise TrainingError(
                f"row {rows_N[places.argmin()]}: the first token is a sampled token, but no token precedes it to "
                "predict it"
            )
        sets_N, sets = _allowed(rows, rows_N, places)
        if "value_mask" in rows.batch:
            is_first = rows.batch["value_mask"].reshape(-1)[flat] != 0
        else:  # the first of a run of tokens
            is_first = ~np.pad(takes_part, ((0, 0), (1, 0)))[:, :-1].reshape(-1)[flat]
        return cls(
            ids=rows.batch["input_ids"][is_token].astype(np.int64),
            starts_B=np.cumsum(lengths) - lengths,
            lengths_B=lengths,
            counts_B=np.bincount(rows_N, minlength=len(lengths)),
            flat_N=flat,
            positions_N=places,
            is_first_N=is_first,
            turns_N=np.cumsum(is_first),
            columns={key: rows.batch[key].reshape(-1)[flat] for key in _COLUMNS if key in rows.batch},
            sets_N=sets_N,
            sets=sets,
        )

    @property
    def count(self) -> int:
        """The number of tokens in the loss."""
        return len(self.flat_N)

    @property
    def choices(self) -> int:
        """The number of tokens in the loss that train the policy. All other tokens train only the critic."""
        chosen = self.columns.get(CHOICE)
        return self.count if chosen is None else int(np.count_nonzero(chosen))

    def without_forced(self, *, keep_firsts: bool) -> TrainingRows:
        """Remove tokens for which a constraint allowed only one id, because the policy had no choice.

        Their log-probability is 0 for any weights, so these tokens would lower mean losses, entropies and divergences.
        If `keep_firsts` is true, the first token of each action is kept, because the critic predicts the value at that
        token. The column `CHOICE` is 0 for this token so that no other loss counts it.
        """
        sizes = np.array([*map(len, self.sets), 0])
        is_forced = sizes[self.sets_N] == 1
        stays = ~is_forced | (keep_firsts & self.is_first_N)
        columns = {key: values[stays] for key, values in self.columns.items()}
        if keep_firsts and (is_forced & stays).any():
            columns[CHOICE] = ~is_forced[stays]
        return replace(
            self,
            counts_B=np.bincount(self.rows_N[stays], minlength=len(self.counts_B)),
            flat_N=self.flat_N[stays],
            positions_N=self.positions_N[stays],
            is_first_N=self.is_first_N[stays],
            turns_N=self.turns_N[stays],
            columns=columns,
            sets_N=self.sets_N[stays],
            forced=self.forced + int(np.count_nonzero(is_forced)),
        )

    @property
    def rows_N(self) -> Ints:
        """The row of each token in the loss."""
        return np.repeat(np.arange(len(self.counts_B)), self.counts_B)

    def token_indices(self, rows: Ints) -> Ints:
        """Return the indices, row by row, of the tokens in the loss that belong to these rows."""
        return ranges((np.cumsum(self.counts_B) - self.counts_B)[rows], self.counts_B[rows])

    def part(
        self, rows: Ints, device: torch.device, dtype: torch.dtype = torch.float32, *, is_packed: bool = False
    ) -> MicroBatch:
        """Return these rows as a micro-batch on a device.

        If there are no rows, the micro-batch consists of one row with a single token that is not in the loss.
        """
        lengths, counts = self.lengths_B[rows], self.counts_B[rows]
        present = lengths if len(rows) else np.ones(1, dtype=np.int64)
        if is_packed:
            shape, starts = (1, int(present.sum())), np.cumsum(lengths) - lengths
        else:
            shape = (len(present), int(present.max()))
            starts = np.arange(len(rows)) * shape[1]
        ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        cells = ranges(starts, lengths)
        ids.reshape(-1)[cells] = self.ids[ranges(self.starts_B[rows], lengths)]
        mask.reshape(-1)[cells if len(rows) else 0] = 1
        tokens, local = self.token_indices(rows), np.repeat(np.arange(len(rows)), counts)
        places = starts[local] + self.positions_N[tokens]
        firsts, choices = np.flatnonzero(self.is_first_N[tokens]), self.columns.get(CHOICE)
        real = np.float64 if dtype == torch.float64 else np.float32

        def moved(values: Array) -> Tensor:
            return _moved(values, device)

        return MicroBatch(
            ids_BT=moved(ids),
            mask_BT=moved(mask),
            before_N=moved(places - 1),
            targets_N=moved(ids.reshape(-1)[places]),
            rows_N=torch.from_numpy(local),
            turns_N=torch.from_numpy(self.turns_N[tokens]),
            firsts_M=moved(firsts),
            first_rows_M=torch.from_numpy(local[firsts]),
            choices_N=None if choices is None else torch.from_numpy(choices[tokens]),
            columns={key: moved(values[tokens].astype(real)) for key, values in self.columns.items() if key != CHOICE},
            restriction=self._restriction(tokens, moved),
            allowed_U=self._allowed_by_any(tokens, moved),
            packing=Packing.of(present, device) if is_packed else None,
        )

    def _allowed_by_any(self, tokens: Ints, moved: Callable[[Array], Tensor]) -> Tensor | None:
        used = np.unique(self.sets_N[tokens])
        if not len(used) or used[0] < 0:
            return None
        return moved(np.unique(np.concatenate([self.sets[index] for index in used])).astype(np.int64))

    def _restriction(self, tokens: Ints, moved: Callable[[Array], Tensor]) -> Restriction | None:
        restricted = np.flatnonzero(self.sets_N[tokens] >= 0)
        if not len(restricted):
            return None
        used, numbers = np.unique(self.sets_N[tokens[restricted]], return_inverse=True)
        ids = [self.sets[number] for number in used]
        owners = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
        flat = np.concatenate(ids).astype(np.int64)
        return Restriction(moved(restricted), moved(numbers.astype(np.int64)), moved(owners), moved(flat), len(ids))


def _moved(values: Array, device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(values), device)


def _allowed(rows: TokenBatch, rows_N: Ints, positions_N: Ints) -> tuple[Ints, tuple[Array, ...]]:
    """Return, for each token in the loss, the index of its set of allowed ids (-1 if unconstrained), and the sets."""
    sets_N = np.full(len(rows_N), -1, dtype=np.int64)
    numbers: dict[bytes, int] = {}
    for row, allowed in enumerate(rows.non_tensor_batch.get("allowed_ids", ())):
        if allowed is None or not len(allowed.places):
            continue
        first, last = np.searchsorted(rows_N, [row, row + 1])
        indices = np.searchsorted(allowed.places, positions_N[first:last])
        indices = np.minimum(indices, len(allowed.places) - 1)
        own = np.array([numbers.setdefault(ids.tobytes(), len(numbers)) for ids in allowed.sets], dtype=np.int64)
        is_there = allowed.places[indices] == positions_N[first:last]
        sets_N[first:last] = np.where(is_there, own[allowed.which[indices]], -1)
    return sets_N, tuple(np.frombuffer(ids, dtype=np.int32) for ids in numbers)


def to_tensors(
    rows: TokenBatch | PackedBatch,
    keys: Collection[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Convert arrays of `rows.batch` to tensors of the same shapes.

    Real numbers are converted to `dtype`, and ids and masks to int64. Packed rows also contain `cu_seqlens` in int32,
    as attention kernels require. A tensor shares memory with its array if their types are the same.

    Args:
        rows: the batch, padded or packed.
        keys: the names of the arrays to convert. If None, all arrays are converted.
        dtype: the type for real numbers.

    Raises:
        ConfigError: If an array does not exist.
    """
    arrays = rows.batch if isinstance(rows, TokenBatch) else {**rows.batch, "cu_seqlens": rows.cu_seqlens}
    for key in keys or ():
        if key not in arrays:
            raise ConfigError(f"the rows have no {key!r}{did_you_mean(key, arrays)}")
    tensors = {}
    for key, values in arrays.items():
        if keys is None or key in keys:
            whole = torch.int32 if key == "cu_seqlens" else torch.int64
            tensors[key] = torch.from_numpy(values).to(dtype if np.issubdtype(values.dtype, np.floating) else whole)
    return tensors
