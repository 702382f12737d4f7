"""A train file on disk with a policy small enough to train in a test, and in-process runs of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import TrainingPlan, load_plan
from reward_kit.rl.training.resume import new_run_header
from reward_kit.rl.training.session import TrainingOutcome, run_training
from reward_kit.rl.training.setup import Factories
from reward_kit.runs.plan import Control
from reward_kit.runs.run_folder import RunFolder

REWARD = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def walked(messages: list[Message], environment_return: float, assistant_turns: list[int]) -> EvaluateResult:
    return EvaluateResult(score=environment_return + len(assistant_turns) / 100)

@reward_function
def broken(messages: list[Message]) -> EvaluateResult:
    raise ValueError("no score")
"""

TRAIN: dict[str, Any] = {
    "name": "tiny-lake",
    "task": {
        "name": "lake",
        "resource_type": "gymnasium",
        "base_resource_config": {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
        "dataset_path": "lakes.jsonl",
        "max_episode_steps": 5,
        "reward_function_path": "reward.py:walked",
    },
    "policy": {"type": "policy.py:TinyPolicy", "seed": 1},
    "updates": 2,
    "threads": 1,
    "rollout": {"samples_per_update": 2, "group_size": 2},
    "credit": {"estimator": "gigpo", "step_rewards": "environment"},
    "ppo": {"lr": 0.01, "epochs": 2, "minibatches": 2},
    "evaluation": {"hold_out": 1, "every": 2},
}


def lake_folder(folder: Path, **changes: Any) -> Path:
    """Write `train.yaml` and its files into a folder; `changes` override keys, and None removes them."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "policy.py").write_text((Path(__file__).parents[2] / "tiny_policy.py").read_text())
    (folder / "lakes.jsonl").write_text("".join(json.dumps({"id": name}) + "\n" for name in "abcd"))
    data = {key: value for key, value in {**TRAIN, **changes}.items() if value is not None}
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


@asynccontextmanager
async def uninterrupted(control: Control, display: TrainingDisplay) -> AsyncIterator[None]:
    """Run without a stop request."""
    yield


def interrupted_after(updates: int) -> Callable[[Control, TrainingDisplay], Any]:
    """Simulate Ctrl-C during the update after this many."""

    @asynccontextmanager
    async def stop(control: Control, display: TrainingDisplay) -> AsyncIterator[None]:
        told = display.updated

        def updated(figures: Any, progress: Any) -> None:
            told(figures, progress)
            if progress.updates == updates:
                control.finish("interrupted")

        display.updated = updated  # type: ignore[method-assign]
        yield

    return stop


async def train(
    plan: TrainingPlan, run: Path, interruptible: Any = uninterrupted, factories: Factories | None = None
) -> TrainingOutcome:
    """Train into the folder `run`, and resume the run there if one exists."""
    display = TrainingDisplay("none", plan.config)
    with _opened(plan, run) as folder:
        return await run_training(plan, folder, display, lambda control: interruptible(control, display), factories)


def _opened(plan: TrainingPlan, run: Path) -> RunFolder:
    if run.exists():
        return RunFolder(run, plan.redaction)
    return RunFolder.create(run, new_run_header(run.name, plan), plan.redaction)


async def trained(path: Path, run: Path, **overrides: Any) -> TrainingOutcome:
    """Train the file with overrides; `__` in a name stands for a dot."""
    return await train(load_plan(path, {key.replace("__", "."): value for key, value in overrides.items()}), run)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the latest checkpoint."""
    from reward_kit.rl.checkpoint import load_latest

    checkpoint = load_latest(run / "checkpoints")
    assert checkpoint is not None
    weights: dict[str, torch.Tensor] = checkpoint.state["learner"]["module"]
    return weights


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether all weights are bit-equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
