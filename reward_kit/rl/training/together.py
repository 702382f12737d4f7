"""A training run in several processes: what the first of them gives the others, and what the others do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.crew import Crew
from reward_kit.rl.learner.sharded_learner import ShardedLearner, work_for
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.trainer import trainable
from reward_kit.rl.training.plan import TrainingPlan, load_plan
from reward_kit.rl.training.setup import learner_over, use_threads, with_temperature


def sharded_by(crew: Crew) -> Callable[[AgentPolicy, PPOConfig, TrainingPlan, Path], ShardedLearner]:
    """Makes the learner of the first process, over shards of which every process has one.

    Args:
        crew: the processes.
    """

    def make(policy: AgentPolicy, ppo: PPOConfig, plan: TrainingPlan, folder: Path) -> ShardedLearner:
        told = (str(plan.path.resolve()), dict(plan.overrides))
        module = trainable(policy).module
        return ShardedLearner(module, lambda copy: learner_over(copy, ppo, plan, folder), crew, told)

    return make


def help_to_train(crew: Crew) -> bool:
    """Train what the first process trains; see `work_for`."""
    return work_for(crew, _learner_of)


def _learner_of(path: str, overrides: Mapping[str, Any]) -> PPOLearner:
    """The learner that the first process has; whatever acts is there alone."""
    plan = load_plan(Path(path), overrides)
    use_threads(plan.config.threads)
    policy = plan.make_policy()
    module, ppo = trainable(policy).module, with_temperature(plan.config.ppo, policy)
    anyio.run(policy.close)
    del policy  # and the copy that it would act with
    return learner_over(module, ppo, plan, plan.folder)
