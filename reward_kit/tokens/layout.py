"""The layout of a model's input rows: padded to a common width, or packed into one long row without padding.

    prompt_ids      (B,P)  the tokens before the first action
    completion_ids  (B,C)  the tokens from the first action onward
    input_ids       (B,T)  both without a gap: the model's input
    other arrays    (B,T)  on the axis of `input_ids`

`attention_mask` is 1 on tokens and 0 on padding, `completion_mask` is 1 on the completion, and `action_mask` is 1 on
sampled tokens. `loss_mask` is the product of `completion_mask` and `action_mask`, except that it is 0 for actions
without an advantage. `position_ids` count from 0. `logprobs` are the sampler's log-probabilities, and 0.0 on tokens
that were not sampled. `step_rewards` are on the last token of each action; `advantages` and `returns` are on all tokens
of an action. `returns` are the targets for a critic. If a critic estimated values, `values` contains its estimates, and
`value_mask` is 1 on the first token of each action that has a return. `policy_versions` are -1 on tokens that were not
sampled. A token column added by a custom connector becomes a (B,T) array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from reward_kit.errors import ConfigError
from reward_kit.tokens.batch import Padding, TokenBatch, fill_value, get_axis
from reward_kit.tokens.columns import Array, Columns, Ints, ranges, row_positions
from reward_kit.tokens.connectors import check_complete


def pad_rows(columns: Columns, *, pad_token_id: int, padding: Padding = "right") -> TokenBatch:
    """Return the rows padded to a common width.

    Args:
        columns: the columns that a `RowPipeline` returned.
        pad_token_id: the token id used as padding.
        padding: the padding side: "right", "left" or "outer". With "outer", as in verl and TRL, prompts are padded on
            the left and completions on the right, so all completions begin in the same column.

    Raises:
        ConfigError: If `padding` or `pad_token_id` is invalid, or the pipeline has no connector that creates rows.
    """
    if padding not in get_args(Padding):
        raise ConfigError(f"padding must be 'right', 'left' or 'outer', got {padding!r}")
    if not isinstance(pad_token_id, int | np.integer) or not -(2**31) <= pad_token_id < 2**31:
        raise ConfigError(
            f"pad_token_id must be a token id, got {pad_token_id!r}; if the tokenizer has none, use its "
            "eos_token_id, because the model never attends to padding"
        )
    check_complete(columns)
    meta = {"pad_token_id": pad_token_id, "padding": padding}
    lengths, prompts = columns.lengths_B, columns.prompt_lengths_B
    completions = lengths - prompts
    size, prompt, completion = len(lengths), int(prompts.max(initial=0)), int(completions.max(initial=0))
    width = prompt + completion if padding == "outer" else int(lengths.max(initial=0))
    before = {"right": np.zeros_like(lengths), "left": width - lengths, "outer": prompt - prompts}[padding]
    in_completion, batch = columns.tokens["completion_mask"] != 0, {}
    for key, columns_P, counts, chosen, on_left in (
        ("prompt_ids", prompt, prompts, ~in_completion, padding != "right"),
        ("completion_ids", completion, completions, in_completion, padding == "left"),
    ):
        positions = ranges(np.arange(size) * columns_P + (columns_P - counts if on_left else 0), counts)
        batch[key] = _laid(columns.tokens["input_ids"][chosen], positions, (size, columns_P), pad_token_id)
    positions = ranges(np.arange(size) * width + before, lengths)
    for key, values in _token_columns(columns).items():
        batch[key] = _laid(values, positions, (size, width), fill_value(key, meta))
    return TokenBatch(batch, dict(columns.rows), meta)


def _laid(values: Array, positions: Ints, shape: tuple[int, int], fill: int) -> Array:
    """Return an array that contains `values` at the given flat positions and `fill` elsewhere."""
    # `np.zeros` does not touch the memory before the first write.
    flat = np.full(shape, fill, dtype=values.dtype) if fill else np.zeros(shape, dtype=values.dtype)
    flat.reshape(-1)[positions] = values
    return flat


def _token_columns(columns: Columns) -> dict[str, Array]:
    """Return the (N,) columns of a batch, except for the internal column `step`."""
    positions = row_positions(columns.lengths_B)
    shown: dict[str, Array] = {"attention_mask": np.ones(len(positions), dtype=np.int8), "position_ids": positions}
    return shown | {key: values for key, values in columns.tokens.items() if key != "step"}


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows concatenated into a single long row without padding.

    Attributes:
        batch: arrays of shape (1,N), with the keys of a padded batch except `prompt_ids`, `completion_ids` and
            `attention_mask`. `position_ids` restart at 0 in each row. `row_ids` contains the row index of each token;
            attention must not cross rows.
        cu_seqlens: a (B+1,) int32 array with the start of each row, followed by N. Variable-length attention kernels
            take it as an argument.
        prompt_lengths: (B,) the number of tokens before the completion in each row.
        non_tensor_batch: (B,) arrays of arbitrary objects.
        meta_info: values that apply to the whole batch.
    """

    batch: dict[str, Array]
    cu_seqlens: Array
    prompt_lengths: Ints
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of packed rows."""
        return len(self.cu_seqlens) - 1


def pack_rows(columns: Columns) -> PackedBatch:
    """Concatenate all rows into one long row.

    Raises:
        ConfigError: If the pipeline has no connector that creates rows.
    """
    check_complete(columns)
    tokens = _token_columns(columns)
    del tokens["attention_mask"]
    tokens["row_ids"] = np.repeat(np.arange(len(columns.lengths_B), dtype=np.int32), columns.lengths_B)
    batch = {key: values[None].copy() for key, values in tokens.items()}
    ends = np.cumsum([0, *columns.lengths_B], dtype=np.int32)
    return PackedBatch(batch, ends, columns.prompt_lengths_B.copy(), dict(columns.rows), {"padding": "none"})


VERL_NAMES = {
    "prompt_ids": "prompts",
    "completion_ids": "responses",
    "action_mask": "response_mask",
    "logprobs": "rollout_log_probs",
}
"""The names of arrays that differ in verl. Like `action_mask`, `response_mask` is 1 on sampled tokens."""


def verl_batch(rows: TokenBatch) -> TokenBatch:
    """Convert rows to verl's names and axes.

    `prompts` (B,P) are padded on the left, and `responses` (B,C) on the right. `input_ids`, `attention_mask` and
    `position_ids` (B,P+C) cover both. All other arrays, such as `response_mask`, `rollout_log_probs` and `advantages`,
    have the shape (B,C). verl's mask includes every sampled token, so first remove all rows whose `loss_mask` is 0
    everywhere.

    Args:
        rows: the batch returned by `build_rows(…, padding="outer")`.

    Raises:
        ConfigError: If the rows have different padding, or `prompt_ids` is missing.
    """
    padding = rows.meta_info.get("padding")
    if padding != "outer" or "prompt_ids" not in rows.batch:
        raise ConfigError(
            f"verl_batch needs rows from build_rows(…, padding='outer') that have prompt_ids, got padding {padding!r}"
        )
    prompt = rows.batch["prompt_ids"].shape[1]
    meta = {**rows.meta_info, "names": "verl"}
    cut = {
        key: values[:, prompt:] if get_axis(key, rows.meta_info) != get_axis(VERL_NAMES.get(key, key), meta) else values
        for key, values in rows.batch.items()
    }
    names = {ours: theirs for ours, theirs in VERL_NAMES.items() if ours in cut}
    return TokenBatch(cut, dict(rows.non_tensor_batch), meta).rename(names)


def micro_batches(
    lengths: Sequence[int] | Array, max_tokens: int, *, padded: bool = False, multiple_of: int = 1
) -> list[Ints]:
    """Split rows into parts of at most `max_tokens` tokens. The result depends only on the arguments.

    First-fit decreasing determines the number of parts, which is at most 11/9 of the minimum plus 1. Packed rows are
    then balanced: each row, longest first, is assigned to the part with the fewest tokens. If a part would then exceed
    `max_tokens`, the parts from first-fit decreasing are kept.

    Args:
        lengths: (B,) the number of tokens in each row; see `TokenBatch.lengths`.
        max_tokens: the maximum number of tokens in a part.
        padded: True if rows are padded to the longest row in their part, in which case padding counts as tokens; False
            if rows are packed.
        multiple_of: a divisor of the number of parts, for workers that run in lockstep.

    Returns:
        The row indices in each part, in ascending order. `restored_order` restores the original order of the rows.

    Raises:
        ConfigError: If `lengths` are invalid, a row is longer than `max_tokens`, or there are fewer rows than parts.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and (sizes.dtype.kind not in "iu" or sizes.min() < 0)):
        raise ConfigError(
            f"lengths must be a (B,) array of integers, the number of tokens in each row, got {lengths!r:.80}"
        )
    sizes = sizes.astype(np.int64)
    if len(sizes) and sizes.max() > max_tokens:
        row = int(sizes.argmax())
        raise ConfigError(f"row {row} has {sizes[row]} tokens, but max_tokens is {max_tokens}; raise max_tokens")
    if multiple_of < 1:
        raise ConfigError(f"multiple_of must be at least 1, got {multiple_of}")
    parts = _first_fit(sizes, max_tokens, padded)
    wanted = -(-len(parts) // multiple_of) * multiple_of
    if wanted > len(sizes):
        raise ConfigError(
            f"{len(sizes)} rows cannot be split into {wanted} parts, the number that multiple_of={multiple_of} requires"
        )
    if not padded:
        even = _lightest_first(sizes, wanted)
        if all(sizes[part].sum() <= max_tokens for part in even):
            parts = even
    return [np.sort(part) for part in split_to_multiple(parts, multiple_of)]


def split_to_multiple(parts: Sequence[Ints], multiple_of: int) -> list[Ints]:
    """Halve the part with the most rows until the number of parts is a multiple. A single row gives an empty part."""
    parts = list(parts)
    while len(parts) % multiple_of:
        most = max(range(len(parts)), key=lambda index: len(parts[index]))
        half = max(1, len(parts[most]) // 2)
        parts[most : most + 1] = [parts[most][:half], parts[most][half:]]
    return parts


def _descending(sizes: Ints) -> Ints:
    return np.argsort(-sizes, kind="stable")


def _first_fit(sizes: Ints, max_tokens: int, padded: bool) -> list[Ints]:
    """Put each row, longest first, into the first part with enough space."""
    room = np.full(len(sizes), max_tokens, dtype=np.int64)
    longest = np.zeros(len(sizes), dtype=np.int64)
    parts: list[list[int]] = []
    for row in _descending(sizes).tolist():
        open_parts = slice(0, len(parts) + 1)
        # The first row of a part is its longest, and in a padded part every other row occupies the same length.
        takes = np.maximum(longest[open_parts], sizes[row]) if padded else sizes[row]
        part = int(np.argmax(room[open_parts] >= takes))
        if part == len(parts):
            parts.append([])
            longest[part] = sizes[row]
        parts[part].append(row)
        room[part] -= max(longest[part], sizes[row]) if padded else sizes[row]
    return [np.array(part, dtype=np.int64) for part in parts]


def _lightest_first(sizes: Ints, count: int) -> list[Ints]:
    """Put each row, longest first, into the part with the fewest tokens or, if tied, the fewest rows."""
    load, rows = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    parts: list[list[int]] = [[] for _ in range(count)]
    for row in _descending(sizes).tolist():
        part = int(np.lexsort((rows, load))[0])
        parts[part].append(row)
        load[part] += sizes[row]
        rows[part] += 1
    return [np.array(part, dtype=np.int64) for part in parts]


def restored_order(parts: Sequence[Ints]) -> Ints:
    """Return the indices that put the concatenated results of the parts back into the original order of the rows."""
    return np.argsort(np.concatenate([np.zeros(0, dtype=np.int64), *parts]), kind="stable")
