"""Run a task or score transcripts from Python, such as in a script, a notebook or a test.

The functions write the same files as the commands but print nothing. `evaluate` and `score_transcripts` block, even
inside a running event loop; `evaluate_async` is asynchronous. API keys are read from the environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from reward_kit.agent.samples import Prompt, Sample
from reward_kit.agent.simulated_user import SimulatedUser
from reward_kit.blocking import run_blocking
from reward_kit.display_text import pluralize
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, ProviderError, type_name
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.notebook_html import code, details, line, root, strong, table
from reward_kit.providers.keys import PRESETS
from reward_kit.providers.response_cache import ResponseCache
from reward_kit.providers.session import ProviderSession
from reward_kit.runs.finished import FinishedRun
from reward_kit.runs.plan import Control, RunArgs, RunPlan, begin_run, label_policies, make_user, plan_run
from reward_kit.runs.run_folder import RunFolder
from reward_kit.runs.runner import run
from reward_kit.runs.scoring import data_origin, load_scoring_setup, scoring_run
from reward_kit.runs.task_file import LocatedYaml, overrides_in_python
from reward_kit.runs.task_objects import (
    LivePolicy,
    TaskObjects,
    check_rows,
    copy_rows,
    copy_sources,
    is_policy_object,
    object_reference,
    placeholder_path,
    resource_reference,
)
from reward_kit.runs.tasks import LoadedTask, check_resource_starts, load_task, resolve_task
from reward_kit.validation import check_positive

Policies = str | LivePolicy | Sequence[str | LivePolicy] | Mapping[str, LivePolicy]


def evaluate(task: str | Path | Task, **options: Any) -> FinishedRun:
    """Run a task and score its episodes. This is the blocking form of `evaluate_async`.

    Args:
        task: the path of a task file, or a `Task`.
        **options: the options of `evaluate_async`.

    Raises:
        ConfigError: the task or an option is invalid; nothing was written.
        RewardKitError: the run itself failed.
    """
    inspect.signature(evaluate_async).bind(
        task, **options
    )  # Report a misspelled option before the coroutine is created
    finished: FinishedRun = run_blocking(evaluate_async(task, **options))
    return finished


async def evaluate_async(
    task: str | Path | Task,
    *,
    models: str | Sequence[str] = (),
    policies: Policies = (),
    rollouts: int | None = None,
    limit: int | None = None,
    sample_ids: Sequence[str] = (),
    seed: int = 0,
    max_concurrency: int = 16,
    overrides: Mapping[str, Any] | None = None,
    base_url: str | None = None,
    cache: str | Path | None = None,
    log_dir: str | Path = "runs",
) -> FinishedRun:
    """Run a task and score its episodes in the same way as `reward-kit run`.

    Args:
        task: the path of a task file, or a `Task`.
        models: one or more models, each as `PROVIDER/NAME`, such as `openai/NAME`.
        policies: one or more policies, or a dict from labels to policies; by default the task's policy. A policy is a
            built-in name, `file.py:Class` relative to the task file, `replay:RUN`, or an `AgentPolicy`: either a class
            without required arguments, or an instance. An instance is not closed after the run.
        rollouts: the number of episodes per sample; by default the number in the task.
        limit: the number of samples to run; by default all.
        sample_ids: the ids of the samples to run; by default all.
        seed: the seed for all random choices.
        max_concurrency: the maximum number of concurrent episodes.
        overrides: the task keys to override; nested keys are dotted, such as `limits.wall_time_s`.
        base_url: the endpoint of the models.
        cache: a file of model and judge responses from earlier runs. New responses are added to the file.
        log_dir: the directory in which the run's directory is created.

    Raises:
        ConfigError: the task or an option is invalid; nothing was written.
        RewardKitError: the run itself failed.
    """
    for name, count in (("rollouts", rollouts), ("limit", limit), ("max_concurrency", max_concurrency)):
        if count is not None:
            check_positive(name, count, is_integer=True)
    models, names, live = _several("models", models), *_chosen(policies)
    keys = _keys("overrides", overrides)
    with overrides_in_python():
        loaded = _loaded(task, keys)
    if not (models or names or live) and loaded.objects.policy is not None:
        live = label_policies([loaded.objects.policy])
    args = RunArgs(
        task_path=loaded.path,
        overrides=keys,
        models=models,
        policies=names,
        base_url=base_url,
        rollouts=rollouts,
        limit=limit,
        sample_ids=_several("sample_ids", sample_ids),
        seed=seed,
    )
    traffic = ProviderSession(cache=ResponseCache(cache) if cache is not None else None)
    try:
        plan = plan_run(loaded, args, max_concurrency=max_concurrency, traffic=traffic, live=live)
        with overrides_in_python():
            await check_resource_starts(loaded)
        folder = begin_run(Path(log_dir), loaded, plan, args, live)
        title = f"{loaded.definition.name}  ({pluralize(len(plan.samples), 'sample')} × {plan.rollouts})"
        finished = await _run(plan, folder, title, traffic)
    finally:
        traffic.close()
    return replace(finished, notes=loaded.notes)


evaluate.__signature__ = inspect.signature(evaluate_async)  # type: ignore[attr-defined]  # for help and editors


def score_transcripts(
    data: str | Path,
    reward: str,
    *,
    options: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    pass_threshold: float | None = None,
    folder: str | Path | None = None,
    log_dir: str | Path = "runs",
) -> FinishedRun:
    """Score existing transcripts in the same way as `reward-kit score`.

    Args:
        data: a JSONL, CSV or YAML file whose rows have `messages`. If rows name a `policy`, the table has a column for
            each policy.
        reward: `file.py:function`.
        options: the options of the reward.
        overrides: values of `sandbox.KEY` and `limits.reward_time_s`, as in a task file.
        pass_threshold: the lowest passing score; by default the threshold of the run that the transcripts come from, or
            1 for other transcripts.
        folder: the directory to which the path of the reward is relative; by default the working directory.
        log_dir: the directory in which the run's directory is created.

    Raises:
        ConfigError: the data has no rows, or the reward cannot be loaded or needs fields that the rows lack.
        RewardKitError: the run itself failed.
    """
    data, own = _path("data", data), _keys("options", options)
    if not isinstance(reward, str):
        raise ConfigError(
            f"reward must be 'file.py:function', got {type_name(reward)}; to score "
            "with a function, use AsyncRewardAgent"
        )
    changes = {**_keys("overrides", overrides), **{f"reward_options.{key}": value for key, value in own.items()}}
    origin = data_origin(data)
    with overrides_in_python():
        chosen = Path(folder) if folder is not None else None
        ready = load_scoring_setup(origin, reward, changes, pass_threshold, chosen)
    scored = scoring_run(data, ready, reward, Path(log_dir))
    finished: FinishedRun = run_blocking(_run(scored.plan, scored.store, scored.title, None, scored.episodes))
    return replace(finished, notes=ready.notes)


async def _run(
    plan: RunPlan,
    folder: RunFolder,
    title: str,
    traffic: ProviderSession | None,
    given: Sequence[SingleAgentEpisode] = (),
) -> FinishedRun:
    """Execute a plan in a new directory."""
    control = Control()
    try:
        outcome = await run(plan, folder, control=control, traffic=traffic, given=given)
    except BaseException as error:
        error.add_note(f"the episodes collected so far are in {folder.path}")
        raise
    if control.is_failure:
        raise ProviderError(f"{folder.path}: {control.stop_reason}")
    stopped = outcome.stop_reason if outcome.missing else None
    threshold = plan.definition.pass_threshold
    return FinishedRun(folder.path, title, outcome.status, stopped, outcome.rows, outcome.policies, threshold)


def _loaded(task: object, overrides: Mapping[str, Any]) -> LoadedTask:
    return task.load(overrides) if isinstance(task, Task) else load_task(_path("task", task), overrides)


def _chosen(policies: object) -> tuple[tuple[str, ...], dict[str, LivePolicy]]:
    """Separate the names of policies from policy objects. The objects are returned keyed by label."""
    if isinstance(policies, Mapping):
        if wrong := [one for one in policies.values() if not is_policy_object(one)]:
            raise ConfigError(
                f"policies: expected a dict from labels to AgentPolicy objects, got {type_name(wrong[0])}"
            )
        return (), {str(label): one for label, one in policies.items()}
    several = list(policies) if isinstance(policies, list | tuple) else [policies]
    live = [one for one in several if is_policy_object(one)]
    return _several("policies", [one for one in several if not is_policy_object(one)]), label_policies(live)


def _path(name: str, given: object) -> Path:
    if not isinstance(given, str | Path):
        raise ConfigError(f"{name} must be the path of a file, got {type_name(given)}")
    return Path(given)


def _keys(name: str, given: object) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be a dict, got {type_name(given)}")
    return dict(given or {})


def _several(name: str, given: object) -> tuple[str, ...]:
    several = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else (given,)
    if wrong := [one for one in several if not isinstance(one, str)]:
        raise ConfigError(f"{name} must be a name or a list of names, got {type_name(wrong[0])}")
    return several


_PLAIN = {
    "reward": "reward_function_path",
    "tools": "tools_module_path",
    "dataset": "dataset_path",
    "resource": "resource_type",
}
"""The task file key of each parameter that takes an object."""


RewardOrPair = str | Callable[..., Any] | tuple[str | Callable[..., Any], float]
"""A reward, or a pair of a reward and its weight."""


class Task:
    """A task defined in Python. It is validated on construction.

    Args:
        name: the name of the task, which is also the prefix of its run directories.
        reward: a reward function or class, or `file.py:function`. A function or class runs in this process without a
            sandbox; `file.py:function` runs in the sandbox.
        rewards: instead of `reward`, a dict from names to rewards. A value is a reward, or a pair of a reward and its
            weight. The score is the weighted mean of the rewards, and each reward's score is also reported as a metric
            under its name.
        policy: an `AgentPolicy` instance, or a class without required arguments; a built-in name; `openai/NAME`;
            `file.py:Class`; or the keys of a `policy:` block. A run can replace it.
        tools: the task's own tools, as a `ToolRegistry` or the file that defines one. Alternatively, a list of the
            tools that the agent sees, as in a task file; a `ToolRegistry` in the list stands for all its tools.
        dataset: a list of rows, each of which is a dict; or the path of a JSONL, CSV or YAML file.
        resource: a built-in name, `file.py:Class`, or a subclass of `ForkableResource`.
        folder: the directory to which paths are relative; by default the working directory.
        **keys: other keys of a task file, such as `initial_user_prompt`, `num_rollouts_per_sample` or `limits`.

    Raises:
        ConfigError: the task is invalid; the message has one line per problem.

    Example:
        ```python
        task = Task("capitals", reward=right, policy=MyPolicy, dataset=rows, initial_user_prompt="{{ question }}")
        run = task.run(rollouts=4)
        ```
    """

    def __init__(
        self,
        name: str,
        *,
        reward: str | Callable[..., Any] | None = None,
        rewards: Mapping[str, RewardOrPair] | Sequence[Mapping[str, Any]] | None = None,
        policy: str | Mapping[str, Any] | LivePolicy | None = None,
        tools: str | ToolRegistry | Sequence[str | ToolRegistry] | None = None,
        dataset: str | Path | Iterable[Mapping[str, Any]] | None = None,
        resource: str | type[ForkableResource] | None = None,
        folder: str | Path | None = None,
        **keys: Any,
    ) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"name must be a str, got {type_name(name)}; to read a task file, use Task.from_file")
        own, offered = _split_tools(tools)
        keys |= {} if offered is None else {"tools": offered}
        entries, live = _split_rewards(rewards)
        keys |= {} if entries is None else {"rewards": entries}
        objects = {"reward": reward, "tools": own, "dataset": dataset, "resource": resource}
        values, given = _read(name, objects, policy, keys, live)
        path = placeholder_path(Path(folder) if folder is not None else None, name)
        self._begin(lambda overrides: resolve_task(LocatedYaml.from_values(values, path), overrides, given))

    def _begin(self, load: Callable[[Mapping[str, Any]], LoadedTask]) -> None:
        self._load = load
        self._loaded = load({})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Load a task file. The file is read again for each run.

        Raises:
            ConfigError: the file is invalid; the message has one line per problem.
        """
        task = cls.__new__(cls)
        task._begin(lambda overrides: load_task(Path(path), overrides))
        return task

    @property
    def name(self) -> str:
        """The name of the task."""
        return self._loaded.definition.name

    @property
    def definition(self) -> TaskDefinitionModel:
        """The task definition, with default values for missing keys."""
        return self._loaded.definition

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples in the order of the dataset."""
        return self._loaded.samples

    @property
    def tools(self) -> ToolRegistry | None:
        """The task's own tools; the tools of its resource are not included."""
        return self._loaded.tools

    @property
    def user(self) -> SimulatedUser | None:
        """A new simulated user, if the task has one."""
        return make_user(self._loaded)

    def messages(self, sample: int = 0) -> list[Message]:
        """Return the initial messages of a sample, excluding messages from its environment.

        Args:
            sample: the index of the sample in `samples`.
        """
        return Prompt(self.definition).render(self.samples[sample])

    def load(self, overrides: Mapping[str, Any]) -> LoadedTask:
        """Return the task with overrides applied, for use by `evaluate`.

        Raises:
            ConfigError: an override is invalid.
        """
        return self._load(overrides)

    def run(self, **options: Any) -> FinishedRun:
        """Run the task and score its episodes.

        The method blocks, even inside a running event loop, such as that of a notebook.

        Args:
            **options: the options of `evaluate`.

        Raises:
            ConfigError: the task or an option is invalid; nothing was written.
            RewardKitError: the run itself failed.
        """
        return evaluate(self, **options)

    async def run_async(self, **options: Any) -> FinishedRun:
        """Run the task and score its episodes asynchronously.

        Args:
            **options: the options of `evaluate`.

        Raises:
            ConfigError: the task or an option is invalid; nothing was written.
            RewardKitError: the run itself failed.
        """
        return await evaluate_async(self, **options)

    def __repr__(self) -> str:
        if not hasattr(self, "_loaded"):  # shown by the traceback of its constructor
            return "Task(not loaded)"
        return f"Task({self.name!r}, {pluralize(len(self.samples), 'sample')})"

    def _repr_html_(self) -> str:
        task, definition, given = self._loaded, self._loaded.definition, self._loaded.objects.policy
        policy = definition.policy.type if definition.policy else getattr(given, "__name__", None)
        facts = {
            "samples": f"{len(task.samples):,} × {task.rollouts_per_sample} episodes",
            "policy": policy or (type(given).__name__ if given is not None else "set per run"),
            "reward": task.reward.id if task.reward is not None else "none (collect only)",
            "tools": ", ".join(sorted(definition.tools or (task.tools.get_tools() if task.tools is not None else ()))),
            "resource": definition.resource_type or "",
        }
        parts = [line(strong(f"Task {definition.name}"))]
        parts.append(table(["", ""], [(name, value) for name, value in facts.items() if value]))
        if definition.initial_user_prompt:
            parts.append(details("prompt", code(definition.initial_user_prompt)))
        return root(*parts, *map(line, task.notes))


