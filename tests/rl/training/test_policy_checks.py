"""Test that unsuitable policies are rejected before a run folder exists and weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer, save_model
from reward_kit.rl.training.plan import check_policy, load_plan
from reward_kit.rl.training.session import save_weights
from tests.rl.training.frozen_lake import lake_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    tokenizer = build_tokenizer(level="byte")
    save_model(folder, build_decoder(tokenizer, layers=1, width=16, heads=2, context=512, seed=1), tokenizer)
    # Nothing of this is read: a file that nobody can read stands for weights that do not fit in memory.
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


def hf(model: Path, options: dict[str, Any]) -> dict[str, Any]:
    return {"type": "hf", "action_format": "bare", "max_new_tokens": 16, **{"model": str(model), **options}}


@pytest.mark.parametrize(
    ("policy", "ppo", "told"),
    [
        (
            {"top_p": 0.9},
            {},
            "train.yaml: HFAgentPolicy cannot be trained with its sampling: top_p and top_k exclude tokens",
        ),
        ({"temperature": 0}, {}, "the policy samples greedily"),
        (
            {"temperature": 0.7},
            {"temperature": 0.5},
            r"train.yaml:\d+: ppo.temperature is 0.5, but the policy samples at a temperature of 0.7",
        ),
        ({}, {"value_clip": 0.2}, r"train.yaml:\d+: value_clip: the module has no value head.* value_head: true"),
        (
            {},
            {"lr_by_name": {"*nrom*": 1.0}},
            r"train.yaml:\d+: lr_by_name: '\*nrom\*' does not match any of the \d+ trained parameters",
        ),
        ({}, {"lora": {"targets": ["nowhere"]}}, r"train.yaml:\d+: lora.targets"),
        ({"device": "abacus"}, {}, "device: 'abacus' cannot be used"),
        ({"model": "walker"}, {}, "model 'walker': it is neither a directory.*looked up in"),
        ({"model": "train.yml"}, {}, r"looked up in .*; did you mean 'train.yaml'"),
        ({"temprature": 1}, {}, "policy.temprature: unknown key"),
        ({"max_new_tokens": 512}, {}, "leaves no room for a prompt"),
    ],
)
def test_unsuitable_policy_options_are_rejected(
    tmp_path: Path, model: Path, policy: dict[str, Any], ppo: dict[str, Any], told: str
) -> None:
    plan = load_plan(lake_folder(tmp_path, policy=hf(model, policy), ppo={"lr": 1e-4, **ppo}))
    with pytest.raises(ConfigError, match=told):
        check_policy(plan)


@pytest.mark.parametrize(
    ("policy", "ppo"),
    [
        ({}, {"lr_by_name": {"*norm*": 1e-2}, "lora": None}),
        ({"value_head": True}, {"value_clip": 0.2, "lr_by_name": {"value_head*": 1e-2}}),
        ({"temperature": 0.7}, {"lora": {"rank": 2}, "lr_by_name": {"*lora_B*": 1e-2}}),
    ],
)
def test_valid_policy_passes_without_reading_weights(
    tmp_path: Path, model: Path, policy: dict[str, Any], ppo: dict[str, Any]
) -> None:
    check_policy(load_plan(lake_folder(tmp_path, policy=hf(model, policy), ppo={"lr": 1e-4, **ppo})))


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("random", "RandomPolicy is not a TrainablePolicy"),
        ({"type": "policy.py:NoPolicy"}, "NoPolicy"),
        ({"type": "policy.py:TinyPolicy", "sede": 1}, "policy.sede: unknown key .*did you mean 'seed'"),
    ],
)
def test_custom_policy_class_and_options_are_checked(tmp_path: Path, policy: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_policy(load_plan(lake_folder(tmp_path, policy=policy)))


def test_a_model_with_adapters_is_saved_with_them_added(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from reward_kit.agent.policies.hf_policy import HFAgentPolicy
    from reward_kit.rl.learner.config import LoRAOptions
    from reward_kit.rl.learner.optimizer import add_adapters, without_adapters

    tokenizer = build_tokenizer(level="byte")
    decoder = build_decoder(tokenizer, layers=1, width=16, heads=2, context=512, seed=1)
    policy = HFAgentPolicy(decoder, tokenizer, action_format="bare", max_new_tokens=16)
    add_adapters(policy.module, LoRAOptions(rank=2))
    for name, one in policy.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, generator=torch.Generator().manual_seed(0))
    assert save_weights(tmp_path / "model", policy)
    ids = torch.arange(4)[None]
    with torch.no_grad():
        adapted = policy.module(ids).logits
        with without_adapters(policy.module):
            plain = policy.module(ids).logits
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids).logits
    torch.testing.assert_close(saved, adapted, rtol=0, atol=1e-5)
    assert (saved - plain).abs().max() > 1e-3
    assert not any("lora" in name for name in AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict())


def test_ray_engine_requires_a_policy_that_accepts_weights(tmp_path: Path, model: Path) -> None:
    plan = load_plan(lake_folder(tmp_path, engine="ray"))
    with pytest.raises(
        ConfigError, match=r"TinyPolicy\.publish does not accept any; define publish\(version, state_dict\)"
    ):
        check_policy(plan)
    check_policy(load_plan(lake_folder(tmp_path, engine="ray", policy=hf(model, {}))))
