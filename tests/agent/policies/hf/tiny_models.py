"""Causal language models with a few thousand random weights, and their outputs without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from tests.devices import DEVICE

VOCABULARY = 64
_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_COMMON, **_WIDE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 256}
_GPT2 = {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_LLAMA),
    "qwen3": Qwen3Config(**_LLAMA, head_dim=8),
    "gpt2": GPT2Config(**_GPT2),
    "mistral": MistralConfig(**_LLAMA, sliding_window=10),
    "falcon": FalconConfig(**_COMMON, **_WIDE),
    "gptj": GPTJConfig(**_GPT2, rotary_dim=4),
}


def masked_window_model() -> PreTrainedModel:
    """Return a model whose sliding window of 8 tokens is only in its mask."""
    return _random(PhimoeConfig(**_LLAMA, sliding_window=8, num_local_experts=2, num_experts_per_tok=1))


def tiny_model(kind: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Return a model with weights so large that its logits depend on the whole context."""
    return _random(CONFIGS[kind], seed)


def _random(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().to(DEVICE)


@torch.no_grad()
def full_logits(model: PreTrainedModel, contexts: Sequence[Sequence[int]], side: str) -> list[Tensor]:
    """Return logits per context (T, V), from one forward pass over all, padded on `side`."""
    width = max(map(len, contexts))
    pads = [0 if side == "right" else width - len(context) for context in contexts]
    ids_BT = torch.zeros(len(contexts), width, dtype=torch.long)
    mask_BT = torch.zeros(len(contexts), width, dtype=torch.long)
    for row, (context, pad) in enumerate(zip(contexts, pads, strict=True)):
        ids_BT[row, pad : pad + len(context)] = torch.tensor(context)
        mask_BT[row, pad : pad + len(context)] = 1
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT).logits
    return [
        logits_BTV[row, pad : pad + len(context)] for row, (context, pad) in enumerate(zip(contexts, pads, strict=True))
    ]
