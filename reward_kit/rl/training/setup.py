"""What a plan is carried out with: the policy, the learner over its weights, the reward agents, the pipeline."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import derive_seed
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError
from reward_kit.providers.retry import RetryPolicy
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.levels import scorer_of
from reward_kit.reward_agent.retrying import Retries
from reward_kit.reward_agent.score_cache import ScoreCache
from reward_kit.rl.checkpoint import save_batch_for_study
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.rl.trainer import Trainer, trainable
from reward_kit.rl.training.collecting import Collector
from reward_kit.rl.training.evaluation import Evaluation, acting_as
from reward_kit.rl.training.pipelines import Pipeline, PipelineOptions
from reward_kit.rl.training.plan import HeldOut, TrainingPlan
from reward_kit.rl.training.sample_stream import SampleStream
from reward_kit.rl.training.start_together import StartTogether
from reward_kit.runs.tasks import Task
from reward_kit.runs.users import make_user
from reward_kit.tokens import TokenBatch

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a run works with.

    Attributes:
        pipeline: makes the updates.
        evaluation: None where nothing is held out.
        reward_agent: of training.
        policy: as the train file names it.
    """

    pipeline: Pipeline
    evaluation: Evaluation | None
    reward_agent: AsyncRewardAgent
    policy: AgentPolicy


