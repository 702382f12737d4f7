"""The stages that compare results of the device with the CPU's, or with themselves: losses, resume, LoRA."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_campaign.context import SkipStageError, StageContext
from benchmarks.gpu_campaign.models import (
    SHAPES,
    epsilon,
    is_importable,
    logit_error,
    parameters,
    peak_memory_gb,
    qwen2,
    random_rows,
    reset_peak_memory,
)
from reward_kit.agent.policies.hf.forward import RowModel
from reward_kit.agent.policies.hf.model import merged_state_dict
from reward_kit.rl.checkpoint import load_checkpoint, save_checkpoint
from reward_kit.rl.learner.config import LoRAOptions, OffPolicyLimits, PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.reward_manager import EpisodeRewardManager
from tests.rl.loss_cases import AGGREGATIONS, LOSSES, Case, random_case, whole_of
from tests.rl.reward_cases import WORDS, WordTokenizer, answers

TERMS = 64
"""Roundings in the gradient of a token: logarithms, exponentials, products, clips, weights, and their derivatives."""


def losses(context: StageContext) -> None:
    """Compare every loss and its gradient with float64 on the CPU, from the same rounded inputs."""
    rows, width = (256, 512) if context.is_full else (9, 6)
    for dtype in (torch.float32, torch.bfloat16):
        worst, worst_loss, worst_name = 0.0, 0.0, ""
        case = random_case(1, rows, width)
        rounded = {key: one.to(dtype) if one.is_floating_point() else one for key, one in case.items()}
        on_device = {key: one.to(context.device) for key, one in rounded.items()}
        exact = {key: one.double() if one.is_floating_point() else one for key, one in rounded.items()}
        for name in LOSSES:
            for aggregation in AGGREGATIONS:
                expected, expected_gradient = _loss_and_gradient(name, exact, aggregation)
                found, gradient = _loss_and_gradient(name, on_device, aggregation)
                # Losses are computed in float32; a bfloat16 gradient is rounded once at the end.
                tolerance = TERMS * epsilon(torch.float32) + (epsilon(dtype) / 2 if dtype == torch.bfloat16 else 0.0)
                size = float(expected_gradient.abs().max())
                error = float((gradient.double().cpu() - expected_gradient).abs().max()) / size
                count = int(case["mask"].sum())
                # The sum of n terms is off by at most n·ε/2·Σ|x|, and the terms by their own errors.
                magnitude = max(float(expected_gradient.abs().sum()), abs(expected))
                loss_error = abs(found - expected) / magnitude
                context.check(error <= tolerance, f"{name}, {aggregation}, {dtype}: gradient differs by {error:.2g}")
                is_close = loss_error <= (TERMS + count / 2) * epsilon(torch.float32)
                context.check(is_close, f"{name}, {aggregation}, {dtype}: loss differs by {loss_error:.2g}")
                worst_loss = max(worst_loss, loss_error)
                if error >= worst:
                    worst, worst_name = error, f"{name}, {aggregation}"
        short = str(dtype).removeprefix("torch.")
        context.record(**{f"{short}_gradient_error": worst, f"{short}_loss_error": worst_loss})
        context.record(**{f"{short}_worst": worst_name, f"{short}_tolerance": tolerance})
    context.record(losses=len(LOSSES) * len(AGGREGATIONS), tokens=int(random_case(1, rows, width)["mask"].sum()))
    _managers(context)


def _loss_and_gradient(name: str, case: Case, aggregation: Any) -> tuple[float, torch.Tensor]:
    leaf = case["trained"].clone().requires_grad_()
    ids = case["row_ids"]
    loss, _ = LOSSES[name](
        case | {"trained": leaf}, aggregation=aggregation, global_batch=whole_of(name, case), sequence_ids_BT=ids
    )
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad.detach()


def _managers(context: StageContext) -> None:
    """Place the same rewards with tensors on the device and on the CPU."""
    rng = np.random.default_rng(0)
    responses = [rng.integers(2, len(WORDS), size).tolist() for size in rng.integers(1, 48, 16)]
    scores, found = rng.normal(size=len(responses)), []
    for device in ("cpu", context.device):
        data = answers(responses, episode_rewards=scores)
        data.batch.update({name: tensor.to(device) for name, tensor in data.batch.items()})
        rewards = EpisodeRewardManager(WordTokenizer(), 0, normalization_type="none")(data)
        context.check(rewards.device.type == torch.device(device).type, f"rewards of {device} are on {rewards.device}")
        found.append(rewards.cpu())
    context.check(torch.equal(*found), "the reward manager places different rewards on the device")
    context.record(rewards_placed=int((found[1] != 0).sum()))
    context.check(bool(found[1].any()), "the reward manager places no reward")


def resume(context: StageContext) -> None:
    """Compare updates after a checkpoint with uninterrupted ones, bit for bit.

    Some kernels of an accelerator add in an order that differs from run to run, so two uninterrupted runs are compared
    first. With `torch.use_deterministic_algorithms`, both comparisons must be bit-equal. Without it, a resumed run may
    differ from an uninterrupted one only if two uninterrupted runs differ as well.
    """
    shape = SHAPES["small" if context.is_full else "tiny"]
    batches = [random_rows(8, 512 if context.is_full else 24, shape.vocabulary, seed) for seed in range(4)]
    limits = OffPolicyLimits(logprob_gap_mean=None)  # the rows were not sampled by this model
    options: dict[str, Any] = {
        "limits": limits,
        "lr": 1e-4,
        "minibatches": 2,
        "epochs": 2,
        "kl_coefficient": 0.05,
        "warmup": 2,
    }

    def learner(seed: int = 0, weights: int = 0) -> PPOLearner:
        model, reference = qwen2(shape, context.device, seed=weights), qwen2(shape, context.device, seed=5)
        config = PPOConfig(**options, precision="bfloat16" if context.is_full else None)
        return PPOLearner(model, config, reference=reference, seed=seed, device=context.device)

    def train(one: PPOLearner, versions: range) -> dict[str, torch.Tensor]:
        for version in versions:
            one.update(batches[version], version=version)
        return {name: value.clone() for name, value in one.module.state_dict().items()}

    def resumed() -> dict[str, torch.Tensor]:
        first = learner()
        train(first, range(2))
        path = save_checkpoint(context.work / "checkpoints", 1, first.state_dict())
        second = learner(seed=9, weights=3)
        second.load_state_dict(load_checkpoint(path).state)
        return train(second, range(2, 4))

    for is_deterministic in (True, False):
        torch.use_deterministic_algorithms(is_deterministic)
        label = "deterministic" if is_deterministic else "default"
        once, again, continued = train(learner(), range(4)), train(learner(), range(4)), resumed()
        repeats, resumes = _largest_difference(once, again), _largest_difference(once, continued)
        context.record(**{f"{label}_repeat_difference": repeats, f"{label}_resume_difference": resumes})
        if is_deterministic:
            context.check(repeats == 0, f"two deterministic runs differ by {repeats:.2g}")
            context.check(resumes == 0, f"a resumed deterministic run differs by {resumes:.2g}")
        else:
            context.check(
                resumes == 0 or repeats > 0, f"runs repeat exactly, but a resumed one differs by {resumes:.2g}"
            )


def _largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def lora(context: StageContext) -> None:
    """Train adapters, and compare the merged weights in the engine's model with the trained module.

    Raises:
        SkipStageError: If `peft` is not installed.
    """
    if not is_importable("peft"):
        raise SkipStageError("peft is not installed")
    device, shape = context.device, SHAPES["0.5B" if context.is_full else "tiny"]
    length = 1024 if context.is_full else 24
    rows = random_rows(4, length, shape.vocabulary)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    reset_peak_memory(device)
    model = qwen2(shape, device, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    limits = OffPolicyLimits(logprob_gap_mean=None)
    config = PPOConfig(lr=1e-2, lora=LoRAOptions(rank=8, alpha=16.0), kl_coefficient=0.01, limits=limits)
    learner = PPOLearner(model, config, device=device)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    context.record(trained_share=trained / parameters(model))
    metrics = [learner.update(rows, version=version) for version in range(2)]
    context.check(all(math.isfinite(one["loss"]) for one in metrics), "a loss is not finite")
    context.record(peak_memory_gb=peak_memory_gb(device))
    for name, value in model.state_dict().items():
        if (plain := name.replace(".base_layer", "")) in before:
            context.check(torch.equal(value, before[plain]), f"{plain} changed, but only adapters are trained")
    acting = qwen2(shape, device, dtype, seed=1)
    rows_of_acting = RowModel(acting, 1, 64)
    rows_of_acting.load(merged_state_dict(model))
    rows_of_acting.close()
    merged = PPOLearner(acting, PPOConfig(), device=device).logprobs(rows)
    own = learner.logprobs(rows)
    plain = PPOLearner(qwen2(shape, device, dtype), PPOConfig(), device=device).logprobs(rows)
    in_loss = rows.batch["loss_mask"] == 1
    gap, moved = np.abs(merged - own)[in_loss], np.abs(plain - own)[in_loss]
    # Merging rounds every changed weight once, so the merged model has one more rounding in each layer.
    tolerance = 2 * logit_error(dtype, shape.layers, shape.width, _logit_scale(acting, rows, device))
    context.record(logprob_gap=float(gap.max()), tolerance=tolerance, moved_by=float(moved.max()))
    context.check(float(gap.max()) <= tolerance, f"merged weights differ by {gap.max():.2g} in log-probability")
    context.check(float(moved.max()) > float(gap.max()), "training moved no log-probability")


@torch.no_grad()
def _logit_scale(model: Any, rows: Any, device: str) -> float:
    """Return the standard deviation of the logits on a row."""
    ids = torch.from_numpy(rows.batch["input_ids"][:1, :64].astype(np.int64)).to(device)
    return float(model(input_ids=ids).logits.float().std())
