"""The orders in which training performs its steps: one after another, or with overlapping steps.

    sync          collect, score and learn; nothing overlaps
    minibatch     train on part of the batch as soon as its groups are scored
    one_step_off  roll out the next batch while the current batch is scored and trained on; the weights that sample the
                  next batch are then one version older than the weights that are trained on it
    both          minibatch and one_step_off combined

With any order, each token records the version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import anyio
import anyio.abc
import torch

from reward_kit.credit.group_filter import filter_groups
from reward_kit.episodes.record import episode_from_record, episode_to_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.rl.checkpoint import (
    Checkpoint,
    prune,
    random_states,
    restore_random_states,
    save_checkpoint,
)
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.rl.schedule import Schedule
from reward_kit.rl.training.config import DynamicSamplingModel
from reward_kit.rl.training.figures import SCORING, WAIT, Figures, merge_updates
from reward_kit.rl.training.rollouts import GroupRequest, SampleStream
from reward_kit.rl.training.trainer import Trainer
from reward_kit.rl_processing import AlignedEpisode, CreditBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The order of calls and the batch sizes."""

    schedule: Schedule
    samples_per_update: int  # The number of groups in a batch
    samples_per_minibatch: int  # The number of groups per update, if groups are trained on as they are scored
    dynamic_sampling: DynamicSamplingModel | None = None  # Selects groups worth training on; None selects all groups.


class Pipeline:
    """The training loop over batches. Use it as an async context manager inside the context of the reward agent."""

    def __init__(self, trainer: Trainer, stream: SampleStream, options: PipelineOptions) -> None:
        self.trainer, self.stream, self.options = trainer, stream, options
        self._ahead: _PendingBatch | None = None
        self._waiting: list[list[SingleAgentEpisode]] = []

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A resumed run rescores the episodes that were rolled out ahead but not trained on.
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    @property
    def has_waiting_batch(self) -> bool:
        """True if a batch has been rolled out but not used for training."""
        return self._ahead is not None or bool(self._waiting)

    async def step(self, *, more: bool) -> Figures:
        """Process a batch, from its samples to the next version of the weights, and return diagnostics.

        If `more` is true, a further batch follows and may be rolled out early.
        """
        options = self.options
        if options.schedule is Schedule.SYNC and options.dynamic_sampling is None:
            diagnostics = await self.trainer.train_step(self.stream.take(options.samples_per_update))
            return {name: value for name, value in diagnostics.items() if name not in ("score", "unscored")}
        if (batch := self._ahead) is None:
            batch = _PendingBatch(self.trainer, self._tasks)
            if self._waiting:  # rolled out before a resume
                batch.add(self._waiting)
                self._waiting = []
            else:
                await batch.roll_out(self._next_requests(options.samples_per_update))
        self._ahead = None

        async def roll_ahead() -> None:
            ahead = _PendingBatch(self.trainer, self._tasks)
            await ahead.roll_out(self._next_requests(options.samples_per_update))
            self._ahead = ahead

        size = options.samples_per_minibatch if options.schedule.updates_early else options.samples_per_update
        updates, part, kept = list[Figures](), list[_Group](), 0
        async with anyio.create_task_group() as tasks:
            if more and options.schedule.rolls_ahead:
                tasks.start_soon(roll_ahead)
            async for group in self._kept_groups(batch):
                part.append(group)
                kept += 1
                if len(part) == size or kept == options.samples_per_update:
                    updates.append(await self._learn(part))
                    part = []
            if part:
                updates.append(await self._learn(part))
        await self.trainer.publish()
        # Without updates, all groups were dropped. The learner returns the same figures if there is nothing to learn.
        return merge_updates(updates) if updates else {"tokens": 0.0, "optimizer_steps": 0.0}

    async def _learn(self, groups: Sequence[_Group]) -> Figures:
        trainer, groups = self.trainer, sorted(groups, key=lambda one: one.number)
        episodes = [episode for group in groups for episode in group.episodes]
        aligned = trainer.manage(episodes, CreditBatch.from_episodes(one for group in groups for one in group.aligned))
        credited = trainer.advantages(aligned)
        rows = trainer.batch(episodes, credited)
        return await trainer.update(rows)

    def _next_requests(self, count: int) -> list[GroupRequest]:
        return self.trainer.requests(self.stream.take(count))

    async def _kept_groups(self, batch: _PendingBatch) -> AsyncIterator[_Group]:
        """Yield groups that are useful for training as their scores arrive, and replace dropped groups."""
        dynamic, kept, collections, meter = self.options.dynamic_sampling, 0, 1, self.trainer.meter
        while True:
            while batch.outstanding:
                group = await batch.next_group()
                if dynamic is None or self._is_kept(group, dynamic):
                    kept += 1
                    yield group
            if dynamic is None:
                return
            missing = self.options.samples_per_update - kept
            if not missing or collections >= dynamic.max_collections:
                break
            collections += 1
            await batch.roll_out(self._next_requests(missing))
        for name, count in (("kept", kept), ("missing", missing), ("collections", collections)):
            meter.count(f"groups/{name}", count)

    def _is_kept(self, group: _Group, dynamic: DynamicSamplingModel) -> bool:
        credit = self.trainer.credit
        aligned = CreditBatch.from_episodes(group.aligned)
        advantages: Sequence[Sequence[float | None]] | None = None
        if dynamic.keep_step_signal:
            credited = credit.advantages(aligned)
            assert credited.credit is not None
            flat = iter(credited.credit.step_advantages_S.tolist())
            advantages = [[next(flat) for _ in steps] for steps in credited.steps]
        verdict = filter_groups(
            aligned.scores,
            aligned.group_ids,
            band=dynamic.band,
            keep_step_signal=dynamic.keep_step_signal,
            step_advantages=advantages,
            unscored=dynamic.unscored,
        )
        if verdict.kept:
            return True
        self.trainer.meter.add_scored(group.episodes, aligned)
        for reason in verdict.dropped.values():
            self.trainer.meter.count(f"groups/dropped/{reason}")
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the samples and the episodes that were rolled out but not used for training."""
        groups = self._waiting
        if self._ahead is not None:
            groups = [self._ahead.episodes[index] for index in sorted(self._ahead.episodes)]
        return {
            "position": self.stream.position,
            "collected": self.trainer.collected,
            "rolled_out": [[episode_to_record(episode) for episode in group] for group in groups],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Call this before the first step."""
        self.stream.position, self.trainer.collected = state["position"], state["collected"]
        self._waiting = [[episode_from_record(record) for record in group] for group in state["rolled_out"]]


