"""Small modules and rows for the tests of the learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from reward_kit.tokens import TokenBatch
from tests.devices import DEVICE, WIDEST

VOCABULARY = 37


class Bigram(nn.Module):
    """A model whose logits depend only on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 6))

    def forward(self, ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
        return self.table[ids_BT]


def bigram_rows(advantages: Sequence[float], **columns: Any) -> TokenBatch:
    """Return a row `0 n` per advantage, where n = 1, 2, … is the token sampled by an initial `Bigram`."""
    count = len(advantages)
    batch = {
        "input_ids": np.array([[0, 1 + n] for n in range(count)], dtype=np.int32),
        "attention_mask": np.ones((count, 2), dtype=np.int8),
        "action_mask": np.array([[0, 1]] * count, dtype=np.int8),
        "loss_mask": np.array([[0, 1]] * count, dtype=np.int8),
        "logprobs": np.array([[0.0, -np.log(6.0)]] * count),
        "advantages": np.array([[0.0, advantage] for advantage in advantages]),
    }
    return TokenBatch({**batch, **columns})


def a_model(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    """Return a decoder of two layers, with weights large enough that every token matters."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return (
            LlamaForCausalLM(LlamaConfig(**{**settings, **options}))
            .to(DEVICE, WIDEST if dtype == torch.float64 else dtype)
            .eval()
        )


def some_rows(count: int = 9, seed: int = 0, padding: str = "right", width: int = 24) -> TokenBatch:
    """Return rows of several actions of one to three tokens; values outside actions are garbage."""
    rng = np.random.default_rng(seed)
    names = ("input_ids", "attention_mask", "action_mask", "loss_mask", "logprobs", "advantages", "returns", "values")
    batch = {name: np.zeros((count, width)) for name in (*names, "policy_versions", "value_mask")}
    batch["logprobs"][:], batch["advantages"][:], batch["returns"][:] = np.nan, np.nan, np.nan
    for row in range(count):
        length = int(rng.integers(8, width + 1))
        start = width - length if padding == "left" else 0
        batch["input_ids"][row] = rng.integers(0, VOCABULARY, width)
        batch["attention_mask"][row, start : start + length] = 1
        place = start + 2
        while place + 3 < start + length:
            stop = place + int(rng.integers(1, 4))
            _act(batch, rng, row, place, stop)
            place = stop + int(rng.integers(1, 3))
    integers = {"input_ids", "attention_mask", "action_mask", "loss_mask", "policy_versions", "value_mask"}
    made = {name: values.astype(np.int32) if name in integers else values for name, values in batch.items()}
    return TokenBatch(made, {}, {"padding": padding, "pad_token_id": 0})


def _act(batch: dict[str, Any], rng: np.random.Generator, row: int, start: int, stop: int) -> None:
    """Return an action with these tokens."""
    batch["action_mask"][row, start:stop] = batch["loss_mask"][row, start:stop] = 1
    batch["value_mask"][row, start] = 1
    batch["logprobs"][row, start:stop] = -rng.uniform(0.5, 4.0, stop - start)
    for name in ("advantages", "returns", "values"):
        batch[name][row, start:stop] = rng.normal()
    batch["policy_versions"][row, start:stop] = rng.integers(0, 3)
