"""Test `ppo.packed` and `ppo.attention`: the same losses and gradients, and a warning where they cannot be used."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import Gemma2Config, Gemma2ForCausalLM, Lfm2Config, Lfm2ForCausalLM, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import PreTrainedModel

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.rl.learner import attention
from reward_kit.rl.learner.attention import BY_ROW, attend_by_row, attend_varlen, attention_name
from reward_kit.rl.learner.config import LoRAOptions, PPOConfig
from reward_kit.rl.learner.training_rows import TrainingRows
from reward_kit.rl.ppo import PPOLearner
from tests.agent.policies.hf.tiny_models import masked_window_model
from tests.devices import DEVICE, WIDEST, randomize, tolerance
from tests.rl.learner.cases import VOCABULARY, Bigram, a_model, bigram_rows, some_rows
from tests.tolerances import rounding_error

pytestmark = pytest.mark.device
ATOL, REL = tolerance(1e-11), tolerance(1e-9)


def other_model(kind: Any, config: Any, **options: Any) -> Any:
    """Return a small decoder of another kind than `a_model`."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    return kind(config(**sizes, **heads, initializer_range=0.3, **options)).to(DEVICE, WIDEST).eval()


def with_value() -> PolicyWithValue:
    """Return a model with a critic whose values differ."""
    module = PolicyWithValue(a_model(dtype=torch.float64))
    randomize(module.value_head.weight, seed=1)
    return module