class _Group(NamedTuple):
    """The (G,) episodes for one sample, aligned with their scores. `number` is the request number."""

    number: int
    episodes: list[SingleAgentEpisode]
    aligned: list[AlignedEpisode]


class _PendingBatch:
    """Groups that are being rolled out or scored. A group is scored as soon as all of its episodes are finished.

    `tasks` remain open until all scores have arrived. `episodes` contains the groups that have been rolled out but not
    returned, keyed by index.
    """

    def __init__(self, trainer: Trainer, tasks: anyio.abc.TaskGroup) -> None:
        self.episodes: dict[int, list[SingleAgentEpisode]] = {}
        self._trainer, self._tasks = trainer, tasks
        self._ready: asyncio.Queue[tuple[int, list[Scored]]] = asyncio.Queue()
        self._requested = self._handed_on = 0
        self._first_call = math.inf

    @property
    def outstanding(self) -> int:
        """The number of groups that have been requested but not returned."""
        return self._requested - self._handed_on

    async def roll_out(self, requests: Sequence[GroupRequest]) -> None:
        """Collect additional groups."""
        first, self._requested = self._requested, self._requested + len(requests)

        async def finished(index: int, episodes: list[SingleAgentEpisode]) -> None:
            self._trainer.meter.add_collected(episodes)
            self._start_scoring(first + index, episodes)

        with self._trainer.meter.time("collect"):
            await self._trainer.collector.collect(self._trainer.worker, requests, finished)

    def add(self, groups: Sequence[list[SingleAgentEpisode]]) -> None:
        """Add groups that were rolled out before a resume."""
        for episodes in groups:
            self._requested += 1
            self._start_scoring(self._requested - 1, episodes)

    def _start_scoring(self, index: int, episodes: list[SingleAgentEpisode]) -> None:
        self.episodes[index] = episodes
        self._tasks.start_soon(self._score, index)

    async def _score(self, index: int) -> None:
        episodes, trainer = self.episodes[index], self._trainer
        requests = [ScoringRequest.from_episode(episode, trainer.worker.task_definition) for episode in episodes]
        self._first_call = min(self._first_call, time.perf_counter())
        scored = await trainer.reward_agent.score_all(requests, len(requests))
        self._ready.put_nowait((index, scored))

    async def next_group(self) -> _Group:
        """Wait for the next scored group. Groups can arrive in any order."""
        meter = self._trainer.meter
        with meter.time(WAIT):
            index, scored = await self._ready.get()
        self._handed_on += 1
        episodes = self.episodes.pop(index)
        if not self.outstanding:
            meter.add_seconds(SCORING, time.perf_counter() - self._first_call)
            self._first_call = math.inf
        with meter.time("credit"):
            align = self._trainer.credit.align_one
            return _Group(index, episodes, [align(*pair) for pair in zip(episodes, scored, strict=True)])


