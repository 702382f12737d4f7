"""`Run`: collects, scores and writes the episodes of every sample, rollout and policy.

Collecting and scoring overlap: an episode is submitted to the reward agent when it stops or, for a batch reward, when
its group is complete, and the next episode starts. Results depend only on the seeds; concurrency affects only the order
of the lines.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
import anyio.abc

from reward_kit.agent.limits import ActionUsage, RunBudget
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, RolloutWorker
from reward_kit.agent.samples import Sample, make_group_id, make_rollout_id
from reward_kit.agent.simulated_user import WHO, SimulatedUser
from reward_kit.agent.starts import CLOSE_SECONDS
from reward_kit.blocking import allow_threads
from reward_kit.display_text import pluralize
from reward_kit.environments.servers import ServerPool
from reward_kit.episodes.record import episode_to_record, get_attempt, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import PolicyError, RewardKitError, boundary
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.loading import make_scorer
from reward_kit.reward_agent.scoring import Reward, Scored, Scorer, ScoringRequest
from reward_kit.reward_agent.stats import AgentStats
from reward_kit.run_warnings import CURRENT_RUN_WARNINGS, RunWarnings
from reward_kit.runs import events
from reward_kit.runs.card import run_card
from reward_kit.runs.files import CARD_FILE, CREDIT_FILE, report_store_errors
from reward_kit.runs.plan import Control, Listener, RunPlan
from reward_kit.runs.run_folder import RunFolder, episode_at, placed_episodes, read_scores
from reward_kit.runs.scoring_units import RunClock, ScoringUnit, ScoringUnits, StoppedEpisode, UnitScoring
from reward_kit.runs.summary import EpisodeRow, JudgeCall, PolicySummary, repeated_cost, summarize, summary_to_json
from reward_kit.task_parts import CreditModel
from reward_kit.telemetry.current import CURRENT_TELEMETRY
from reward_kit.typed_interface import EvaluationMode

if TYPE_CHECKING:
    from reward_kit.runs.credit import RunCredit

logger = logging.getLogger("reward_kit.runs")


class RunEngine(Protocol):
    """The interface through which a run collects its episodes and calls its reward."""

    def workers(self, plan: RunPlan, budget: RunBudget) -> AbstractAsyncContextManager[Mapping[str, RolloutWorker]]:
        """Yield a worker for each policy, keyed by label; all workers share `budget`."""

    def scorer(self, reward: Reward, deadline_s: float | None) -> Scorer:
        """Return the scorer of a reward. Each call is limited by the reward's own deadline, or else by `deadline_s`."""


