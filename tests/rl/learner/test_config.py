"""Validation of learner options and learning rate schedules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.errors import ConfigError
from reward_kit.rl.learner.config import LoRAOptions, OffPolicyLimits, PPOConfig, lr_factor
from reward_kit.rl.learner.optimizer import make_optimizer
from reward_kit.rl.ppo import PPOLearner
from tests.rl.learner.cases import Bigram, a_model, bigram_rows, some_rows

pytestmark = pytest.mark.device


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be an integer of at least 1"),
        ({"minibatch_rows": 0}, "minibatch_rows"),
        ({"minibatches": 1.5}, "minibatches"),
        ({"epochs": True}, "epochs"),
        ({"lr": True}, "lr must be a finite number"),
        ({"packed": "no"}, "packed must be True or False, got 'no'"),
        ({"compile": 1}, "compile must be True or False, got 1"),
        ({"packed": True, "attention": "eager"}, "packed rows cannot be computed with attention 'eager'"),
        ({"clip_low": 1.0}, "clip_low must be below 1"),
        ({"clip_low": 1.5, "loss": "cispo"}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high above 0"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"min_lr_share": 1.5, "schedule": "linear"}, "min_lr_share"),
        ({"loss": "gpso"}, "unknown loss 'gpso'.*gspo"),
        ({"kl_kind": "k4"}, "unknown kl_kind"),
        ({"schedule": "step"}, "unknown schedule"),
        ({"minibatches": 2, "minibatch_rows": 2}, "not both"),
        ({"loss": "gspo", "dual_clip": 3.0}, "has no dual_clip"),
        ({"loss": "sapo", "clip_low": 0.1}, "has no clip range"),
        ({"decoupled_cap": 4.0}, "decoupled_cap applies only to loss 'decoupled'"),
        ({"loss": "decoupled", "importance": "token"}, "its own importance weights"),
        ({"importance_cap": 4.0}, "set importance='token'"),
        ({"kl_target": 6.0}, "kl_coefficient, which is 0"),
        ({"kl_horizon": 5.0, "kl_coefficient": 0.1}, "set kl_target"),
        ({"kl_kind": "k2"}, "kl_coefficient is 0"),
        ({"norm_length": 10.0}, "seq-mean-token-sum-norm"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "set both or neither"),
        ({"min_lr_share": 0.1}, "set schedule='linear'"),
        ({"critic_warmup": 1, "value_coefficient": 0.0}, "critic_warmup"),
    ],
)
def test_invalid_option_values_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LoRAOptions, {"rank": 0}, "lora.rank"),
        (LoRAOptions, {"targets": ()}, "lora.targets"),
        (OffPolicyLimits, {"lag_max": -1.0}, "limits.lag_max"),
    ],
)
def test_invalid_nested_option_values_are_rejected(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_defaults_are_those_of_the_loss() -> None:
    assert (PPOConfig().clip, PPOConfig().reduction) == ((0.2, 0.2, None), "token-mean")
    gspo = PPOConfig(loss="gspo", clip_high=1e-3)
    assert (gspo.clip, gspo.reduction) == ((3e-4, 1e-3, None), "seq-mean-token-mean")
    assert PPOConfig(loss="cispo").clip == (1.0, 4.0, None)


@pytest.mark.parametrize(
    ("module", "options", "given", "message"),
    [
        (Bigram, {"kl_coefficient": 0.1}, {}, "requires a reference"),
        (Bigram, {"critic_warmup": 1}, {}, "value head"),
        (Bigram, {"schedule": "cosine"}, {}, "pass total_steps"),
        (Bigram, {"gradient_checkpointing": True}, {}, "does not support gradient checkpointing"),
        (lambda: Bigram().requires_grad_(False), {}, {}, "the module has no trainable parameters"),
        (lambda: PolicyWithValue(Bigram()), {}, {}, "a value head needs a causal language model"),
    ],
)
def test_options_unsuitable_for_the_module_are_rejected(module: Any, options: Any, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOLearner(module(), PPOConfig(**options), **given)


def test_module_itself_is_rejected_as_reference() -> None:
    module = Bigram()
    with pytest.raises(ConfigError, match="copy"):
        PPOLearner(module, PPOConfig(kl_coefficient=0.1), reference=module)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup": 2}, [0.5, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ({"schedule": "linear", "warmup": 2, "min_lr_share": 0.5}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5]),
        ({"schedule": "cosine"}, [1, 0.933, 0.75, 0.5, 0.25, 0.067, 0]),
    ],
)
def test_learning_rate_follows_the_schedule(options: dict[str, Any], expected: list[float]) -> None:
    config = PPOConfig(**options)
    assert [lr_factor(config, update, 6) for update in range(7)] == pytest.approx(expected, abs=1e-3)


def test_learning_rate_follows_the_progress_without_a_number_of_updates() -> None:
    config = PPOConfig(schedule="linear", warmup=2, min_lr_share=0.5)
    rates = [lr_factor(config, update, math.inf, progress) for update, progress in enumerate([0, 0.25, 0.5, 1.0, 2.0])]
    assert rates == [0.5, 1.0, 0.75, 0.5, 0.5]
    assert lr_factor(config, 4, 6, 0.75) == 0.625  # the further of half of the updates and the progress


def test_schedule_affects_weight_updates() -> None:
    module = Bigram()
    learner = PPOLearner(module, PPOConfig(lr=0.1, schedule="linear", betas=(0.0, 0.0)), total_steps=2)
    moved, rates = [], []
    for version in range(3):
        before = module.table.detach().clone()
        rates.append(learner.update(bigram_rows([1.0, -1.0]), version=version)["lr"])
        moved.append((module.table - before).abs().max().item())
    # Without momentum a step of AdamW is as long as the rate.
    assert rates == pytest.approx([0.1, 0.05, 0.0])
    assert moved == pytest.approx([0.1, 0.05, 0.0], rel=1e-4)


def test_only_matrices_decay_and_the_value_head_has_its_own_rate() -> None:
    module = PolicyWithValue(a_model())
    optimizer = make_optimizer(module, PPOConfig(lr=0.1, value_lr=0.5, weight_decay=0.3))
    names = {one: name for name, one in module.named_parameters()}
    found = {
        names[one]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for one in group["params"]
    }
    assert found.keys() == dict(module.named_parameters()).keys()
    assert found["policy.lm_head.weight"] == found["policy.model.embed_tokens.weight"] == (0.1, 0.3)
    assert found["policy.model.norm.weight"] == (0.1, 0.0)
    assert (found["value_head.weight"], found["value_head.bias"]) == ((0.5, 0.3), (0.5, 0.0))


def test_muon_trains_the_matrices_of_hidden_layers_and_adamw_everything_else() -> None:
    module = a_model()
    by_hand = copy.deepcopy(module)
    learner = PPOLearner(module, PPOConfig(optimizer="muon", lr=1e-2, weight_decay=0.1))
    learner.update(some_rows(), version=0)
    gradients = PPOLearner(by_hand, PPOConfig())
    gradients.gradients(some_rows())
    torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
    parameters = dict(by_hand.named_parameters())
    hidden = {name for name, one in parameters.items() if one.dim() == 2 and "embed" not in name and "head" not in name}
    assert len(hidden) == 14
    vectors = [one for one in parameters.values() if one.dim() == 1]
    tables = [one for name, one in parameters.items() if one.dim() == 2 and name not in hidden]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    torch.optim.Muon([parameters[name] for name in hidden], **options, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW(tables, **options).step()
    torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.0).step()
    for name, one in module.named_parameters():
        torch.testing.assert_close(one, parameters[name], rtol=1e-4, atol=1e-6)


def test_muon_needs_a_matrix_of_a_hidden_layer() -> None:
    module = a_model()
    for name, one in module.named_parameters():
        one.requires_grad_("norm" in name)
    with pytest.raises(ConfigError, match="muon trains matrices of hidden layers, but the module has none; set adamw"):
        PPOLearner(module, PPOConfig(optimizer="muon"))


def test_dropout_is_disabled() -> None:
    class Drops(Bigram):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor) -> torch.Tensor:
            return self.dropout(super().forward(ids_BT, attention_mask_BT) + 1.0)

    found = PPOLearner(Drops().train(), PPOConfig()).gradients(bigram_rows([1.0, -1.0]))
    assert found["logprob_gap"] < 1e-6


@pytest.mark.parametrize("options", [{"value_lr": 0.1}, {"old_values": "recomputed"}, {"critic_warmup": 2}])
def test_critic_options_are_rejected_without_a_value_head(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: the module has no value head"):
        PPOLearner(a_model(), PPOConfig(**options))
