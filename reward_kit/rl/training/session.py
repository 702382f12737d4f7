"""A training run: its updates, evaluations, checkpoints and figures."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_kit.agent.policies.hf.model import merged_model, remember
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.blocking import allow_threads
from reward_kit.display_text import pluralize
from reward_kit.errors import TrainingError
from reward_kit.private_files import make_private_folder
from reward_kit.rl.checkpoint import load_latest
from reward_kit.rl.training.figures import Figures, UpdateRecorder, prefixed
from reward_kit.rl.training.logs import Logs, TrainingDisplay
from reward_kit.rl.training.pipelines import Progress, restore_state, save_state, why_not_reproducible
from reward_kit.rl.training.plan import TrainingPlan
from reward_kit.rl.training.resume import stored_config
from reward_kit.rl.training.setup import Components, Factories, open_components, use_threads
from reward_kit.runs import events
from reward_kit.runs.files import episodes_file, report_store_errors, write_atomically
from reward_kit.runs.plan import INTERRUPTED, Control, Interruptible
from reward_kit.runs.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The outcome of a run: its directory, its status ("complete" or "interrupted"), and its summary.

    The summary is the content of `summary.json`. If the run was stopped during an update, the summary contains only
    `updates` and `stopped`.
    """

    path: Path
    status: str
    summary: dict[str, Any]


async def run_training(
    plan: TrainingPlan,
    folder: RunFolder,
    display: TrainingDisplay,
    interruptible: Interruptible,
    factories: Factories | None = None,
) -> TrainingOutcome:
    """Train a policy. If the directory contains checkpoints, continue from the latest one.

    Args:
        plan: the training plan.
        folder: the open run directory.
        display: the progress display.
        interruptible: a context manager in which the user can stop the run.
        factories: the functions that create components in other processes. By default, all components are in this
            process.

    Raises:
        RewardKitError: If training cannot continue. The last checkpoint is kept.
    """
    use_threads(plan.config.threads)
    allow_threads(plan.config.rollout.samples_per_update * plan.config.rollout.group_size)
    control = Control()

    def note_end(status: str) -> int:
        """Record the status, and return the number of updates that a resumed run would not repeat."""
        updates = int((folder.header.training or {}).get("updates", 0))
        folder.update_status(status=status, worked_s=folder.header.timing.worked_s, training={"updates": updates})
        return updates

    try:
        async with interruptible(control):
            with control.scope:
                checkpoint = load_latest(folder.checkpoints)
                async with open_components(plan, folder.path, display.say, factories or Factories()) as components:
                    progress = Progress()
                    if checkpoint is not None:
                        progress = await restore_state(checkpoint, components.pipeline)
                        display.begin_at(progress)
                        if difference := why_not_reproducible(checkpoint, components.pipeline):
                            display.say(
                                "resuming, but the results will not be bitwise identical to those of an "
                                f"uninterrupted run: {difference}"
                            )
                    config, first, size = stored_config(plan), progress.updates + 1, progress.metrics_size
                    with Logs(folder.path, plan.config.logs, config, first=first, metrics_size=size) as logs:
                        session = _Session(plan, components, folder, logs, control, display, progress)
                        with _rare_garbage_collection():
                            status = await session.run(resumed=checkpoint is not None)
                summary = session.summary()
                folder.write_summary(summary)
                return TrainingOutcome(folder.path, status, summary)
    except BaseException:
        with report_store_errors():  # a full disk must not hide the original error
            note_end("failed")
        raise
    # This is reached only if the control has cancelled its scope.
    return TrainingOutcome(folder.path, INTERRUPTED, {"updates": note_end(INTERRUPTED), "stopped": control.stop_reason})


