"""The function `train`, which is the Python equivalent of `reward-kit train`, and functions that both use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.blocking import run_blocking
from reward_kit.errors import ConfigError, requires_extra
from reward_kit.report.run_page import write_page
from reward_kit.runs import events
from reward_kit.runs.files import METRICS_FILE
from reward_kit.runs.plan import Interruptible
from reward_kit.runs.run_folder import CHECKPOINTS, RunFolder, new_run_path
from reward_kit.runs.tasks import check_resource_starts

if TYPE_CHECKING:
    from reward_kit.rl.training.logs import TrainingDisplay
    from reward_kit.rl.training.plan import TrainingPlan
    from reward_kit.rl.training.session import TrainingOutcome
    from reward_kit.rl.training.setup import Factories


def train(
    config: str | Path, *, overrides: Mapping[str, Any] | None = None, log_dir: str | Path = "runs"
) -> TrainingOutcome:
    """Train a policy as described in a train file, and return the new run.

    This call blocks, even inside a running event loop.

    The run has the same files as a run of `reward-kit train`. Resume it with `reward-kit train --resume RUN`. Code that
    the train file refers to runs without a trust prompt.

    Args:
        config: the train file.
        overrides: values that replace values in the file. Nested keys are dotted, as in `{"ppo.lr": 1e-4}`, and
            `task.KEY` refers to a key of the task.
        log_dir: the directory in which the run directory is created.

    Raises:
        ConfigError: If the train file or an override is invalid, or the `train` extra is not installed.
        RewardKitError: If training fails. Everything up to the last checkpoint is kept.
    """
    with requires_extra("train", "train"):
        from reward_kit.rl.training.logs import TrainingDisplay
        from reward_kit.rl.training.plan import check_policy, load_plan
        from reward_kit.rl.training.session import run_training  # noqa: F401  # needs PyTorch
    plan = load_plan(Path(config), dict(overrides or {}))
    check_policy(plan)
    check_resources(plan)
    display = TrainingDisplay("none", plan.config)
    path = create_run(plan, Path(log_dir))
    return train_into(path, plan, display, lambda control: nullcontext(), is_new=True, on_end=write_page)


def check_resources(plan: TrainingPlan) -> None:
    """Create and reset the resources of the training task and the held-out task once."""
    run_blocking(check_resource_starts(plan.task, plan.samples))
    if (held_out := plan.held_out) is not None:
        run_blocking(check_resource_starts(held_out.task, held_out.samples))


def create_run(plan: TrainingPlan, log_dir: Path) -> Path:
    """Create the directory for a new run, including `run.json`."""
    from reward_kit.rl.training.resume import new_run_header

    path = new_run_path(log_dir, plan.name)
    RunFolder.create(path, new_run_header(path.name, plan), plan.redaction)
    return path


def train_into(
    path: Path,
    plan: TrainingPlan,
    display: TrainingDisplay,
    interruptible: Interruptible,
    *,
    factories: Factories | None = None,
    is_new: bool,
    on_end: Callable[[Path], object],
) -> TrainingOutcome:
    """Train in a run directory.

    If a new run is rejected after weights or resources have been loaded, its directory is removed.

    Args:
        path: the run directory, which either was returned by `create_run` or belongs to a run to resume.
        plan: the plan for the run.
        display: the progress display.
        interruptible: a context manager in which the user can stop the run.
        factories: the functions that create components in other processes.
        is_new: True if the run was just created.
        on_end: a function that is called with the path if there are metrics, even if training failed.
    """
    from reward_kit.rl.training.resume import resumed_run_header
    from reward_kit.rl.training.session import run_training

    # Libraries that load and write weights would draw their own progress bars over this display.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    async def run(folder: RunFolder) -> TrainingOutcome:
        with display:
            return await run_training(plan, folder, display, interruptible, factories)

    try:
        with RunFolder(path, plan.redaction) as folder, events.run_logs(path, plan.redaction):
            if not is_new:
                folder.write_header(resumed_run_header(folder.header, plan, path))
            events.began(path, "training", plan.config.updates)
            try:
                outcome = run_blocking(run(folder))
            finally:
                if _has_metrics(path):
                    on_end(path)
            events.ended(path, "training", outcome.status)
            return outcome
    except (ConfigError, ExceptionGroup) as error:
        is_refused = isinstance(error, ConfigError) or error.subgroup(ConfigError) is not None
        if is_refused and is_new and not _has_metrics(path) and not any((path / CHECKPOINTS).glob("*")):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _has_metrics(run: Path) -> bool:
    return (run / METRICS_FILE).is_file() and (run / METRICS_FILE).stat().st_size > 0
