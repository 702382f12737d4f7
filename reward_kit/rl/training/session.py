"""The training run: updates, evaluations, checkpoints and figures, until the last update or until it is stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from reward_kit.errors import TrainingError
from reward_kit.private_files import make_private_folder
from reward_kit.rl.training.config import TrainModel
from reward_kit.rl.training.figures import Figures, prefixed
from reward_kit.rl.training.kept import KeptUpdate
from reward_kit.rl.training.logs import Logs
from reward_kit.rl.training.plan import TrainingPlan
from reward_kit.rl.training.run_folder import RunFolder
from reward_kit.rl.training.saved_model import save_weights
from reward_kit.rl.training.setup import Equipment
from reward_kit.rl.training.state import Progress, save_state
from reward_kit.runs import events
from reward_kit.runs.files import kept_file, write_atomically
from reward_kit.runs.plan import Control

INTERRUPTED = "interrupted"


class Watcher(Protocol):
    """Who watches a training run."""

    def updated(self, update: int, figures: Mapping[str, float], progress: Progress) -> None:
        """The figures of an update; update 0 is the evaluation before the first."""


class TrainingSession:
    """Carries a plan out.

    Args:
        plan: what is trained, and for how long.
        equipment: what it is trained with.
        folder: of the run, open.
        logs: take the figures.
        control: stops it from outside: `finish` after the update at hand.
        watcher: told of every update.
        progress: how far an earlier process came.

    Attributes:
        progress: how far it is.
        why_stopped: in words, once it stopped before its last update; None else.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        equipment: Equipment,
        folder: RunFolder,
        logs: Logs,
        *,
        control: Control,
        watcher: Watcher,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.why_stopped: str | None = None
        self._plan, self._equipment, self._folder, self._logs = plan, equipment, folder, logs
        self._control, self._watcher = control, watcher
        self._saved = self.progress.updates if progress is not None else -1
        self._measured: float | None = None
        self._began = time.perf_counter() - self.progress.worked_s

    @property
    def _config(self) -> TrainModel:
        return self._plan.config

    async def run(self) -> str:
        """Train; how it ended: "complete" or "interrupted".

        Raises:
            TrainingError: a loss or a gradient is not finite, or nothing of a batch could be scored.
        """
        self._note("running")
        if self.progress.updates == 0 and self._equipment.evaluation is not None:
            self._tell(await self._evaluated())
        while self.progress.updates < self._config.updates and self.why_stopped is None:
            await self._update()
            if self._control.stop_reason:
                self.why_stopped = self._control.stop_reason
        self._save()
        # A stop that came with the last update changed nothing.
        is_cut = self.why_stopped == self._control.stop_reason is not None and self._is_unfinished
        status = INTERRUPTED if is_cut else "complete"
        self._note(status)
        return status

    @property
    def _is_unfinished(self) -> bool:
        return self.progress.updates < self._config.updates

    async def _update(self) -> None:
        began, before = time.perf_counter(), dict(self._equipment.pipeline.trainer.meter.totals)
        number = self.progress.updates + 1
        pipeline = self._equipment.pipeline
        every = self._config.logs.episodes_every
        pipeline.trainer.kept = KeptUpdate() if every is not None and number % every == 0 else None
        diagnostics = await pipeline.step(more=number < self._config.updates)
        seconds = time.perf_counter() - began
        meter = pipeline.trainer.meter
        self._keep_episodes(number)
        figures = prefixed("learner", diagnostics) | meter.take()
        _refuse_unscored(number, figures)
        figures |= self._progress_figures(before, diagnostics, seconds)
        self.progress.updates = number
        is_due = self._config.evaluation is not None and number % self._config.evaluation.every == 0
        if self._config.evaluation is not None and (is_due or number == self._config.updates):
            figures |= await self._evaluated()
        self._look_at_target(figures)
        self._tell(figures)
        if number % self._config.checkpoints.every == 0:
            self._save()

    def _progress_figures(self, before: Mapping[str, int], diagnostics: Figures, seconds: float) -> Figures:
        pipeline = self._equipment.pipeline
        totals = pipeline.trainer.meter.totals
        self.progress.totals = dict(totals)
        done = {name: totals[name] - before.get(name, 0) for name in ("env_steps", "sampled_tokens", "episodes")}
        figures = {f"progress/{name}": float(totals[name]) for name in done}
        figures |= {f"speed/{name}_per_s": count / seconds for name, count in done.items()}
        figures["speed/trained_tokens_per_s"] = diagnostics.get("tokens", 0.0) / seconds
        figures |= {
            "progress/version": float(pipeline.trainer.version),
            "progress/epoch": pipeline.stream.epoch,
            "time/total_s": seconds,
            "time/worked_s": self._worked_s(),
        }
        return figures | self._equipment.reward_agent.stats.metrics()

    async def _evaluated(self) -> Figures:
        assert self._equipment.evaluation is not None
        began = time.perf_counter()
        figures = await self._equipment.evaluation.measure()
        return figures | {"time/evaluate_s": time.perf_counter() - began}

    def _look_at_target(self, figures: Figures) -> None:
        """Whether the early stop's target is reached, where its metric was measured now."""
        target = self._config.early_stop
        if target is None or target.metric not in figures:
            return
        self.progress.streak = self.progress.streak + 1 if figures[target.metric] >= target.at_least else 0
        if self.progress.streak >= target.times:
            self.why_stopped = f"{target.metric} is {figures[target.metric]:.3f}, at least {target.at_least:g}"

    def _tell(self, figures: Figures) -> None:
        """Write the figures, and remember whether they are the best."""
        progress = self.progress
        self._logs.write(progress.updates, figures)
        progress.metrics_size = self._logs.metrics.size
        progress.worked_s = self._worked_s()
        value = self._measured = figures.get(self._config.best_by)
        progress.last = progress.last if value is None else value
        if value is not None and self._is_better(value):
            progress.best, progress.best_update = value, progress.updates
            if progress.updates:
                self._save()
                save_weights(self._folder.path / "model", self._equipment.policy)
        self._watcher.updated(progress.updates, figures, progress)
        events.updated(progress.updates, figures)

    def _is_better(self, value: float) -> bool:
        """Whether this is the best so far; of equals the first, but for the policy as it was given."""
        best, is_given = self.progress.best, self.progress.best_update == 0
        return best is None or value > best or (is_given and value == best)

    def _save(self) -> None:
        """Write a checkpoint, unless this update has one."""
        if self._saved == self.progress.updates:
            return
        keep = self._config.checkpoints.keep
        save_state(self._folder.checkpoints, self._equipment.pipeline, self.progress, self._measured, keep)
        self._saved = self.progress.updates
        self._note("running")

    def _keep_episodes(self, number: int) -> None:
        trainer = self._equipment.pipeline.trainer
        if trainer.kept is None:
            return
        file = kept_file(self._folder.path, number)
        make_private_folder(file.parent, exist_ok=True)
        lines = [trainer.kept.line(episode, self._plan.redaction) for episode in trainer.meter.episodes]
        write_atomically(file, lines)

    def _note(self, status: str) -> None:
        self._folder.note(status=status, updates=self.progress.updates, worked_s=self._worked_s())

    def _worked_s(self) -> float:
        return time.perf_counter() - self._began

    def summary(self) -> dict[str, Any]:
        """What came of it."""
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
            "policies": [
                {"policy": "best", "score": None if progress.best is None else {"mean": progress.best}},
                {"policy": "last", "score": None if progress.last is None else {"mean": progress.last}},
            ],
        }


def _refuse_unscored(number: int, figures: Figures) -> None:
    """A batch of which nothing is scored teaches nothing, and so will the next ones; what broke is worth a look."""
    if figures.get("episode/count") and "score/mean" not in figures:
        broken = ", ".join(
            f"{count:.0f} {name.rpartition('/')[2]}" for name, count in figures.items() if "score/failed/" in name
        )
        raise TrainingError(f"update {number}: no episode of its batch is scored ({broken or 'no reason was given'})")
