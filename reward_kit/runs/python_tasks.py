"""`Task`: a task in a notebook or a script, from a file or made of Python values and objects, and run where it stands.

Its keys are those of a task file, and what is run of it, and how, is what `evaluate` takes. Where a file would name a
reward, tools, a dataset, a resource or a policy, the thing itself may be given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from reward_kit.agent.samples import Prompt, Sample
from reward_kit.display_text import counted
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, kind_of
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.notebook_html import code, folded, line, strong, table, whole
from reward_kit.runs.evaluation import evaluate, evaluate_async
from reward_kit.runs.finished import FinishedRun
from reward_kit.runs.given import (
    Given,
    Kept,
    LivePolicy,
    given_rows,
    is_live,
    kept_rows,
    kept_sources,
    name_of,
    named_resource,
    place_of_task,
)
from reward_kit.runs.tasks import LoadedTask, load_task, task_of
from reward_kit.runs.yaml_lines import LocatedYaml

_PLAIN = {
    "reward": "reward_function_path",
    "tools": "tools_module_path",
    "dataset": "dataset_path",
    "resource": "resource_type",
}
"""What may be given as an object, with the key of a task file that names it."""


class Task:
    """A task that is made in Python, checked as soon as it is made.

    Args:
        name: of the task; the folders of its runs begin with it.
        reward: a reward function or class, which then runs in this process, without walls; or where it is,
            `file.py:function`, which runs in the sandbox.
        policy: an `AgentPolicy`, as an instance or a class that is made without arguments; a built-in name;
            `openai/NAME`; `file.py:Class`; or the keys of a `policy:` block. A run may name others.
        tools: a `ToolRegistry`, or the file of one.
        dataset: rows, each a dict; or the path of a JSONL, CSV or YAML file.
        resource: a built-in name, `file.py:Class`, or a subclass of `ForkableResource`.
        folder: what paths are relative to; by default the working directory.
        **keys: the further keys of a task file, such as `initial_user_prompt`, `num_rollouts_per_sample` or `limits`.

    Raises:
        ConfigError: something is wrong; the message has one line for each problem.

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
        policy: str | Mapping[str, Any] | LivePolicy | None = None,
        tools: str | ToolRegistry | None = None,
        dataset: str | Path | Iterable[Mapping[str, Any]] | None = None,
        resource: str | type[ForkableResource] | None = None,
        folder: str | Path | None = None,
        **keys: Any,
    ) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"a task's name is a text, not {kind_of(name)}; Task.from_file reads a task file")
        objects = {"reward": reward, "tools": tools, "dataset": dataset, "resource": resource}
        values, given = _read(name, objects, policy, keys)
        place = place_of_task(Path(folder) if folder is not None else None, name)
        self._begin(lambda overrides: task_of(LocatedYaml.of_values(values, place), overrides, given))

    def _begin(self, load: Callable[[Mapping[str, Any]], LoadedTask]) -> None:
        self._load = load
        self._loaded = load({})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """The task of a task file, read anew for each run.

        Raises:
            ConfigError: something is wrong with it; the message has one line for each problem.
        """
        task = cls.__new__(cls)
        task._begin(lambda overrides: load_task(Path(path), overrides))
        return task

    @property
    def name(self) -> str:
        """Of the task."""
        return self._loaded.definition.name

    @property
    def definition(self) -> TaskDefinitionModel:
        """Its keys, with their defaults."""
        return self._loaded.definition

    @property
    def samples(self) -> Sequence[Sample]:
        """Its initial conditions, in the order of the dataset."""
        return self._loaded.samples

    def messages(self, sample: int = 0) -> list[Message]:
        """What an agent is told at the beginning of a sample, as far as the task says it and not its world.

        Args:
            sample: its place in `samples`.
        """
        return Prompt(self.definition).render(self.samples[sample])

    def load(self, overrides: Mapping[str, Any]) -> LoadedTask:
        """The task with other values for some keys; `evaluate` asks for it.

        Raises:
            ConfigError: it cannot be loaded so.
        """
        return self._load(overrides)

    def run(self, **options: Any) -> FinishedRun:
        """Run the task and score its episodes. It blocks, also where an event loop runs already, as in a notebook.

        Args:
            **options: as of `evaluate`.

        Raises:
            ConfigError: something is wrong with the task or an option; nothing was written.
            RewardKitError: the run itself failed.
        """
        return evaluate(self, **options)

    async def run_async(self, **options: Any) -> FinishedRun:
        """`run`, for code that is asynchronous itself.

        Args:
            **options: as of `evaluate`.

        Raises:
            ConfigError: something is wrong with the task or an option; nothing was written.
            RewardKitError: the run itself failed.
        """
        return await evaluate_async(self, **options)

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {counted(len(self.samples), 'sample')})"

    def _repr_html_(self) -> str:
        loaded = self._loaded
        definition, given = loaded.definition, loaded.given
        policy = definition.policy.type if definition.policy else getattr(given.policy, "__name__", None)
        policy = policy or (type(given.policy).__name__ if given.policy is not None else "named by each run")
        facts = {
            "samples": f"{len(loaded.samples):,} × {loaded.rollouts_per_sample} episodes",
            "policy": policy,
            "reward": loaded.reward.id if loaded.reward is not None else "none: episodes are only collected",
            "tools": ", ".join(sorted(loaded.tools.get_tools())) if loaded.tools is not None else "",
            "resource": definition.resource_type or "",
        }
        parts = [line(strong(f"Task {definition.name}"))]
        parts.append(table(["", ""], [(name, told) for name, told in facts.items() if told]))
        if definition.initial_user_prompt:
            parts.append(folded("prompt", code(definition.initial_user_prompt)))
        parts += [line(note) for note in loaded.notes]
        return whole(*parts)


