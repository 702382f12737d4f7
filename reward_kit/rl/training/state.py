"""Everything that a training run goes on from, in a checkpoint and out of it again, bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from reward_kit.errors import ConfigError
from reward_kit.rl.checkpoint import (
    Checkpoint,
    latest,
    load_checkpoint,
    prune,
    random_states,
    restore_random_states,
    save_checkpoint,
)
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.rl.training.pipelines import Pipeline


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        updates: that are done.
        metrics_size: bytes of `metrics.jsonl` that belong to them.
        best: the highest value of the metric that decides which checkpoint is the best; None before there is one.
        best_update: when it was reached.
        last: the latest value of that metric.
        streak: how often in a row the early stop's target was reached.
        worked_s: seconds of work.
        totals: episodes, environment steps and sampled tokens.
    """

    updates: int = 0
    metrics_size: int = 0
    best: float | None = None
    best_update: int | None = None
    last: float | None = None
    streak: int = 0
    worked_s: float = 0.0
    totals: dict[str, int] = field(default_factory=dict)


def save_state(folder: Path, pipeline: Pipeline, progress: Progress, score: float | None, keep: int) -> Path:
    """Write a checkpoint, and remove those that are not kept.

    Args:
        folder: the checkpoints of the run.
        pipeline: what trains.
        progress: how far it is.
        score: how good the weights are by the metric that decides which are the best; None where it is not known.
        keep: how many of the latest stay; the best one stays besides.

    Raises:
        StoreError: it cannot be written; the ones before it stand.
    """
    trainer = pipeline.trainer
    manager = trainer.reward_manager
    state = {
        "learner": trainer.learner.state_dict(),
        # As text: episodes hold whatever their worlds gave them.
        "pipeline": json.dumps(pipeline.state_dict()),
        "version": trainer.version,
        "reward_manager": manager.state_dict() if isinstance(manager, EpisodeRewardManager) else None,
        "random": random_states(),
        "progress": asdict(progress),
    }
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    path = save_checkpoint(folder, progress.updates, state, score=score, facts=facts)
    prune(folder, keep=keep)
    return path


def latest_state(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None where there is none."""
    found = latest(folder)
    return load_checkpoint(found.path) if found.path is not None else None


async def restore_state(checkpoint: Checkpoint, pipeline: Pipeline) -> Progress:
    """Go on from a checkpoint, before the first step.

    Returns:
        How far it is.

    Raises:
        ConfigError: it is of another model or another optimizer.
    """
    state: dict[str, Any] = checkpoint.state
    trainer = pipeline.trainer
    try:
        trainer.learner.load_state_dict(state["learner"])
    except (ConfigError, RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(f"{checkpoint.path} does not fit the policy or the optimizer: {error}") from error
    pipeline.load_state_dict(json.loads(state["pipeline"]))
    trainer.version = state["version"]
    if isinstance(trainer.reward_manager, EpisodeRewardManager):
        trainer.reward_manager.load_state_dict(state["reward_manager"])
    progress = Progress(**state["progress"])
    trainer.meter.totals.update(progress.totals)
    restore_random_states(state["random"])
    await trainer.policy.publish(trainer.version)
    return progress


def threads_differ(checkpoint: Checkpoint) -> str:
    """Why what follows will not be equal to the last bit to what an unbroken run gives; "" where it will."""
    before, now = checkpoint.facts, {"threads": torch.get_num_threads(), "torch": torch.__version__}
    told = [f"{name} {before.get(name)} then, {value} now" for name, value in now.items() if before.get(name) != value]
    return ", ".join(told)
