"""`engine: ray` of a train file: episodes in processes of a cluster, each with a copy of the weights.

`train_loop` runs a train file under Ray Train: `TorchTrainer(train_loop, …)` starts the processes. Weights travel as
arrays without copies, which the processes of a machine read from one place in memory.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
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
from reward_kit.integrations.ray.actors import Assignment, Setup
from reward_kit.integrations.ray.cluster import connected, ray_module, workers_to_start
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.integrations.ray.rewards import RayScorer
from reward_kit.integrations.ray.rollouts import RayGroup, RayRolloutWorker, RolloutPool
from reward_kit.integrations.ray.task_workers import environment_for
from reward_kit.models import Message
from reward_kit.providers.session import ProviderSession
from reward_kit.reward_agent.scoring import Scorer
from reward_kit.rl.learner.sharding import ProcessGroup, open_process_group
from reward_kit.rl.trainer import trainable
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import TrainingPlan, check_policy, load_plan
from reward_kit.rl.training.resume import changes_since, header_of
from reward_kit.rl.training.rollouts import acting_as
from reward_kit.rl.training.session import TrainingOutcome, train
from reward_kit.rl.training.setup import Factories, Workers, help_to_train, make_worker, sharded_by, use_threads
from reward_kit.runs.plan import Control
from reward_kit.runs.run_folder import FILE, RunFolder, RunHeader
from reward_kit.runs.tasks import LoadedTask, load_tools
from reward_kit.task_parts import PolicyModel


class PackedTensor(NamedTuple):
    """The bytes of a tensor on the CPU; NumPy knows no bfloat16."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def packed(weights: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """The weights as Ray ships them without pickling their bytes.

    Args:
        weights: by name, on any device; they may change once this returns and what it gives is put into the store.
    """
    found = {}
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        found[name] = PackedTensor(plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))
    return found


def unpacked(weights: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """The weights again, to be read only: their memory is the object store's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: _tensor(one) for name, one in weights.items()}


def _tensor(one: PackedTensor) -> Tensor:
    if not one.data.size:  # of nothing there is no view in another type
        return torch.empty(one.shape, dtype=one.dtype)
    return torch.from_numpy(one.data).view(one.dtype).reshape(one.shape)


def bytes_of(weights: Mapping[str, PackedTensor]) -> int:
    """How much travels."""
    return sum(one.data.nbytes for one in weights.values())


TRAINED, HELD_OUT = "policy", "held_out"


def on_cluster(plan: TrainingPlan, factories: Factories) -> Factories:
    """Factories whose episodes are collected on a cluster, and whose rewards are called there where the file says so.

    Args:
        plan: what is trained.
        factories: of the rest.

    Raises:
        ConfigError: Ray is not installed, or a variable for the processes is not set.
    """
    ray_module()
    cluster = _Cluster(plan)
    scorer = cluster.scorer if plan.config.engine.reward_workers else factories.scorer
    return replace(factories, actors=cluster.actors, scorer=scorer)


class _Cluster:
    """What a train file says of its cluster, opened for one run."""

    def __init__(self, plan: TrainingPlan) -> None:
        engine = plan.config.engine
        self._options = RayOptions(**{**engine.model_dump(exclude={"type"}), "env": tuple(engine.env)})
        self._env = environment_for(plan.task.definition, self._options.env)

    @asynccontextmanager
    async def actors(self, plan: TrainingPlan, policy: AgentPolicy) -> AsyncIterator[Workers]:
        """As `Factories`: connected, with processes that start meanwhile.

        Raises:
            ConfigError: not one process fits on the cluster, or one lacks something.
            ClusterError: there is no cluster, or no process comes in time.
        """
        rollout, connection = plan.config.rollout, connected(self._options.address)
        in_flight = rollout.max_concurrency or rollout.samples_per_update * rollout.group_size
        is_own = await anyio.to_thread.run_sync(connection.__enter__)
        try:
            size = self._size(min(in_flight, rollout.samples_per_update), is_own)
            setup = Setup(TrainingWorkers.of(plan), max_concurrency=in_flight, env=self._env)
            pool = RolloutPool(plan.task.definition, setup, self._options, size=size)
            publishing = ClusterPolicy(policy, pool)
            await publishing.publish(publishing.version)  # nobody trusts seeds to give the same weights
            async with pool.open():
                held_out = _held_out_pool(pool, plan)
                yield Workers(
                    ClusterWorker(pool, TRAINED, publishing),
                    None if held_out is None else ClusterWorker(held_out, HELD_OUT, publishing),
                )
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(connection.__exit__, None, None, None)

    def _size(self, most: int, is_own: bool) -> int:
        size = workers_to_start(self._options, is_own, "engine.{}")
        return size if self._options.workers is not None else min(size, most)

    def scorer(self, task: LoadedTask) -> Scorer:
        """As `Factories`, in processes of their own."""
        assert task.reward is not None and task.definition.reward_function_path is not None
        return RayScorer(
            task.reward,
            task.definition.reward_function_path,
            task.folder,
            workers=self._options.reward_workers,
            deadline_s=task.definition.limits.reward_time_s,
            env=self._env,
            wait_s=self._options.worker_wait_s,
        )


