"""A training run from its folder to its end: what `reward-kit train` does once everything is checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread

from reward_kit.rl.training.display import TrainingDisplay
from reward_kit.rl.training.garbage import rare_garbage_collection
from reward_kit.rl.training.logs import Logs
from reward_kit.rl.training.plan import TrainingPlan
from reward_kit.rl.training.run_folder import RunFolder, stored_config
from reward_kit.rl.training.session import INTERRUPTED, TrainingSession
from reward_kit.rl.training.setup import Makers, equipped, use_threads
from reward_kit.rl.training.state import Progress, latest_state, restore_state, threads_differ
from reward_kit.runs.plan import Control

Interruptible = Callable[[Control, TrainingDisplay], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: "complete" or "interrupted".
        summary: what came of it, as in `summary.json`.
    """

    status: str
    summary: dict[str, Any]


async def carry_out(
    plan: TrainingPlan,
    folder: RunFolder,
    display: TrainingDisplay,
    interruptible: Interruptible,
    makers: Makers | None = None,
) -> Outcome:
    """Train; where the folder has checkpoints, go on from the latest.

    Args:
        plan: what is trained.
        folder: of the run, open.
        display: shows how it goes.
        interruptible: lets the user stop it, while its block runs.
        makers: of what is not in this process; by default everything is.

    Raises:
        RewardKitError: it cannot go on; what was reached until the last checkpoint is kept.
    """
    use_threads(plan.config.threads)
    # Episodes in flight may each wait in a thread, in their worlds or their tools, and so may each reward.
    rollout = plan.config.rollout
    threads = anyio.to_thread.current_default_thread_limiter()
    threads.total_tokens = max(threads.total_tokens, 3 * rollout.samples_per_update * rollout.group_size + 64)
    control = Control()
    try:
        async with interruptible(control, display):
            with control.scope:
                return await _train(plan, folder, display, control, makers)
    except BaseException:
        updates, worked_s = _reached(folder)
        folder.note(status="failed", updates=updates, worked_s=worked_s)
        raise
    updates, worked_s = _reached(folder)
    folder.note(status=INTERRUPTED, updates=updates, worked_s=worked_s)
    return Outcome(INTERRUPTED, {"updates": updates, "stopped": control.stop_reason})


def _reached(folder: RunFolder) -> tuple[int, float]:
    """The updates that a resume would not make again, and the seconds of work so far."""
    training = folder.header.training or {}
    return int(training.get("updates", 0)), folder.header.timing.worked_s


async def _train(
    plan: TrainingPlan, folder: RunFolder, display: TrainingDisplay, control: Control, makers: Makers | None
) -> Outcome:
    checkpoint = latest_state(folder.checkpoints)
    async with equipped(plan, folder.path, display.say, makers) as equipment:
        progress: Progress | None = None
        if checkpoint is not None:
            progress = await restore_state(checkpoint, equipment.pipeline)
            display.begin_at(progress.updates)
            if told := threads_differ(checkpoint):
                display.say(f"going on, but not equal to the last bit to an unbroken run: {told}")
        async with _logs(plan, folder, progress) as logs:
            session = TrainingSession(
                plan, equipment, folder, logs, control=control, watcher=display, progress=progress
            )
            with rare_garbage_collection():
                status = await session.run()
    summary = session.summary()
    folder.write_summary(summary)
    return Outcome(status, summary)


@asynccontextmanager
async def _logs(plan: TrainingPlan, folder: RunFolder, progress: Progress | None) -> AsyncIterator[Logs]:
    done = progress or Progress()
    config = stored_config(plan)
    with Logs(folder.path, plan.config.logs, config, first=done.updates + 1, metrics_size=done.metrics_size) as logs:
        yield logs