def gradients(module: nn.Module, **options: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the diagnostics and gradients of a learner on a copy of the module, and whether its rows are packed."""
    learner = PPOLearner(copy.deepcopy(module), PPOConfig(**options), reference=options.pop("reference", None))
    found = learner.gradients(some_rows())
    assert learner._model.is_packed == learner.config.packed
    return found, {name: one.grad for name, one in learner.module.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (a_model(dtype=torch.float64), {}),
        (a_model(dtype=torch.float64), {"max_tokens_per_micro_batch": 50}),
        (a_model(dtype=torch.float64), {"gradient_checkpointing": True}),
        (a_model(dtype=torch.float64), {"max_logits": 5 * VOCABULARY, "entropy_coefficient": 0.1}),
        (a_model(dtype=torch.float64), {"old_logprobs": "recomputed", "loss": "gspo"}),
        (a_model(dtype=torch.float64), {"lora": LoRAOptions(rank=2), "kl_coefficient": 0.1}),
        (with_value(), {"old_values": "recomputed"}),
        # Rows have up to 24 tokens, so the window hides some.
        (other_model(MistralForCausalLM, MistralConfig, sliding_window=5), {}),
    ],
)
def test_packed_rows_have_the_same_loss_and_gradient(module: nn.Module, options: dict[str, Any]) -> None:
    expected, expected_gradients = gradients(module, **options)
    found, found_gradients = gradients(module, **options, packed=True)
    assert found == pytest.approx(expected, rel=REL, abs=REL)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in found_gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=ATOL)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_packed_rows_in_compiled_layers() -> None:
    if DEVICE.type == "standin":
        pytest.skip("the stand-in device has no compiler")
    module = a_model()
    _, expected = gradients(module, packed=True)
    _, found = gradients(module, packed=True, compile=True)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-4 * float(expected[name].abs().max()))


def test_no_padding_passes_through_the_module() -> None:
    rows, learner = some_rows(), PPOLearner(a_model(), PPOConfig(packed=True, max_tokens_per_micro_batch=50))
    sizes: list[torch.Size] = []
    learner.module.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    learner.gradients(rows)
    assert {one[0] for one in sizes} == {1}
    assert sum(one[1] for one in sizes) == rows.batch["attention_mask"].sum()
    assert max(one[1] for one in sizes) <= 50
    assert learner.update(rows, version=0)["padding_share"] == 0.0


def test_share_of_padding_is_measured() -> None:
    rows = some_rows()
    lengths_B = rows.batch["attention_mask"].sum(axis=1)
    padded = PPOLearner(a_model(), PPOConfig()).update(rows, version=0)["padding_share"]
    assert padded == pytest.approx(1 - lengths_B.mean() / lengths_B.max())


def test_micro_batch_without_rows_can_be_packed() -> None:
    flat = TrainingRows.of(some_rows())
    part = flat.part(np.zeros(0, dtype=np.int64), DEVICE, is_packed=True)
    scores = PPOLearner(a_model(), PPOConfig(packed=True))._model(part)
    assert part.ids_BT.shape == (1, 1)
    assert len(scores.logprobs_N) == 0


class Shifted(nn.Module):
    """A model whose layers mix a token with the one before, which may belong to another row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = a_model()
        self.config = self.inner.config
        layers: Any = self.inner.model.layers
        layers[0].register_forward_hook(lambda _, args, output: output + output.roll(1, dims=1))

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def _can_set_attn_implementation(self) -> bool:
        return True

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)

    def forward(self, **kwargs: Any) -> Any:
        return self.inner(**kwargs)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Shifted(), "hidden states differ"),
        pytest.param(
            masked_window_model(),
            "PhimoeForCausalLM does not pass its sliding window to its attention function",
            marks=pytest.mark.skipif(DEVICE.type == "standin", reason="the stand-in device has no experts"),
        ),
        (other_model(Gemma2ForCausalLM, Gemma2Config, head_dim=8, attn_implementation="eager"), "softcap"),
        pytest.param(
            other_model(
                Lfm2ForCausalLM, Lfm2Config, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
            ),
            "Lfm2ForCausalLM has layers of the type conv",
            marks=pytest.mark.skipif(DEVICE.type == "standin", reason="the stand-in device has no convolutions"),
        ),
    ],
)
def test_rows_are_padded_if_the_module_cannot_compute_packed_rows(
    module: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = attention_name(module)
    expected = PPOLearner(copy.deepcopy(module), PPOConfig()).gradients(some_rows())
    learner = PPOLearner(module, PPOConfig(packed=True))
    assert "ppo.packed: rows are padded, because the module cannot compute packed rows" in caplog.text
    assert reason in caplog.text
    assert attention_name(module) == own
    assert learner.gradients(some_rows()) == expected


def test_modules_without_a_head_are_never_packed(caplog: pytest.LogCaptureFixture) -> None:
    learner = PPOLearner(Bigram(), PPOConfig(packed=True, attention="sdpa"))
    assert np.isfinite(learner.update(bigram_rows([1.0, -1.0]), version=0)["loss"])
    assert "ppo.packed: Bigram" in caplog.text
    assert "ppo.attention: Bigram" in caplog.text


def test_another_attention_changes_no_gradient() -> None:
    module = a_model(dtype=torch.float64)
    assert attention_name(module) == "sdpa"
    _, expected = gradients(module)
    learner = PPOLearner(module, PPOConfig(attention="eager"))
    assert attention_name(module) == "eager"
    learner.gradients(some_rows())
    largest = max(float(one.abs().max()) for one in expected.values())
    for name, one in module.named_parameters():
        # Its softmax over at most 24 tokens is computed in float32, in each of two layers.
        torch.testing.assert_close(one.grad, expected[name], rtol=0, atol=rounding_error(2 * 24) * largest)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="flash_attn may be installed")
def test_attention_without_its_package_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    module = a_model()
    _, expected = gradients(module)
    _, found = gradients(module, attention="flash_attention_2")
    assert "ppo.attention: sdpa is used instead of flash_attention_2: there is no GPU" in caplog.text
    for name, one in found.items():
        assert torch.equal(one, expected[name]), name