@dataclass(frozen=True, slots=True)
class TrainingWorkers:
    """The workers of one process, of training and of evaluations, with one policy; a `messages.Build`.

    Attributes:
        tasks: by name, without what is loaded.
        policy, folder: who acts, and what its paths are relative to.
        temperature: of evaluations; None is that of training.
        threads: of torch; None leaves it to Ray, which counts reserved CPUs.
        policy_of_user: which options of the policy the user gave, and no file.
    """

    tasks: Mapping[str, LoadedTask]
    policy: PolicyModel
    folder: Path
    temperature: float | None
    threads: int | None
    policy_of_user: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: TrainingPlan) -> TrainingWorkers:
        """Those of a plan."""
        policy, folder = plan.policy_block
        tasks = {TRAINED: plan.task} | ({HELD_OUT: plan.held_out.task} if plan.held_out is not None else {})
        plain = {name: replace(task, samples=(), tools=None, reward=None, notes=()) for name, task in tasks.items()}
        asked = plan.config.evaluation
        temperature = asked.temperature if asked is not None else None
        return cls(plain, policy, folder, temperature, plan.config.threads, frozenset(plan.policy_of_user))

    def __call__(self, traffic: ProviderSession, budget: RunBudget) -> Mapping[str, RLRolloutWorker]:
        """The workers.

        Raises:
            ConfigError: something is not on this machine, or cannot be made here.
        """
        use_threads(self.threads)
        policy: Any = make_policy(
            self.policy.type, self.policy.options(), self.folder, traffic, of_user=self.policy_of_user
        )
        acting = {TRAINED: ActingPolicy(policy, publishes=True)}
        if HELD_OUT in self.tasks:
            acting[HELD_OUT] = ActingPolicy(acting_as(policy, self.temperature), publishes=False)
        return {name: self._worker(task, acting[name], traffic) for name, task in self.tasks.items()}

    def _worker(self, task: LoadedTask, policy: AgentPolicy, traffic: ProviderSession) -> RLRolloutWorker:
        location = task.definition.tools_module_path
        return make_worker(
            replace(task, tools=load_tools(location, task.folder) if location else None), policy, traffic
        )


class ActingPolicy(AgentPolicy):
    """A policy in one of the processes, which is sent the weights that it acts with.

    Args:
        policy: has `publish(version, state_dict)`.
        publishes: False where another one hands the same weights on already.
    """

    def __init__(self, policy: Any, *, publishes: bool) -> None:
        self._policy, self._publishes = policy, publishes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def is_free(self) -> bool:  # type: ignore[override]
        """As of the policy."""
        return bool(self._policy.is_free)

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """The policy's session."""
        session: AgentPolicy = await self._policy.open(context)
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """That of the policy itself, which has no session."""
        output: PolicyOutput = await self._policy.get_action(observation, available_tools_specs)
        return output

    async def publish(self, version: int, weights: Mapping[str, PackedTensor]) -> None:
        """Act with these weights from the next forward pass on."""
        if self._publishes:
            await self._policy.publish(version, unpacked(weights))

    async def close(self) -> None:
        """Close the policy."""
        if self._publishes:
            await self._policy.close()


