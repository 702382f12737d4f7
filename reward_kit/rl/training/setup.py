"""What a plan is carried out with: the policy, the learner over its weights, the reward agents, the pipeline."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import derive_seed
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError
from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.providers.session import ProviderSession
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.calling import Retries
from reward_kit.reward_agent.levels import scorer_of
from reward_kit.reward_agent.score_cache import ScoreCache
from reward_kit.reward_agent.scoring import Scorer
from reward_kit.rl.checkpoint import save_batch_for_study
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.rl.trainer import Learner, Trainer, trainable
from reward_kit.rl.training.collecting import Collector, TrainingWorker
from reward_kit.rl.training.evaluation import Evaluation, acting_as
from reward_kit.rl.training.pipelines import Pipeline, PipelineOptions
from reward_kit.rl.training.plan import TrainingPlan
from reward_kit.rl.training.sample_stream import SampleStream
from reward_kit.rl.training.start_together import StartTogether
from reward_kit.runs.plan import make_user
from reward_kit.runs.tasks import LoadedTask
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


class Actors(NamedTuple):
    """Who collects: the episodes that are trained on, and those of evaluations, where there are any."""

    worker: TrainingWorker
    held_out: TrainingWorker | None


class _NoTokenizer:
    """Decodes for a policy that has no tokenizer: the ids as they are."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


@asynccontextmanager
async def equipped(
    plan: TrainingPlan, folder: Path, say: Say, makers: Makers | None = None
) -> AsyncIterator[Equipment]:
    """Everything that a plan needs, opened; closed at the end of the block.

    Args:
        plan: what is trained.
        folder: of the run; batches for study go there.
        say: takes each line of an example that an evaluation shows.
        makers: of what is not in this process; by default everything is.

    Raises:
        ConfigError: the policy cannot be made, or not be trained as it samples, or an option does not fit it.
    """
    makers = makers or Makers()
    policy = plan.make_policy()
    ppo = with_temperature(plan.config.ppo, policy)
    learner = makers.learner(policy, ppo, plan, folder)
    try:
        async with (
            ServerPool(),
            makers.actors(plan, policy) as actors,
            _reward_agent(plan.task, plan, makers.scorer) as agent,
        ):
            trainer = Trainer(
                actors.worker,
                agent,
                plan.credit,
                learner,
                group_size=plan.config.rollout.group_size,
                run_seed=plan.config.seed,
                reward_manager=_reward_manager(plan),
                max_concurrency=plan.config.rollout.max_concurrency,
            )
            evaluating = _evaluation(plan, policy, actors.held_out, agent, say, makers.scorer)
            async with evaluating as evaluation, _pipeline(plan, trainer) as pipeline:
                yield Equipment(pipeline, evaluation, agent, policy)
    finally:
        await policy.close()


def acting_for_evaluation(plan: TrainingPlan, policy: AgentPolicy) -> AgentPolicy:
    """The policy as it is evaluated.

    Raises:
        ConfigError: it knows no temperature, and is to have another one.
    """
    acting: AgentPolicy = acting_as(policy, plan.config.evaluation.temperature if plan.config.evaluation else None)
    return acting


@asynccontextmanager
async def _actors_here(plan: TrainingPlan, policy: AgentPolicy) -> AsyncIterator[Actors]:
    held_out = None
    if plan.held_out is not None:
        held_out = make_worker(plan.held_out.task, _in_lockstep(acting_for_evaluation(plan, policy)))
    yield Actors(make_worker(plan.task, _in_lockstep(policy)), held_out)


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
    return learner_over(trainable(policy).module, ppo, plan, folder)


def learner_over(module: torch.nn.Module, ppo: PPOConfig, plan: TrainingPlan, folder: Path) -> PPOLearner:
    """The learner over these weights; as `make_learner`."""
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


def make_worker(task: LoadedTask, policy: AgentPolicy, traffic: ProviderSession | None = None) -> RLRolloutWorker:
    """The worker that collects episodes of a task, on whichever machine.

    Args:
        task: with its tools.
        policy: who acts.
        traffic: what all requests to endpoints share there.
    """
    # The label is a part of ids and seeds: a policy that is wrapped draws as one that is not.
    user = make_user(task, traffic)
    return RLRolloutWorker(task.definition, policy, tools=task.tools, user=user, policy_label="policy")


def _scorer_here(task: LoadedTask) -> Scorer:
    assert task.reward is not None, "load_plan refuses tasks without one"
    return scorer_of(task.reward, task.definition.limits.reward_time_s)


@dataclass(frozen=True, slots=True)
class Makers:
    """Who makes what need not be in this process; by default everything is.

    Attributes:
        learner: over the policy's weights.
        actors: who collects episodes, for as long as the block lasts.
        scorer: where a task's reward is called.
    """

    learner: Callable[[AgentPolicy, PPOConfig, TrainingPlan, Path], Learner] = make_learner
    actors: Callable[[TrainingPlan, AgentPolicy], AbstractAsyncContextManager[Actors]] = _actors_here
    scorer: Callable[[LoadedTask], Scorer] = _scorer_here


def _reward_agent(task: LoadedTask, plan: TrainingPlan, scorer: Callable[[LoadedTask], Scorer]) -> AsyncRewardAgent:
    asked = plan.config.reward
    retries = Retries(RetryPolicy(max_attempts=asked.max_attempts), seed=plan.config.seed)
    return AsyncRewardAgent(
        scorer(task),
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
    plan: TrainingPlan,
    policy: AgentPolicy,
    worker: TrainingWorker | None,
    agent: AsyncRewardAgent,
    say: Say,
    scorer: Callable[[LoadedTask], Scorer],
) -> AsyncIterator[Evaluation | None]:
    asked, held_out = plan.config.evaluation, plan.held_out
    if asked is None or held_out is None or worker is None:
        yield None
        return
    manager = None
    if asked.examples:
        decoder = getattr(policy, "tokenizer", None) or _NoTokenizer()
        manager = EpisodeRewardManager(decoder, asked.examples, seed=plan.config.seed, echo=say)
    # The reward agent of training, or one of its own for a task with another reward.
    own = _reward_agent(held_out.task, plan, scorer) if held_out.is_own_task else nullcontext(agent)
    async with own as scoring:
        yield Evaluation(
            worker=worker,
            reward_agent=scoring,
            samples=held_out.samples,
            rollouts=asked.rollouts,
            run_seed=plan.config.seed,
            collector=Collector(asked.rollouts, plan.config.rollout.max_concurrency),
            examples=manager,
            pad_token_id=trainable(policy).pad_token_id,
        )


def use_threads(threads: int | None) -> None:
    """How many threads torch uses."""
    if threads is not None:
        torch.set_num_threads(threads)
