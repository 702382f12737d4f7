"""The orders in which the trainer's calls are made: one after another, or rollouts and scores while the weights learn.

    sync          the trainer's own order; nothing is done at the same time
    minibatch     a part of the batch is trained on as soon as its groups are scored, others first where they are slower
    one_step_off  the next batch is rolled out while this one waits for its scores and is trained on, with weights that
                  are one version older than those it will be trained on
    both          both

Whatever the order, each token says which version of the weights sampled it; weights change between versions alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio

from reward_kit.credit.group_filter import filter_groups
from reward_kit.episodes.record import episode_from_record, episode_to_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.rl.overlap import Schedule
from reward_kit.rl.trainer import Trainer
from reward_kit.rl.training.batches import BatchOnItsWay, Group
from reward_kit.rl.training.config import DynamicSamplingModel
from reward_kit.rl.training.figures import Figures, merged_updates
from reward_kit.rl.training.sample_stream import SampleStream


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How a batch is made and trained on.

    Attributes:
        schedule: which order.
        samples_per_update: groups of a batch.
        samples_per_minibatch: groups of an update, where they are trained on as they are scored.
        dynamic_sampling: which groups are worth training on; None takes all.
    """

    schedule: Schedule
    samples_per_update: int
    samples_per_minibatch: int
    dynamic_sampling: DynamicSamplingModel | None = None


class Pipeline:
    """Makes one batch after another. Use it as an async context manager, inside of the reward agent's.

    Args:
        trainer: whose calls are made.
        stream: the samples.
        options: in which order.
    """

    def __init__(self, trainer: Trainer, stream: SampleStream, options: PipelineOptions) -> None:
        self.trainer, self.stream, self.options = trainer, stream, options
        self._ahead: BatchOnItsWay | None = None
        self._waiting: list[list[SingleAgentEpisode]] = []

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Scores of what was rolled out ahead and is not trained on now are asked for again on resume.
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def step(self, *, more: bool) -> Figures:
        """One batch, from its samples to the next version of the weights; the diagnostics of its update.

        Args:
            more: another batch will follow, and may be rolled out ahead.
        """
        if self.options.schedule is Schedule.SYNC and self.options.dynamic_sampling is None:
            diagnostics = await self.trainer.train_step(self.stream.take(self.options.samples_per_update))
            return {name: value for name, value in diagnostics.items() if name not in ("score", "unscored")}
        if (batch := self._ahead) is None:
            batch = self._restored() or await self._rolled_out()
        self._ahead = None
        async with anyio.create_task_group() as tasks:
            if more and self.options.schedule.rolls_ahead:
                tasks.start_soon(self._roll_ahead)
            updates = [await self._learn(groups) async for groups in self._parts(batch)]
        await self.trainer.publish()
        return merged_updates(updates)

    async def _roll_ahead(self) -> None:
        self._ahead = await self._rolled_out()

    async def _rolled_out(self) -> BatchOnItsWay:
        batch = BatchOnItsWay(self.trainer, self._tasks)
        await batch.roll_out(self.trainer.asked(self.stream.take(self.options.samples_per_update)))
        return batch

    def _restored(self) -> BatchOnItsWay | None:
        """The batch that was rolled out before a resume."""
        groups, self._waiting = self._waiting, []
        if not groups:
            return None
        batch = BatchOnItsWay(self.trainer, self._tasks)
        batch.restore(groups)
        return batch

    async def _parts(self, batch: BatchOnItsWay) -> AsyncIterator[list[Group]]:
        """The groups of a batch that are worth training on, in as many parts as it is trained on in."""
        options, part, kept = self.options, list[Group](), 0
        size = options.samples_per_minibatch if options.schedule.updates_early else options.samples_per_update
        async for group in self._kept(batch):
            part.append(group)
            kept += 1
            if len(part) == size or kept == options.samples_per_update:
                yield sorted(part, key=lambda one: one.place)
                part = []
        if part:
            yield sorted(part, key=lambda one: one.place)

    async def _kept(self, batch: BatchOnItsWay) -> AsyncIterator[Group]:
        """The groups that are kept, as their scores arrive; where some are not, others are collected in their place."""
        dynamic, kept, collections = self.options.dynamic_sampling, 0, 1
        while True:
            while batch.outstanding:
                group = await batch.next_group()
                if dynamic is None or self._is_kept(group, dynamic):
                    kept += 1
                    yield group
            missing = self.options.samples_per_update - kept
            if dynamic is None or not missing or collections >= dynamic.max_collections:
                break
            collections += 1
            await batch.roll_out(self.trainer.asked(self.stream.take(missing)))
        if dynamic is not None:
            for name, count in (
                ("groups/kept", kept),
                ("groups/missing", missing),
                ("groups/collections", collections),
            ):
                self.trainer.meter.count(name, count)

    def _is_kept(self, group: Group, dynamic: DynamicSamplingModel) -> bool:
        credit = self.trainer.credit
        aligned = credit.align(group.episodes, group.scored)
        advantages: Sequence[Sequence[float | None]] | None = None
        if dynamic.keep_step_signal:
            advantages = _step_advantages(credit.advantages(aligned))
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

    async def _learn(self, groups: Sequence[Group]) -> Figures:
        trainer = self.trainer
        episodes = [episode for group in groups for episode in group.episodes]
        aligned = trainer.align(episodes, [one for group in groups for one in group.scored])
        credited = trainer.advantages(aligned)
        rows = trainer.batch(episodes, credited)
        return await trainer.update(rows)

    def state_dict(self) -> dict[str, Any]:
        """What goes on from here depends on: where the samples stand, and what was rolled out and is not trained on."""
        groups = self._waiting
        if self._ahead is not None:
            groups = [self._ahead.episodes[place] for place in sorted(self._ahead.episodes)]
        return {
            "position": self.stream.position,
            "collected": self.trainer.collected,
            "rolled_out": [[episode_to_record(episode) for episode in group] for group in groups],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, before the first step."""
        self.stream.position, self.trainer.collected = state["position"], state["collected"]
        self._waiting = [[episode_from_record(record) for record in group] for group in state["rolled_out"]]


def _step_advantages(credited: Any) -> list[list[float | None]]:
    """The step advantages of each trajectory of a batch."""
    flat = iter(credited.credit.step_advantages_S.tolist())
    return [[next(flat) for _ in steps] for steps in credited.steps]