class ClusterPolicy:
    """The policy in training, as the trainer has it: its weights are here, and those who act with them elsewhere.

    Args:
        policy: whose `module` is trained.
        pool: where it acts.

    Attributes:
        version: of the weights that were sent last.
    """

    def __init__(self, policy: AgentPolicy, pool: RolloutPool) -> None:
        self._policy, self._pool, self.version = trainable(policy), pool, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def module(self) -> torch.nn.Module:
        """The weights in training."""
        return self._policy.module

    @property
    def pad_token_id(self) -> int:
        """What fills up rows."""
        return self._policy.pad_token_id

    async def publish(self, version: int) -> None:
        """Send the weights to all that act."""
        weights = await anyio.to_thread.run_sync(lambda: packed(merged_state_dict(self.module)))
        await self._pool.publish(version, weights)
        self.version = version


class ClusterWorker(RayRolloutWorker):
    """Collects the episodes of training, or of evaluations, somewhere on the cluster.

    Args:
        pool: of processes, with the task's definition.
        name: of the worker there.
        policy: publishes weights to it.
    """

    def __init__(self, pool: RolloutPool, name: str, policy: ClusterPolicy) -> None:
        # The label is a part of ids and seeds, and the same for all, as in one process.
        super().__init__(pool, TRAINED)
        self.agent_policy, self.task_definition, self._name = policy, pool.definition, name

    def group(self, sample: Sample, run_seed: int = 0) -> RayGroup:
        """The start that the episodes of `sample` share."""
        group = _NamedGroup(self._pool, sample, run_seed, self.policy_label)
        group.name = self._name
        return group


class _NamedGroup(RayGroup):
    name = TRAINED

    def assignment(self, rollout_index: int) -> Assignment:
        """One episode of it."""
        return super().assignment(rollout_index)._replace(label=self.name)


def _held_out_pool(pool: RolloutPool, plan: TrainingPlan) -> RolloutPool | None:
    """The same processes for the episodes of evaluations."""
    if plan.held_out is None:
        return None
    other = copy.copy(pool)
    other.definition = plan.held_out.task.definition
    return other


_KEYS = ("train_file", "run", "overrides")


def train_loop(config: Mapping[str, Any]) -> None:
    """What each worker of Ray Train does.

    Args:
        config: of `train_loop_config`: `train_file`, a path that is there on every node; `run`, the folder of the run,
            on a disk that the first worker sees wherever it is started again; `overrides`, keys laid over the file's.

    Raises:
        ConfigError: something is wrong with the file, or the folder holds a run that began otherwise.
    """
    if unknown := [key for key in config if key not in _KEYS]:
        raise ConfigError(f"train_loop_config: unknown key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    if missing := [key for key in _KEYS[:2] if key not in config]:
        raise ConfigError(f"train_loop_config: {missing[0]} is missing")
    with open_process_group() as group:
        if group is not None and not group.processes.is_first:
            help_to_train(group)
            return
        plan = load_plan(Path(config["train_file"]), config.get("overrides"))
        check_policy(plan)
        with _opened(plan, Path(config["run"])) as folder:
            anyio.run(_train, plan, folder, group)


def _opened(plan: TrainingPlan, run: Path) -> RunFolder:
    if not (run / FILE).is_file():
        return RunFolder.create(run, header_of(run.name, plan), plan.redaction)
    if refused := changes_since(RunHeader.read(run), plan, run).refused:
        raise ConfigError(f"{run} cannot go on as it began, because these changed: {', '.join(refused)}")
    return RunFolder(run, plan.redaction)


async def _train(plan: TrainingPlan, folder: RunFolder, group: ProcessGroup | None) -> TrainingOutcome:
    factories = Factories() if group is None else Factories(sharded_by(group))
    if plan.config.engine.type == "ray":
        factories = on_cluster(plan, factories)
    return await train(plan, folder, TrainingDisplay("none", plan.config.updates), _uninterrupted, factories)


@asynccontextmanager
async def _uninterrupted(control: Control, display: TrainingDisplay) -> AsyncIterator[None]:
    """Ray ends its workers itself; what they have saved is gone on from."""
    yield
