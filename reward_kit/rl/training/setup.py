"""The components of a training run: policy, learner, workers, reward agents, pipeline and evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import torch

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import derive_seed
from reward_kit.environments.servers import ServerPool
from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.providers.session import ProviderSession
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.call_scheduler import Retries
from reward_kit.reward_agent.loading import make_scorer
from reward_kit.reward_agent.score_cache import ScoreCache
from reward_kit.reward_agent.scoring import Scorer
from reward_kit.rl.checkpoint import save_batch_for_study
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.sharding import ProcessGroup, ShardedLearner, follow
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.rl.training.branching import Branching
from reward_kit.rl.training.pipelines import Pipeline, PipelineOptions
from reward_kit.rl.training.plan import TrainingPlan, load_plan, with_temperature
from reward_kit.rl.training.rollouts import (
    Collector,
    HeldOutEvaluation,
    LockstepBarrier,
    SampleStream,
    TrainingWorker,
    evaluation_policy,
)
from reward_kit.rl.training.trainer import Learner, Trainer, trainable
from reward_kit.runs.plan import make_user
from reward_kit.runs.tasks import LoadedTask
from reward_kit.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class Components:
    """The open components of a run. `evaluation` is `None` without held-out samples."""

    pipeline: Pipeline
    evaluation: HeldOutEvaluation | None
    reward_agent: AsyncRewardAgent
    policy: AgentPolicy


class Workers(NamedTuple):
    """The worker that collects episodes for training and, if there are evaluations, the worker for them."""

    worker: TrainingWorker
    held_out: TrainingWorker | None


class _IdTokenizer:
    """A replacement for the tokenizer of a policy that has none. It shows token ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def make_learner(module: torch.nn.Module, ppo: PPOConfig, plan: TrainingPlan, folder: Path) -> PPOLearner:
    """Create the learner for a policy's weights. Its reference model is a copy of the current weights."""

    def keep(rows: TokenBatch, facts: Mapping[str, Any]) -> None:
        save_batch_for_study(folder / "studies", rows, facts)

    parts = -(-plan.config.rollout.samples_per_update // plan.samples_per_minibatch)
    return PPOLearner(
        module,
        ppo,
        reference=copy.deepcopy(module) if ppo.kl_coefficient and ppo.lora is None else None,
        seed=derive_seed("minibatches", plan.config.seed),
        total_steps=math.inf if plan.config.updates is None else plan.config.updates * parts,
        on_failure=keep,
    )


@asynccontextmanager
async def _local_workers(plan: TrainingPlan, policy: AgentPolicy) -> AsyncIterator[Workers]:
    held_out = None
    if plan.held_out is not None and plan.config.evaluation is not None:
        acting = evaluation_policy(policy, plan.config.evaluation.temperature)
        held_out = make_worker(plan.held_out.task, in_lockstep(acting))
    yield Workers(make_worker(plan.task, in_lockstep(policy)), held_out)


def in_lockstep(acting: AgentPolicy) -> AgentPolicy:
    """Return the policy with a barrier if it acts in lockstep, and otherwise the policy itself."""
    return LockstepBarrier(acting) if getattr(acting, "lockstep", False) else acting


def make_worker(task: LoadedTask, policy: AgentPolicy, traffic: ProviderSession | None = None) -> RLRolloutWorker:
    """Create a worker that collects episodes for a task. It can run on any machine. Its endpoints share `traffic`."""
    # The label is part of ids and seeds, so a wrapped policy must keep its label.
    user = make_user(task, traffic)
    return RLRolloutWorker(task.definition, policy, tools=task.tools, user=user, policy_label="policy")


def _local_scorer(task: LoadedTask) -> Scorer:
    assert task.reward is not None, "load_plan rejects tasks without a reward"
    return make_scorer(task.reward, task.definition.limits.reward_time_s)


@dataclass(frozen=True, slots=True)
class Factories:
    """Functions that create the components of a run, possibly in other processes.

    By default, all components are in this process.
    """

    learner: Callable[[torch.nn.Module, PPOConfig, TrainingPlan, Path], Learner] = make_learner
    actors: Callable[[TrainingPlan, AgentPolicy], AbstractAsyncContextManager[Workers]] = _local_workers
    scorer: Callable[[LoadedTask], Scorer] = _local_scorer


@asynccontextmanager
async def open_components(
    plan: TrainingPlan, folder: Path, echo: Callable[[str], None], factories: Factories
) -> AsyncIterator[Components]:
    """Open all components of a plan and close them at the end of the block.

    Batches for debugging are written to `folder`, the run directory. `echo` is called with each line of the examples
    that an evaluation shows.
    """
    config, rollout = plan.config, plan.config.rollout

    def reward_agent(task: LoadedTask) -> AsyncRewardAgent:
        attempts = config.reward.max_attempts
        return AsyncRewardAgent(
            factories.scorer(task),
            max_concurrency=config.reward.max_concurrency,
            retries=Retries(RetryPolicy(max_attempts=attempts), seed=config.seed) if attempts > 1 else None,
            cache=ScoreCache() if config.reward.cache else None,
        )

    async with AsyncExitStack() as stack:
        policy = plan.make_policy()
        stack.push_async_callback(policy.close)
        ppo = with_temperature(config.ppo, policy)
        learner = factories.learner(trainable(policy).module, ppo, plan, folder)
        await stack.enter_async_context(ServerPool())
        workers = await stack.enter_async_context(factories.actors(plan, policy))
        agent = await stack.enter_async_context(reward_agent(plan.task))
        normalization = config.reward_manager.normalization_type
        # Without normalization, scores would be placed on tokens and read back unchanged.
        manager = EpisodeRewardManager(_IdTokenizer(), 0, normalization_type=normalization)
        trainer = Trainer(
            workers.worker,
            agent,
            plan.credit,
            learner,
            group_size=rollout.group_size,
            run_seed=config.seed,
            reward_manager=None if normalization == "none" else manager,
            max_concurrency=rollout.max_concurrency,
            after_collect=plan.after_collect,
            branching=Branching(branching.groups, branching.where) if (branching := rollout.branching) else None,
            continuations=rollout.continuations or 0,
        )
        evaluation = None
        if config.evaluation is not None and plan.held_out is not None and workers.held_out is not None:
            held_out, examples = plan.held_out, None
            if config.evaluation.examples:
                decoder = getattr(policy, "tokenizer", None) or _IdTokenizer()
                examples = EpisodeRewardManager(decoder, config.evaluation.examples, seed=config.seed, echo=echo)
            # A separate held-out task has its own reward.
            own = await stack.enter_async_context(reward_agent(held_out.task)) if held_out.is_own_task else agent
            evaluation = HeldOutEvaluation(
                worker=workers.held_out,
                reward_agent=own,
                samples=held_out.samples,
                rollouts=config.evaluation.rollouts,
                run_seed=config.seed,
                collector=Collector(config.evaluation.rollouts, rollout.max_concurrency),
                examples=examples,
                pad_token_id=trainable(policy).pad_token_id,
            )
        options = PipelineOptions(
            schedule=config.pipeline,
            samples_per_update=rollout.samples_per_update,
            samples_per_minibatch=plan.samples_per_minibatch,
            dynamic_sampling=config.dynamic_sampling,
        )
        stream = SampleStream(plan.samples, config.seed)
        pipeline = await stack.enter_async_context(Pipeline(trainer, stream, options))
        yield Components(pipeline, evaluation, agent, policy)


def use_threads(threads: int | None) -> None:
    """Set the number of threads that torch uses. If `threads` is `None`, do not change it."""
    if threads is not None:
        torch.set_num_threads(threads)


def sharded_learner_factory(
    group: ProcessGroup,
) -> Callable[[torch.nn.Module, PPOConfig, TrainingPlan, Path], ShardedLearner]:
    """Return a function that creates the learner in the first of multiple processes."""

    def make(module: torch.nn.Module, ppo: PPOConfig, plan: TrainingPlan, folder: Path) -> ShardedLearner:
        orders = (str(plan.path.resolve()), dict(plan.overrides))
        return ShardedLearner(module, lambda copied: make_learner(copied, ppo, plan, folder), group, orders)

    return make


def follow_training(group: ProcessGroup) -> bool:
    """Take part in training as a process other than the first; see `follow`."""

    def make(path: str, overrides: Mapping[str, Any]) -> PPOLearner:
        plan = load_plan(Path(path), overrides)
        use_threads(plan.config.threads)
        policy = plan.make_policy()
        module, ppo = trainable(policy).module, with_temperature(plan.config.ppo, policy)
        anyio.run(policy.close)
        del policy  # this process does not act, so it needs no copy of the weights for acting
        return make_learner(module, ppo, plan, plan.folder)

    return follow(group, make)
