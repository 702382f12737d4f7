"""`Run`: every sample, every rollout, every policy; collected, scored and written as they finish.

Collecting and scoring overlap: an episode is submitted to the reward agent when it stops, and its slot goes on to the
next one. What is written is decided by seeds alone, so the number of slots changes only the order of the lines.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
import anyio.to_thread

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample, make_group_id, make_rollout_id
from reward_kit.agent.starts import CLOSE_SECONDS, GroupStart
from reward_kit.errors import PolicyError, RewardKitError, boundary
from reward_kit.reward_agent import AsyncRewardAgent, Scored, ScoringRequest
from reward_kit.runs.store import RunStore, load_episode, read_episodes, read_scores
from reward_kit.runs.summary import EpisodeRow
from reward_kit.runs.tasks import Task
from reward_kit.typed_interface import RewardSpec

logger = logging.getLogger("reward_kit.runs")


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy and the label under which its results stand."""

    label: str
    policy: AgentPolicy


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run consists of.

    Attributes:
        task: the loaded task.
        policies: each runs every sample.
        samples: the selected ones.
        rollouts: episodes of each sample and policy.
        seed: everything random derives from it.
        max_concurrency: episodes in flight.
    """

    task: Task
    policies: Sequence[NamedPolicy]
    samples: Sequence[Sample]
    rollouts: int
    seed: int = 0
    max_concurrency: int = 16

    @property
    def total(self) -> int:
        """The number of episodes."""
        return len(self.policies) * len(self.samples) * self.rollouts


class Listener(Protocol):
    """Who watches a run. Called in the run's own event loop."""

    def episode_stopped(self, row: EpisodeRow) -> None: ...

    def episode_scored(self, row: EpisodeRow) -> None: ...


@dataclass(slots=True)
class Control:
    """How a run is stopped from outside, and why it stopped.

    Attributes:
        stop_reason: set once no further episode begins; what is in flight is finished.
        scope: cancel it to stop at once; what is in flight is lost and runs again on resume.
    """

    stop_reason: str | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def finish(self, reason: str) -> None:
        """Begin no further episode."""
        self.stop_reason = self.stop_reason or reason


