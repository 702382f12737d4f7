"""The batches that reward managers score, and the positions of rewards in these batches.

Batches have the structure of verl's `DataProto`. A batch is any object with the attributes `batch` (tensors or NumPy
arrays by name) and `non_tensor_batch`, such as a `DataProto`, a `TokenBatch`, or a `TokenBatch` that was converted with
`to_tensors`. In verl batches, rewards are aligned with `responses`. In a `TokenBatch`, they are aligned with
`action_mask`, like all other arrays.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reward_kit.errors import ConfigError, did_you_mean, type_name
from reward_kit.tokens import PackedBatch

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Column = npt.NDArray[Any]
_BLOCK = 256  # The number of columns examined together; 128 to 512 take about the same time.
_GREATEST = float(np.finfo(np.float32).max)  # A larger float32 is infinite.


class TokenRewards(NamedTuple):
    """Rewards with their rows and columns. Each position has at most one reward."""

    rows: Ints
    columns: Ints
    values: Floats


@dataclass(frozen=True)
class RewardBatch:
    """A batch in the form that reward managers use.

    A token is *valid* if the policy sampled it and it is not padding.
    """

    arrays: Mapping[str, Tensor]
    others: Mapping[str, Any]  # `non_tensor_batch`
    actions_BT: Tensor  # Nonzero on sampled tokens, aligned with the rewards
    attention_BT: Tensor | None  # Nonzero on tokens, aligned in the same way; None if the batch has no mask

    @classmethod
    def of(cls, data: Any) -> RewardBatch:
        """Wrap a batch without copying it.

        Raises:
            ConfigError: If an array is missing or has an unexpected shape.
        """
        wanted = ("responses", "prompts", "response_mask", "action_mask", "attention_mask", "step_rewards")
        arrays = read_tensors(data, (*wanted, "input_ids", "completion_mask"))
        mask = next((arrays[key] for key in ("response_mask", "action_mask") if key in arrays), None)
        attention = arrays.get("attention_mask")
        for name, values in arrays.items():
            if values.dim() != 2 and name != "step_rewards":
                raise ConfigError(f"{name!r} must have two axes, row and token, but its shape is {tuple(values.shape)}")
        if "responses" in arrays:
            attention = _align_to_responses("attention_mask", attention, arrays)
            mask = _align_to_responses("response_mask", mask, arrays) if mask is not None else attention
        if mask is None:
            known = ", ".join(sorted(map(str, data.batch.keys()))) or "nothing"
            raise ConfigError(
                "a reward manager needs 'responses' with 'attention_mask' or 'response_mask' (verl's names), "
                f"or 'action_mask' (the name in build_rows); the batch has {known}"
            )
        if attention is not None and attention.shape != mask.shape:
            raise ConfigError(
                f"'attention_mask' has shape {tuple(attention.shape)}, but the action mask has shape "
                f"{tuple(mask.shape)}"
            )
        return cls(arrays, read_non_tensors(data), mask, None if attention is mask else attention)

    def __len__(self) -> int:
        return len(self.actions_BT)

    @cached_property
    def last_B(self) -> Ints:
        """The column of each row's last valid token, or -1 if the row has no valid token."""
        last = last_nonzero(self.actions_BT)
        if self.attention_BT is not None and (last >= 0).any():
            # Sampled tokens are rarely padding. Check the last sampled token of each row, and the other tokens only if
            # needed.
            rows = torch.arange(len(last), device=self.device)
            columns = torch.from_numpy(last).to(self.device).clamp(min=0)
            attended = self.attention_BT[rows, columns].cpu().numpy()
            _check_binary("'attention_mask'", attended)
            on_padding = (attended == 0) & (last >= 0)
            if on_padding.any():
                last[on_padding] = last_nonzero(self.valid_BT[torch.from_numpy(on_padding).to(self.device)])
        return last

    @cached_property
    def valid_BT(self) -> Tensor:
        """A (B,T) mask that is true for valid tokens."""
        valid = _truth(self.actions_BT)
        return valid if self.attention_BT is None else valid & _truth(self.attention_BT)

    @property
    def is_empty_B(self) -> Bools:
        """A mask that is true for rows without a valid token."""
        empty: Bools = self.last_B < 0
        return empty

    @property
    def device(self) -> torch.device:
        """The device of the inputs and the rewards."""
        return self.actions_BT.device

    def column(self, name: str) -> Any | None:
        """Return a (B,) column of `non_tensor_batch`, or None if the column does not exist."""
        values = self.others.get(name)
        if values is not None and (np.ndim(values) == 0 or len(values) != len(self)):
            raise ConfigError(f"non_tensor_batch[{name!r}] must have one item for each of the {len(self)} rows")
        return values

    def numbers(self, name: str) -> Floats:
        """Return a required column of `non_tensor_batch` as (B,) floats. None becomes NaN; infinity is rejected."""
        if (values := self.column(name)) is None:
            raise ConfigError(f"non_tensor_batch has no {name!r}{did_you_mean(name, map(str, self.others))}")
        return as_numbers(values, f"non_tensor_batch[{name!r}]")

    @cached_property
    def episodes_B(self) -> Ints:
        """The index of each row's episode, determined by `traj_uid`.

        If the batch has no `traj_uid`, each row is a separate episode.
        """
        if (uids := self.column("traj_uid")) is None:
            return np.arange(len(self))
        codes: dict[Any, int] = {}
        try:
            numbers = [codes.setdefault(uid, len(codes)) for uid in uids]
        except TypeError as error:
            raise ConfigError(f"non_tensor_batch['traj_uid'] must contain strings or numbers: {error}") from error
        if None in codes:
            raise ConfigError(
                "non_tensor_batch['traj_uid'] is None in at least one row; every row must belong to an episode"
            )
        return np.array(numbers, dtype=np.int64)

    @cached_property
    def ends_B(self) -> Bools:
        """A (B,) mask that is true for rows that end their episode.

        The column `ends_episode` marks these rows. If that column is missing, the last row with a valid token ends an
        episode.
        """
        if (ends_episode := self.column("ends_episode")) is not None:
            if any(value not in (True, False) for value in np.asarray(ends_episode).tolist()):
                raise ConfigError("non_tensor_batch['ends_episode'] must contain true or false for each row")
            return np.asarray(ends_episode, dtype=np.bool_)
        rows = np.flatnonzero(~self.is_empty_B)
        last = np.full(len(self), -1)
        last[self.episodes_B[rows]] = rows  # The last row takes precedence.
        ends: Bools = last[self.episodes_B] == np.arange(len(self))
        return ends

    def action_ends(self) -> tuple[Ints, Ints]:
        """Return the rows (S,) and the columns (S,) of the last tokens of all actions, in order.

        The column `action_lengths` contains, for each row, a list of the number of tokens in each action. Without this
        column, an action is a contiguous run of valid tokens. An action without tokens ends at the last token of the
        previous action or, for the first action, at the first token of the row.

        Raises:
            ConfigError: If the lengths do not add up to the number of valid tokens in the row, or if no action in a row
                has tokens.
        """
        valid = self.valid_BT.cpu().numpy()
        if (lengths := self.column("action_lengths")) is None:
            ends = valid.copy()
            ends[:, :-1] &= ~valid[:, 1:]
            rows, columns = np.nonzero(ends)
            return rows, columns
        places = []
        for row, counts in enumerate(lengths):
            tokens = np.flatnonzero(valid[row])
            if sum(counts) != len(tokens) or (len(counts) and not len(tokens)):
                raise ConfigError(
                    f"non_tensor_batch['action_lengths'][{row}] is {list(counts)}, but the row has {len(tokens)} valid "
                    "tokens"
                )
            places.append(tokens[np.maximum(np.cumsum(np.asarray(counts, dtype=np.int64)) - 1, 0)])
        return np.repeat(np.arange(len(places)), [len(ends) for ends in places]), np.concatenate(places)

    def placed(self, scores_B: Floats, others: TokenRewards | None = None) -> Tensor:
        """Return (B,T) float32 rewards on the inputs' device. Each score is at the last valid token of its row.

        Rows without a valid token and rows whose score is NaN get no reward. The rewards in `others` are added at their
        own positions.
        """
        shape = tuple(self.actions_BT.shape)
        if self.device.type == "cpu":
            # NumPy's zeros touch memory only when written.
            rewards = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        else:
            rewards = torch.zeros(shape, dtype=torch.float32, device=self.device)
        rows = np.flatnonzero(~np.isnan(scores_B) & ~self.is_empty_B)
        for one in (TokenRewards(rows, self.last_B[rows], scores_B[rows]), others):
            if one is None:
                continue
            if (wrong := np.flatnonzero(~(np.abs(one.values) <= _GREATEST))).size:
                raise ConfigError(
                    f"the reward of row {one.rows[wrong[0]]} is {one.values[wrong[0]]:g}, which is not a finite float32"
                )
            at, columns = (torch.from_numpy(indices).to(self.device) for indices in one[:2])
            values = torch.from_numpy(one.values).to(self.device, torch.float32)
            rewards.index_put_((at, columns), values, accumulate=True)
        return rewards

    def ids(self, row: int) -> tuple[list[int], list[int]]:
        """Return the token ids of a row's prompt and response, without padding."""
        if "responses" in self.arrays:
            prompts, responses = self.arrays.get("prompts"), self.arrays["responses"]
            width = responses.shape[1]
            prompt = prompts[row] if prompts is not None else responses[row, :0]
            attention = self.arrays.get("attention_mask")
            if attention is None:
                return prompt.tolist(), responses[row][self.actions_BT[row] != 0].tolist()
            is_token = attention[row] != 0
            before = is_token[: len(is_token) - width] if len(is_token) > width else torch.ones_like(prompt) != 0
            return prompt[before].tolist(), responses[row][is_token[-width:] if width else slice(0)].tolist()
        if "input_ids" not in self.arrays:
            raise ConfigError("the batch cannot be decoded, because it has neither 'responses' nor 'input_ids'")
        ids, later = self.arrays["input_ids"][row], self.arrays.get("completion_mask", self.actions_BT)[row] != 0
        is_token = self.attention_BT[row] != 0 if self.attention_BT is not None else torch.ones_like(later)
        return ids[is_token & ~later].tolist(), ids[is_token & later].tolist()


