"""Small batches for the tests of reward managers: real tensors, and a tokenizer of a few words."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

WORDS = ["<pad>", "<eos>", "what", "is", "one", "two", "and", "more"]
SPECIAL = {0, 1}


class WordTokenizer:
    """A tokenizer with one word per id, which counts its calls."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.decoded += 1
        return " ".join(WORDS[token] for token in token_ids if not (skip_special_tokens and token in SPECIAL))


class NoMembership(dict[str, Any]):
    """A mapping that rejects `in`, like a TensorDict."""

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError("TensorDict does not support membership checks with the `in` keyword")


def objects(values: Sequence[Any]) -> np.ndarray:
    """Return an object array of exactly these items."""
    made = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        made[index] = value
    return made


def proto(batch: dict[str, Any], meta_info: dict[str, Any] | None = None, **others: Any) -> Any:
    """Return a batch in the shape of verl's `DataProto`."""
    arrays = {key: np.array(v) if isinstance(v, np.ndarray) else objects(v) for key, v in others.items()}
    return SimpleNamespace(batch=NoMembership(batch), non_tensor_batch=arrays, meta_info=meta_info or {})


def answers(responses: Sequence[Sequence[int]], prompt: Sequence[int] = (0, 2, 3), **others: Any) -> Any:
    """Return a batch of right-padded single answers; all prompts are equal and left-padded."""
    width = max(map(len, responses), default=0)
    rows = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in responses]).reshape(len(responses), width).long()
    lengths = torch.tensor([len(ids) for ids in responses]).long()
    is_token = (torch.arange(width)[None] < lengths[:, None]).long()
    prompts = torch.tensor([list(prompt)] * len(responses)).reshape(len(responses), len(prompt)).long()
    attention = torch.cat([(prompts != 0).long(), is_token], dim=1)
    return proto({"prompts": prompts, "responses": rows, "attention_mask": attention}, **others)
