"""Test that a value head leaves the model unchanged and predicts 0 before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.errors import ConfigError
from tests.devices import DEVICE

pytestmark = pytest.mark.device

IDS = torch.tensor([[1, 2, 3]], device=DEVICE)


def a_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **shape)).to(DEVICE, dtype).eval()


def test_forward_equals_the_wrapped_model() -> None:
    model = a_model()
    both = PolicyWithValue(model)
    assert torch.equal(both(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert both.get_output_embeddings() is model.lm_head
    assert both.config is model.config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_are_zero_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    both = PolicyWithValue(a_model(dtype))
    values = both.value_head(torch.randn(2, 16, dtype=dtype))
    assert values.dtype == dtype
    assert values.tolist() == [[0.0], [0.0]]


def test_custom_value_head_is_used() -> None:
    head = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 1))
    assert PolicyWithValue(a_model(), head).value_head is head


def test_module_without_lm_head_is_rejected() -> None:
    with pytest.raises(ConfigError, match="got a Linear"):
        PolicyWithValue(nn.Linear(2, 2))
