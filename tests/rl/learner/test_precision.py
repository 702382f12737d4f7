"""Test that trained weights are float32, since AdamW's small steps would be lost in bfloat16."""

from __future__ import annotations

import pytest
import torch

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.rl.learner.config import LoRAOptions, PPOConfig
from reward_kit.rl.model_kit.sft import SFTConfig, fit
from reward_kit.rl.ppo import PPOLearner
from tests.rl.learner.cases import a_model, some_rows

pytestmark = pytest.mark.device


def test_small_steps_change_a_bfloat16_module() -> None:
    given, exact = a_model(dtype=torch.bfloat16), a_model()
    learner = PPOLearner(given, PPOConfig(lr=1e-6))
    assert learner.config.precision == "bfloat16"
    found, expected = (one.update(some_rows(), version=0) for one in (learner, PPOLearner(exact, PPOConfig(lr=1e-6))))
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.1)
    for name, value in given.state_dict().items():
        assert value.dtype == torch.float32, name
        assert not torch.equal(value, a_model(dtype=torch.bfloat16).state_dict()[name].float()), name


def test_frozen_weights_beside_adapters_keep_their_precision() -> None:
    module = PolicyWithValue(a_model(dtype=torch.bfloat16))
    learner = PPOLearner(module, PPOConfig(lr=1e-6, precision="float32", lora=LoRAOptions(rank=2)))
    assert learner.update(some_rows(), version=0)["value_loss"] > 0.0
    for name, parameter in module.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name


def test_requested_precision_is_used() -> None:
    assert PPOLearner(a_model(dtype=torch.bfloat16), PPOConfig(precision="float32")).config.precision == "float32"
    assert PPOLearner(a_model(), PPOConfig()).config.precision == "float32"


def test_supervised_training_converts_weights_to_float32() -> None:
    model = a_model(dtype=torch.bfloat16)
    fit(model, some_rows(), SFTConfig(lr=1e-5))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
