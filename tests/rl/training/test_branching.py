"""Updates that also learn from groups which continue episodes from one of their steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reward_kit import EvaluateResult, Message, RLRolloutWorker, TaskDefinitionModel, reward_function
from reward_kit.agent.branches import repeated_steps
from reward_kit.agent.rl_rollout_worker import collect_group
from reward_kit.agent.samples import Sample
from reward_kit.episodes.record import get_facts
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.rl.ppo import PPOConfig, PPOLearner
from reward_kit.rl.trainer import Trainer
from reward_kit.rl.training.branching import Branching
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl_processing import CreditAssigner
from tests.rl.training.frozen_lake import lake_folder, train
from tests.tiny_policy import TinyPolicy

TASK = TaskDefinitionModel(
    name="lake",
    resource_type="gymnasium",
    base_resource_config={"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    max_episode_steps=12,
)


@reward_function
def crossed(messages: list[Message], environment_return: float) -> EvaluateResult:
    return EvaluateResult(score=environment_return)


async def test_repeated_steps_are_context_and_only_new_ones_are_trained_on() -> None:
    policy = TinyPolicy(1)
    learner = PPOLearner(policy.module, PPOConfig(lr=0.01), seed=1)
    worker = RLRolloutWorker(TASK, policy)
    async with AsyncRewardAgent(crossed) as agent:
        trainer = Trainer(
            worker, agent, CreditAssigner("grpo"), learner, group_size=4, run_seed=1, branching=Branching(3)
        )
        episodes = await trainer.collect([Sample("lake"), Sample("pond")])
        scored = await trainer.score(episodes)
        credited = trainer.advantages(trainer.align(episodes, scored))
        rows = trainer.batch(episodes, credited)
        diagnostics = await trainer.update(rows)
    assert len(episodes) == (2 + 3) * 4 and len(set(Counter(credited.group_ids).values())) == 1
    continued = [episode for episode in episodes if repeated_steps(episode)]
    assert len(continued) == 12 and all(get_facts(one)["failure"] is None for one in continued)
    by_id = {episode.id_: episode for episode in episodes}
    for episode in continued:
        origin = by_id[get_facts(episode)["start"]["continues"]["rollout_id"]]
        step = repeated_steps(episode)
        assert step >= 1 and episode.messages[: 1 + 2 * step] == origin.messages[: 1 + 2 * step]
    for episode, steps in zip(episodes, credited.steps, strict=True):
        assert [step.advantage is None for step in steps] == [t < repeated_steps(episode) for t in range(len(steps))]
    new = sum(len(episode) - repeated_steps(episode) for episode in episodes)
    assert rows.batch["loss_mask"].sum() == new < sum(map(len, episodes))
    assert trainer.meter.totals["env_steps"] == new
    assert diagnostics["logprob_gap"] < 1e-5  # the recorded prefix is the context in which the new tokens were sampled


@pytest.mark.parametrize("where", ["uniform", "first_visits", "uncertainty"])
async def test_steps_are_drawn_as_described(where: Any) -> None:
    policy = TinyPolicy(1)
    groups = [await collect_group(RLRolloutWorker(TASK, policy), Sample(name), 6) for name in ("a", "b")]
    branching = Branching(10, where)
    points = branching.choose(groups, 5)
    assert points == branching.choose(groups, 5) != branching.choose(groups, 6)
    assert len(set(points)) == len(points) <= 10
    assert all(1 <= point.step < len(groups[point.group][point.episode]) for point in points)
    if where == "first_visits":
        keys = [groups[p.group][p.episode].get_infos(p.step)["state_key"] for p in points]
        assert len({(p.group, key) for p, key in zip(points, keys, strict=True)}) == len(points)


async def test_uncertain_steps_are_preferred() -> None:
    policy = TinyPolicy(1)
    groups = [await collect_group(RLRolloutWorker(TASK, policy), Sample("a"), 6)]
    for episode in groups[0]:
        for span in episode.tokens.spans:  # certain, except for the actions of step 2
            episode.tokens.logprobs[span.start] = -1.0 if span.step == 2 else -0.01
    drawn = Counter(point.step for seed in range(40) for point in Branching(2, "uncertainty").choose(groups, seed))
    assert drawn[2] / drawn.total() > 0.8


async def test_branching_in_a_train_file(tmp_path: Path) -> None:
    rollout = {"samples_per_update": 2, "group_size": 2, "branching": {"groups": 2, "where": "first_visits"}}
    plan = load_plan(lake_folder(tmp_path, rollout=rollout))
    outcome = await train(plan, tmp_path / "run")
    again = await train(load_plan(lake_folder(tmp_path, rollout=rollout)), tmp_path / "again")
    assert outcome is not None and again is not None
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "again")]
    assert len(lines[0]) == len(lines[1]) >= 2


@pytest.mark.parametrize("changes", [{"pipeline": "one_step_off"}, {"dynamic_sampling": {}}, {"engine": "ray"}])
def test_branching_with_other_schedules_is_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    rollout = {"samples_per_update": 2, "group_size": 2, "branching": {"groups": 2}}
    with pytest.raises(ConfigError, match=r"rollout.branching: requires pipeline: sync and engine: local"):
        load_plan(lake_folder(tmp_path, rollout=rollout, **changes))


def test_no_steps_to_continue_from() -> None:
    assert Branching(4).choose([[], []], 0) == []
