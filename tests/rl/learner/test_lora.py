"""Test LoRA adapters: frozen base weights, the reference without adapters, and merged plain models."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from reward_kit.agent.policies.hf.model import PolicyWithValue, merged_state_dict
from reward_kit.errors import ConfigError
from reward_kit.rl.learner.config import LoRAOptions, PPOConfig
from reward_kit.rl.learner.optimizer import add_adapters, without_adapters
from reward_kit.rl.ppo import PPOLearner
from tests.rl.learner.cases import a_model, some_rows

pytestmark = pytest.mark.device

LORA = LoRAOptions(rank=2, alpha=4.0)


def trained(module: nn.Module, **options: object) -> PPOLearner:
    learner = PPOLearner(module, PPOConfig(lr=0.05, lora=LORA, **options))  # type: ignore[arg-type]
    for version in range(2):
        learner.update(some_rows(), version=version)
    return learner


def test_only_adapters_and_the_value_head_change() -> None:
    module = PolicyWithValue(a_model())
    before = {name: value.clone() for name, value in a_model().state_dict().items()}
    trained(module)
    changed = set()
    for name, value in module.policy.state_dict().items():
        plain = name.replace(".base_layer", "")
        if plain in before:
            assert torch.equal(value, before[plain])
        else:
            changed.add(name.split(".")[-3])
    assert changed == {"lora_A", "lora_B"}
    assert module.value_head.weight.any()


def test_kl_reference_is_the_module_without_adapters() -> None:
    rows, model = some_rows(), a_model()
    learner = trained(model, kl_coefficient=0.1)
    found = learner.gradients(rows)
    reference = PPOLearner(a_model(), PPOConfig()).logprobs(rows)
    takes_part = rows.batch["loss_mask"] == 1
    difference = (learner.logprobs(rows) - reference)[takes_part]
    assert found["kl"] == pytest.approx(np.mean(np.exp(-difference) - 1 + difference), rel=1e-4)
    assert found["kl"] > 1e-3
    assert all(one.requires_grad for name, one in model.named_parameters() if "lora_" in name)


def test_merged_weights_equal_a_plain_model() -> None:
    rows, model = some_rows(), a_model()
    learner = trained(model)
    before = copy.deepcopy(model.state_dict())
    plain = a_model(1)
    plain.load_state_dict(merged_state_dict(model))
    merged = PPOLearner(plain, PPOConfig()).logprobs(rows)
    np.testing.assert_allclose(merged, learner.logprobs(rows), rtol=0, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with without_adapters(model):
        assert abs(learner.logprobs(rows) - merged).max() > 1e-2


def test_adapters_merged_or_disabled_by_peft_are_not_merged_again() -> None:
    model = a_model()
    trained(model)
    expected = {name: value.clone() for name, value in merged_state_dict(model).items()}
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer.merge()
    for name, value in merged_state_dict(model).items():
        torch.testing.assert_close(value, expected[name])
    for layer in layers:
        layer.unmerge()
        layer.enable_adapters(False)
    bare = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora_" not in name}
    merged = merged_state_dict(model)
    assert merged.keys() == bare.keys()
    for name, value in merged.items():
        torch.testing.assert_close(value, bare[name])


def test_merging_a_model_without_adapters_is_a_no_op() -> None:
    model = a_model()
    assert merged_state_dict(model).keys() == model.state_dict().keys()


def test_unknown_targets_and_repeated_adapters_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"lora.targets \['q_porj'\]"):
        add_adapters(a_model(), LoRAOptions(targets=["q_porj"]))  # type: ignore[arg-type]
    model = a_model()
    add_adapters(model, LoRAOptions(targets=("q_proj",)))
    with pytest.raises(ConfigError, match="already has adapters"):
        add_adapters(model, LORA)
