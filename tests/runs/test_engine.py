"""The interface to engines that do the work of a run elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from reward_kit.agent.limits import RunBudget
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RolloutWorker
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.reward_agent.scoring import Reward, Scorer
from reward_kit.runs.plan import RunPlan
from reward_kit.runs.run_folder import read_episodes
from reward_kit.runs.runner import LocalEngine
from tests.agent.resources import text
from tests.runs.test_runner import plan_of, run_in, status


class RecordingEngine(LocalEngine):
    """A local engine that records its requests, and whose episodes were lost `losses` times."""

    def __init__(self, losses: int = 0) -> None:
        self.opened = self.closed = 0
        self.rewards: list[str] = []
        self._losses = losses

    @asynccontextmanager
    async def workers(self, plan: RunPlan, budget: RunBudget) -> AsyncIterator[Mapping[str, RolloutWorker]]:
        self.opened += 1
        async with super().workers(plan, budget) as workers:
            yield {label: Losing(worker, self._losses) for label, worker in workers.items()}
        self.closed += 1

    def scorer(self, reward: Reward, deadline_s: float | None) -> Scorer:
        self.rewards.append(reward.id)
        return super().scorer(reward, deadline_s)


class Losing:
    def __init__(self, worker: RolloutWorker, losses: int) -> None:
        self._worker, self._losses = worker, losses

    def group(self, sample: Any, run_seed: int = 0) -> Any:
        return self._worker.group(sample, run_seed)

    async def collect_episode(self, group: Any, rollout_index: int = 0) -> SingleAgentEpisode:
        episode = await self._worker.collect_episode(group, rollout_index)
        episode.custom_data["attempt"] = self._losses
        return episode


class Raises(AgentPolicy):
    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        raise OSError("no answer")


async def test_a_run_asks_its_engine_for_workers_and_for_a_scorer(tmp_path: Path) -> None:
    engine = RecordingEngine()
    run = await run_in(tmp_path / "run", plan_of([text("done")]), engine=engine)
    assert (engine.opened, engine.closed, engine.rewards) == (1, 1, ["one"])
    assert len(run.rows) == 6 and status(tmp_path / "run") == "complete"


async def test_engine_is_not_opened_without_missing_episodes(tmp_path: Path) -> None:
    await run_in(tmp_path / "run", plan_of([text("done")]))
    engine = RecordingEngine()
    run = await run_in(tmp_path / "run", plan_of([text("done")]), engine=engine)
    assert engine.opened == 0 and run.count_incomplete() == 0


async def test_attempts_lost_by_the_engine_count_towards_later_attempts(tmp_path: Path) -> None:
    plan = plan_of(Raises(), samples=1, rollouts=1, reward=None)
    await run_in(tmp_path / "run", plan, engine=RecordingEngine(losses=2))
    await run_in(tmp_path / "run", plan, engine=RecordingEngine(losses=1), only_failed=True)
    assert [record["attempt"] for record in read_episodes(tmp_path / "run")] == [2, 4]
