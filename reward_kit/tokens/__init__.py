"""Conversion of episodes to training rows as NumPy arrays: tokens, masks, log-probabilities and advantages."""

from reward_kit.tokens.batch import TokenBatch, TokenItem
from reward_kit.tokens.columns import Columns
from reward_kit.tokens.connectors import (
    ImageInputs,
    action_rows,
    credit_on_tokens,
    episode_facts,
    identities,
    segment_rows,
    standardized_advantages,
    step_values,
)
from reward_kit.tokens.layout import PackedBatch, micro_batches, pack_rows, pad_rows, restored_order, verl_batch
from reward_kit.tokens.pipeline import Connector, RowPipeline, build_rows, default_pipeline, row_columns

__all__ = [
    "Columns",
    "Connector",
    "ImageInputs",
    "PackedBatch",
    "RowPipeline",
    "TokenBatch",
    "TokenItem",
    "action_rows",
    "build_rows",
    "credit_on_tokens",
    "default_pipeline",
    "episode_facts",
    "identities",
    "micro_batches",
    "pack_rows",
    "pad_rows",
    "restored_order",
    "row_columns",
    "segment_rows",
    "standardized_advantages",
    "step_values",
    "verl_batch",
]