class _NoTokenizer:
    """Decodes for a policy that has no tokenizer: the ids as they are."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


@asynccontextmanager
async def equipped(plan: TrainingPlan, folder: Path, say: Say) -> AsyncIterator[Equipment]:
    """Everything that a plan needs, opened; closed at the end of the block.

    Args:
        plan: what is trained.
        folder: of the run; batches for study go there.
        say: takes each line of an example that an evaluation shows.

    Raises:
        ConfigError: the policy cannot be made, or not be trained as it samples, or an option does not fit it.
    """
    policy = plan.make_policy()
    ppo = with_temperature(plan.config.ppo, policy)
    acting = _in_lockstep(policy)
    learner = make_learner(policy, ppo, plan, folder)
    try:
        async with ServerPool(), _reward_agent(plan.task, plan) as agent:
            trainer = Trainer(
                _worker(plan.task, acting),
                agent,
                plan.credit,
                learner,
                group_size=plan.config.rollout.group_size,
                run_seed=plan.config.seed,
                reward_manager=_reward_manager(plan),
                max_concurrency=plan.config.rollout.max_concurrency,
            )
            async with _evaluation(plan, policy, agent, say) as evaluation, _pipeline(plan, trainer) as pipeline:
                yield Equipment(pipeline, evaluation, agent, policy)
    finally:
        await policy.close()


def _in_lockstep(policy: AgentPolicy) -> AgentPolicy:
    return StartTogether(policy) if getattr(policy, "lockstep", False) else policy


def with_temperature(ppo: PPOConfig, policy: object) -> PPOConfig:
    """The options with the temperature at which the policy samples: the logits are divided by the same in both.

    Raises:
        ConfigError: another one was asked for.
    """
    sampling = getattr(policy, "sampling", None)
    temperature = getattr(sampling, "temperature", 1.0)
    if temperature == ppo.temperature:
        return ppo
    if ppo.temperature != 1.0:
        raise ConfigError(
            f"ppo.temperature is {ppo.temperature:g}, and the policy samples at {temperature:g}; leave it out"
        )
    if temperature == 0.0:
        raise ConfigError("the policy samples greedily (temperature 0), so there is nothing to learn from its choices")
    return replace(ppo, temperature=temperature)


def make_learner(policy: AgentPolicy, ppo: PPOConfig, plan: TrainingPlan, folder: Path) -> PPOLearner:
    """The learner over the policy's weights, with a copy of them as they are now for the reference.

    Raises:
        ConfigError: the policy cannot be trained, or not with these options.
    """
    module = trainable(policy).module
    config = plan.config
    parts = -(-config.rollout.samples_per_update // plan.samples_per_minibatch)

    def keep(rows: TokenBatch, facts: Mapping[str, Any]) -> None:
        save_batch_for_study(folder / "studies", rows, facts)

    return PPOLearner(
        module,
        ppo,
        reference=copy.deepcopy(module) if ppo.kl_coefficient and ppo.lora is None else None,
        seed=derive_seed("minibatches", config.seed),
        device=next(module.parameters()).device,
        total_steps=config.updates * parts,
        on_failure=keep,
    )


def _reward_manager(plan: TrainingPlan) -> EpisodeRewardManager | None:
    kind = plan.config.reward_manager.normalization_type
    # Placed and read back unchanged: it would only cost time.
    return None if kind == "none" else EpisodeRewardManager(_NoTokenizer(), 0, normalization_type=kind)


def _worker(task: Task, policy: AgentPolicy) -> RLRolloutWorker:
    # The label is a part of ids and seeds: a policy that is wrapped draws as one that is not.
    label = "policy"
    return RLRolloutWorker(task.definition, policy, tools=task.tools, user=make_user(task), policy_label=label)


def _reward_agent(task: Task, plan: TrainingPlan) -> AsyncRewardAgent:
    asked, deadline_s = plan.config.reward, task.definition.limits.reward_time_s
    assert task.reward is not None, "load_plan refuses tasks without one"
    retries = Retries(RetryPolicy(max_attempts=asked.max_attempts), seed=plan.config.seed)
    return AsyncRewardAgent(
        scorer_of(task.reward, deadline_s),
        max_concurrency=asked.max_concurrency,
        retries=retries if asked.max_attempts > 1 else None,
        cache=ScoreCache() if asked.cache else None,
    )


@asynccontextmanager
async def _pipeline(plan: TrainingPlan, trainer: Trainer) -> AsyncIterator[Pipeline]:
    config = plan.config
    options = PipelineOptions(
        schedule=config.pipeline,
        samples_per_update=config.rollout.samples_per_update,
        samples_per_minibatch=plan.samples_per_minibatch,
        dynamic_sampling=config.dynamic_sampling,
    )
    async with Pipeline(trainer, SampleStream(plan.samples, config.seed), options) as pipeline:
        yield pipeline


@asynccontextmanager
async def _evaluation(
    plan: TrainingPlan, policy: AgentPolicy, agent: AsyncRewardAgent, say: Say
) -> AsyncIterator[Evaluation | None]:
    asked, held_out = plan.config.evaluation, plan.held_out
    if asked is None or held_out is None:
        yield None
        return
    acting = _in_lockstep(acting_as(policy, asked.temperature))
    manager = None
    if asked.examples:
        decoder = getattr(policy, "tokenizer", None) or _NoTokenizer()
        manager = EpisodeRewardManager(decoder, asked.examples, seed=plan.config.seed, echo=say)
    async with _agent_for(held_out, plan, agent) as scoring:
        yield Evaluation(
            worker=_worker(held_out.task, acting),
            reward_agent=scoring,
            samples=held_out.samples,
            rollouts=asked.rollouts,
            run_seed=plan.config.seed,
            collector=Collector(asked.rollouts, plan.config.rollout.max_concurrency),
            examples=manager,
            pad_token_id=trainable(policy).pad_token_id,
        )


@asynccontextmanager
async def _agent_for(held_out: HeldOut, plan: TrainingPlan, agent: AsyncRewardAgent) -> AsyncIterator[AsyncRewardAgent]:
    """The reward agent of training, or one of its own for a task with another reward."""
    if not held_out.is_own_task:
        yield agent
        return
    async with _reward_agent(held_out.task, plan) as own:
        yield own


def use_threads(threads: int | None) -> None:
    """How many threads torch uses."""
    if threads is not None:
        torch.set_num_threads(threads)
