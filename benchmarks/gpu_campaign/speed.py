"""The stages about the speed of training: updates of models of two sizes, attention kernels, and compilation."""

from __future__ import annotations

import gc
import importlib
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.gpu_campaign.context import StageContext
from benchmarks.gpu_campaign.models import (
    SHAPES,
    Shape,
    epsilon,
    is_importable,
    matmul_rate,
    parameters,
    peak_memory_gb,
    qwen2,
    random_rows,
    reset_peak_memory,
    timed,
)
from reward_kit.rl.learner.attention import BY_ROW, VARLEN, attention_name
from reward_kit.rl.learner.config import OffPolicyLimits, PPOConfig
from reward_kit.rl.learner.training_rows import TrainingRows
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 2
PROMPT = 20
"""The number of tokens that TRL receives as prompts; no action begins before."""


class Case(NamedTuple):
    """A model, a number of rows and their maximum length, and options of the learner."""

    shape: str
    rows: int
    length: int
    has_checkpointing: bool = False
    is_packed: bool = False

    @property
    def label(self) -> str:
        """The beginning of the names of the figures."""
        options = {"checkpointing": self.has_checkpointing, "packed": self.is_packed}
        return "_".join([self.shape, str(self.length), *(name for name, is_set in options.items() if is_set)])


CASES = {
    "full": [
        Case("0.5B", 16, 2048),
        Case("0.5B", 16, 2048, is_packed=True),
        Case("0.5B", 16, 2048, has_checkpointing=True),
        Case("0.5B", 4, 8192),
        Case("0.5B", 4, 8192, has_checkpointing=True, is_packed=True),
        Case("1.5B", 16, 2048),
        Case("1.5B", 4, 8192, has_checkpointing=True, is_packed=True),
    ],
    "tiny": [
        Case("tiny", 4, 128),
        Case("tiny", 4, 128, is_packed=True),
        Case("tiny", 4, 128, has_checkpointing=True, is_packed=True),
    ],
}


def ppo_step(context: StageContext) -> None:
    """Measure updates: tokens/s, the share of the matrix product rate, and memory; and TRL's for the first case."""
    device = context.device
    side, dtype = (8192, torch.bfloat16) if context.is_full else (256, torch.float32)
    rate = matmul_rate(device, dtype, side)
    context.record(matmul_tflops=rate / 1e12)
    for index, case in enumerate(CASES[context.size]):
        rows = random_rows(case.rows, case.length, SHAPES[case.shape].vocabulary)
        try:
            tokens_per_s = _our_update(context, case, rows, rate)
        except torch.OutOfMemoryError:
            context.record(**{f"{case.label}_tokens_per_s": "out of memory"})
            context.check(False, f"{case.label}: out of memory")
            continue
        finally:
            gc.collect()
        if index == 0:
            try:
                _trl_update(context, case, rows, tokens_per_s)
            except torch.OutOfMemoryError:
                context.record(**{f"{case.label}_trl_tokens_per_s": "out of memory"})


def _our_update(context: StageContext, case: Case, rows: TokenBatch, rate: float) -> float:
    device, shape = context.device, SHAPES[case.shape]
    reset_peak_memory(device)
    model = qwen2(shape, device)
    config = PPOConfig(
        lr=1e-8,
        precision="bfloat16" if context.is_full else None,
        gradient_checkpointing=case.has_checkpointing,
        packed=case.is_packed,
        limits=OffPolicyLimits(logprob_gap_mean=None),  # the rows were not sampled by this model
    )
    learner = PPOLearner(model, config, device=device)
    figures: dict[str, float] = {}

    def update() -> None:
        figures.update(learner.update(rows, version=0))

    seconds = timed(update, device, ROUNDS)
    flat = TrainingRows.of(rows)
    tokens = int(flat.lengths_B.sum())
    work = flops(shape, model, flat)
    context.check(
        np.isfinite(figures["loss"]) and figures["grad_norm"] > 0, f"{case.label}: the loss is {figures['loss']}"
    )
    context.record(
        **{
            f"{case.label}_tokens_per_s": tokens / seconds,
            f"{case.label}_share_of_matmul_rate": work / seconds / rate,
            f"{case.label}_peak_memory_gb": peak_memory_gb(device),
            f"{case.label}_padding": figures["padding_share"],
        }
    )
    if case.is_packed:
        name = attention_name(learner.module)
        context.record(**{f"{case.label}_attention": name})
        context.check(learner._model.is_packed, f"{case.label}: the rows are padded; see the log")
        expected = VARLEN if context.device == "cuda" and context.is_full else BY_ROW
        context.check(name == expected, f"{case.label}: attention is {name} instead of {expected}; see the log")
    return tokens / seconds


def flops(shape: Shape, model: Qwen2ForCausalLM, flat: TrainingRows) -> float:
    """Return the operations of a forward and backward pass: 6 for each weight and token, and those of attention.

    The head only computes the tokens in the loss. Recomputed activations do not count.
    """
    body = parameters(model) - shape.vocabulary * shape.width * (1 if shape.is_tied else 2)
    tokens, head = int(flat.lengths_B.sum()), shape.vocabulary * shape.width * flat.count
    attention = shape.layers * shape.width * float((flat.lengths_B.astype(np.float64) ** 2).sum())
    return 6.0 * body * tokens + 6.0 * head + 6.0 * attention


