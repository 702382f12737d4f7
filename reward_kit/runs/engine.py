"""Where the episodes of a run are collected, and where its rewards are called: the seam behind which a cluster fits.

A `Run` asks its engine for a worker per policy and for a scorer, and knows nothing else of where they are. Everything
that is one per run stays with the run: its store, its budget, what is scored together, the display, resuming.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from reward_kit.agent.limits import RunBudget
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.reward_agent.levels import scorer_of
from reward_kit.reward_agent.scoring import Reward, Scorer
from reward_kit.runs.plan import Plan


class RolloutWorker(Protocol):
    """Collects episodes of one task with one policy; `RLRolloutWorker` is the one in this process.

    A group is whatever `group` gives: an async context manager with `close`, which `collect_episode` knows.
    """

    def group(self, sample: Sample, run_seed: int = 0) -> Any:
        """The start that the episodes of `sample` share. Nothing is made yet."""

    async def collect_episode(self, group: Any, rollout_index: int = 0) -> SingleAgentEpisode:
        """Collect one episode; it always comes back, whatever fails in it.

        Its `attempt` says how often it was begun before and lost with the machine it ran on: 0 in this process.
        """


class Engine(Protocol):
    """Where a run's work is done. One of them serves one run."""

    def workers(self, plan: Plan, budget: RunBudget) -> AbstractAsyncContextManager[Mapping[str, RolloutWorker]]:
        """A worker for each policy, by its label, for as long as the block lasts.

        Args:
            plan: what is run.
            budget: what all workers spend from; a bound that is reached stops their episodes.
        """

    def scorer(self, reward: Reward, deadline_s: float | None) -> Scorer:
        """Where a reward is called.

        Args:
            reward: the run's.
            deadline_s: for one call, where the reward has none of its own.
        """


class LocalEngine:
    """Everything in this process, on its one event loop."""

    @asynccontextmanager
    async def workers(self, plan: Plan, budget: RunBudget) -> AsyncIterator[Mapping[str, RolloutWorker]]:
        """As `Engine`."""
        yield {
            named.label: RLRolloutWorker(
                plan.definition,
                named.policy,
                tools=plan.tools,
                user=plan.user,
                budget=budget,
                policy_label=named.label,
            )
            for named in plan.policies
        }

    def scorer(self, reward: Reward, deadline_s: float | None) -> Scorer:
        """As `Engine`."""
        return scorer_of(reward, deadline_s)
