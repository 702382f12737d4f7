"""Test `build_decoder`: reproducible, well-initialized, and a stock `transformers` model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl.model_kit.models import (
    build_decoder,
    build_tokenizer,
    compose_embeddings,
    describe,
    load_model,
    parameter_count,
    save_model,
)
from tests.devices import DEVICE

pytestmark = pytest.mark.device

TOKENIZER = build_tokenizer(["go to fridge 1 and open it"], context=32)
SIZES: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "context": 32}


def weights(**options: Any) -> dict[str, torch.Tensor]:
    return dict(build_decoder(TOKENIZER, **{**SIZES, **options}).state_dict())


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    made = weights(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert equal(weights(seed=3), made)
    assert not equal(weights(seed=4), made)


def test_initial_token_distribution_is_nearly_uniform() -> None:
    model = build_decoder(500, **SIZES).to(DEVICE)
    ids = torch.randint(500, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert -logprobs.mean().item() == pytest.approx(math.log(500), rel=0.02)


def test_layers_start_as_identity_and_receive_gradients() -> None:
    model = build_decoder(TOKENIZER, **SIZES).to(DEVICE)
    ids = torch.arange(10)[None]
    hidden = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden[1], hidden[0])
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 1e-6


def test_multi_word_token_embedding_starts_near_its_words() -> None:
    words = ["take mug 1", "take mug 2", "take pan 1", "mug", "pan 2"]
    tokenizer = build_tokenizer(words=words, units=[r"take [a-z]+ \d+", r"[a-z]+ \d+"], spaces="none")
    model = build_decoder(tokenizer, **{**SIZES, "width": 512})
    before = model.get_input_embeddings().weight.detach().clone()
    compose_embeddings(model, tokenizer, seed=1)
    table = model.get_input_embeddings().weight.detach()

    def akin(one: str, other: str) -> float:
        first, second = (table[tokenizer.convert_tokens_to_ids(token)] for token in (one, other))
        return float(torch.cosine_similarity(first, second, dim=0))

    # Of 1 + 1 + 1/4 parts "take mug 1" shares one with "mug", and 2 with "take mug 2".
    assert akin("take mug 1", "mug") == pytest.approx(1 / 1.5, abs=0.12)
    assert akin("take mug 1", "take mug 2") == pytest.approx(2 / 2.25, abs=0.12)
    assert akin("mug", "pan 2") == pytest.approx(0.0, abs=0.2)
    assert float(table.std()) == pytest.approx(float(before.std()), rel=0.1)
    special = sorted(tokenizer.added_tokens_decoder)
    assert torch.equal(table[special], before[special])
    again = build_decoder(tokenizer, **{**SIZES, "width": 512})
    compose_embeddings(again, tokenizer, seed=1)
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize("tie", [True, False])
def test_model_has_the_requested_sizes(tie: bool) -> None:
    model = build_decoder(100, **{**SIZES, "width": 36, "heads": 6}, kv_heads=2, hidden=40, tie=tie).to(DEVICE)
    head_dim, norms = 6, 2 * 36 + 2 * 6
    per_layer = 36 * head_dim * (6 + 2 + 2 + 6) + 3 * 36 * 40 + norms
    tables = 100 * 36 * (1 if tie else 2)
    assert parameter_count(model) == 2 * per_layer + 36 + tables
    assert "2 layers, width 36, 6 heads, context 32" in describe(model)
    assert model(torch.zeros(1, 32, dtype=torch.long)).logits.shape == (1, 32, 100)


def test_mlps_are_eight_thirds_wide_by_default() -> None:
    assert build_decoder(10, **SIZES).config.intermediate_size == 96
    assert build_decoder(10, **{**SIZES, "width": 128}).config.intermediate_size == 352


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"width": 30}, "width must be an even multiple of heads"),
        ({"width": 36}, "width must be an even multiple of heads"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"context": 0}, "context must be at least 1"),
    ],
)
def test_impossible_sizes_are_rejected(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_decoder(TOKENIZER, **{**SIZES, **wrong})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_model_loads_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model, folder = build_decoder(TOKENIZER, **SIZES, dtype=dtype), tmp_path / "models" / "tiny"
    save_model(folder, model, TOKENIZER)
    loaded = load_model(folder)
    assert equal(dict(loaded.model.state_dict()), dict(model.state_dict()))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == TOKENIZER.get_vocab()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert equal(dict(plain.state_dict()), dict(model.state_dict()))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == plain.generation_config.eos_token_id
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert not list(folder.glob("*.bin")) + list(folder.glob("*.pt"))


def test_a_saved_model_generates_and_stops(tmp_path: Path) -> None:
    model = build_decoder(TOKENIZER, **SIZES).to(DEVICE)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are 0, and the first of all, the padding, is the likeliest
    ids = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)
    assert ids.tolist() == [[5, 6, 0, 0, 0]]
    model.generation_config.eos_token_id = 0
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).tolist() == [[5, 6, 0]]


def test_a_failed_save_leaves_the_old_model(tmp_path: Path) -> None:
    model, folder = build_decoder(TOKENIZER, **SIZES), tmp_path / "tiny"
    save_model(folder, model, TOKENIZER)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(StoreError, match="cannot write the model"):
        save_model(folder, torch.nn.Linear(2, 2), TOKENIZER)  # type: ignore[arg-type]
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model(tmp_path)
