"""Makes the workers of a run in another process, of the task as the driver loaded it.

A process needs the task's own files, at the same path or shipped with it; that they are the driver's is checked. It
needs neither the dataset nor the reward: samples come with each episode, and rewards are called elsewhere.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reward_kit.agent.limits import RunBudget
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.keys import OPENAI_KEY, OPENAI_URL, ORIGINS_VARIABLE, read_dotenv, resolve_endpoint
from reward_kit.providers.session import ProviderSession
from reward_kit.runs.inputs import TASK_FILE, digest_of
from reward_kit.runs.plan import RunArgs, plan_run
from reward_kit.runs.tasks import LoadedTask, load_tools

RATES = ("requests_per_minute", "tokens_per_minute", "max_connections")
_NOT_NEEDED = (TASK_FILE, "dataset", "reward", "redaction")


@dataclass(frozen=True, slots=True)
class TaskWorkers:
    """The workers of a task, one per policy; a `messages.Build`.

    Attributes:
        task: without what is loaded.
        models, policies, base_url: who acts, as `preparation.prepare` takes them.
        is_shipped: the task's folder is this process's working directory, and not where it is in the driver.
    """

    task: LoadedTask
    models: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    base_url: str | None = None
    is_shipped: bool = False

    @classmethod
    def of(cls, task: LoadedTask, request: RunArgs, processes: int, *, is_shipped: bool = False) -> TaskWorkers:
        """For the policies of a request, with its share of each limit on rates.

        Raises:
            ConfigError: a limit cannot be shared by so many processes.
        """
        definition = shared_rates(task.definition, processes)
        plain = replace(task, definition=definition, samples=(), tools=None, reward=None, notes=())
        return cls(plain, tuple(request.models), tuple(request.policies), request.base_url, is_shipped)

    def __call__(self, traffic: ProviderSession, budget: RunBudget) -> Mapping[str, RLRolloutWorker]:
        """The workers, by the label of their policy.

        Raises:
            ConfigError: a file is missing or another one than the driver's, or something cannot be made of it.
        """
        task = moved(self.task, Path.cwd()) if self.is_shipped else self.task
        if not task.folder.is_dir():
            raise ConfigError(
                f"{task.folder} is not on {os.uname().nodename}; put it there, or ship it with -E ship=true"
            )
        _check_files(task)
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
    """The task with its folder elsewhere; what lies outside of it stays where it is."""
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


def _check_files(task: LoadedTask) -> None:
    """That what decides an episode is here as it is in the driver."""
    for name, path in task.inputs.items():
        if name in _NOT_NEEDED or path.is_dir() or not path.exists():
            continue  # what is missing and needed is told by who loads it
        if digest_of(path) != task.digests[name]:
            raise ConfigError(f"the {name} {path} on {os.uname().nodename} is another one than the driver's")


def shared_rates(definition: TaskDefinitionModel, processes: int) -> TaskDefinitionModel:
    """The definition for one of several processes: of each limit on requests it has its share.

    Raises:
        ConfigError: there are more processes than connections.
    """
    changed = {}
    for section in ("policy", "user"):
        block = getattr(definition, section)
        given = block.options() if block is not None else {}
        shares = {key: given[key] / processes for key in RATES if isinstance(given.get(key), int | float)}
        if (connections := shares.get("max_connections")) is not None:
            if connections < 1:
                raise ConfigError(
                    f"{section}.max_connections {given['max_connections']} cannot be shared by {processes} workers; "
                    f"give no more of them with -E workers={given['max_connections']}"
                )
            shares["max_connections"] = int(connections)
        if shares:
            changed[section] = block.model_copy(update=shares)
    return definition.model_copy(update=changed) if changed else definition


def most_processes(definition: TaskDefinitionModel) -> int:
    """How many processes can share the task's limits on connections; more than anybody has where there are none."""
    blocks = [block.options() for block in (definition.policy, definition.user) if block is not None]
    limits = [block["max_connections"] for block in blocks if isinstance(block.get("max_connections"), int)]
    return min(limits, default=sys.maxsize)


def environment_for(definition: TaskDefinitionModel, asked: Iterable[str]) -> dict[str, str]:
    """The environment variables that the processes get: those of the endpoints, those the task names, those asked for.

    Their values go to the processes only.

    Args:
        definition: of the task.
        asked: further names.

    Raises:
        ConfigError: one that is asked for is not set.
    """
    known = {**read_dotenv(Path.cwd()), **{name: value for name, value in os.environ.items() if value}}
    if missing := [name for name in asked if name not in known]:
        raise ConfigError(f"-E env: {missing[0]} is not set here")
    blocks = [block.options() for block in (definition.policy, definition.user) if block is not None]
    named = [block["api_key_env"] for block in blocks if isinstance(block.get("api_key_env"), str)]
    passed = definition.resource_server.pass_env if definition.resource_server is not None else []
    names = (OPENAI_KEY, OPENAI_URL, ORIGINS_VARIABLE, *named, *passed, *asked)
    known.pop(ORIGINS_VARIABLE, None)  # a `.env` says nothing of keys
    known |= {name: os.environ[name] for name in (ORIGINS_VARIABLE,) if name in os.environ}
    if not os.environ.get(OPENAI_URL) and OPENAI_KEY not in asked:
        # The workers cannot tell a URL of a `.env` from one of the shell, so that they get the key that belongs to it.
        known[OPENAI_KEY] = resolve_endpoint(needs_key=False).api_key or ""
    return {name: known[name] for name in names if known.get(name)}
