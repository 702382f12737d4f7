"""Test that the stages of the GPU campaign fail if a defect is planted in what they check."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu_campaign import correctness, generation
from benchmarks.gpu_campaign.context import StageContext
from benchmarks.gpu_campaign.parallel import Kind, _compare
from reward_kit.agent.policies.hf.engine import Engine
from reward_kit.rl.checkpoint import Checkpoint, load_checkpoint
from reward_kit.rl.ppo import PPOLearner
from tests.rl.loss_cases import LOSSES


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return StageContext("engine", "cpu", "tiny", 600.0, tmp_path, tmp_path)


def failures(context: StageContext, word: str) -> list[str]:
    """Return the failures that contain a word."""
    assert context.failures, "the defect was not found"
    return [failure for failure in context.failures if word in failure]


def test_losses_that_are_computed_in_half_precision_fail(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = LOSSES["ppo"]

    def rough(case: dict[str, Tensor], **options: Any) -> Any:
        trained = case["trained"]
        return correct(case if trained.dtype == torch.float64 else case | {"trained": trained.bfloat16()}, **options)

    monkeypatch.setitem(LOSSES, "ppo", rough)
    correctness.losses(context)
    assert len(failures(context, "ppo, ")) == len(context.failures) >= 4


def test_trainer_with_other_log_probabilities_than_the_engine_fails(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = PPOLearner.logprobs
    monkeypatch.setattr(PPOLearner, "logprobs", lambda self, rows: correct(self, rows) * np.float32(1.001))
    generation.engine(context)
    assert failures(context, "float32: the trainer's logprobs differ")


def test_engine_whose_tokens_depend_on_the_batch_fails(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Engine.generate

    async def generate(self: Engine, slot: Any, prompt_ids: Any, **options: Any) -> Any:
        ids = prompt_ids if len(self._open) == 1 else [*prompt_ids[:-1], 1]  # another last token in a batch
        return await correct(self, slot, ids, **options)

    monkeypatch.setattr(Engine, "generate", generate)
    generation.engine(context)
    assert failures(context, "float32_greedy: tokens differ")
    assert failures(context, "float32_sampled: tokens differ")


def test_checkpoint_without_moments_fails(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_moments(path: Path) -> Checkpoint:
        checkpoint = load_checkpoint(path)
        for moments in checkpoint.state["optimizer"]["state"].values():
            moments["exp_avg"].zero_()
        return checkpoint

    monkeypatch.setattr(correctness, "load_checkpoint", without_moments)
    correctness.resume(context)
    assert failures(context, "a resumed deterministic run differs")
    assert failures(context, "runs repeat exactly, but a resumed one differs")


def test_weights_without_merged_adapters_fail(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmerged(module: torch.nn.Module) -> dict[str, Tensor]:
        state = module.state_dict()
        return {name.replace(".base_layer", ""): one for name, one in state.items() if "lora_" not in name}

    monkeypatch.setattr(correctness, "merged_state_dict", unmerged)
    correctness.lora(context)
    assert failures(context, "merged weights differ")


@pytest.mark.parametrize("kind", [Kind("tiny", "float64", "float32"), Kind("tiny", "float32", "bfloat16")])
def test_gradients_without_a_micro_batch_fail(context: StageContext, kind: Kind) -> None:
    gradients = {"weight": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    alone = {"gradients": gradients, "losses": [0.3, 0.2], "peak_memory_gb": None}
    _compare(context, "equal", kind, alone, copy.deepcopy(alone))
    assert not context.failures
    missing = {**alone, "gradients": {"weight": gradients["weight"] * 0.75}}
    _compare(context, "missing", kind, alone, missing)
    assert failures(context, "missing: gradients differ")
    _compare(context, "loss", kind, alone, {**alone, "losses": [0.3, 0.15]})
    assert failures(context, "loss: losses differ")