def read_tensors(data: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the named arrays that exist in the batch, as tensors. The tensors share the arrays' memory."""
    if isinstance(data, PackedBatch):
        raise ConfigError("a reward manager cannot use packed rows; pass padded rows, and pack them later")
    if not hasattr(getattr(data, "batch", None), "keys"):
        raise ConfigError(
            f"a batch must have `batch` and `non_tensor_batch`, like DataProto and TokenBatch, got {type_name(data)}"
        )
    present = set(data.batch.keys())  # A TensorDict does not support `in`.
    tensors: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        # The tensors are only read.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        for name in present.intersection(names):
            try:
                tensors[name] = torch.as_tensor(data.batch[name])
            except (TypeError, ValueError, RuntimeError) as error:
                raise ConfigError(f"{name!r} cannot be converted to a tensor: {error}") from error
    return {name: tensors[name] for name in names if name in tensors}


def read_non_tensors(data: Any) -> Mapping[str, Any]:
    return getattr(data, "non_tensor_batch", None) or {}


def as_numbers(values: Any, name: str) -> Floats:
    """Convert a sequence of finite numbers, 0-d tensors and None (which becomes NaN) to (N,) float64.

    `name` is used in messages.
    """
    try:
        given = values.tolist() if hasattr(values, "tolist") else list(values)
        if texts := [value for value in given if isinstance(value, str | bytes)]:
            raise TypeError(f"{texts[0]!r:.80} is a string")
        numbers = np.array([np.nan if value is None else float(value) for value in given], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} contains a value that is not a number: {error}") from error
    if (wrong := np.flatnonzero(np.abs(numbers) > _GREATEST)).size:
        raise ConfigError(f"{name} is infinite in row {wrong[0]}; use NaN or None for an unscored row")
    return numbers


def last_nonzero(mask_BT: Tensor) -> Ints:
    """Return the index of the last nonzero column in each row, or -1 if all columns are zero.

    Raises:
        ConfigError: If the mask is on the CPU, does not contain floats, and contains a number other than 0 and 1.
    """
    return _by_blocks(mask_BT) if mask_BT.device.type == "cpu" else _by_columns(mask_BT)


def _by_columns(mask_BT: Tensor) -> Ints:
    """Find the columns on an accelerator with a single pass and a single copy."""
    columns = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)
    numbered = torch.where(mask_BT != 0, columns, 0)
    none = numbered.new_zeros((len(numbered), 1))  # max() over zero columns raises an error.
    last: Ints = torch.cat([none, numbered], dim=1).amax(1).cpu().numpy() - 1
    return last


