"""Episodes as training rows: what the model saw and sampled, what counts, and what it was worth. In NumPy."""

from reward_kit.tokens.batch import TokenBatch, TokenItem
from reward_kit.tokens.columns import Columns
from reward_kit.tokens.connectors import (
    action_rows,
    credit_on_tokens,
    episode_facts,
    identities,
    segment_rows,
    standardised_advantages,
    step_values,
)
from reward_kit.tokens.layout import PackedBatch, pack_rows, pad_rows
from reward_kit.tokens.micro_batches import micro_batches, restored_order
from reward_kit.tokens.names import verl_batch
from reward_kit.tokens.pipeline import Connector, RowPipeline, default_pipeline
from reward_kit.tokens.rows import build_rows, row_columns

__all__ = [
    "Columns",
    "Connector",
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
    "standardised_advantages",
    "step_values",
    "verl_batch",
]
