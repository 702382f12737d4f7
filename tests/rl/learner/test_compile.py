"""Test `ppo.compile`: compiled layers have the same gradients, and layers that cannot be compiled stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from tests.rl.learner.cases import Bigram, a_model, bigram_rows, some_rows
from tests.tolerances import rounding_error

# The compiler itself causes warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(module: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of a learner on the module."""
    PPOLearner(module, PPOConfig(**options)).gradients(some_rows())
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def is_compiled(module: nn.Module) -> list[bool]:
    layers: Any = module.get_submodule("model.layers")
    return [layer._compiled_call_impl is not None for layer in layers]


def test_compiled_layers_change_no_gradient() -> None:
    expected, module = gradients(a_model()), a_model()
    found = gradients(module, compile=True)
    assert is_compiled(module) == [True, False]
    largest = max(float(one.abs().max()) for one in expected.values())
    for name, gradient in found.items():
        # Fused kernels add in another order: about eight sums over at most 24 terms in each of the two layers.
        error = float((gradient - expected[name]).abs().max())
        assert error <= rounding_error(8 * 2 * 24) * largest, name


def test_layers_stay_uncompiled_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()  # forget what other tests compiled
    module = a_model()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        found = gradients(module, compile=True)
    assert "ppo.compile: the layers run uncompiled, because the compiler failed" in caplog.text
    assert is_compiled(module) == [False, False]
    for name, gradient in gradients(a_model()).items():
        assert torch.equal(gradient, found[name]), name


def test_module_without_layers_stays_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    learner = PPOLearner(Bigram(), PPOConfig(compile=True))
    assert "Bigram has no layers that can be compiled" in caplog.text
    assert np.isfinite(learner.update(bigram_rows([1.0, -1.0]), version=0)["loss"])