@dataclass(slots=True)
class Progress:
    """The progress of a run. `metric` is the name of the figure by which the best checkpoint is selected."""

    updates: int = 0  # number of finished updates
    metrics_size: int = 0  # The bytes of `metrics.jsonl` that belong to these updates
    best: float | None = None  # The highest value of the metric
    best_update: int | None = None
    last: float | None = None  # The latest value of the metric
    streak: int = 0  # The number of consecutive times that the target of `early_stop` was reached
    streak_of: dict[str, Any] | None = None  # The target
    worked_s: float = 0.0
    cpu_s: float = 0.0  # CPU time of the process and of its finished child processes
    totals: dict[str, int] = field(default_factory=dict)  # The number of episodes, environment steps and sampled tokens

    @property
    def env_steps(self) -> int:
        return self.totals.get("env_steps", 0)


def save_state(folder: Path, pipeline: Pipeline, progress: Progress, score: float | None, keep: int) -> Path:
    """Write a checkpoint from which a run resumes exactly, and keep only the latest `keep` checkpoints and the best.

    `score` is the value of the metric by which the best checkpoint is selected, or None if the value is unknown.
    """
    trainer = pipeline.trainer
    manager = trainer.reward_manager
    state = {
        "learner": trainer.learner.state_dict(),
        # Store the state as text, since episodes may contain any data from their environments.
        "pipeline": json.dumps(pipeline.state_dict()),
        "version": trainer.version,
        "reward_manager": manager.state_dict() if isinstance(manager, EpisodeRewardManager) else None,
        "random": random_states(),
        "progress": asdict(progress),
    }
    path = save_checkpoint(folder, progress.updates, state, score=score, facts=_arithmetic(pipeline))
    prune(path, keep=keep)
    return path


async def restore_state(checkpoint: Checkpoint, pipeline: Pipeline) -> Progress:
    """Restore a checkpoint before the first step.

    Raises:
        ConfigError: If the checkpoint belongs to a different model or optimizer.
    """
    state: dict[str, Any] = checkpoint.state
    trainer = pipeline.trainer
    try:
        trainer.learner.load_state_dict(state["learner"])
    except (ConfigError, RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(f"{checkpoint.path} was saved with a different policy or optimizer: {error}") from error
    pipeline.load_state_dict(json.loads(state["pipeline"]))
    trainer.version = state["version"]
    if isinstance(trainer.reward_manager, EpisodeRewardManager):
        trainer.reward_manager.load_state_dict(state["reward_manager"])
    progress = Progress(**state["progress"])
    trainer.meter.totals.update(progress.totals)
    restore_random_states(state["random"])
    await trainer.policy.publish(trainer.version)
    return progress


def _arithmetic(pipeline: Pipeline) -> dict[str, Any]:
    """Return the settings that affect how results are rounded."""
    device = next(pipeline.trainer.policy.module.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "device": name}


def why_not_reproducible(checkpoint: Checkpoint, pipeline: Pipeline) -> str:
    """Return the reason why the last bits of a resumed run will differ from those of an uninterrupted run.

    If the runs will be identical, return "".
    """
    before, now = checkpoint.facts, _arithmetic(pipeline)
    return ", ".join(
        f"{name} was {before.get(name)}, is {value}" for name, value in now.items() if before.get(name) != value
    )
