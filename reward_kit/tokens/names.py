"""Our names of a batch's arrays and verl's, in one mapping, and a batch as verl's code expects it."""

from __future__ import annotations

from reward_kit.errors import ConfigError
from reward_kit.tokens.batch import TokenBatch
from reward_kit.tokens.widths import axis_of

VERL_NAMES = {
    "prompt_ids": "prompts",
    "completion_ids": "responses",
    "action_mask": "response_mask",
    "logprobs": "rollout_log_probs",
}
"""Names that differ; all others are the same. verl's `response_mask` is 1 where the model sampled, like ours."""


def verl_batch(rows: TokenBatch) -> TokenBatch:
    """The rows as verl has them: its names, and all but four arrays on the axis of `responses`.

    `prompts` (B,P) are padded on the left and `responses` (B,C) on the right; `input_ids`, `attention_mask` and
    `position_ids` (B,P+C) hold the two side by side; `response_mask`, `rollout_log_probs`, `advantages` and the others
    are (B,C). verl's mask counts every sampled token: leave rows out first whose `loss_mask` is empty.

    Args:
        rows: of `build_rows(…, padding="outer")`.

    Raises:
        ConfigError: they are padded otherwise, or `prompt_ids` are missing.
    """
    padding = rows.meta_info.get("padding")
    if padding != "outer" or "prompt_ids" not in rows.batch:
        raise ConfigError(f"verl wants whole rows of build_rows(…, padding='outer'); these are padded {padding!r}")
    prompt = rows.batch["prompt_ids"].shape[1]
    meta = {**rows.meta_info, "names": "verl"}
    cut = {
        key: values[:, prompt:] if axis_of(key, rows.meta_info) != axis_of(VERL_NAMES.get(key, key), meta) else values
        for key, values in rows.batch.items()
    }
    names = {ours: theirs for ours, theirs in VERL_NAMES.items() if ours in cut}
    return TokenBatch(cut, dict(rows.non_tensor_batch), meta).rename(names)