_options = list(inspect.signature(evaluate_async).parameters.values())[1:]
_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
Task.run.__signature__ = inspect.Signature([_self, *_options])  # type: ignore[attr-defined]  # for help and editors
Task.run_async.__signature__ = Task.run.__signature__  # type: ignore[attr-defined]


def _split_tools(tools: Any) -> tuple[Any, list[Any] | None]:
    """Return the task's own tools and, if `tools` is a list, the names of the tools that the agent sees."""
    if not isinstance(tools, list | tuple):
        return tools, None
    registries = [one for one in tools if isinstance(one, ToolRegistry)]
    if len(registries) > 1:
        raise ConfigError("tools: a task can have only one ToolRegistry, got more than one")
    names = [[*one.get_tools()] if isinstance(one, ToolRegistry) else [one] for one in tools]
    return registries[0] if registries else None, [name for several in names for name in several]


def _split_rewards(rewards: Any) -> tuple[Any, dict[str, Any]]:
    """Return the entries of `rewards` in the form of a task file, and a dict of the rewards that are objects."""
    if not isinstance(rewards, Mapping):
        return rewards, {}
    pairs = {name: given if isinstance(given, tuple) else (given, 1.0) for name, given in rewards.items()}
    if wrong := next((name for name, pair in pairs.items() if len(pair) != 2), None):
        raise ConfigError(f"rewards: {wrong}: expected a reward, or a pair of a reward and its weight")
    live = {name: reward for name, (reward, _) in pairs.items() if not isinstance(reward, str)}
    entries = [
        {
            "name": name,
            "weight": weight,
            "reward_function_path": reward if isinstance(reward, str) else object_reference(reward),
        }
        for name, (reward, weight) in pairs.items()
    ]
    return entries, live


