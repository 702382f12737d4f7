"""The last layer at some tokens only gives what the whole one gives there, or is not used at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.rl.learner.forward import find_last_layer

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
PLACES = torch.tensor([2, 3, 7, 12])


def built(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZE)
    made: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made.double().eval()


def gradient_of(model: PreTrainedModel, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.log_softmax(-1)[..., 5].sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3"])
def test_logits_and_gradients_are_those_of_the_whole(kind: str) -> None:
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
    assert torch.allclose(picked, whole, rtol=1e-12, atol=1e-12)
    assert seen == [16, len(PLACES)]
    expected, found = gradient_of(model, whole), gradient_of(model, picked)
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-10) for name in expected)


def test_the_model_is_left_as_it_was() -> None:
    model = built("Llama")
    ids = torch.arange(6).unsqueeze(0)
    before = model(input_ids=ids).logits
    last = find_last_layer(model, model.lm_head)
    assert last is not None
    with pytest.raises(IndexError), last.only_at(torch.tensor([6])):
        model(input_ids=ids)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_value_head_around_it_does_not_hide_it() -> None:
    wrapped = PolicyWithValue(built("Llama"))
    assert find_last_layer(wrapped, wrapped.get_output_embeddings()) is not None


@pytest.mark.parametrize("kind", ["Cohere", "Olmo2"])
def test_a_model_that_is_built_in_another_way_runs_whole(kind: str) -> None:
    model = built(kind)
    assert find_last_layer(model, model.lm_head) is None


def test_a_layer_that_mixes_tokens_after_its_attention_is_found_out() -> None:
    model = built("Llama")

    class Mixing(nn.Module):
        def forward(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
            return hidden_BTH.cumsum(dim=1)

    model.model.layers[-1].mlp = Mixing()
    assert find_last_layer(model, model.lm_head) is None