def _by_blocks(mask_BT: Tensor) -> Ints:
    """Find the columns on a CPU by searching only the last non-empty block of each row.

    This is four times as fast as searching all columns.
    """
    mask = mask_BT.detach()
    values = (mask != 0 if mask.is_floating_point() else mask).numpy()
    rows, width = values.shape
    head, blocks = width % _BLOCK, width // _BLOCK
    # Columns that do not fill a block come first so that the other columns form a view with an axis of blocks.
    by_block = values[:, head:].reshape(rows, blocks, _BLOCK)
    bits = np.bitwise_or.reduce(by_block, axis=2)
    _check_binary("the mask of actions", bits, values[:, :head])
    is_used = bits != 0
    last = _last_true(values[:, :head] != 0)
    in_blocks = np.flatnonzero(is_used.any(axis=1))
    block = _last_true(is_used[in_blocks])
    last[in_blocks] = head + block * _BLOCK + _last_true(by_block[in_blocks, block] != 0)
    return last


def _check_binary(name: str, *parts: Any) -> None:
    for values in parts:
        if values.dtype != np.bool_ and ((values != 0) & (values != 1)).any():
            raise ConfigError(f"{name} must contain only 0 and 1")


def _last_true(is_here: Bools) -> Ints:
    if not is_here.shape[1]:
        return np.full(len(is_here), -1, dtype=np.int64)
    columns = is_here.shape[1] - 1 - is_here[:, ::-1].argmax(axis=1)
    return np.where(is_here.any(axis=1), columns, -1)


