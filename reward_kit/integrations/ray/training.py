"""Training with `engine: ray`.

Episodes are collected in processes on a cluster, each of which has a copy of the weights.

`train_loop` runs a train file under Ray Train. `TorchTrainer(train_loop, …)` starts the processes. Weights are sent as
arrays without copying them, and the processes on a machine read them from shared memory.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import torch
from torch import Tensor

from reward_kit.agent.limits import RunBudget
from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.hf.model import merged_state_dict
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.integrations.ray.actors import Setup
from reward_kit.integrations.ray.cluster import Connection, ray_module, workers_to_start
from reward_kit.integrations.ray.engine import environment_for
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.integrations.ray.rewards import RayScorer
from reward_kit.integrations.ray.rollouts import RayGroup, RayRolloutWorker, RolloutPool
from reward_kit.models import Message
from reward_kit.providers.session import ProviderSession
from reward_kit.report.run_page import write_page
from reward_kit.reward_agent.scoring import Scorer
from reward_kit.rl.learner.sharding import open_process_group
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import TrainingPlan, check_policy, load_plan
from reward_kit.rl.training.resume import changes_since, new_run_header
from reward_kit.rl.training.rollouts import evaluation_policy
from reward_kit.rl.training.setup import (
    Factories,
    Workers,
    follow_training,
    make_worker,
    sharded_learner_factory,
    use_threads,
)
from reward_kit.rl.training.train_file import check_resources, train_into
from reward_kit.rl.training.trainer import trainable
from reward_kit.runs.files import RUN_FILE
from reward_kit.runs.inputs import refuse_changes
from reward_kit.runs.run_folder import RunFolder, RunHeader
from reward_kit.runs.tasks import LoadedTask, load_tools
from reward_kit.task_parts import PolicyModel

TRAINED, HELD_OUT = "policy", "held_out"
_KEYS = ("train_file", "run", "overrides")


class PackedTensor(NamedTuple):
    """The bytes of a tensor on the CPU. NumPy has no bfloat16, so an array cannot represent every tensor."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack_weights(weights: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Convert weights to a form that Ray sends without pickling the bytes.

    The weights must not be modified before they are sent.
    """
    result = {}
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        result[name] = PackedTensor(plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))
    return result


def unpack_weights(weights: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """Return the weights as tensors. They are read-only, because their memory belongs to the object store."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (data, dtype, shape) in weights.items():
            # An empty array has no view of a different type.
            flat = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(shape)
    return tensors


def on_cluster(plan: TrainingPlan, factories: Factories) -> Factories:
    """Return factories that collect episodes on a cluster.

    If the train file requests it, rewards are also called there.

    Raises:
        ConfigError: If Ray is not installed, or if an environment variable for the processes is not set.
    """
    ray_module()
    engine = plan.config.engine
    options = RayOptions(**{**engine.model_dump(exclude={"type"}), "env": tuple(engine.env)})
    env = environment_for(plan.task.definition, options.env)

    @asynccontextmanager
    async def actors(plan: TrainingPlan, policy: AgentPolicy) -> AsyncIterator[Workers]:
        """Connect to the cluster, and start the processes without waiting until they are ready."""
        rollout, connection = plan.config.rollout, Connection(options.address)
        in_flight = rollout.max_concurrency or rollout.samples_per_update * rollout.group_size
        async with connection:
            size = workers_to_start(options, connection.is_own, "engine.{}")
            if options.workers is None:
                size = min(size, in_flight, rollout.samples_per_update)
            setup = Setup(TrainingWorkers.of(plan), max_concurrency=in_flight, env=env)
            pool = RolloutPool(plan.task.definition, setup, options, size=size)
            publishing = ClusterPolicy(policy, pool)
            await publishing.publish(publishing.version)  # Equal seeds do not guarantee equal weights.
            held_out = None
            if plan.held_out is not None:  # The same processes also run the task of the evaluations.
                evaluation_pool = copy.copy(pool)
                evaluation_pool.definition = plan.held_out.task.definition
                held_out = ClusterWorker(evaluation_pool, HELD_OUT, publishing)
            async with pool.open():
                yield Workers(ClusterWorker(pool, TRAINED, publishing), held_out)

    def scorer(task: LoadedTask) -> Scorer:
        assert task.reward is not None, "load_plan rejects tasks without a reward"
        if task.definition.reward_function_path is None:
            raise ConfigError("engine.reward_workers supports only one reward; remove it, or define a single reward")
        return RayScorer(
            task.reward,
            task.definition.reward_function_path,
            task.folder,
            workers=options.reward_workers,
            deadline_s=task.definition.limits.reward_time_s,
            env=env,
            wait_s=options.worker_wait_s,
        )

    return replace(factories, actors=actors, scorer=scorer if options.reward_workers else factories.scorer)