def _read(
    name: str, objects: Mapping[str, Any], policy: Any, keys: Mapping[str, Any], rewards: Mapping[str, Any]
) -> tuple[dict[str, Any], TaskObjects]:
    """Return the keys of a task file for these objects, and the objects that a task file cannot refer to."""
    values: dict[str, Any] = {"name": name, **keys}
    live = {what: one for what, one in objects.items() if one is not None and not isinstance(one, str | Path)}
    for what, one in {**objects, "policy": policy}.items():
        key = _PLAIN.get(what, what)
        if one is not None and key in keys:
            raise ConfigError(f"Task {name!r}: {what} and {key} set the same key; keep one of them")
        if isinstance(one, str | Path) and what in _PLAIN:
            values[key] = str(one)
    names: dict[str, Any] = {"task": name}
    named = {f"reward {what}": one for what, one in rewards.items()}
    kept = copy_sources({**{what: live[what] for what in ("reward", "resource") if what in live}, **named})
    names |= {what: object_reference(one) for what, one in named.items()}
    if "reward" in live:
        values["reward_function_path"] = names["reward"] = object_reference(live["reward"])
    if "resource" in live:
        values["resource_type"] = names["resource"] = resource_reference(live["resource"])
    rows = None
    if "dataset" in live:
        rows = check_rows(live["dataset"])
        names["dataset"], kept["dataset"] = pluralize(len(rows), "row"), copy_rows(rows)
    if "tools" in live:
        if not isinstance(live["tools"], ToolRegistry):
            raise ConfigError(
                f"tools: expected a ToolRegistry or a file that defines one, got {type_name(live['tools'])}"
            )
        names["tools"] = sorted(live["tools"].get_tools())
    if isinstance(policy, Mapping):
        values["policy"] = dict(policy)
    elif isinstance(policy, str):
        provider, separator, model = policy.partition("/")
        is_model = bool(separator) and provider in PRESETS
        values["policy"] = {"type": provider, "model": model} if is_model else {"type": policy}
    elif policy is not None and not is_policy_object(policy):
        raise ConfigError(f"policy: expected an AgentPolicy, a name or a dict of keys, got {type_name(policy)}")
    given = policy if is_policy_object(policy) else None
    return values, TaskObjects(live.get("reward"), live.get("tools"), rows, given, names, kept, rewards)
