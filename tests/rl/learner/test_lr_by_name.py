"""Test learning rates by parameter name against separate AdamW optimizers, also after a resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.errors import ConfigError
from reward_kit.rl.learner.config import LoRAOptions, PPOConfig
from reward_kit.rl.ppo import PPOLearner
from tests.rl.learner.cases import a_model, some_rows

pytestmark = pytest.mark.device

RATES = {"*layers.0*norm*": 5e-2, "*norm*": 2e-2, "*embed_tokens*": 0.0}
OPTIONS: dict[str, Any] = {"lr": 1e-3, "max_grad_norm": None, "weight_decay": 0.1, "betas": (0.8, 0.9)}


def updated(learner: PPOLearner, versions: range) -> list[dict[str, float]]:
    return [learner.update(some_rows(seed=version), version=version) for version in versions]


def rate_by_hand(name: str) -> float:
    if "norm" in name:
        return 5e-2 if "layers.0" in name else 2e-2
    return 0.0 if "embed_tokens" in name else 7e-3 if name.startswith("value_head") else 1e-3


def steps_by_hand(module: nn.Module, updates: int) -> dict[str, Tensor]:
    """Update each parameter with its own AdamW, with the gradients of the current module."""
    optimizers = {
        name: torch.optim.AdamW(
            [one], lr=rate_by_hand(name), betas=(0.8, 0.9), weight_decay=0.1 if one.dim() >= 2 else 0.0
        )
        for name, one in module.named_parameters()
    }
    measure = PPOLearner(copy.deepcopy(module), PPOConfig(**OPTIONS))
    for update in range(updates):
        measure.module.load_state_dict(module.state_dict())
        measure.gradients(some_rows(seed=update))
        gradients = dict(measure.module.named_parameters())
        for name, one in module.named_parameters():
            one.grad = None if gradients[name].grad is None else gradients[name].grad.clone()  # type: ignore[union-attr]
            # The schedule: half the rate in the first of two updates of warm-up.
            optimizers[name].param_groups[0]["lr"] = rate_by_hand(name) * (0.5 if update == 0 else 1.0)
            optimizers[name].step()
    return dict(module.state_dict())


def test_parameter_groups_match_separate_optimizers() -> None:
    module = PolicyWithValue(a_model())
    expected = steps_by_hand(copy.deepcopy(module), 3)
    learner = PPOLearner(module, PPOConfig(**OPTIONS, lr_by_name=RATES, value_lr=7e-3, warmup=2))
    found = updated(learner, range(3))
    begun = a_model().state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)
        assert torch.equal(value, begun.get(name.removeprefix("policy."), value)) == (
            rate_by_hand(name) == 0.0 or name.startswith("value_head")
        )
    assert {name: rate for name, rate in found[0].items() if "lr" in name} == {
        "lr": 5e-4,
        "lr/*layers.0*norm*": 2.5e-2,
        "lr/*norm*": 1e-2,
        "lr/*embed_tokens*": 0.0,
        "value_lr": 3.5e-3,
    }
    assert found[2]["lr/*norm*"] == 2e-2


@pytest.mark.parametrize("lora", [None, LoRAOptions(rank=2, alpha=4.0)])
def test_resumed_updates_equal_uninterrupted_updates(lora: LoRAOptions | None) -> None:
    rates = {"*lora_B*": 1e-2} if lora else RATES

    def a_learner(seed: int) -> PPOLearner:
        config = PPOConfig(lr=1e-3, minibatches=3, lr_by_name=rates, lora=lora, schedule="cosine")
        return PPOLearner(a_model(seed), config, seed=seed, total_steps=5)

    straight, first, second = a_learner(0), a_learner(0), a_learner(3)
    expected = updated(straight, range(4))
    found = updated(first, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert found + updated(second, range(2, 4)) == expected
    weights = straight.module.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in second.module.state_dict().items())


def test_moments_stay_with_their_parameters_when_the_groups_change() -> None:
    first = PPOLearner(a_model(), PPOConfig(lr=1e-3))
    updated(first, range(2))
    second = PPOLearner(a_model(1), PPOConfig(lr=1e-3, lr_by_name={"*mlp*": 1e-3}))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state_dict()["parameters"] != first.state_dict()["parameters"]
    assert second.optimizer.param_groups[0]["lr"] == 1e-3
    moments = {name: second.optimizer.state[one]["exp_avg"] for name, one in second.module.named_parameters()}
    for name, one in first.module.named_parameters():
        assert torch.equal(first.optimizer.state[one]["exp_avg"], moments[name]), name
    assert len(second.optimizer.param_groups) == len(first.optimizer.param_groups) + 1
    # The same rate under another name changes nothing but the order in which norms are added up.
    assert updated(second, range(2, 3))[0]["loss"] == pytest.approx(updated(first, range(2, 3))[0]["loss"], abs=1e-6)


def test_adapters_and_the_value_head_have_rates_by_name() -> None:
    module = PolicyWithValue(a_model())
    config = PPOConfig(lr=1e-3, lora=LoRAOptions(rank=2), value_lr=7e-3, lr_by_name={"*lora_B*": 2e-2, "*.bias": 3e-3})
    learner = PPOLearner(module, config)
    names = {one: name for name, one in module.named_parameters()}
    rates = {names[one]: group["lr"] for group in learner.optimizer.param_groups for one in group["params"]}
    assert {rate for name, rate in rates.items() if "lora_B" in name} == {2e-2}
    assert {rate for name, rate in rates.items() if "lora_A" in name} == {1e-3}
    assert (rates["value_head.weight"], rates["value_head.bias"]) == (7e-3, 3e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lr_by_name": {"*nrom*": 1e-2}},
            r"'\*nrom\*' does not match any of the 23 trained parameters, such as .*embed_tokens.*, value_head.bias",
        ),
        (
            {"lr_by_name": {"*norm*": 1e-2, "*.0.*norm*": 2e-2}},
            r"'\*\.0\.\*norm\*' has no effect, because the earlier pattern '\*norm\*'",
        ),
        (
            {"lr_by_name": {"value_head*": 1e-2}, "value_lr": 1e-3},
            "value_lr has no effect, because patterns in lr_by_name match",
        ),
        ({"lr_by_name": {"*q_proj*": 1e-2}, "lora": LoRAOptions(targets=("o_proj",))}, "does not match any of the 6"),
    ],
)
def test_pattern_without_effect_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOLearner(PolicyWithValue(a_model()), PPOConfig(**options))


@pytest.mark.parametrize("rate", [-1.0, float("nan"), "fast"])
def test_negative_or_non_numeric_rates_are_rejected(rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"lr_by_name '\*norm\*' must be"):
        PPOConfig(lr_by_name={"*norm*": rate})