@dataclass(frozen=True, slots=True)
class TrainingWorkers:
    """A factory (`actors.Build`) that creates the workers for training and for evaluation. They share one policy."""

    tasks: Mapping[str, LoadedTask]
    policy: PolicyModel
    folder: Path
    temperature: float | None
    threads: int | None
    policy_of_user: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: TrainingPlan) -> TrainingWorkers:
        """Return the factory for a plan."""
        policy, folder = plan.policy_block
        tasks = {TRAINED: plan.task} | ({HELD_OUT: plan.held_out.task} if plan.held_out is not None else {})
        plain = {name: replace(task, samples=(), tools=None, reward=None, notes=()) for name, task in tasks.items()}
        evaluation = plan.config.evaluation
        temperature = evaluation.temperature if evaluation is not None else None
        return cls(plain, policy, folder, temperature, plan.config.threads, frozenset(plan.policy_of_user))

    def __call__(self, traffic: ProviderSession, budget: RunBudget) -> Mapping[str, RLRolloutWorker]:
        """Create the workers, keyed by name."""
        use_threads(self.threads)
        policy: Any = make_policy(
            self.policy.type, self.policy.options(), self.folder, traffic, of_user=self.policy_of_user
        )
        acting = {TRAINED: ActingPolicy(policy, publishes=True)}
        if HELD_OUT in self.tasks:
            acting[HELD_OUT] = ActingPolicy(evaluation_policy(policy, self.temperature), publishes=False)
        workers = {}
        for name, task in self.tasks.items():
            location = task.definition.tools_module_path
            tools = load_tools(location, task.folder) if location else None
            workers[name] = make_worker(replace(task, tools=tools), acting[name], traffic)
        return workers


class ActingPolicy(AgentPolicy):
    """A policy in one of the processes. It receives new weights from the trainer.

    `publishes` is False if a different policy already publishes the same weights.
    """

    def __init__(self, policy: Any, *, publishes: bool) -> None:
        self._policy, self._publishes = policy, publishes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def is_free(self) -> bool:  # type: ignore[override]
        return bool(self._policy.is_free)

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        session: AgentPolicy = await self._policy.open(context)
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        output: PolicyOutput = await self._policy.get_action(observation, available_tools_specs)
        return output

    async def publish(self, version: int, weights: Mapping[str, PackedTensor]) -> None:
        """Use these weights starting with the next forward pass."""
        if self._publishes:
            await self._policy.publish(version, unpack_weights(weights))

    async def close(self) -> None:
        if self._publishes:
            await self._policy.close()


class ClusterPolicy:
    """The trained policy, as the trainer sees it. Its weights are in this process, and the actors use copies."""

    def __init__(self, policy: AgentPolicy, pool: RolloutPool) -> None:
        self._policy, self._pool, self.version = trainable(policy), pool, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def module(self) -> torch.nn.Module:
        """The model that is being trained."""
        return self._policy.module

    @property
    def pad_token_id(self) -> int:
        """The id of the padding token."""
        return self._policy.pad_token_id

    async def publish(self, version: int) -> None:
        """Send the weights to all processes."""
        weights = await anyio.to_thread.run_sync(lambda: pack_weights(merged_state_dict(self.module)))
        await self._pool.publish(version, weights)
        self.version = version


class ClusterWorker(RayRolloutWorker):
    """A worker that collects episodes for training or evaluation, using the worker `name` in each process."""

    def __init__(self, pool: RolloutPool, name: str, policy: ClusterPolicy) -> None:
        # The label is part of ids and seeds. It is the same for all workers, as in a single process.
        super().__init__(pool, TRAINED)
        self.agent_policy, self.task_definition, self._name = policy, pool.definition, name

    def group(self, sample: Sample, run_seed: int = 0) -> RayGroup:
        return RayGroup(self._pool, sample, run_seed, self.policy_label, worker=self._name)


def train_loop(config: Mapping[str, Any]) -> None:
    """Run a train file in a worker of Ray Train. Pass this function to `TorchTrainer`.

    Args:
        config: the `train_loop_config`. Its keys are `train_file`, `run` and `overrides`. `train_file` is a path that
            exists on every node. `run` is the run directory, which must be on a disk that the first worker can still
            read after a restart. `overrides` contains the keys to override.

    Raises:
        ConfigError: If the file is invalid, or if the directory contains a run that was started with different
            settings.
    """
    if unknown := [key for key in config if key not in _KEYS]:
        raise ConfigError(f"train_loop_config: unknown key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    if missing := [key for key in _KEYS[:2] if key not in config]:
        raise ConfigError(f"train_loop_config: {missing[0]} is missing")
    with open_process_group() as group:
        if group is not None and not group.processes.is_first:
            follow_training(group)
            return
        plan, run = load_plan(Path(config["train_file"]), config.get("overrides")), Path(config["run"])
        check_policy(plan)
        check_resources(plan)
        if is_new := not (run / RUN_FILE).is_file():
            RunFolder.create(run, new_run_header(run.name, plan), plan.redaction)
        else:
            refuse_changes(run, changes_since(RunHeader.read(run), plan, run).refused)
        factories = Factories() if group is None else Factories(sharded_learner_factory(group))
        if plan.config.engine.type == "ray":
            factories = on_cluster(plan, factories)
        display = TrainingDisplay("none", plan.config)
        # Ray ends its workers itself. A restart resumes from their last checkpoint.
        train_into(
            run, plan, display, lambda control: nullcontext(), factories=factories, is_new=is_new, on_end=write_page
        )
