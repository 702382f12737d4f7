"""A train file under Ray Train: `TorchTrainer(train_loop, …)` starts the processes, and they train one module together.

The first of them collects, scores and writes the run's folder, and the weights are sharded over all of them, as under
`torchrun`. Where its workers are lost, Ray Train starts others, which go on from the latest checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.integrations.ray.training import on_cluster
from reward_kit.rl.learner.sharding import ProcessGroup, open_process_group
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import TrainingPlan, check_policy, load_plan
from reward_kit.rl.training.run_folder import RunFolder, changes_since, header_of
from reward_kit.rl.training.session import Outcome, train
from reward_kit.rl.training.setup import Factories, help_to_train, sharded_by
from reward_kit.runs.plan import Control
from reward_kit.runs.run_folder import FILE, RunHeader

_KEYS = ("train_file", "run", "overrides")


def train_loop(config: Mapping[str, Any]) -> None:
    """What each worker of Ray Train does.

    Args:
        config: of `train_loop_config`: `train_file`, a path that is there on every node; `run`, the folder of the run,
            on a disk that the first worker sees wherever it is started again; `overrides`, keys laid over the file's.

    Raises:
        ConfigError: something is wrong with the file, or the folder holds a run that began otherwise.
    """
    if unknown := [key for key in config if key not in _KEYS]:
        raise ConfigError(f"train_loop_config: unknown key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    if missing := [key for key in _KEYS[:2] if key not in config]:
        raise ConfigError(f"train_loop_config: {missing[0]} is missing")
    with open_process_group() as group:
        if group is not None and not group.processes.is_first:
            help_to_train(group)
            return
        plan = load_plan(Path(config["train_file"]), config.get("overrides"))
        check_policy(plan)
        with _opened(plan, Path(config["run"])) as folder:
            anyio.run(_train, plan, folder, group)


def _opened(plan: TrainingPlan, run: Path) -> RunFolder:
    if not (run / FILE).is_file():
        return RunFolder.create(run, header_of(run.name, plan), plan.redaction)
    if refused := changes_since(RunHeader.read(run), plan, run).refused:
        raise ConfigError(f"{run} cannot go on as it began, because these changed: {', '.join(refused)}")
    return RunFolder(run, plan.redaction)


async def _train(plan: TrainingPlan, folder: RunFolder, group: ProcessGroup | None) -> Outcome:
    factories = Factories() if group is None else Factories(sharded_by(group))
    if plan.config.engine.type == "ray":
        factories = on_cluster(plan, factories)
    return await train(plan, folder, TrainingDisplay("none", plan.config.updates), _uninterrupted, factories)


@asynccontextmanager
async def _uninterrupted(control: Control, display: TrainingDisplay) -> AsyncIterator[None]:
    """Ray ends its workers itself; what they have saved is gone on from."""
    yield
