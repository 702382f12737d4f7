"""Test that a last layer computed only at some tokens equals the full one, or is not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.rl.learner.forward import find_last_layer
from tests.devices import DEVICE, WIDEST, tolerance

pytestmark = pytest.mark.device

SIZE: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
PLACES = torch.tensor([2, 3, 7, 12], device=DEVICE)


def built(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZE)
    made: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made.to(DEVICE, WIDEST).eval()


def gradient_of(model: PreTrainedModel, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.log_softmax(-1)[..., 5].sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3"])
def test_partial_last_layer_matches_the_full_layer(kind: str) -> None:
    model = built(kind)
    ids = torch.randint(1, 37, (2, 8), generator=torch.Generator().manual_seed(1))
    last = find_last_layer(model, model.lm_head)
    assert last is not None
    seen: list[int] = []
    handle = last.layer.mlp.register_forward_hook(lambda _, args, output: seen.append(output.shape[:2].numel()))
    whole = model(input_ids=ids, use_cache=False).logits.reshape(16, -1)[PLACES]
    with last.only_at(PLACES):
        picked = model(input_ids=ids, use_cache=False).logits.squeeze(0)
    handle.remove()
    assert torch.allclose(picked, whole, rtol=tolerance(1e-12), atol=tolerance(1e-12))
    assert seen == [16, len(PLACES)]
    expected, found = gradient_of(model, whole), gradient_of(model, picked)
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], expected[name], atol=tolerance(1e-10)) for name in expected)


def test_model_is_restored_after_partial_forward() -> None:
    model = built("Llama")
    ids = torch.arange(6).unsqueeze(0)
    before = model(input_ids=ids).logits
    last = find_last_layer(model, model.lm_head)
    assert last is not None
    with pytest.raises(IndexError), last.only_at(torch.tensor([6])):
        model(input_ids=ids)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_last_layer_is_found_inside_a_value_head_wrapper() -> None:
    wrapped = PolicyWithValue(built("Llama"))
    assert find_last_layer(wrapped, wrapped.get_output_embeddings()) is not None


@pytest.mark.parametrize("kind", ["Cohere", "Olmo2"])
def test_unsupported_architectures_run_the_full_layer(kind: str) -> None:
    model = built(kind)
    assert find_last_layer(model, model.lm_head) is None


def test_layer_mixing_tokens_after_attention_is_detected() -> None:
    model = built("Llama")

    class Mixing(nn.Module):
        def forward(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
            return hidden_BTH.cumsum(dim=1)

    model.model.layers[-1].mlp = Mixing()
    assert find_last_layer(model, model.lm_head) is None
