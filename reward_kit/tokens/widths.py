"""How wide the arrays of a batch are, and on which side each is padded: what joining and trimming have to know.

`meta_info["padding"]` says which side: "right", "left", or "outer" (prompts on the left and completions on the right,
so that all completions begin in one column). Arrays lie on one of three axes: P, of the prompts; C, of the completions;
T, of both without a gap, where "outer" makes T = P + C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from reward_kit.errors import ConfigError
from reward_kit.tokens.columns import Array

Padding = Literal["right", "left", "outer"]
Axis = Literal["prompt", "completion", "both"]

# Our names, and verl's (`reward_kit.tokens.names`), which puts all but four arrays on the completion's axis.
_PROMPT, _COMPLETION = ("prompt_ids", "prompts"), ("completion_ids", "responses")
_BOTH_IN_VERL = ("input_ids", "attention_mask", "position_ids")
_IDS = (*_PROMPT, *_COMPLETION, "input_ids")


class Widths(NamedTuple):
    """Columns of each axis; None where the batch has no array that shows it."""

    prompt: int | None
    completion: int | None
    both: int | None


def check_padding(padding: str) -> None:
    """Refuse an unknown side.

    Raises:
        ConfigError: it is none of the three.
    """
    if padding not in get_args(Padding):
        raise ConfigError(f"padding is 'right', 'left' or 'outer'; got {padding!r}")


def axis_of(key: str, meta_info: Mapping[str, Any]) -> Axis:
    """The axis on which an array of a batch lies."""
    if key in _PROMPT:
        return "prompt"
    if key in _COMPLETION or (meta_info.get("names") == "verl" and key not in _BOTH_IN_VERL):
        return "completion"
    return "both"


def fill_of(key: str, meta_info: Mapping[str, Any]) -> int:
    """What stands in the padding of an array."""
    if key in _IDS:
        return int(meta_info.get("pad_token_id", 0))
    return -1 if key == "policy_versions" else 0


def widths_of(batch: Mapping[str, Array], meta_info: Mapping[str, Any]) -> Widths:
    """The width of each axis."""
    found: dict[str, int] = {}
    for key in (*_PROMPT, *_COMPLETION, "input_ids", "attention_mask"):
        if key in batch:
            found[axis_of(key, meta_info)] = batch[key].shape[1]
    return Widths(found.get("prompt"), found.get("completion"), found.get("both"))


def joined(batches: Sequence[Mapping[str, Array]], meta_info: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of several batches of the same keys, one batch under another, all padded to the widest.

    Raises:
        ConfigError: arrays of one key cannot be brought to one width.
    """
    found = [widths_of(batch, meta_info) for batch in batches]
    return {
        key: np.concatenate(_widened(key, [batch[key] for batch in batches], found, meta_info)) for key in batches[0]
    }


def _widened(key: str, arrays: list[Array], found: list[Widths], meta_info: Mapping[str, Any]) -> list[Array]:
    shapes = {array.shape[1:] for array in arrays}
    axis, padding = axis_of(key, meta_info), meta_info.get("padding", "right")
    outer_both = padding == "outer" and axis == "both"
    known = all(None not in (widths.prompt, widths.completion) for widths in found)
    # Where all begin and end in the same columns there is nothing to do, whatever the arrays are.
    if len(shapes) == 1 and not (outer_both and known and len({widths[:2] for widths in found}) > 1):
        return arrays
    if any(array.ndim != 2 for array in arrays) or (outer_both and not known):
        listed = ", ".join(map(str, sorted(shapes)))
        raise ConfigError(
            f"{key!r} cannot be padded to one width; its rows have the shapes {listed}. Padding takes arrays (B,T), "
            "and with padding 'outer' the batches' prompt_ids and completion_ids besides"
        )
    if outer_both:
        lefts = [widths.prompt or 0 for widths in found]
        rights = [array.shape[1] - left for array, left in zip(arrays, lefts, strict=True)]
    else:
        on_left = padding == "left" or (padding == "outer" and axis == "prompt")
        sizes, none = [array.shape[1] for array in arrays], [0] * len(arrays)
        lefts, rights = (sizes, none) if on_left else (none, sizes)
    fill = fill_of(key, meta_info)
    return [
        np.pad(array, ((0, 0), (max(lefts) - left, max(rights) - right)), constant_values=fill)
        for array, left, right in zip(arrays, lefts, rights, strict=True)
    ]


def trimmed(batch: Mapping[str, Array], meta_info: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays without the columns that are padding in every row.

    Raises:
        ConfigError: what says where tokens are is missing.
    """
    old, new = widths_of(batch, meta_info), _needed(batch, meta_info)
    padding = meta_info.get("padding", "right")
    made = {}
    for key, values in batch.items():
        axis = axis_of(key, meta_info)
        width, needed = getattr(old, axis), getattr(new, axis)
        if values.ndim < 2 or values.shape[1] != width:
            made[key] = values
        elif padding == "outer" and axis == "both":
            made[key] = values[:, (old.prompt or 0) - (new.prompt or 0) : (old.prompt or 0) + (new.completion or 0)]
        else:
            on_left = padding == "left" or (padding == "outer" and axis == "prompt")
            made[key] = values[:, width - needed :] if on_left else values[:, :needed]
    return made


def _needed(batch: Mapping[str, Array], meta_info: Mapping[str, Any]) -> Widths:
    """The least width of each axis."""
    if "attention_mask" not in batch:
        raise ConfigError("a batch without 'attention_mask' does not say where its padding is")
    is_token, old = batch["attention_mask"] != 0, widths_of(batch, meta_info)
    if meta_info.get("padding") == "outer" and old.prompt is not None:
        in_completion = np.arange(is_token.shape[1]) >= old.prompt
    elif "completion_mask" in batch:
        in_completion = batch["completion_mask"] != 0
    elif old.prompt is None and old.completion is None:
        in_completion = np.array(False)
    else:
        raise ConfigError("a batch with prompts but without 'completion_mask' does not say how long they are")
    prompt, completion, both = (
        int(counted.sum(axis=1).max(initial=0))
        for counted in (is_token & ~in_completion, is_token & in_completion, is_token)
    )
    return Widths(prompt, completion, both)
