"""A critic beside a model: the model stays what it is, and the critic says 0 until it has learned."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.errors import ConfigError

IDS = torch.tensor([[1, 2, 3]])


def a_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **shape)).to(dtype).eval()


def test_called_it_is_the_model() -> None:
    model = a_model()
    both = PolicyWithValue(model)
    assert torch.equal(both(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert both.get_output_embeddings() is model.lm_head
    assert both.config is model.config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_says_nothing_at_first_in_the_models_own_type(dtype: torch.dtype) -> None:
    both = PolicyWithValue(a_model(dtype))
    values = both.value_head(torch.randn(2, 16, dtype=dtype))
    assert values.dtype == dtype
    assert values.tolist() == [[0.0], [0.0]]


def test_a_head_of_ones_own_is_kept() -> None:
    head = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 1))
    assert PolicyWithValue(a_model(), head).value_head is head


def test_what_has_no_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="got a Linear"):
        PolicyWithValue(nn.Linear(2, 2))
