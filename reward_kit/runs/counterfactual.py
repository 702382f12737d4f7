"""Counterfactual values of finished episodes: how likely was success before each step, and which step changed it?

A policy continues the episode from a step multiple times, and the task's reward scores the continuations. The results
are written to the run's `counterfactual.jsonl`, one line per episode and continuing policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from reward_kit.agent.actions import action_text
from reward_kit.agent.branches import Branch, check_started
from reward_kit.agent.limits import ActionUsage, RunBudget
from reward_kit.agent.models import StopReason
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, gather
from reward_kit.blocking import allow_threads
from reward_kit.environments.servers import ServerPool
from reward_kit.episodes.json_codec import compact_json
from reward_kit.episodes.record import get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardKitError, did_you_mean
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.rewards.judge_prompts import METRIC
from reward_kit.runs.counterfactual_file import SCHEMA_VERSION, read_counterfactuals
from reward_kit.runs.files import COUNTERFACTUALS_FILE, write_atomically
from reward_kit.runs.plan import RunPlan
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.results import index_results, read_results
from reward_kit.runs.run_folder import RunHeader
from reward_kit.runs.runner import LocalEngine, close_policies
from reward_kit.runs.step_search import CONFIDENCE, Change, StepSearch, StepValue
from reward_kit.runs.summary import EpisodeRow, JudgeCall

_ACTION_CHARS = 300


@dataclass(frozen=True, slots=True)
class Continuation:
    """A continuation of an episode, without its transcript."""

    step: int
    index: int
    score: float | None
    passed: bool | None
    stop_reason: str
    steps: int
    action: str
    error: str | None = None


@dataclass(slots=True)
class Counterfactual:
    """The measured values of one episode.

    Attributes:
        rollout_id: the id of the episode.
        sample_id: the id of its sample.
        policy: the policy that acted in the episode.
        continued_by: the policy that continued the episode.
        score: the score of the episode.
        passed: whether the episode passed.
        actions: (T,) the episode's actions as text.
        seed: the random seed for the continuations.
        search: the search, which contains the measured values.
        continuations: all continuations, in the order of measurement.
        cost: the cost of the continuations in US dollars, or None if it is unknown.
        stopped: the limit that stopped the search, "interrupted" until the search ends, or None.
    """

    rollout_id: str
    sample_id: str
    policy: str
    continued_by: str
    score: float
    passed: bool
    actions: Sequence[str]
    seed: int
    search: StepSearch
    continuations: list[Continuation] = field(default_factory=list)
    cost: float | None = None
    stopped: str | None = "interrupted"

    @property
    def values(self) -> list[StepValue]:
        """The measured values, in the order of the steps."""
        return [self.search.values[step] for step in sorted(self.search.values)]

    def instead(self, change: Change) -> list[tuple[str, int]]:
        """Return the first actions of the passing continuations from before a change, and how often each was taken."""
        first = (one.action for one in self.continuations if one.step == change.before.step and one.passed)
        return Counter(first).most_common()

    def to_json(self) -> dict[str, Any]:
        """Return the line for `counterfactual.jsonl`."""
        changes = [
            {
                "step": change.before.step,
                "next": change.after.step,
                "before": change.before.mean,
                "after": change.after.mean,
                "p_value": change.p_value,
                "action": self.actions[change.before.step] if change.is_located else None,
                "instead": [{"action": action, "passed": count} for action, count in self.instead(change)],
            }
            for change in self.search.changes()
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "rollout_id": self.rollout_id,
            "sample_id": self.sample_id,
            "policy": self.policy,
            "continued_by": self.continued_by,
            "score": self.score,
            "passed": self.passed,
            "steps": len(self.actions),
            "seed": self.seed,
            "per_step": self.search.per_step,
            "confidence": CONFIDENCE,
            "values": [value.to_json() for value in self.values],
            "changes": changes,
            "continuations": [asdict(one) for one in self.continuations],
            "cost": self.cost,
            "stopped": self.stopped,
        }


class CounterfactualWorker:
    """Measures the success probability before the steps of finished episodes.

    Args:
        worker: the worker of the policy that continues.
        rewards: the open reward agent of the task.
        pass_threshold: the lowest score that passes.
        seed: the random seed for the continuations.
        max_concurrency: the maximum number of concurrent continuations.
    """

    def __init__(
        self,
        worker: RLRolloutWorker,
        rewards: AsyncRewardAgent,
        *,
        pass_threshold: float = 1.0,
        seed: int = 0,
        max_concurrency: int = 16,
    ) -> None:
        self._worker, self._rewards, self._threshold = worker, rewards, pass_threshold
        self._seed, self._limiter = seed, anyio.CapacityLimiter(max_concurrency)

    async def measure(
        self,
        episode: SingleAgentEpisode,
        score: float,
        continuations: int,
        measured: Callable[[Counterfactual, StepValue], None] = lambda _result, _value: None,
    ) -> Counterfactual:
        """Measure the values of one episode.

        Args:
            episode: the episode.
            score: its score.
            continuations: the maximum number of continuations.
            measured: a function that is called with the result so far and its newest value.

        Raises:
            RewardKitError: a continuation cannot start, or no continuation from a step is scored.
        """
        facts, is_passed = get_facts(episode), score >= self._threshold
        search = StepSearch(len(episode), is_passed, continuations)
        result = Counterfactual(
            episode.id_,
            facts["sample_id"],
            facts["policy"],
            self._worker.policy_label,
            score,
            is_passed,
            [action_text(episode.get_actions(t))[:_ACTION_CHARS] for t in range(len(episode))],
            self._seed,
            search,
        )
        spent = self._worker.budget.cost
        open_branches: dict[int, Branch] = {}
        async with AsyncExitStack() as stack:
            while (step := search.next_step()) is not None:
                before = max((earlier for earlier in open_branches if earlier < step), default=None)
                branch = self._worker.branch(
                    episode, step, seed=self._seed, before=open_branches[before] if before is not None else None
                )
                open_branches[step] = await stack.enter_async_context(branch)
                episodes = await gather(partial(self._collect, branch), range(search.per_step))
                result.cost = self._cost_since(spent)
                if any(get_facts(one)["stop_reason"] == StopReason.RUN_LIMIT for one in episodes):
                    limit = self._worker.budget.exhausted()  # the outcomes of these continuations are unknown
                    result.stopped = limit.text if limit is not None else "a run limit"
                    break
                found = await self._score(step, episodes)
                result.cost = self._cost_since(spent)
                result.continuations += found
                outcomes = [one.passed for one in found if one.passed is not None]
                if not outcomes:
                    raise RewardKitError(
                        f"episode {episode.id_}: no continuation from step {step} is scored; "
                        f"the first error: {found[0].error}"
                    )
                value = StepValue(step, sum(outcomes), len(outcomes))
                search.add(value)
                measured(result, value)
            else:
                result.stopped = None
        return result

    def _cost_since(self, spent: float) -> float | None:
        cost = self._worker.budget.cost - spent
        return cost if cost or self._worker.agent_policy.knows_cost else None

    async def _collect(self, branch: Branch, index: int) -> SingleAgentEpisode:
        async with self._limiter:
            return await self._worker.collect_episode(branch, index)

    async def _score(self, step: int, episodes: Sequence[SingleAgentEpisode]) -> list[Continuation]:
        for episode in episodes:
            check_started(episode)
        requests = [ScoringRequest.from_episode(episode, self._worker.task_definition) for episode in episodes]
        scored = await self._rewards.score_all(requests, len(requests))
        self._worker.budget.spend(ActionUsage(0, self._judge_cost(scored)))
        return [
            Continuation(
                step,
                index,
                one.score,
                None if one.score is None else one.score >= self._threshold,
                get_facts(episode)["stop_reason"],
                len(episode) - step,
                action_text(episode.get_actions(step))[:_ACTION_CHARS] if len(episode) > step else "",
                one.failure.message if one.failure is not None else None,
            )
            for index, (episode, one) in enumerate(zip(episodes, scored, strict=True))
        ]

    def _judge_cost(self, scored: Sequence[Scored]) -> float:
        """Return the known cost of the judge calls for a group, in US dollars. A group reward makes one call."""
        is_group = self._rewards.scorer.mode == "batch"
        calls = set()
        for one in scored:
            usage = one.result.metrics.get(METRIC) if one.result is not None else None
            if usage is not None:
                calls.add(JudgeCall("" if is_group else one.rollout_id, usage.reason or ""))
        return sum(call.cost or 0.0 for call in calls)


@dataclass(frozen=True, slots=True)
class MeasuredEpisode:
    """A finished and scored episode of a run."""

    row: EpisodeRow
    score: float
    offset: int


def choose_episodes(
    path: Path, header: RunHeader, rollout_id: str | None = None, limit: int | None = None
) -> list[MeasuredEpisode]:
    """Return the episode with the given id or, without an id, the first episodes of a run that did not pass.

    Raises:
        ConfigError: the episode is unknown or unscored, or no scored episode failed.
    """
    index = index_results(path)
    scores, rows = {}, {}
    for result in read_results(path, index):
        id_ = result.episode["rollout_id"]
        rows[id_] = EpisodeRow.from_record(result.episode), index.episodes[id_]
        scores[id_] = result.score["score"] if result.score is not None else None
    if rollout_id is not None:
        named = [id_ for id_ in rows if id_ == rollout_id] or [id_ for id_ in rows if id_.startswith(rollout_id)]
        if len(named) > 1:
            raise ConfigError(f"{path} has {len(named)} episodes whose ids start with {rollout_id!r}")
        if not named:
            raise ConfigError(f"{path} has no episode {rollout_id!r}{did_you_mean(rollout_id, rows)}")
        row, offset = rows[named[0]]
        if (score := scores.get(row.rollout_id)) is None:
            raise ConfigError(f"episode {row.rollout_id} is not scored, so its outcome is unknown; score the run first")
        return [MeasuredEpisode(row, score, offset)]
    if not any(score is not None for score in scores.values()):
        raise ConfigError(f"no episode in {path} is scored; the task needs a reward (reward_function_path)")
    chosen = [
        MeasuredEpisode(row, score, offset)
        for id_, (row, offset) in rows.items()
        if (score := scores.get(id_)) is not None and score < header.pass_threshold and row.error_class is None
    ]
    if not chosen:
        raise ConfigError(f"no scored episode in {path} failed; pass the id of an EPISODE to examine one that passed")
    return chosen[:limit]


@asynccontextmanager
async def open_measuring(
    plan: RunPlan, traffic: ProviderSession | None
) -> AsyncIterator[Mapping[str, CounterfactualWorker]]:
    """Yield a worker for each policy of a plan, keyed by label. They share the servers, the reward and the budget.

    Raises:
        ConfigError: the task has no reward.
    """
    if plan.reward is None:
        raise ConfigError(f"task {plan.definition.name!r} has no reward, so continuations cannot be scored")
    allow_threads(plan.max_concurrency)
    session = CURRENT_PROVIDER_SESSION.set(traffic)
    engine, budget = LocalEngine(), RunBudget(plan.definition.run_limits)
    scorer = engine.scorer(plan.reward, plan.definition.limits.reward_time_s)
    try:
        async with (
            ServerPool(),
            AsyncRewardAgent(scorer, max_concurrency=plan.max_concurrency) as rewards,
            engine.workers(plan, budget) as workers,
        ):
            yield {
                label: CounterfactualWorker(
                    worker,
                    rewards,
                    pass_threshold=plan.definition.pass_threshold,
                    seed=plan.seed,
                    max_concurrency=plan.max_concurrency,
                )
                for label, worker in workers.items()
            }
    finally:
        CURRENT_PROVIDER_SESSION.reset(session)
        with anyio.CancelScope(shield=True):
            await close_policies(plan)


def write_result(path: Path, result: Counterfactual, redaction: Redaction) -> None:
    """Write an episode's line to `counterfactual.jsonl`, replacing an earlier line for the same two policies."""
    lines = [
        line
        for line in read_counterfactuals(path)
        if (line["rollout_id"], line["continued_by"]) != (result.rollout_id, result.continued_by)
    ]
    texts = (compact_json(line).encode("ascii") for line in [*lines, redaction.redact_record(result.to_json())])
    write_atomically(path / COUNTERFACTUALS_FILE, (redaction.redact_line(text) + b"\n" for text in texts))
