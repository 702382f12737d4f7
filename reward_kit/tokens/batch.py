"""Training rows in the layout of verl's `DataProto`, with the operations that trainers use.

`meta_info["padding"]` is the padding side: "right", "left", or "outer". With "outer", prompts are padded on the left
and completions on the right, so all completions begin in the same column. The columns of each array form one of three
axes: P for prompts, C for completions, or T for both. With "outer", T = P + C. Batches can be concatenated if they have
the same keys and no conflicting values in `meta_info`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from reward_kit.episodes.columns import same_value
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.tokens.columns import Array, Ints


def _check_same_keys(batches: Sequence[Mapping[str, Array]], part_name: str) -> None:
    every = set().union(*batches)
    partial = sorted(key for key in every if not all(key in batch for batch in batches))
    if partial:
        lacking = [str(i) for i, batch in enumerate(batches) if any(key not in batch for key in partial)]
        raise ConfigError(
            f"batches with different keys cannot be concatenated: batch {', '.join(lacking)} has no "
            f"{', '.join(partial)} in {part_name}; select the same keys in each batch"
        )


def _merged_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in merged and not same_value(merged[key], value):
                raise ConfigError(f"meta_info[{key!r}] is {merged[key]!r} in one batch and {value!r} in another")
            merged[key] = value
    return merged


Padding = Literal["right", "left", "outer"]
Axis = Literal["prompt", "completion", "both"]

# The names in `build_rows` and in verl (`reward_kit.tokens.layout`); verl puts all but four arrays on the axis C.
_PROMPT, _COMPLETION = ("prompt_ids", "prompts"), ("completion_ids", "responses")
_BOTH_IN_VERL = ("input_ids", "attention_mask", "position_ids")
_IDS = (*_PROMPT, *_COMPLETION, "input_ids")


class Widths(NamedTuple):
    """The number of columns on each axis, or None if no array in the batch has that axis."""

    prompt: int | None
    completion: int | None
    both: int | None


def get_axis(key: str, meta_info: Mapping[str, Any]) -> Axis:
    """Return the axis formed by the columns of the array named `key`."""
    if key in _PROMPT:
        return "prompt"
    if key in _COMPLETION or (meta_info.get("names") == "verl" and key not in _BOTH_IN_VERL):
        return "completion"
    return "both"


def fill_value(key: str, meta_info: Mapping[str, Any]) -> int:
    """Return the padding value for the array named `key`."""
    if key in _IDS:
        return int(meta_info.get("pad_token_id", 0))
    return -1 if key == "policy_versions" else 0


def get_widths(batch: Mapping[str, Array], meta_info: Mapping[str, Any]) -> Widths:
    """Return the width of each axis in a batch."""
    widths: dict[str, int] = {}
    for key in (*_PROMPT, *_COMPLETION, "input_ids", "attention_mask"):
        if key in batch:
            widths[get_axis(key, meta_info)] = batch[key].shape[1]
    return Widths(widths.get("prompt"), widths.get("completion"), widths.get("both"))


def concat_arrays(batches: Sequence[Mapping[str, Array]], meta_info: Mapping[str, Any]) -> dict[str, Array]:
    """Pad the arrays of multiple batches with the same keys to a common width, and concatenate them."""
    widths = [get_widths(batch, meta_info) for batch in batches]
    return {
        key: np.concatenate(_widened(key, [batch[key] for batch in batches], widths, meta_info)) for key in batches[0]
    }


def _widened(key: str, arrays: list[Array], all_widths: list[Widths], meta_info: Mapping[str, Any]) -> list[Array]:
    """Pad the arrays for one key in multiple batches to a common width."""
    shapes = {array.shape[1:] for array in arrays}
    axis, padding = get_axis(key, meta_info), meta_info.get("padding", "right")
    outer_both = padding == "outer" and axis == "both"
    known = all(None not in (widths.prompt, widths.completion) for widths in all_widths)
    # No padding is needed if all arrays begin and end in the same columns.
    if len(shapes) == 1 and not (outer_both and known and len({widths[:2] for widths in all_widths}) > 1):
        return arrays
    if any(array.ndim != 2 for array in arrays) or (outer_both and not known):
        listed = ", ".join(map(str, sorted(shapes)))
        raise ConfigError(
            f"{key!r} cannot be padded to a common width, because its rows have the shapes {listed}; pass (B,T) "
            "arrays and, if padding is 'outer', prompt_ids and completion_ids in every batch"
        )
    if outer_both:
        lefts = [widths.prompt or 0 for widths in all_widths]
        rights = [array.shape[1] - left for array, left in zip(arrays, lefts, strict=True)]
    else:
        on_left = padding == "left" or (padding == "outer" and axis == "prompt")
        sizes, none = [array.shape[1] for array in arrays], [0] * len(arrays)
        lefts, rights = (sizes, none) if on_left else (none, sizes)
    fill = fill_value(key, meta_info)
    return [
        np.pad(array, ((0, 0), (max(lefts) - left, max(rights) - right)), constant_values=fill)
        for array, left, right in zip(arrays, lefts, rights, strict=True)
    ]


def _needed(batch: Mapping[str, Array], meta_info: Mapping[str, Any]) -> Widths:
    """Return the smallest width of each axis at which all tokens fit."""
    if "attention_mask" not in batch:
        raise ConfigError("the batch has no 'attention_mask', so the position of its padding is unknown")
    is_token, old = batch["attention_mask"] != 0, get_widths(batch, meta_info)
    if meta_info.get("padding") == "outer" and old.prompt is not None:
        in_completion = np.arange(is_token.shape[1]) >= old.prompt
    elif "completion_mask" in batch:
        in_completion = batch["completion_mask"] != 0
    elif old.prompt is None and old.completion is None:
        in_completion = np.array(False)
    else:
        raise ConfigError("the batch has prompts but no 'completion_mask', so the lengths of the prompts are unknown")
    prompt, completion, both = (
        int(counted.sum(axis=1).max(initial=0))
        for counted in (is_token & ~in_completion, is_token & in_completion, is_token)
    )
    return Widths(prompt, completion, both)


RowIndex = slice | Sequence[int] | Array


class TokenItem(NamedTuple):
    """A single row of a `TokenBatch`. It has the same keys, but its arrays have no batch axis."""

    batch: dict[str, Array]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Training rows in the layout of verl's `DataProto`.

    Every operation returns a new batch and leaves the original unchanged.

    Attributes:
        batch: arrays whose first axis is the row axis; see `tokens.layout`.
        non_tensor_batch: (B,) arrays of arbitrary objects; see `tokens.connectors`.
        meta_info: values that apply to the whole batch, such as `pad_token_id` and `padding`.

    Raises:
        ConfigError: If the arrays have different numbers of rows.
    """

    batch: dict[str, Array]
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {key: len(values) for key, values in (*self.batch.items(), *self.non_tensor_batch.items())}
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"the arrays of a batch must have the same number of rows, got {sizes}")

    def __len__(self) -> int:
        return len(next(iter(self.batch.values()), next(iter(self.non_tensor_batch.values()), ())))

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> TokenItem: ...
    @overload
    def __getitem__(self, index: RowIndex) -> TokenBatch: ...
    def __getitem__(self, index: int | np.integer[Any] | RowIndex) -> TokenItem | TokenBatch:
        """Return a `TokenItem` if `index` is an int, or a batch if it is a slice, a list of ints or a boolean mask.

        Raises:
            IndexError: If a row is out of range, the length of a mask differs from the number of rows, or `index` has
                the wrong type.
        """
        rows = _rows(index)
        batch = {key: values[rows] for key, values in self.batch.items()}
        others = {key: values[rows] for key, values in self.non_tensor_batch.items()}
        if isinstance(rows, int | np.integer):
            return TokenItem(batch, others, dict(self.meta_info))
        return TokenBatch(batch, others, dict(self.meta_info))

    def __iter__(self) -> Iterator[TokenItem]:
        return (self[index] for index in range(len(self)))

    def lengths(self) -> Ints:
        """Return the number of tokens in each row as a (B,) array.

        Raises:
            ConfigError: If the batch has no `attention_mask`.
        """
        _check_known(["attention_mask"], self.batch, "batch")
        lengths: Ints = np.count_nonzero(self.batch["attention_mask"], axis=1).astype(np.int64)
        return lengths

    def select(
        self,
        keys: Sequence[str] | None = None,
        non_tensor_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> TokenBatch:
        """Return a batch that contains only the given keys. None keeps all keys.

        Raises:
            ConfigError: If a key is unknown.
        """
        parts = []
        for wanted, part, part_name in (
            (keys, self.batch, "batch"),
            (non_tensor_keys, self.non_tensor_batch, "non_tensor_batch"),
            (meta_info_keys, self.meta_info, "meta_info"),
        ):
            _check_known(wanted or (), part, part_name)
            parts.append(dict(part) if wanted is None else {key: part[key] for key in wanted})
        return TokenBatch(*parts)

    def rename(self, names: Mapping[str, str]) -> TokenBatch:
        """Rename arrays of `batch` and `non_tensor_batch`; `names` maps old names to new names.

        Raises:
            ConfigError: If an old name is unknown, or two arrays would have the same name.
        """
        _check_known(names, {**self.batch, **self.non_tensor_batch}, "batch")
        new = [names.get(key, key) for key in (*self.batch, *self.non_tensor_batch)]
        if doubled := sorted({key for key in new if new.count(key) > 1}):
            raise ConfigError(f"two arrays would be named {doubled[0]!r}; give each array a unique name")
        parts = [{names.get(key, key): v for key, v in part.items()} for part in (self.batch, self.non_tensor_batch)]
        return TokenBatch(parts[0], parts[1], dict(self.meta_info))

    def union(self, other: TokenBatch) -> TokenBatch:
        """Return a batch that contains the keys of both batches. Both must have the same rows in the same order.

        Raises:
            ConfigError: If the batches have different numbers of rows, or different values for a key that both contain.
        """
        if len(self) != len(other):
            raise ConfigError(
                f"the two batches in a union must have the same number of rows, got {len(self)} and {len(other)}"
            )
        parts = []
        for part_name in ("batch", "non_tensor_batch"):
            first, second = getattr(self, part_name), getattr(other, part_name)
            for key in first.keys() & second.keys():
                if not same_value(first[key], second[key]):
                    raise ConfigError(
                        f"{part_name}[{key!r}] differs between the two batches; rename or remove it in one of them"
                    )
            parts.append({**first, **second})
        return TokenBatch(parts[0], parts[1], _merged_meta([self.meta_info, other.meta_info]))

    @staticmethod
    def concat(batches: Sequence[TokenBatch]) -> TokenBatch:
        """Concatenate the rows of all batches, pad them to a common width, and merge `meta_info`.

        Raises:
            ConfigError: If the list is empty, the batches have different keys or conflicting values in `meta_info`, or
                an array cannot be padded.
        """
        if not batches:
            raise ConfigError("no batches to concatenate; pass at least one")
        _check_same_keys([one.batch for one in batches], "batch")
        _check_same_keys([one.non_tensor_batch for one in batches], "non_tensor_batch")
        meta = _merged_meta([one.meta_info for one in batches])
        first, parts = batches[0], [one.non_tensor_batch for one in batches]
        others = {key: np.concatenate([part[key] for part in parts]) for key in first.non_tensor_batch}
        return TokenBatch(concat_arrays([one.batch for one in batches], meta), others, meta)

    def repeat(self, times: int, interleave: bool = True) -> TokenBatch:
        """Repeat every row `times` times.

        If `interleave` is true, the copies of a row are adjacent. If it is false, the whole batch is repeated.

        Raises:
            ConfigError: If `times` is negative or not an integer.
        """
        if not isinstance(times, int | np.integer) or times < 0:
            raise ConfigError(f"times must be an integer of at least 0, got {times!r}")
        rows = np.arange(len(self))
        return self[np.repeat(rows, times) if interleave else np.tile(rows, times)]

    def reorder(self, order: Sequence[int] | Array) -> TokenBatch:
        """Return the rows in a new order.

        Raises:
            ConfigError: If `order` does not contain each row index exactly once.
        """
        indices = np.asarray(order)
        if not np.array_equal(np.sort(indices), np.arange(len(self))):
            raise ConfigError(
                f"order must contain each of the {len(self)} row indices exactly once, got {indices.tolist()}"
            )
        return self[indices.astype(np.int64)]

    def split(self, size: int) -> list[TokenBatch]:
        """Split the batch into parts of `size` rows. The last part may be smaller.

        Raises:
            ConfigError: If `size` is less than 1.
        """
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def chunk(self, chunks: int) -> list[TokenBatch]:
        """Split the batch into the given number of parts. Their sizes differ by at most one row.

        Raises:
            ConfigError: If a part would be empty.
        """
        if not 1 <= chunks <= len(self):
            raise ConfigError(f"chunks must be between 1 and {len(self)}, the number of rows, got {chunks}")
        return [self[part] for part in np.array_split(np.arange(len(self)), chunks)]

    def trim(self) -> TokenBatch:
        """Remove the columns that contain only padding, for example after selecting short rows.

        Raises:
            ConfigError: If the masks that identify the padding are missing.
        """
        old, new = get_widths(self.batch, self.meta_info), _needed(self.batch, self.meta_info)
        padding = self.meta_info.get("padding", "right")
        batch = {}
        for key, values in self.batch.items():
            axis = get_axis(key, self.meta_info)
            width, needed = getattr(old, axis), getattr(new, axis)
            if values.ndim < 2 or values.shape[1] != width:
                batch[key] = values
            elif padding == "outer" and axis == "both":
                begin = old.prompt or 0
                batch[key] = values[:, begin - (new.prompt or 0) : begin + (new.completion or 0)]
            else:
                on_left = padding == "left" or (padding == "outer" and axis == "prompt")
                batch[key] = values[:, width - needed :] if on_left else values[:, :needed]
        return TokenBatch(batch, dict(self.non_tensor_batch), dict(self.meta_info))


def _rows(index: Any) -> int | np.integer[Any] | slice | Array:
    """Return an index for NumPy, and reject values that NumPy would interpret differently. True would be a new axis."""
    if isinstance(index, slice) or (isinstance(index, int | np.integer) and not isinstance(index, bool)):
        return index
    rows = np.asarray(index)
    if rows.ndim != 1 or not (rows.dtype.kind in "iub" or not rows.size):
        raise IndexError(f"an index must be an int, a slice, a list of ints or a (B,) mask, got {index!r:.80}")
    return rows if rows.dtype == np.bool_ else rows.astype(np.int64)


def _check_known(wanted: Sequence[str] | Mapping[str, str], part: Mapping[str, Any], part_name: str) -> None:
    for key in wanted:
        if key not in part:
            raise ConfigError(f"unknown key {key!r} in {part_name}{did_you_mean(key, part)}")
