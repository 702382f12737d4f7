"""Lays rows out for a model: padded to one width, or packed into one long row without padding.

    prompt_ids      (B,P)  the tokens before the first action
    completion_ids  (B,C)  the tokens from the first action on
    input_ids       (B,T)  the two without a gap: what the model runs on
    everything else (B,T)  lies on the axis of `input_ids`

On that axis: `attention_mask` is 1 on tokens and 0 on padding, `completion_mask` is 1 on the completion, `action_mask`
is 1 where the policy sampled, `loss_mask` = completion_mask · action_mask, 0 also where the action has no advantage.
`position_ids` count from 0. `logprobs` are those of the sampler, 0.0 off the actions. `step_rewards` stand on each
action's last token; `advantages` and `returns` on all tokens of the action. `returns` are what a critic is to expect;
where one gave estimates, `values` are what it did expect, and `value_mask` is 1 where an action with a return begins.
`policy_versions` are -1 off the actions. A token column that a connector of yours adds becomes a (B,T) array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reward_kit.errors import ConfigError
from reward_kit.tokens.batch import TokenBatch
from reward_kit.tokens.columns import Array, Columns, Ints, counted, ranges
from reward_kit.tokens.connectors import check_complete
from reward_kit.tokens.widths import Padding, check_padding, fill_of

_INTERNAL = ("step",)


def pad_rows(columns: Columns, *, pad_token_id: int, padding: Padding = "right") -> TokenBatch:
    """Every row in a row of its own.

    Args:
        columns: what a `RowPipeline` made.
        pad_token_id: what fills up the ids.
        padding: where to fill up: "right"; "left"; or "outer", prompts on the left and completions on the right, so
            that all completions begin in one column, as verl and TRL have it.

    Raises:
        ConfigError: the padding or the id is none, or the columns hold no rows.
    """
    check_padding(padding)
    if not isinstance(pad_token_id, int | np.integer) or not -(2**31) <= pad_token_id < 2**31:
        raise ConfigError(
            f"pad_token_id is a token id; got {pad_token_id!r}. Of a tokenizer without one take its eos_token_id: "
            "padding is never attended to"
        )
    check_complete(columns)
    meta = {"pad_token_id": pad_token_id, "padding": padding}
    lengths, prompts = columns.lengths_B, columns.prompt_lengths_B
    completions = lengths - prompts
    size, prompt, completion = len(lengths), int(prompts.max(initial=0)), int(completions.max(initial=0))
    width = prompt + completion if padding == "outer" else int(lengths.max(initial=0))
    before = {"right": np.zeros_like(lengths), "left": width - lengths, "outer": prompt - prompts}[padding]
    places = ranges(np.arange(size) * width + before, lengths)
    batch = _ids(columns, prompt, completion, padding, pad_token_id)
    for key, values in _token_columns(columns).items():
        batch[key] = _laid(values, places, (size, width), fill_of(key, meta))
    return TokenBatch(batch, dict(columns.rows), meta)


def _laid(values: Array, places: Ints, shape: tuple[int, int], fill: int) -> Array:
    """An array of this shape with the values at these places of its flat form."""
    # `np.zeros` leaves it to the first write to touch the memory.
    flat = np.full(shape, fill, dtype=values.dtype) if fill else np.zeros(shape, dtype=values.dtype)
    flat.reshape(-1)[places] = values
    return flat


def _ids(columns: Columns, prompt: int, completion: int, padding: Padding, pad_token_id: int) -> dict[str, Array]:
    """`prompt_ids` and `completion_ids`."""
    prompts, size = columns.prompt_lengths_B, len(columns.lengths_B)
    in_completion = columns.tokens["completion_mask"] != 0
    made = {}
    for key, width, counts, chosen, on_left in (
        ("prompt_ids", prompt, prompts, ~in_completion, padding != "right"),
        ("completion_ids", completion, columns.lengths_B - prompts, in_completion, padding == "left"),
    ):
        places = ranges(np.arange(size) * width + (width - counts if on_left else 0), counts)
        made[key] = _laid(columns.tokens["input_ids"][chosen], places, (size, width), pad_token_id)
    return made


def _token_columns(columns: Columns) -> dict[str, Array]:
    """All (N,) columns that a batch shows."""
    places = counted(columns.lengths_B)
    made: dict[str, Array] = {"attention_mask": np.ones(len(places), dtype=np.int8), "position_ids": places}
    return made | {key: values for key, values in columns.tokens.items() if key not in _INTERNAL}


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows one after another in a single long row, without padding.

    Attributes:
        batch: (1,N) arrays, the keys of a padded batch without `prompt_ids`, `completion_ids` and `attention_mask`.
            `position_ids` begin at 0 again with each row; `row_ids` say which row a token belongs to, and attention
            must not cross from one to another.
        cu_seqlens: (B+1,) int32, where each row begins, and N at the end: what variable-length attention kernels take.
        prompt_lengths: (B,) how many tokens of each row stand before its completion.
        non_tensor_batch: (B,) arrays of anything.
        meta_info: facts about the whole batch.
    """

    batch: dict[str, Array]
    cu_seqlens: Array
    prompt_lengths: Ints
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of rows in the long row."""
        return len(self.cu_seqlens) - 1


def pack_rows(columns: Columns) -> PackedBatch:
    """All rows in one long row.

    Raises:
        ConfigError: the columns hold no rows.
    """
    check_complete(columns)
    tokens = _token_columns(columns)
    del tokens["attention_mask"]
    tokens["row_ids"] = np.repeat(np.arange(len(columns.lengths_B), dtype=np.int32), columns.lengths_B)
    batch = {key: values[None].copy() for key, values in tokens.items()}
    ends = np.cumsum([0, *columns.lengths_B], dtype=np.int32)
    return PackedBatch(batch, ends, columns.prompt_lengths_B.copy(), dict(columns.rows), {"padding": "none"})