def reference_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None) -> Tensor:
    """Return causal attention within rows as the packages of FlashAttention compute it, from (L, heads, width)."""
    assert cu_seqlens.dtype == torch.int32
    lengths = cu_seqlens.diff().tolist()
    assert longest == max(lengths)
    assert sum(lengths) == len(q)
    groups = q.shape[1] // k.shape[1]
    result = []
    for one, keys, values in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        keys, values = (states.repeat_interleave(groups, dim=1) for states in (keys, values))
        scores = torch.einsum("qhw,khw->hqk", one, keys) * (one.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.ones(len(one), len(one), dtype=torch.bool, device=one.device).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        result.append(torch.einsum("hqk,khw->qhw", weights, values))
    return torch.cat(result)


@contextmanager
def flash_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replace the kernels of the package flash_attn, which need a GPU, and yield the names of those that are called."""
    calls: list[str] = []

    def whole(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, dropout_p: float = 0.0) -> Tensor:
        calls.append("flash_attn_func")
        assert causal
        cu_seqlens = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * q.shape[1]
        flat = (one.flatten(0, 1) for one in (q, k, v))
        return reference_varlen(*flat, cu_seqlens, q.shape[1], softmax_scale).view(q.shape)

    def by_row(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        dropout_p: float = 0.0,
    ) -> Tensor:
        calls.append("flash_attn_varlen_func")
        assert causal
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k
        return reference_varlen(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)

    monkeypatch.setitem(attention._FLASH, "flash_attention_2", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda _, name, **__: name)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: (whole, by_row, None, None, None))
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    yield calls
    monkeypatch.undo()


@pytest.mark.parametrize(("is_packed", "kernel"), [(False, "flash_attn_func"), (True, "flash_attn_varlen_func")])
def test_flash_attention_of_transformers(
    is_packed: bool, kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = a_model(dtype=torch.float64)
    expected, expected_gradients = gradients(module)
    with flash_package(monkeypatch) as calls:
        learner = PPOLearner(module, PPOConfig(attention="flash_attention_2", packed=is_packed))
        calls.clear()
        found = learner.gradients(some_rows())
        assert {*calls} == {kernel}
    assert attention_name(module) == "flash_attention_2"
    assert "ppo." not in caplog.text
    assert found == pytest.approx(expected, rel=REL, abs=REL)
    for name, one in module.named_parameters():
        torch.testing.assert_close(one.grad, expected_gradients[name], rtol=0, atol=ATOL)


def random_states(dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    """Return queries of four heads, and keys and values of two, for 12 tokens."""
    return [torch.randn(1, heads, 12, 8, dtype=dtype, device="cpu").to(device) for heads in (4, 2, 2)]


def test_arguments_of_the_kernel_for_rows_of_variable_length(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    states, cu_seqlens = random_states(WIDEST, DEVICE), torch.tensor([0, 5, 12], dtype=torch.int32)
    signature = inspect.signature(varlen.varlen_attn)

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        assert given["window_size"] == (-1, 0), "causal"
        assert given["enable_gqa"]
        assert given["max_q"] == given["max_k"]
        q, k, v = (given[name] for name in ("query", "key", "value"))
        return reference_varlen(q, k, v, given["cu_seq_q"], given["max_q"], given.get("scale"))

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    module = nn.Module()
    module.num_key_value_groups = 2
    for scale in (None, 0.3):
        found, _ = attend_varlen(module, *states, None, 0.0, scale, cu_seq_lens_q=cu_seqlens, max_length_q=7)
        expected, _ = attend_by_row(module, *states, None, 0.0, scale, cu_seq_lens_q=cu_seqlens)
        torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("window", [None, 4])
def test_kernel_for_rows_of_variable_length_accepts_the_arguments(window: int | None) -> None:
    # Without a GPU, the kernel only checks its arguments and returns the shapes.
    states = [one.requires_grad_() for one in random_states(torch.bfloat16, "meta")]
    cu_seqlens = torch.zeros(3, dtype=torch.int32, device="meta")
    found, _ = attend_varlen(
        nn.Module(), *states, None, cu_seq_lens_q=cu_seqlens, max_length_q=7, sliding_window=window
    )
    assert found.shape == (1, 12, 4, 8)
    found.sum().backward()
    assert states[1].grad is not None
    assert states[1].grad.shape == (1, 2, 12, 8)


def test_unpacked_rows_are_masked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    module, ids = a_model(dtype=torch.float64), torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = module(input_ids=ids, attention_mask=mask).logits
        for name in (BY_ROW, attention.VARLEN):
            module.set_attn_implementation(name)
            found = module(input_ids=ids, attention_mask=mask).logits
            torch.testing.assert_close(found[mask > 0], expected[mask > 0], rtol=0, atol=ATOL)