class _Session:
    """The loop over the updates of a run."""

    def __init__(
        self,
        plan: TrainingPlan,
        components: Components,
        folder: RunFolder,
        logs: Logs,
        control: Control,
        display: TrainingDisplay,
        progress: Progress,
    ) -> None:
        self.progress = progress
        self.why_stopped: str | None = None
        self._plan, self._config, self._folder, self._logs = plan, plan.config, folder, logs
        self._components, self._pipeline, self._trainer = components, components.pipeline, components.pipeline.trainer
        self._control, self._display = control, display
        self._saved_at = -1
        self._measured: float | None = None
        self._idle = 0  # the number of updates that had nothing to learn from
        self._began = time.perf_counter() - progress.worked_s
        self._cpu_began = _cpu_s() - progress.cpu_s

    async def run(self, *, resumed: bool) -> str:
        """Train, and return "complete" or "interrupted".

        Raises:
            TrainingError: If a loss or a gradient is not finite, or no episode in a batch could be scored.
        """
        progress, config = self.progress, self._config
        self._saved_at = progress.updates if resumed else -1
        self._note("running")
        if progress.best_update == progress.updates > 0:  # a killed process may not have written them
            save_weights(self._folder.path / "model", self._components.policy)
        if progress.streak_of != self._target():
            progress.streak, progress.streak_of = 0, self._target()
        if self._has_reached_target():
            self.why_stopped = f"the target of early_stop was reached at update {progress.updates}"
        if progress.updates == 0 and self._components.evaluation is not None:
            self._log(await self._evaluate())
        while not self._is_finished() and self.why_stopped is None:
            before = progress.env_steps
            figures = await self._update(progress.updates + 1)
            progress.updates += 1
            self._report_idle(figures)
            if (evaluation := config.evaluation) is not None and (
                self._is_finished() or evaluation.is_due(progress.updates, before, progress.env_steps)
            ):
                figures |= await self._evaluate()
            if (target := config.early_stop) is not None and target.metric in figures:
                progress.streak = progress.streak + 1 if figures[target.metric] >= target.at_least else 0
                if self._has_reached_target():
                    self.why_stopped = f"{target.metric} is {figures[target.metric]:.3f}, at least {target.at_least:g}"
            self._log(figures)
            if progress.updates % config.checkpoints.every == 0:
                self._save()
            if self._control.stop_reason:
                self.why_stopped = self._control.stop_reason
        if self._idle > 1:
            self._display.say(f"{pluralize(self._idle, 'update')} had nothing to learn from")
        self._save()
        # A stop during the last update has no effect.
        is_cut = self.why_stopped == self._control.stop_reason is not None and not self._is_finished()
        status = INTERRUPTED if is_cut else "complete"
        self._note(status)
        return status

    def _is_finished(self) -> bool:
        """Return whether training has reached its limit. A batch that was rolled out ahead is still trained on."""
        env_steps = 0 if self._pipeline.has_waiting_batch else self.progress.env_steps
        return self._config.is_finished(self.progress.updates, env_steps)

    def _target(self) -> dict[str, Any] | None:
        return target.model_dump() if (target := self._config.early_stop) is not None else None

    def _has_reached_target(self) -> bool:
        target = self._config.early_stop
        return target is not None and self.progress.streak >= target.times

    async def _update(self, number: int) -> Figures:
        """Perform one update, and return its figures."""
        trainer, began = self._trainer, time.perf_counter()
        before, totals = Counter(trainer.meter.totals), trainer.meter.totals
        every = self._config.logs.episodes_every
        trainer.kept = UpdateRecorder() if every is not None and number % every == 0 else None
        if self._config.max_env_steps is not None:
            trainer.progress = min(before["env_steps"] / self._config.max_env_steps, 1.0)
        diagnostics = await self._pipeline.step(more=not self._config.is_finished(number, before["env_steps"]))
        seconds = time.perf_counter() - began
        if trainer.kept is not None:
            file = episodes_file(self._folder.path, number)
            make_private_folder(file.parent, exist_ok=True)
            redaction = self._plan.redaction
            write_atomically(file, [trainer.kept.line(episode, redaction) for episode in trainer.meter.episodes])
        figures = prefixed("learner", diagnostics) | trainer.meter.take()
        if figures.get("episode/count") and "score/mean" not in figures:
            # Nothing can be learned from this batch, and the cause probably affects the next batches too.
            failed = {name: count for name, count in figures.items() if "score/failed/" in name}
            reasons = ", ".join(f"{count:.0f} {name.rpartition('/')[2]}" for name, count in failed.items())
            raise TrainingError(
                f"update {number}: no episode in the batch could be scored ({reasons or 'the reason is unknown'})"
            )
        self.progress.totals = dict(totals)
        done = {name: totals[name] - before[name] for name in ("env_steps", "sampled_tokens", "episodes")}
        figures |= {f"progress/{name}": float(totals[name]) for name in done}
        figures |= {f"speed/{name}_per_s": count / seconds for name, count in done.items()}
        figures |= {
            "speed/trained_tokens_per_s": diagnostics.get("tokens", 0.0) / seconds,
            "progress/version": float(trainer.version),
            "progress/epoch": self._pipeline.stream.epoch,
            "time/total_s": seconds,
            "time/worked_s": self._worked_s(),
            "time/cpu_s": _cpu_s() - self._cpu_began,
        }
        return figures | self._components.reward_agent.stats.metrics()

    def _report_idle(self, figures: Figures) -> None:
        """Count updates with nothing to learn from, and report the first one."""
        has_tokens = figures.get("learner/tokens") != 0.0
        if has_tokens and figures.get("credit/zero_advantage_share") != 1.0:
            return
        self._idle += 1
        if self._idle == 1:
            why = "all advantages are zero, for example because the scores of each group are equal"
            if figures.get("groups/kept") == 0.0:
                why = "dynamic_sampling dropped all groups, see groups/dropped in metrics.jsonl"
            elif not has_tokens:
                why = "no sampled token is in the loss; run.log has the reason"
            self._display.say(f"update {self.progress.updates}: nothing to learn from: {why}")

    async def _evaluate(self) -> Figures:
        assert self._components.evaluation is not None
        began = time.perf_counter()
        figures = await self._components.evaluation.measure()
        return figures | {"time/evaluate_s": time.perf_counter() - began}

    def _log(self, figures: Figures) -> None:
        """Write the figures. Save the weights if they are the best so far."""
        progress = self.progress
        self._logs.write(progress.updates, figures)
        progress.metrics_size = self._logs.metrics.size
        progress.worked_s, progress.cpu_s = self._worked_s(), _cpu_s() - self._cpu_began
        value = self._measured = figures.get(self._config.best_by)
        if value is not None:
            progress.last = value
            # On a tie, the earlier update counts as the best, unless it is the untrained policy.
            is_tie_with_start = progress.best_update == 0 and value == progress.best
            if progress.best is None or value > progress.best or is_tie_with_start:
                progress.best, progress.best_update = value, progress.updates
                if progress.updates:
                    self._save()
                    save_weights(self._folder.path / "model", self._components.policy)
        self._display.updated(figures, progress)
        events.updated(progress.updates, figures)

    def _save(self) -> None:
        """Write a checkpoint unless this update already has one."""
        if self._saved_at == self.progress.updates:
            return
        keep = self._config.checkpoints.keep
        save_state(self._folder.checkpoints, self._pipeline, self.progress, self._measured, keep)
        self._saved_at = self.progress.updates
        self._note("running")

    def _note(self, status: str) -> None:
        training = {"updates": self.progress.updates, "env_steps": self.progress.env_steps}
        self._folder.update_status(status=status, worked_s=self._worked_s(), training=training)

    def _worked_s(self) -> float:
        return time.perf_counter() - self._began

    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        progress = self.progress
        return {
            "updates": progress.updates,
            "stopped": self.why_stopped,
            "metric": self._config.best_by,
            "best": progress.best,
            "best_update": progress.best_update,
            "last": progress.last,
            "totals": progress.totals,
            "worked_s": round(progress.worked_s, 3),
            "cpu_s": round(progress.cpu_s, 3),
            "policies": [
                {"policy": "best", "score": None if progress.best is None else {"mean": progress.best}},
                {"policy": "last", "score": None if progress.last is None else {"mean": progress.last}},
            ],
        }


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely, and without scanning the modules and weights that exist at the start.

    An update creates so many objects that the collections would otherwise take a quarter of its CPU time.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended."""
    return sum(os.times()[:4])


def save_weights(folder: Path, policy: AgentPolicy) -> bool:
    """Write a policy's model and tokenizer in a format that other programs can load. Adapters are merged.

    Returns:
        True if the policy is a `transformers` model. For any other policy, nothing is written, and the result is False.

    Raises:
        StoreError: If the model cannot be written.
    """
    if "transformers" not in sys.modules:  # If transformers is not imported, the policy is not one of its models.
        return False
    from transformers import PreTrainedModel

    from reward_kit.rl.model_kit.models import save_model

    module: Any = getattr(policy, "module", None)
    model = getattr(module, "policy", module)  # a `PolicyWithValue` contains the model and its head
    if not isinstance(model, PreTrainedModel):
        return False
    tokenizer: Any = getattr(policy, "tokenizer", None)
    if tokenizer is not None:
        remember(tokenizer, **getattr(policy, "taught", {}))
    save_model(folder, merged_model(model), tokenizer, is_private=True)
    return True