def _truth(values: Tensor) -> Tensor:
    return values if values.dtype == torch.bool else values != 0


def _align_to_responses(name: str, values: Tensor | None, arrays: Mapping[str, Tensor]) -> Tensor | None:
    """Return the part of an array that is aligned with the responses. The array may cover the prompts as well."""
    rows, width = arrays["responses"].shape
    if values is None or tuple(values.shape) == (rows, width):
        return values
    whole = width + arrays["prompts"].shape[1] if "prompts" in arrays else max(values.shape[1], width)
    if tuple(values.shape) != (rows, whole):
        longer = f", or {(rows, whole)} including the prompts" if whole > width else ""
        raise ConfigError(
            f"{name!r} has shape {tuple(values.shape)}; in a batch with 'responses', it must be {(rows, width)}{longer}"
        )
    return values[:, whole - width :]


def stack_facts(items: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Convert a list of dictionaries, one for each row, to arrays with one item for each row.

    If a row's dictionary lacks a key, the row's item is `None`. An array is numeric if all of its items are numbers.
    """
    columns = {}
    for key in dict.fromkeys(key for item in items for key in item):
        values = [item.get(key) for item in items]
        if all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values):
            columns[key] = np.array(values)
        else:  # NumPy would turn a list value into an axis.
            columns[key] = np.fromiter(values, dtype=object, count=len(values))
    return columns