class LocalEngine:
    """An engine that runs everything on the event loop of this process."""

    @asynccontextmanager
    async def workers(self, plan: RunPlan, budget: RunBudget) -> AsyncIterator[Mapping[str, RLRolloutWorker]]:
        """Yield workers that run on this event loop."""
        yield {
            named.label: RLRolloutWorker(plan, named.policy, budget=budget, policy_label=named.label)
            for named in plan.policies
        }

    def scorer(self, reward: Reward, deadline_s: float | None) -> Scorer:
        """Return a scorer that runs in this process."""
        return make_scorer(reward, deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run."""

    path: Path
    status: str
    stop_reason: str | None
    rows: Sequence[EpisodeRow]
    policies: Sequence[PolicySummary]
    summary: Mapping[str, Any]
    missing: int
    not_begun: Sequence[str]  # the policies that have no episode
    credit: RunCredit | None
    credit_error: RewardKitError | None
    page: Path | None
    page_error: RewardKitError | None
    warnings: Sequence[str]


async def run(
    plan: RunPlan,
    folder: RunFolder,
    *,
    control: Control | None = None,
    traffic: ProviderSession | None = None,
    listener: Listener | None = None,
    watch: Callable[[Run], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
    error_limit: float | None = None,
    only_failed: bool = False,
    engine: RunEngine | None = None,
    given: Iterable[SingleAgentEpisode] = (),
    further: Callable[[Sequence[EpisodeRow]], Mapping[str, Any]] = lambda _: {},
) -> RunOutcome:
    """Collect and score the missing episodes of a run, and write its summary, credit and report.

    Args:
        plan: the plan of the run.
        folder: the run's directory; its finished episodes are not run again.
        control: an object that can stop the run.
        traffic: the provider session for all requests, or None if the run calls no models.
        listener: callbacks for every episode.
        watch: a factory of a context manager that is open while episodes are collected and scored.
        error_limit: the number of errors after which the run stops. A value below 1 is a share of all episodes.
        only_failed: rerun only the episodes that ended with an error.
        engine: the object that collects and scores episodes; by default they are collected and scored in this process.
        given: existing episodes, which are only scored.
        further: a function that receives the rows and returns additional keys for `summary.json`.
    """
    control = control or Control()
    warnings = RunWarnings()
    if traffic is not None:
        traffic.gave_up = control.give_up
        traffic.outage_time_s = plan.definition.run_limits.outage_time_s or traffic.outage_time_s
        if traffic.cassette is not None:
            traffic.cassette.redact = folder.redaction.redact_line
        if traffic.cache is not None:
            traffic.cache.redact = folder.redaction.redact_line
    with ExitStack() as stack:
        stack.enter_context(folder)
        stack.enter_context(events.run_logs(folder.path, folder.redaction))
        session = CURRENT_PROVIDER_SESSION.set(traffic)  # For rewards that call a model
        stack.callback(CURRENT_PROVIDER_SESSION.reset, session)
        stack.callback(CURRENT_RUN_WARNINGS.reset, CURRENT_RUN_WARNINGS.set(warnings))
        folder.write_header(folder.header.replace(run_limits=plan.definition.run_limits.model_dump()))
        execution = Run(
            plan,
            folder,
            listener=listener,
            control=control,
            error_limit=error_limit,
            only_failed=only_failed,
            engine=engine,
        )
        events.began(folder.path, "run", plan.total)
        execution.load_stored()
        execution.add_episodes(given)
        async with watch(execution):
            await execution.execute()
        events.ended(folder.path, "run", folder.header.status)
        rows = list(execution.rows.values())
        policies = summarize(rows, plan.definition.pass_threshold)
        cached = {"cache": traffic.cache.to_json()} if traffic is not None and traffic.cache is not None else {}
        repeated = {"repeated_cost": cost} if (cost := execution.repeated_cost) else {}
        summary = {**summary_to_json(policies), **repeated, **cached, **further(rows)}
        settings = plan.definition.credit
        # Credit assigned by `reward-kit credit`, possibly for earlier scores. The settings are in the old summary.
        if settings is None and (folder.path / CREDIT_FILE).exists():
            from reward_kit.runs.credit import credit_settings

            settings = credit_settings(folder.path)
        folder.write_summary(summary)
        folder.write_summary(run_card(folder.header, rows, policies, execution.repeated_cost), CARD_FILE)
        is_stored = settings is not plan.definition.credit
        credit, credit_error = (None, None) if settings is None else _assign_credit(folder.path, settings, is_stored)
        from reward_kit.report.run_page import write_page

        page, page_error = write_page(folder.path)
    return RunOutcome(
        path=folder.path,
        status=folder.header.status,
        stop_reason=control.stop_reason,
        rows=rows,
        policies=policies,
        summary={**summary, "credit": credit.section} if credit is not None else summary,
        missing=execution.count_incomplete(),
        not_begun=sorted({named.label for named in plan.policies} - {summary.policy for summary in policies}),
        credit=credit,
        credit_error=credit_error,
        page=page,
        page_error=page_error,
        warnings=warnings.lines(),
    )


def _assign_credit(run: Path, settings: CreditModel, is_stored: bool) -> tuple[RunCredit | None, RewardKitError | None]:
    """Assign credit. An error does not fail the run, and settings from the directory cannot execute code."""
    from reward_kit.runs.credit import assign_credit, reject_stored_code, write_section

    try:
        if is_stored:
            reject_stored_code(run, settings)
        credit = assign_credit(run, settings)
        write_section(run, credit)
    except RewardKitError as error:
        logger.warning("credit was not assigned: %s", error)
        return None, error
    return credit, None


class Run:
    """Collects and scores the missing episodes of a run."""

    def __init__(
        self,
        plan: RunPlan,
        store: RunFolder,
        *,
        listener: Listener | None = None,
        control: Control | None = None,
        error_limit: float | None = None,
        only_failed: bool = False,
        engine: RunEngine | None = None,
    ) -> None:
        self.rows: dict[str, EpisodeRow] = {}
        self.collected = anyio.Event()  # set when no episode is running any more
        self._plan, self._store, self._listener = plan, store, listener
        self._control = control or Control()
        self._error_limit = error_limit
        self._only_failed = only_failed
        self._engine = engine or LocalEngine()
        self._budget = RunBudget(plan.definition.run_limits, seconds=store.header.timing.worked_s)
        self._next_attempt: dict[str, int] = {}
        self._failed: set[str] = set()
        self._errors = 0
        self._judge_calls: set[JudgeCall] = set()
        self._mode: EvaluationMode = plan.reward.mode if plan.reward else "pointwise"
        # Without policies, no episode can be added to the stored groups.
        self._units = ScoringUnits(self._mode, plan.rollouts if plan.policies else None)
        self._unscored: deque[ScoringUnit] = deque()
        self._groups: dict[str, _OpenGroup] = {}
        self._running: dict[str, float] = {}
        self._agent: AsyncRewardAgent | None = None

    def longest_episode(self) -> tuple[float, str] | None:
        """Return the duration in seconds and the id of the longest-running episode, or None if none is running."""
        if not self._running:
            return None
        rollout_id, began = min(self._running.items(), key=lambda item: item[1])
        return time.monotonic() - began, rollout_id

    @property
    def scoring(self) -> AgentStats | None:
        """The statistics of the reward agent; None before it starts."""
        return self._agent.stats if self._agent is not None else None

    def count_incomplete(self) -> int:
        """Return the number of missing or unscored episodes."""
        waits = self._plan.reward is not None
        waiting = sum(waits and row.score is None and not row.is_error for row in self.rows.values())
        return max(self._plan.total - len(self.rows), 0) + waiting

    def load_stored(self) -> None:
        """Load the finished episodes and their scores from the directory. This method must be called first.

        The cost of an episode is counted even if the episode is unfinished or will be run again.
        """
        latest: dict[str, tuple[int, EpisodeRow, str, int]] = {}
        for offset, record in placed_episodes(self._store.path):
            row = EpisodeRow.from_record(record)
            following = max(self._next_attempt.get(row.rollout_id, 0), row.attempt + 1)
            self._next_attempt[row.rollout_id] = following
            tokens = row.usage.get("prompt_tokens", 0) + row.usage.get("completion_tokens", 0)
            self._budget.spend(ActionUsage(int(tokens), row.usage.get("cost")), steps=row.num_steps)
            if row.attempt + 1 == following:
                latest[row.rollout_id] = (offset, row, record["group_id"], record["rollout_index"])
        scores: dict[tuple[str, int], dict[str, Any]] = {}
        for record in read_scores(self._store.path):
            scores[record["rollout_id"], get_attempt(record)] = record
            self._spend_judge_call(JudgeCall.of(record))
        for offset, row, group_id, index in sorted(latest.values(), key=itemgetter(0)):
            if row.is_unfinished:
                continue
            if self._only_failed and row.error_class is not None and self._plan.policies:
                self._failed.add(row.rollout_id)
                continue
            score = scores.get((row.rollout_id, row.attempt))
            if score is not None and self._only_failed and score.get("failure"):
                score = None
            self._take(row)
            self._add(self._units, group_id, index, row, partial(self._stored_request, offset), score)
        if not self._plan.policies:
            self._settle(self._units.remaining())
        if self.count_incomplete():
            self._check_budget()

    def add_episodes(self, episodes: Iterable[SingleAgentEpisode]) -> None:
        """Store episodes that were collected elsewhere, and queue them for scoring.

        The cost of these episodes does not count toward the limits of this run.
        """
        units = ScoringUnits(self._mode, None)
        for episode in episodes:
            self._store.append_episode(episode)
            row, facts = EpisodeRow.from_episode(episode), get_facts(episode)
            self._take(row)
            self._add(units, facts["group_id"], facts["rollout_index"], row, partial(self._request, episode))
        self._settle(units.remaining())

    async def execute(self) -> None:
        """Run the missing episodes, score the unscored ones, store the results, and add them to `rows`."""
        began = time.perf_counter()
        status = "failed"
        allow_threads(self._plan.max_concurrency)
        async with ServerPool():
            try:
                with self._control.scope:
                    await self._collect_and_score()
                status = "interrupted" if self.count_incomplete() else "complete"
            finally:
                with anyio.CancelScope(shield=True):
                    for group in list(self._groups.values()):
                        await group.start.close()
                    await close_policies(self._plan)
                worked_s = self._store.header.timing.worked_s + time.perf_counter() - began
                with report_store_errors() if status == "failed" else nullcontext():
                    self._store.update_status(status=status, worked_s=worked_s)

    # Collecting

    async def _collect_and_score(self) -> None:
        reward, plan = self._plan.reward, self._plan
        if reward is None:
            await self._collect(None)
            return
        # The sandbox itself limits calls to one per CPU; waiting calls cost nothing.
        width = max(plan.max_concurrency, os.cpu_count() or 1)
        scorer = self._engine.scorer(reward, plan.definition.limits.reward_time_s)
        self._agent = AsyncRewardAgent(scorer, max_concurrency=width)
        async with self._agent as agent, anyio.create_task_group() as takers:
            clock = RunClock(self._store.header.timing.started_at)
            scoring = UnitScoring(reward, agent, takers, clock, self._record_score, plan.max_concurrency)
            stored, self._unscored = self._unscored, deque()
            takers.start_soon(scoring.submit_stored, stored, self._rejects_stored)
            await self._collect(scoring)
            self.collected.set()

    async def _collect(self, scoring: UnitScoring | None) -> None:
        missing = self._items_to_collect()
        if (first := next(missing, None)) is None:
            return
        items = chain([first], missing)

        async def work() -> None:
            for item in items:
                if self._control.stop_reason:
                    return
                await self._run_item(item, workers[item.policy], scoring)

        async with self._engine.workers(self._plan, self._budget) as workers, anyio.create_task_group() as tasks:
            for _ in range(min(self._plan.max_concurrency, self._plan.total)):
                tasks.start_soon(work)

    def _items_to_collect(self) -> Iterator[_Item]:
        """Yield the missing episodes group by group, so that groups are completed early."""
        plan = self._plan
        for sample in plan.samples:
            for label in (named.label for named in plan.policies):
                group_id = make_group_id(plan.seed, sample.id, label)
                ids = [make_rollout_id(group_id, index) for index in range(plan.rollouts)]
                runs = [id_ in self._failed if self._only_failed else id_ not in self.rows for id_ in ids]
                for index in (index for index, is_run in enumerate(runs) if is_run):
                    yield _Item(label, sample, group_id, index, sum(runs))

    async def _run_item(self, item: _Item, worker: RolloutWorker, scoring: UnitScoring | None) -> None:
        if item.group_id not in self._groups:
            start = worker.group(item.sample, self._plan.seed)
            self._groups[item.group_id] = _OpenGroup(start, item.group_size)
        group = self._groups[item.group_id]
        rollout_id = make_rollout_id(item.group_id, item.rollout_index)
        self._running[rollout_id] = time.monotonic()
        try:
            episode = await worker.collect_episode(group.start, item.rollout_index)
        finally:
            del self._running[rollout_id]
        episode.custom_data["attempt"] += self._next_attempt.get(episode.id_, 0)
        self._store.append_episode(episode)
        telemetry, timing = CURRENT_TELEMETRY.get(), get_facts(episode).get("timing") or {}
        if telemetry is not None and "traceparent" not in timing:  # collected in another process
            telemetry.end_episode(episode_to_record(episode))
        row = EpisodeRow.from_episode(episode)
        events.episode_stopped(row)
        if not row.is_unfinished:
            self._take(row)
        self._check_budget()
        group.remaining -= 1
        if group.remaining == 0:
            await self._groups.pop(item.group_id).start.close()
        if scoring is not None and not row.is_unfinished:
            self._add(self._units, item.group_id, item.rollout_index, row, partial(self._request, episode))
            await scoring.submit_all(self._unscored)

    # Bookkeeping

    def _request(self, episode: SingleAgentEpisode) -> ScoringRequest:
        return ScoringRequest.from_episode(episode, self._plan.definition)

    def _stored_request(self, offset: int) -> ScoringRequest:
        return self._request(episode_at(self._store.path, offset))

    def _take(self, row: EpisodeRow) -> None:
        """Register an episode that has stopped."""
        self.rows[row.rollout_id] = row
        if self._listener is not None:
            self._listener.episode_stopped(row)
        self._count_error(row.error_class)

    def _add(
        self,
        units: ScoringUnits,
        group_id: str,
        index: int,
        row: EpisodeRow,
        request: Callable[[], ScoringRequest],
        score: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue an episode for scoring.

        An episode that ended with an error is not scored, and its group does not wait for it.
        """
        given = request if row.error_class is None else None
        self._settle(units.add(group_id, StoppedEpisode(row.rollout_id, row.attempt, index, given, score)))

    def _settle(self, units: Iterable[ScoringUnit]) -> None:
        """Keep the valid scores from an earlier process, and queue all other units."""
        for unit in units:
            if unit.is_scored:
                for episode in unit.episodes:
                    self._add_score(self.rows[episode.rollout_id], episode.score or {})
            elif self._plan.reward is not None:
                self._unscored.append(unit)

    def _add_score(self, row: EpisodeRow, record: Mapping[str, Any]) -> None:
        row.add_score(record)
        self._spend_judge_call(row.judge_call)
        if self._listener is not None:
            self._listener.episode_scored(row)
        self._count_error(row.score_error)

    def _spend_judge_call(self, call: JudgeCall | None) -> None:
        if call is not None and call not in self._judge_calls:
            self._judge_calls.add(call)
            self._budget.spend(ActionUsage(0, call.cost))

    @property
    def repeated_cost(self) -> float:
        """The known cost, in US dollars, of replaced and unfinished attempts, which are not in `rows`."""
        return repeated_cost(self._budget.cost, list(self.rows.values())) if self._plan.policies else 0.0

    def _record_score(self, scored: Scored, record: Mapping[str, Any]) -> None:
        row = self.rows[scored.rollout_id]
        record = {"attempt": row.attempt, **record}
        self._store.append_score(record)
        self._add_score(row, record)
        self._check_judge_price(row)
        self._check_budget()
        events.episode_scored(row, scored.duration_s)

    def _check_judge_price(self, row: EpisodeRow) -> None:
        """Stop a run that has a cost limit after the first call to a judge whose price is unknown."""
        is_unknown = row.judge_call is not None and row.judge_call.cost is None
        if is_unknown and self._plan.definition.run_limits.cost is not None:
            self._control.give_up(
                "the limit on cost (--max-cost, run_limits.cost) cannot be enforced: the judge's price is unknown; "
                "give the judge a price file (client: {price_file: prices.yaml}), or remove the limit"
            )

    def _check_budget(self) -> None:
        if limit := self._budget.exhausted():
            self._control.reach_limit(limit)

    def _count_error(self, error: str | None) -> None:
        """Count an error, and stop the run if its error limit is exceeded."""
        self._errors += error is not None
        if self._error_limit is not None:
            allowed = self._error_limit * self._plan.total if self._error_limit < 1 else self._error_limit
            if self._errors > allowed:
                self._control.finish(
                    f"--fail-on-error {self._error_limit:g}: {pluralize(self._errors, 'episode')} ended with an error"
                )

    def _rejects_stored(self) -> bool:
        """Return True if the run only scores existing episodes and has been stopped."""
        return not self._plan.policies and self._control.stop_reason is not None


class _Item(NamedTuple):
    """An episode to run that belongs to a group of `group_size` episodes."""

    policy: str
    sample: Sample
    group_id: str
    rollout_index: int
    group_size: int


@dataclass(slots=True)
class _OpenGroup:
    start: Any
    remaining: int


async def close_policies(plan: RunPlan) -> None:
    """Close the policies and the user of a plan; errors are only logged."""
    opened: dict[str, AgentPolicy | SimulatedUser] = {
        named.label: named.policy for named in plan.policies if not named.is_lent
    }
    if plan.user is not None:
        opened[WHO] = plan.user
    for label, policy in opened.items():
        try:
            with boundary(PolicyError, f"close of {label}"), anyio.fail_after(CLOSE_SECONDS):
                await policy.close()
        except RewardKitError as error:
            logger.warning("%s", error)
