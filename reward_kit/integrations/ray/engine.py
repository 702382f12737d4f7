"""The engine for `reward-kit run --engine ray`. It runs episodes in processes on a cluster.

Everything else runs in the driver. A process needs the task's files, either at the same path as in the driver or copied
by Ray. Both sides compare the files. A process needs neither the dataset nor the reward: samples are sent with each
episode, and the reward is called elsewhere.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reward_kit.agent.limits import RunBudget
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, RolloutWorker
from reward_kit.errors import ConfigError
from reward_kit.integrations.ray.actors import Setup
from reward_kit.integrations.ray.cluster import Connection, ray_module, workers_to_start
from reward_kit.integrations.ray.options import RATES, RayOptions
from reward_kit.integrations.ray.rewards import RayScorer
from reward_kit.integrations.ray.rollouts import RolloutPool
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.keys import OPENAI_KEY, OPENAI_URL, ORIGINS_VARIABLE, PRESETS, read_dotenv, resolve_endpoint
from reward_kit.providers.session import ProviderSession
from reward_kit.reward_agent.loading import make_scorer
from reward_kit.reward_agent.scoring import Reward, Scorer
from reward_kit.runs.inputs import TASK_FILE, hash_path
from reward_kit.runs.plan import RunArgs, RunPlan, plan_run
from reward_kit.runs.tasks import LoadedTask, load_tools

_NOT_NEEDED = (TASK_FILE, "dataset", "reward", "redaction", "state hash")


class RayEngine:
    """An `Engine` that runs the episodes of one run on a cluster.

    Raises:
        ConfigError: If a rate limit cannot be shared between processes, or if an environment variable is not set.
    """

    def __init__(
        self, task: LoadedTask, request: RunArgs, options: RayOptions, traffic: ProviderSession | None = None
    ) -> None:
        ray_module()  # report a missing package immediately
        self._task, self._request, self._options, self._traffic = task, request, options, traffic
        self._env = environment_for(task.definition, options.env)
        if options.workers is not None:
            divide_rates(task.definition, options.workers)
        self._connection = Connection(options.address, task.folder if options.ship else None)

    @asynccontextmanager
    async def workers(self, plan: RunPlan, budget: RunBudget) -> AsyncIterator[Mapping[str, RolloutWorker]]:
        """Start the processes concurrently, and yield the workers keyed by label."""
        async with self._connection:
            size = workers_to_start(self._options, self._connection.is_own, "-E {}")
            if self._options.workers is None:
                size = min(size, plan.max_concurrency, max_processes(self._task.definition))
            build = TaskWorkers.of(self._task, self._request, size, is_shipped=self._options.ship)
            setup = Setup(build, budget.limits, plan.max_concurrency, self._env)
            pool = RolloutPool(plan.definition, setup, self._options, size=size, budget=budget, traffic=self._traffic)
            async with pool.open():
                yield {named.label: pool.worker(named.label) for named in plan.policies}

    def scorer(self, reward: Reward, deadline_s: float | None) -> Scorer:
        """Return the scorer. It runs in the driver unless `reward_workers` is above 0."""
        reference = self._task.definition.reward_function_path
        if not self._options.reward_workers or reference is None:
            return make_scorer(reward, deadline_s)
        return RayScorer(
            reward,
            reference,
            self._task.folder,
            workers=self._options.reward_workers,
            deadline_s=deadline_s,
            env=self._env,
            wait_s=self._options.worker_wait_s,
            connection=self._connection,
        )


@dataclass(frozen=True, slots=True)
class TaskWorkers:
    """A factory (`actors.Build`) that creates a task's workers in a process. There is one worker per policy.

    If `is_shipped` is true, the directory of the task is the working directory of the process.
    """

    task: LoadedTask
    models: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    base_url: str | None = None
    is_shipped: bool = False

    @classmethod
    def of(cls, task: LoadedTask, request: RunArgs, processes: int, *, is_shipped: bool = False) -> TaskWorkers:
        """Return the factory for the policies of a run. Each process gets its share of the rate limits."""
        definition = divide_rates(task.definition, processes)
        plain = replace(task, definition=definition, samples=(), tools=None, reward=None, notes=())
        return cls(plain, tuple(request.models), tuple(request.policies), request.base_url, is_shipped)

    def __call__(self, traffic: ProviderSession, budget: RunBudget) -> Mapping[str, RLRolloutWorker]:
        """Create the workers, keyed by the label of their policy."""
        task = moved(self.task, Path.cwd()) if self.is_shipped else self.task
        here = os.uname().nodename
        if not task.folder.is_dir():
            raise ConfigError(f"{task.folder} does not exist on {here}; copy it there, or ship it with -E ship=true")
        for name, path in task.inputs.items():
            if name in _NOT_NEEDED or path.is_dir() or not path.exists():
                continue  # If a required file is missing, the loader reports it.
            if hash_path(path) != task.digests[name]:
                raise ConfigError(f"the {name} {path} on {here} differs from the one on the driver")
        location = task.definition.tools_module_path
        tools = load_tools(location, task.folder) if location else None
        args = RunArgs(task_path=task.path, models=self.models, policies=self.policies, base_url=self.base_url)
        plan = plan_run(replace(task, samples=()), args, traffic=traffic)
        return {
            named.label: RLRolloutWorker(
                task.definition,
                named.policy,
                tools=tools,
                user=plan.user,
                budget=budget,
                policy_label=named.label,
            )
            for named in plan.policies
        }


def moved(task: LoadedTask, folder: Path) -> LoadedTask:
    """Return the task with a different directory. Files outside the directory keep their paths."""
    old = task.folder
    located = copy.copy(task.located)
    located.path = folder / task.path.name

    def there(value: Any) -> Any:
        if isinstance(value, str) and (value == str(old) or value.startswith(f"{old}{os.sep}")):
            return str(folder) + value.removeprefix(str(old))
        if isinstance(value, Mapping):
            return {key: there(item) for key, item in value.items()}
        return [there(item) for item in value] if isinstance(value, list) else value

    definition = task.definition
    config = {key: there(getattr(definition, key)) for key in ("resource_type", "base_resource_config")}
    inputs = {name: Path(there(str(path))) for name, path in task.inputs.items()}
    return replace(task, definition=definition.model_copy(update=config), located=located, inputs=inputs)


def divide_rates(definition: TaskDefinitionModel, processes: int) -> TaskDefinitionModel:
    """Return the definition for one of multiple processes. The process gets its share of each rate limit."""
    changed = {}
    for section in ("policy", "user"):
        block = getattr(definition, section)
        given = block.options() if block is not None else {}
        shares = {key: given[key] / processes for key in RATES if isinstance(given.get(key), int | float)}
        if (connections := shares.get("max_connections")) is not None:
            if connections < 1:
                raise ConfigError(
                    f"{section}.max_connections {given['max_connections']} cannot be shared by {processes} workers; "
                    f"use at most -E workers={given['max_connections']}"
                )
            shares["max_connections"] = int(connections)
        if shares:
            changed[section] = block.model_copy(update=shares)
    return definition.model_copy(update=changed) if changed else definition


def max_processes(definition: TaskDefinitionModel) -> int:
    """Return the number of processes that can share the task's connection limits.

    If there are no limits, the result is a very large number.
    """
    blocks = [block.options() for block in (definition.policy, definition.user) if block is not None]
    limits = [block["max_connections"] for block in blocks if isinstance(block.get("max_connections"), int)]
    return min(limits, default=sys.maxsize)


def environment_for(definition: TaskDefinitionModel, asked: Iterable[str]) -> dict[str, str]:
    """Return the variables in `env` and the environment variables that the endpoints and the task need.

    Raises:
        ConfigError: If a requested variable is not set.
    """
    known = {**read_dotenv(Path.cwd()), **{name: value for name, value in os.environ.items() if value}}
    if missing := [name for name in asked if name not in known]:
        raise ConfigError(f"-E env: the variable {missing[0]} is not set here")
    blocks = [block.options() for block in (definition.policy, definition.user) if block is not None]
    named = [block["api_key_env"] for block in blocks if isinstance(block.get("api_key_env"), str)]
    providers = [PRESETS.get(block.type) for block in (definition.policy, definition.user) if block is not None]
    named += [preset.api_key_env for preset in providers if preset is not None and preset.api_key_env]
    passed = definition.resource_server.pass_env if definition.resource_server is not None else []
    names = (OPENAI_KEY, OPENAI_URL, ORIGINS_VARIABLE, *named, *passed, *asked)
    known.pop(ORIGINS_VARIABLE, None)  # A `.env` file must not assign keys to origins.
    known |= {name: os.environ[name] for name in (ORIGINS_VARIABLE,) if name in os.environ}
    if not os.environ.get(OPENAI_URL) and OPENAI_KEY not in asked:
        # The workers cannot tell whether a URL comes from a `.env` file or from the shell, so they get the key that
        # belongs to it.
        known[OPENAI_KEY] = resolve_endpoint(needs_key=False).api_key or ""
    return {name: known[name] for name in names if known.get(name)}