class Run:
    """One run of a plan into a store.

    Args:
        plan: what is run.
        store: an open run directory; what it already holds is not run again.
        listener: told of every episode.
        control: stops the run.
        error_limit: stops the run once more episodes than this broke; a share of the total where it is below 1.
    """

    def __init__(
        self,
        plan: Plan,
        store: RunStore,
        *,
        listener: Listener | None = None,
        control: Control | None = None,
        error_limit: float | None = None,
    ) -> None:
        self.rows: dict[str, EpisodeRow] = {}
        self._plan, self._store, self._listener = plan, store, listener
        self._control = control or Control()
        self._error_limit = error_limit
        self._broken = 0
        self._unscored: list[ScoringRequest] = []
        self._groups: dict[str, _OpenGroup] = {}

    async def execute(self) -> None:
        """Run what is missing and score what is unscored. The store and `rows` then hold everything that finished."""
        began = time.perf_counter()
        status = "failed"
        # Each episode in flight may wait in a thread, in its world or in its tool, and so may each reward.
        threads = anyio.to_thread.current_default_thread_limiter()
        threads.total_tokens = max(threads.total_tokens, 3 * self._plan.max_concurrency + 64)
        try:
            with self._control.scope:
                await self._collect_and_score()
            status = "interrupted" if self.missing() else "complete"
        finally:
            with anyio.CancelScope(shield=True):
                for group in list(self._groups.values()):
                    await group.start.close()
                await self._close_policies()
            self._store.finish(status, time.perf_counter() - began)

    def missing(self) -> int:
        """How many episodes are not there yet, or wait for a score."""
        waits = self._plan.task.reward is not None
        waiting = sum(waits and row.score is None and not row.is_error for row in self.rows.values())
        return max(self._plan.total - len(self.rows), 0) + waiting

    async def _close_policies(self) -> None:
        """Close them all. A failure is worth a line, not the run, which is over."""
        for named in self._plan.policies:
            try:
                with boundary(PolicyError, f"close of {named.label}"), anyio.fail_after(CLOSE_SECONDS):
                    await named.policy.close()
            except RewardKitError as error:
                logger.warning("%s", error)

    def take_stock(self) -> None:
        """Read what the store holds: finished episodes, and those of them that are not scored yet. Call it first."""
        scores = {record["rollout_id"]: record for record in read_scores(self._store.path)}
        for record in read_episodes(self._store.path):
            row = self.rows[record["rollout_id"]] = EpisodeRow.of(record)
            self._tell_stopped(row)
            if row.rollout_id in scores:
                row.add_score(scores[row.rollout_id])
                self._tell_scored(row)
            elif self._plan.task.reward is not None and row.error_class is None:
                episode = load_episode(self._store.path, record)
                self._unscored.append(ScoringRequest.of(episode, self._plan.task.definition))

    async def _collect_and_score(self) -> None:
        reward = self._plan.task.reward
        if reward is None:
            await self._collect(None)
            return
        deadline_s = self._plan.task.definition.limits.reward_time_s
        async with AsyncRewardAgent(reward, deadline_s=deadline_s) as scorer, anyio.create_task_group() as takers:
            scoring = _Scoring(self, reward, scorer, takers)
            for request in self._unscored:
                await scoring.submit(request)
            await self._collect(scoring)

    async def _collect(self, scoring: _Scoring | None) -> None:
        items = self._missing()

        async def work() -> None:
            for item in items:
                if self._control.stop_reason:
                    return
                await self._run_item(item, scoring)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(self._plan.max_concurrency, self._plan.total)):
                tasks.start_soon(work)

    def _missing(self) -> Iterator[_Item]:
        """What is to be run, a group at a time, so that groups complete early."""
        plan, task = self._plan, self._plan.task
        workers = {
            named.label: RLRolloutWorker(task.definition, named.policy, tools=task.tools, policy_label=named.label)
            for named in plan.policies
        }
        for sample in plan.samples:
            for label, worker in workers.items():
                group_id = make_group_id(plan.seed, sample.id, label)
                missing = [i for i in range(plan.rollouts) if make_rollout_id(group_id, i) not in self.rows]
                for index in missing:
                    yield _Item(worker, sample, group_id, index, len(missing))

    async def _run_item(self, item: _Item, scoring: _Scoring | None) -> None:
        if item.group_id not in self._groups:
            start = item.worker.group(item.sample, self._plan.seed)
            self._groups[item.group_id] = _OpenGroup(start, item.group_size)
        group = self._groups[item.group_id]
        episode = await item.worker.collect_episode(group.start, item.rollout_index)
        row = EpisodeRow.of(self._store.append_episode(episode))
        self.rows[row.rollout_id] = row
        self._tell_stopped(row)
        group.remaining -= 1
        if group.remaining == 0:
            await self._groups.pop(item.group_id).start.close()
        if scoring is not None and row.error_class is None:
            await scoring.submit(ScoringRequest.of(episode, self._plan.task.definition))

    def take_score(self, scored: Scored, reward: RewardSpec, scorer_hash: str) -> None:
        """Write one score and tell of it."""
        row = self.rows[scored.rollout_id]
        record = score_record(scored, reward, scorer_hash)
        self._store.append_score(record)
        row.add_score(record)
        self._tell_scored(row)

    def _tell_stopped(self, row: EpisodeRow) -> None:
        if self._listener is not None:
            self._listener.episode_stopped(row)
        self._broken += row.error_class is not None
        self._check_error_limit()

    def _tell_scored(self, row: EpisodeRow) -> None:
        if self._listener is not None:
            self._listener.episode_scored(row)
        self._broken += row.score_error is not None
        self._check_error_limit()

    def _check_error_limit(self) -> None:
        if self._error_limit is None:
            return
        allowed = self._error_limit * self._plan.total if self._error_limit < 1 else self._error_limit
        if self._broken > allowed:
            self._control.finish(f"--fail-on-error {self._error_limit:g}: {self._broken} episodes broke")


@dataclass(frozen=True, slots=True)
class _Item:
    worker: RLRolloutWorker
    sample: Sample
    group_id: str
    rollout_index: int
    group_size: int


@dataclass(slots=True)
class _OpenGroup:
    start: GroupStart
    remaining: int


class _Scoring:
    """Submits episodes to the reward agent and takes each result as it comes."""

    def __init__(self, run: Run, reward: RewardSpec, agent: AsyncRewardAgent, takers: anyio.abc.TaskGroup) -> None:
        self._run, self._reward, self._agent, self._takers = run, reward, agent, takers
        self._hash = scorer_hash(reward)

    async def submit(self, request: ScoringRequest) -> None:
        await self._agent.submit([request])
        self._takers.start_soon(self._take)

    async def _take(self) -> None:
        chunk = await self._agent.get(1)
        for scored in chunk.extra_infos:
            self._run.take_score(scored, self._reward, self._hash)


def score_record(scored: Scored, reward: RewardSpec, scorer_hash: str) -> dict[str, object]:
    """The line of `scores.jsonl` for one score."""
    return {
        "rollout_id": scored.rollout_id,
        "scorer": {"id": reward.id, "hash": scorer_hash},
        "score": scored.score,
        "result": scored.result.model_dump(mode="json", exclude_none=True) if scored.result else None,
        "failure": scored.failure.to_json() if scored.failure else None,
        "timing": {"duration_s": round(scored.duration_s, 6)},
    }


def scorer_hash(reward: RewardSpec) -> str:
    """SHA-256 of the file the reward function stands in: what scored, whatever it is called."""
    file = inspect.getsourcefile(inspect.unwrap(reward.function))
    source = Path(file).read_bytes() if file and Path(file).is_file() else reward.id.encode()
    return hashlib.sha256(source).hexdigest()
