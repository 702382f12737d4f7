"""Updates that also learn from groups which continue episodes from one of their steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reward_kit import EvaluateResult, Message, RLRolloutWorker, TaskDefinitionModel, reward_function
from reward_kit.agent.branches import new_part
from reward_kit.agent.rl_rollout_worker import collect_group
from reward_kit.agent.samples import Sample
from reward_kit.episodes.record import get_facts
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.training.branching import Branching
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl.training.trainer import Trainer
from reward_kit.rl_processing import CreditAssigner
from tests.rl.training.frozen_lake import lake_folder, train
from tests.tiny_policy import TinyPolicy, cell_of

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
        parts = [new_part(episode) for episode in episodes]
        credited = trainer.advantages(trainer.align(parts, scored))
        rows = trainer.batch(parts, credited)
        diagnostics = await trainer.update(rows)
    assert len(episodes) == (2 + 3) * 4 and set(Counter(credited.group_ids).values()) == {4}
    by_id = {episode.id_: episode for episode in episodes}
    continued = [episode for episode in episodes if "continues" in get_facts(episode)["start"]]
    assert len(continued) == 12 and all(get_facts(one)["failure"] is None for one in continued)
    for episode, part, steps in zip(episodes, parts, credited.steps, strict=True):
        step = (get_facts(episode)["start"].get("continues") or {}).get("step", 0)
        assert len(part) == len(steps) == len(episode) - step
        assert [one.policy_logprobs["token_ids"].tolist() for one in steps] == [
            turn.token_ids.tolist() for t, turn in episode.tokens.turns().items() if t >= step
        ]
        if step:
            origin = by_id[get_facts(episode)["start"]["continues"]["rollout_id"]]
            assert episode.messages[: 1 + 2 * step] == origin.messages[: 1 + 2 * step]
    new = sum(map(len, parts))
    assert rows.batch["loss_mask"].sum() == rows.batch["action_mask"].sum() == new < sum(map(len, episodes))
    assert trainer.meter.totals["env_steps"] == trainer.meter.totals["sampled_tokens"] == new
    assert diagnostics["logprob_gap"] < 1e-5  # the recorded prefix is the context in which the new tokens were sampled


async def test_trainer_rejects_combinations() -> None:
    policy = TinyPolicy(1)
    learner, credit = PPOLearner(policy.module, PPOConfig(lr=0.01), seed=1), CreditAssigner("grpo")
    async with AsyncRewardAgent(crossed) as agent:
        with pytest.raises(ConfigError, match="continuations cannot be combined with branching"):
            Trainer(
                RLRolloutWorker(TASK, policy),
                agent,
                credit,
                learner,
                group_size=4,
                branching=Branching(3),
                continuations=2,
            )


def uniform_values() -> list[list[float]]:
    """Return V[t][cell], the success probability of uniformly random moves on the lake from step t."""
    values = [[0.0] * 16 for _ in range(13)]
    for t in reversed(range(12)):
        for cell in (cell for cell in range(16) if "SFFFFHFHFFFHHFFG"[cell] in "SF"):
            row, column = divmod(cell, 4)
            for down, right in ((0, -1), (1, 0), (0, 1), (-1, 0)):
                after = min(max(row + down, 0), 3) * 4 + min(max(column + right, 0), 3)
                values[t][cell] += (1.0 if after == 15 else values[t + 1][after]) / 4
    return values


async def test_measured_values_are_those_of_the_policy() -> None:
    policy, n = TinyPolicy(1), 24  # its moves are uniformly random before the first update
    learner = PPOLearner(policy.module, PPOConfig(lr=0.01), seed=1)
    async with AsyncRewardAgent(crossed) as agent:
        worker = RLRolloutWorker(TASK, policy)
        trainer = Trainer(worker, agent, CreditAssigner("grpo"), learner, group_size=16, run_seed=3, continuations=n)
        episodes = await trainer.collect([Sample("lake")])
        aligned = trainer.align(episodes, await trainer.score(episodes))
        before = trainer.meter.totals["env_steps"]
        await trainer.measure([Sample("lake")], episodes, aligned)
    exact = uniform_values()
    deviation = variance = 0.0
    for episode, steps in zip(episodes, aligned.steps, strict=True):
        assert "measured_value" not in steps[0].step_info
        for t in range(1, len(episode)):
            value = exact[t][cell_of(episode.get_observations(t))]
            deviation += steps[t].step_info["measured_value"] - value
            variance += value * (1 - value) / n
    assert variance > 0 and abs(deviation) < 4 * variance**0.5
    assert trainer.meter.totals["env_steps"] > 5 * before


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
    figures = json.loads(lines[0][-1])
    assert figures["branching/episodes"] == 4 and figures["episode/count"] == 4 and "branching/score" in figures


async def test_vine_in_a_train_file(tmp_path: Path) -> None:
    rollout = {"samples_per_update": 2, "group_size": 2, "continuations": 2}
    plan = load_plan(lake_folder(tmp_path, rollout=rollout, credit={"estimator": "vine"}))
    await train(plan, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["progress/env_steps"] > 2 * 2 * 2 * 5 and "learner/policy_loss" in lines[-1]


@pytest.mark.parametrize(
    ("rollout", "credit", "message"),
    [
        ({}, {"estimator": "vine"}, "rollout.continuations: is required by the estimator vine"),
        ({"continuations": 2}, {"estimator": "grpo"}, "rollout.continuations: is used only by vine"),
        (
            {"continuations": 2, "branching": {"groups": 1}},
            {"estimator": "vine"},
            "rollout.branching: cannot be combined with continuations",
        ),
    ],
)
def test_options_without_effect_are_rejected(
    tmp_path: Path, rollout: dict[str, Any], credit: dict[str, Any], message: str
) -> None:
    rollout = {"samples_per_update": 2, "group_size": 2, **rollout}
    with pytest.raises(ConfigError, match=message):
        load_plan(lake_folder(tmp_path, rollout=rollout, credit=credit))


@pytest.mark.parametrize("changes", [{"pipeline": "one_step_off"}, {"dynamic_sampling": {}}, {"engine": "ray"}])
def test_branching_with_other_schedules_is_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    rollout = {"samples_per_update": 2, "group_size": 2, "branching": {"groups": 2}}
    with pytest.raises(ConfigError, match=r"rollout.branching: requires pipeline: sync and engine: local"):
        load_plan(lake_folder(tmp_path, rollout=rollout, **changes))


def test_no_steps_to_continue_from() -> None:
    assert Branching(4).choose([[], []], 0) == []
