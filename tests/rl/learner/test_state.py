"""Test that a loaded learner resumes bit for bit, including warm-ups and adaptive terms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.learner.config import LoRAOptions, PPOConfig
from reward_kit.rl.ppo import PPOLearner
from tests.devices import randomize
from tests.rl.learner.cases import a_model, some_rows

pytestmark = pytest.mark.device

OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "minibatches": 3,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "schedule": "cosine",
    "warmup": 1,
    "kl_coefficient": 0.1,
    "kl_target": 0.5,
    "kl_horizon": 20.0,
    "max_tokens_per_micro_batch": 60,
}


def a_learner(*, seed: int = 0, lora: LoRAOptions | None = None, model_seed: int = 0, **options: Any) -> PPOLearner:
    module = PolicyWithValue(a_model(model_seed))
    config = PPOConfig(**OPTIONS, lora=lora, **options)
    return PPOLearner(module, config, reference=a_model(5), seed=seed, total_steps=4)


def updates(learner: PPOLearner, versions: range) -> list[dict[str, float]]:
    return [learner.update(some_rows(seed=version), version=version) for version in versions]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("lora", [None, LoRAOptions(rank=2, alpha=4.0)])
def test_resumed_updates_equal_uninterrupted_updates(lora: LoRAOptions | None, optimizer: str) -> None:
    straight = a_learner(lora=lora, optimizer=optimizer)
    expected = updates(straight, range(4))
    first = a_learner(lora=lora, optimizer=optimizer)
    found = updates(first, range(2))
    state = copy.deepcopy(first.state_dict())
    # Other weights, another order of rows: all of it comes from the state.
    second = a_learner(seed=9, lora=lora, model_seed=3, optimizer=optimizer)
    second.load_state_dict(state)
    found += updates(second, range(2, 4))
    assert found == expected
    weights = straight.module.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in second.module.state_dict().items())
    assert second.updates == 4
    assert second.optimizer_steps == 24


def test_adaptive_kl_coefficient_grows_above_the_target() -> None:
    learner = a_learner()
    before, after = (found["kl_coefficient"] for found in updates(learner, range(2)))
    assert after > before == 0.1


def test_critic_warmup_trains_only_the_value_head() -> None:
    module = PolicyWithValue(a_model())
    learner = PPOLearner(module, PPOConfig(lr=0.01, critic_warmup=2, weight_decay=0.1, max_tokens_per_micro_batch=60))
    policy = copy.deepcopy(module.policy.state_dict())
    heads: list[Tensor] = [module.value_head.weight.detach().clone()]
    for version in range(2):
        found = learner.update(some_rows(), version=version)
        heads.append(module.value_head.weight.detach().clone())
        assert all(torch.equal(value, policy[name]) for name, value in module.policy.state_dict().items())
        assert "policy_loss" not in found
        assert found["logprob_gap"] > 0
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    learner.update(some_rows(), version=2)
    assert not torch.equal(module.policy.lm_head.weight, policy["lm_head.weight"])


def test_critic_learns_the_returns() -> None:
    module = PolicyWithValue(a_model())
    # Returns that the hidden state knows: this module's own first values, of a random head.
    randomize(module.value_head.weight)
    rows = some_rows()
    learner = PPOLearner(
        module, PPOConfig(lr=0.02, critic_warmup=200, old_values="recomputed", value_clip=None, max_grad_norm=None)
    )
    found = [learner.update(rows, version=0) for _ in range(60)]
    assert found[-1]["explained_variance"] > found[0]["explained_variance"] + 0.2
    assert found[-1]["value_loss"] < found[0]["value_loss"]


def test_missing_recorded_value_is_rejected_unless_recomputed() -> None:
    rows = some_rows()
    rows.batch["values"][rows.batch["value_mask"] == 1] = float("nan")
    module = PolicyWithValue(a_model())
    with pytest.raises(TrainingError, match="old_values='recomputed'"):
        PPOLearner(module, PPOConfig()).gradients(rows)
    assert PPOLearner(module, PPOConfig(old_values="recomputed")).gradients(rows)["value_error"] > 0


def test_resumed_learner_uses_its_own_options() -> None:
    first = PPOLearner(a_model(), PPOConfig(lr=1e-3))
    first.update(some_rows(), version=0)
    second = PPOLearner(a_model(), PPOConfig(lr=0.0, betas=(0.5, 0.6)))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    before = copy.deepcopy(second.module.state_dict())
    assert second.update(some_rows(), version=1)["lr"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in second.module.state_dict().items())
    assert {group["betas"] for group in second.optimizer.param_groups} == {(0.5, 0.6)}


def test_newly_adaptive_coefficient_starts_at_its_option() -> None:
    constant = PPOLearner(a_model(), PPOConfig())
    adaptive = PPOLearner(a_model(), PPOConfig(kl_coefficient=0.3, kl_target=0.1), reference=a_model(5))
    adaptive.load_state_dict(constant.state_dict())
    assert adaptive.update(some_rows(), version=0)["kl_coefficient"] == 0.3


def test_state_of_a_different_module_is_rejected() -> None:
    state = PPOLearner(a_model(), PPOConfig()).state_dict()
    frozen = a_model()
    frozen.model.embed_tokens.weight.requires_grad_(False)
    for module in (frozen, PolicyWithValue(a_model())):
        with pytest.raises(ConfigError, match="the state belongs to a module with different weights"):
            PPOLearner(module, PPOConfig()).load_state_dict(state)


def test_weight_frozen_later_is_not_updated() -> None:
    model = a_model()
    learner = PPOLearner(model, PPOConfig(lr=1e-2, weight_decay=0.1))
    learner.update(some_rows(), version=0)
    model.model.embed_tokens.weight.requires_grad_(False)
    before, head = model.model.embed_tokens.weight.clone(), model.lm_head.weight.clone()
    learner.update(some_rows(), version=1)
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert not torch.equal(model.lm_head.weight, head)
