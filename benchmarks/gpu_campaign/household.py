"""The stage that trains on the household chores: success before and after, and the share of time by activity.

A model, for an accelerator of about 100M parameters, is first trained on demonstrations, in the way of the example's
warm start, and then as by `reward-kit train`: until the time is up, or, if it is tiny, for two updates.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_campaign.context import StageContext
from benchmarks.gpu_campaign.models import parameters, peak_memory_gb, reset_peak_memory
from reward_kit.rl import build_decoder, compose_embeddings, fit, save_model
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import check_policy, load_plan
from reward_kit.rl.training.train_file import check_resources, create_run, train_into
from reward_kit.runs.plan import Control

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "alfworld_household"


class WarmStart(NamedTuple):
    """The dimensions of the model, and its training on demonstrations."""

    layers: int
    width: int
    hidden: int
    heads: int
    demonstrations: int
    tokens_per_batch: int
    epochs: int


WARM_STARTS = {
    "full": WarmStart(14, 768, 2048, 12, demonstrations=12_000, tokens_per_batch=4_000, epochs=2),
    "tiny": WarmStart(1, 32, 64, 4, demonstrations=40, tokens_per_batch=1_500, epochs=1),
}
END_S = 60.0
"""The time that is kept for the last update, its evaluation and its checkpoint."""
TINY = {
    "updates": 2,
    "rollout.samples_per_update": 2,
    "rollout.group_size": 4,
    "ppo.minibatches": 2,
    "ppo.epochs": 1,
    "evaluation.limit": 4,
    "evaluation.every": 2,
    "task.max_episode_steps": 8,
    "policy.max_sessions": 8,
}
FULL = {
    "updates": 10_000,
    "threads": None,
    "ppo.lr": 2e-5,
    "ppo.lr_by_name": {},
    "ppo.schedule": "constant",
    "ppo.min_lr_share": 0.0,
    "evaluation.every": 4,
    "checkpoints.every": 1_000,
}


def household(context: StageContext) -> None:
    """Train on the household, and check that the losses are finite and the success does not fall."""
    reset_peak_memory(context.device)
    overrides = {**(FULL if context.is_full else TINY), "policy.device": context.device}
    overrides["policy.model"] = str(_warm_start(context, WARM_STARTS[context.size]))
    plan = load_plan(EXAMPLE / "train.yaml", overrides)
    check_policy(plan)
    check_resources(plan)
    path, display = create_run(plan, context.work / "runs"), TrainingDisplay("none", plan.config)
    stop_at = context.ends - END_S

    @asynccontextmanager
    async def until_time_is_up(control: Control) -> AsyncIterator[None]:
        updated = display.updated

        def look(figures: Any, progress: Any) -> None:
            updated(figures, progress)
            _record(context, [figures], f"update_{progress.updates}_score")
            if time.monotonic() > stop_at:
                control.finish("time is up")

        display.updated = look  # type: ignore[method-assign]
        yield

    train_into(path, plan, display, until_time_is_up, is_new=True, on_end=lambda run: None)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    _summarize(context, lines)


def _record(context: StageContext, lines: list[dict[str, Any]], name: str) -> None:
    for line in lines:
        if "held_out/score" in line:
            context.record(**{name: line["held_out/score"]})


def _summarize(context: StageContext, lines: list[dict[str, Any]]) -> None:
    updates = [line for line in lines if "learner/loss" in line]
    context.check(bool(updates), "no update was made")
    if not updates:
        return
    context.check(all(math.isfinite(line["learner/loss"]) for line in updates), "a loss is not finite")
    scores = [line["held_out/score"] for line in lines if "held_out/score" in line]
    total = sum(line["time/total_s"] for line in updates)
    for activity in ("collect", "update", "publish", "credit", "batch"):
        seconds = sum(line.get(f"time/{activity}_s", 0.0) for line in updates)
        context.record(**{f"{activity}_share": seconds / total})
    steady = updates[1:] or updates  # the first update allocates memory
    seconds = sum(line["time/total_s"] for line in steady)
    steps = steady[-1]["progress/env_steps"] - (updates[0]["progress/env_steps"] if steady is not updates else 0)
    gap = max(line["learner/logprob_gap_mean"] for line in updates)
    context.record(updates=len(updates), env_steps_per_s=steps / seconds, logprob_gap_mean_max=gap)
    context.record(success_before=scores[0], success_after=scores[-1], peak_memory_gb=peak_memory_gb(context.device))
    context.check(gap <= 0.1, f"the sampler's log-probabilities differ from the trainer's by {gap:.2g} on average")
    # Twice the standard error of a difference of two shares of 128 problems.
    margin = 2 * math.sqrt(2 * 0.25 / 128)
    is_kept = not context.is_full or scores[-1] >= scores[0] - margin
    context.check(is_kept, f"the success fell from {scores[0]:.2f} to {scores[-1]:.2f}")


def _warm_start(context: StageContext, size: WarmStart) -> Path:
    """Train a model on demonstrations, and return its folder."""
    example = importlib.import_module("examples.alfworld_household.make_warm_start")
    tokenizer = example.household_tokenizer()
    dimensions = {"layers": size.layers, "width": size.width, "heads": size.heads, "hidden": size.hidden}
    model = build_decoder(tokenizer, **dimensions, context=example.CONTEXT)
    compose_embeddings(model, tokenizer)
    context.record(parameters_m=parameters(model) / 1e6)
    began = time.monotonic()
    rows = example.demonstrations(tokenizer, size.demonstrations, seed=0)
    context.record(demonstrations=len(rows), demonstrations_s=time.monotonic() - began)
    began = time.monotonic()
    batches = {"max_tokens_per_batch": size.tokens_per_batch, "epochs": size.epochs}
    options = replace(example.SFT, **batches, lr=3e-4, precision="bfloat16")
    reports = fit(model, rows, options, device=context.device)
    tokens = int(rows.batch["attention_mask"].sum()) * size.epochs
    context.record(sft_loss=reports[-1].loss, sft_tokens_per_s=tokens / (time.monotonic() - began))
    folder = context.work / "warm_start"
    save_model(folder, model, tokenizer)
    return folder