_options = list(inspect.signature(evaluate_async).parameters.values())[1:]
_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
Task.run.__signature__ = inspect.Signature([_self, *_options])  # type: ignore[attr-defined]  # for help and editors
Task.run_async.__signature__ = Task.run.__signature__  # type: ignore[attr-defined]


def _read(name: str, objects: Mapping[str, Any], policy: Any, keys: Mapping[str, Any]) -> tuple[dict[str, Any], Given]:
    """The keys of a task file that these come to, and what no file could say."""
    values: dict[str, Any] = {"name": name, **keys}
    live = {what: one for what, one in objects.items() if one is not None and not isinstance(one, str | Path)}
    for what, one in {**objects, "policy": policy}.items():
        key = _PLAIN.get(what, what)
        if one is not None and key in keys:
            raise ConfigError(f"Task {name!r}: {what} and {key} are two names of one thing; keep one of them")
        if isinstance(one, str | Path) and what in _PLAIN:
            values[key] = str(one)
    if "resource" in live:
        values["resource_type"] = named_resource(live["resource"])
    if "reward" in live:
        values["reward_function_path"] = name_of(live["reward"])
    if "tools" in live and not isinstance(live["tools"], ToolRegistry):
        raise ConfigError(f"tools: expected a ToolRegistry or the file of one, got {kind_of(live['tools'])}")
    rows = given_rows(live["dataset"]) if "dataset" in live else None
    if policy is not None and not is_live(policy):
        values["policy"] = _block(policy)
    return values, _given(name, {**live, **({"policy": policy} if is_live(policy) else {})}, rows)


def _block(policy: Any) -> dict[str, Any]:
    """The `policy:` block that a name means, or the keys of one."""
    if isinstance(policy, Mapping):
        return dict(policy)
    if not isinstance(policy, str):
        raise ConfigError(f"policy: expected an AgentPolicy, a name or a dict of keys, got {kind_of(policy)}")
    provider, separator, model = policy.partition("/")
    return {"type": "openai", "model": model} if separator and provider == "openai" else {"type": policy}


def _given(name: str, live: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None) -> Given:
    names: dict[str, Any] = {"task": name}
    names |= {what: name_of(one) for what, one in live.items() if what in ("reward", "resource")}
    names |= {"dataset": counted(len(rows), "row")} if rows is not None else {}
    names |= {"tools": sorted(live["tools"].get_tools())} if "tools" in live else {}
    texts = {what: live[what] for what in ("reward", "resource") if what in live}
    kept: dict[str, Kept] = {**kept_sources(texts), **({"dataset": kept_rows(rows)} if rows is not None else {})}
    return Given(live.get("reward"), live.get("tools"), rows, live.get("policy"), names, kept)