def _trl_update(context: StageContext, case: Case, rows: TokenBatch, ours: float) -> None:
    """Measure an optimizer step of TRL's `GRPOTrainer` on the same rows, in the same micro-batches."""
    if not is_importable("trl"):
        context.skip_part("trl", "not installed")
        return
    sys.path.insert(0, str(ROOT / "tests" / "integrations" / "learners"))
    trl_training = importlib.import_module("trl_training")
    device, shape, folder = context.device, SHAPES[case.shape], str(context.work / "trl")
    model = qwen2(shape, device)
    flat = TrainingRows.of(rows)
    learner = PPOLearner(model, PPOConfig(lr=1e-8), device=device)
    parts = learner._context.split(flat, np.flatnonzero(flat.counts_B))
    model.save_pretrained(folder)
    trl_training.save_tokenizer(folder, shape.vocabulary)
    del model, learner
    reset_peak_memory(device)
    trainer = trl_training.make_trainer(
        folder,
        use_cpu=device == "cpu",
        bf16=context.is_full,
        max_completion_length=case.length,
        loss_type="dapo",
        learning_rate=1e-8,
        max_grad_norm=1.0,
        gradient_accumulation_steps=len(parts),
        steps_per_generation=len(parts),
    )
    inputs = [trl_inputs(rows, part, flat.count, device) for part in parts]
    seconds = timed(lambda: trl_training.optimizer_step(trainer, inputs), device, ROUNDS)
    tokens_per_s = int(flat.lengths_B.sum()) / seconds
    context.record(
        **{
            f"{case.label}_trl_tokens_per_s": tokens_per_s,
            f"{case.label}_trl_peak_memory_gb": peak_memory_gb(device),
            f"{case.label}_ratio_to_trl": ours / tokens_per_s,
        }
    )


def trl_inputs(rows: TokenBatch, chosen: Any, loss_tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Return rows as `GRPOTrainer` has them after its rollouts."""
    part = rows[chosen].trim()
    tensors = {key: torch.from_numpy(values).to(device) for key, values in part.batch.items()}
    ids, mask = tensors["input_ids"].long(), tensors["attention_mask"].long()
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": mask[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask[:, PROMPT:],
        "tool_mask": torch.where(mask == 0, 1, tensors["action_mask"].long())[:, PROMPT:],
        "advantages": tensors["advantages"][:, PROMPT:].float(),
        "old_per_token_logps": tensors["logprobs"][:, PROMPT:].float(),
        "num_items_in_batch": torch.tensor(loss_tokens, device=device),
    }


def compile(context: StageContext) -> None:  # noqa: A001 - the name of the stage
    """Compare results and speed with other attention, with packed rows, and with `ppo.compile`."""
    shape = SHAPES["0.5B" if context.is_full else "tiny"]
    rows = random_rows(4, 2048 if context.is_full else 64, shape.vocabulary)
    expected, seconds = _gradients(context, shape, rows)
    context.record(seconds=seconds)
    switches: dict[str, dict[str, Any]] = {
        "eager": {"attention": "eager"},
        "flash_attention_2": {"attention": "flash_attention_2"},
        "flash_attention_2_packed": {"attention": "flash_attention_2", "packed": True},
        "packed": {"packed": True},
        "compiled": {"compile": True},
        "compiled_packed": {"compile": True, "packed": True},
    }
    for label, options in switches.items():
        if "flash" in label and not is_importable("flash_attn"):
            context.skip_part(label, "flash_attn is not installed")
            continue
        began = time.perf_counter()
        found, seconds = _gradients(context, shape, rows, **options)
        context.record(**{f"{label}_seconds": seconds, f"{label}_with_start_s": time.perf_counter() - began})
        _check_close(context, label, shape, expected, found)


def _gradients(
    context: StageContext, shape: Shape, rows: TokenBatch, **options: Any
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradients of a batch, and the seconds that they take."""
    config = PPOConfig(precision="bfloat16" if context.is_full else "float32", **options)
    learner = PPOLearner(qwen2(shape, context.device), config, device=context.device)
    if config.compile:
        layers = [one for one in learner.module.modules() if getattr(one, "_compiled_call_impl", None) is not None]
        context.record(compiled_layers=len(layers))
        context.check(len(layers) == shape.layers - 1, "the layers were not compiled; see the log")
    if config.attention:
        name = attention_name(learner.module)
        context.check(name == config.attention, f"{name} was used instead of {config.attention}; see the log")
    context.check(learner._model.is_packed == config.packed, "the rows were not packed; see the log")
    seconds = timed(lambda: learner.gradients(rows), context.device, ROUNDS)
    return {name: one.grad for name, one in learner.module.named_parameters() if one.grad is not None}, seconds


def _check_close(
    context: StageContext, label: str, shape: Shape, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    """Compare gradients as in the stage `fsdp2`: by the independent roundings of eight operations in each layer."""
    dtype = torch.bfloat16 if context.is_full else torch.float32
    sums = 1.0 if context.is_full else shape.hidden**0.5  # float32 sums are rounded too
    tolerance = 4 * (8 * shape.layers) ** 0.5 * sums * epsilon(dtype) / 2
    largest = max(float(one.abs().max()) for one in expected.values())
    difference = max(float((one - found[name]).abs().max()) for name, one in expected.items()) / largest
    context.record(**{f"{label}_difference": difference, f"{label}_tolerance": tolerance})
    context.check(difference <= tolerance, f"{label}: gradients differ by {difference:.2g}")
