"""From a task file to a task that can run: validated keys, samples, tools, reward, and a world that can be made.

Everything that can be wrong is found here, before anything is written: each problem is one line that names the file,
the line, the key and the value, and the command leaves with exit code 2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import yaml

from reward_kit.agent.samples import Prompt, Sample
from reward_kit.agent.starts import GroupStart
from reward_kit.environments.registry import resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, EnvironmentFailure, boundary, did_you_mean, kind_of
from reward_kit.loading import load_module, load_object
from reward_kit.models import TaskDefinitionModel, describe_validation_error
from reward_kit.reward_agent.confined import ConfinedReward
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice, load_reward
from reward_kit.reward_agent.scoring import Reward, check_parameters
from reward_kit.runs.datasets import read_samples
from reward_kit.runs.resources import check_samples, check_tools, with_surroundings
from reward_kit.runs.yaml_lines import LocatedYaml, about
from reward_kit.typed_interface import RewardSpec


@dataclass(frozen=True, slots=True)
class Task:
    """A task with everything loaded that its file names.

    Attributes:
        definition: the validated file.
        path: the file.
        samples: its initial conditions, in dataset order.
        rollouts_per_sample: how many episodes each gets.
        tools: the task's own tools, None where it has none.
        reward: the reward function, None where the task only collects. Unless it runs in this process, it is known from
            behind its walls and not loaded here.
        notes: lines for the user about what was loaded.
        inputs: the files that decide what a run's episodes and scores are: task file, dataset, tools and reward.
        digests: their SHA-256, to notice a change before a resume.
    """

    definition: TaskDefinitionModel
    path: Path
    samples: tuple[Sample, ...]
    rollouts_per_sample: int
    tools: ToolRegistry | None = None
    reward: RewardSpec | ConfinedReward | None = None
    inputs: Mapping[str, Path] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def load_task(path: Path, overrides: Mapping[str, Any] | None = None) -> Task:
    """Load a task file and everything it names.

    Args:
        path: the YAML file.
        overrides: keys laid over the file's, dotted for inner ones (`limits.wall_time_s`).

    Raises:
        ConfigError: something is wrong; the message has one line per problem.
    """
    located = LocatedYaml(path)
    definition = _validated(located, overrides or {})
    _refuse_unused(located, definition)
    folder = path.resolve().parent
    definition = with_surroundings(located, definition, folder)
    with about(located, "tools_module_path"):
        tools = load_tools(definition.tools_module_path, folder) if definition.tools_module_path else None
        check_tools(tools, definition)
    with about(located, "reward_function_path"):
        loaded = load_tasks_reward(definition, folder)
        reward = loaded.reward if loaded else None
    samples = tuple(read_samples(definition, folder))
    check_samples(definition, samples)
    with about(located, "reward_function_path"):
        _check_reward(reward, samples)
    has_dataset = definition.dataset_path is not None
    task = Task(
        definition=definition,
        path=path,
        samples=samples,
        rollouts_per_sample=definition.num_rollouts_per_sample if has_dataset else definition.num_rollouts,
        tools=tools,
        reward=reward,
        inputs=(inputs := _input_files(path, definition, folder)),
        digests={name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in inputs.items()},
        notes=loaded.notes if loaded else (),
    )
    _check_prompts(task)
    return task


def load_tasks_reward(definition: TaskDefinitionModel, folder: Path) -> LoadedReward | None:
    """The reward that a task names, ready for the level it is to run at; None where it names none.

    Raises:
        ConfigError: it cannot be loaded, or cannot be confined as it is asked to be.
    """
    if definition.reward_function_path is None:
        return None
    asked = definition.sandbox
    choice = SandboxChoice(
        level=asked.level,
        limits=asked.limits.model_dump(exclude_none=True),
        read_paths=tuple(asked.read_paths),
        preload=tuple(asked.preload),
        reward_time_s=definition.limits.reward_time_s,
    )
    return load_reward(definition.reward_function_path, folder, choice)


def _refuse_unused(located: LocatedYaml, definition: TaskDefinitionModel) -> None:
    """A key that would have no effect is an error, not a silent no-op."""
    given, has_dataset = definition.model_fields_set, definition.dataset_path is not None
    unused = {
        "num_rollouts": "a task with a dataset counts num_rollouts_per_sample" if has_dataset else "",
        "num_rollouts_per_sample": "" if has_dataset else "a task without a dataset counts num_rollouts",
        "base_resource_config": "" if definition.resource_type else "the task has no resource_type",
        "sandbox": "" if definition.reward_function_path else "the task has no reward_function_path",
        "nudge": "the simulated user answers a text" if definition.user else "",
    }
    for key, why in unused.items():
        if why and key in given:
            raise ConfigError(f"{located.where((key,))}: {key} has no effect: {why}")


def _check_reward(reward: Reward | None, samples: Sequence[Sample]) -> None:
    """A reward that asks for what nobody gives would break on every episode."""
    if reward is None:
        return
    check_parameters(reward)
    needs_truth = reward.required & {"ground_truth", "ground_truths"}
    if needs_truth and all(sample.ground_truth is None for sample in samples):
        fields = ", ".join(sorted({key for sample in samples for key in sample.row})) or "none"
        raise ConfigError(f"reward {reward.id!r} asks for ground_truth, and no sample has it; their fields: {fields}")


def _validated(located: LocatedYaml, overrides: Mapping[str, Any]) -> TaskDefinitionModel:
    if not isinstance(located.data, dict):
        raise ConfigError(f"{located.path}: a task file is a mapping of keys, this one is {located.data!r:.60}")
    data = overlaid(located.data, overrides)
    try:
        return TaskDefinitionModel.model_validate(data)
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, TaskDefinitionModel)
        lines = [
            f"{_place(located, tuple(problem['loc']), overrides)}: {text}{_why(problem)}"
            for problem, text in zip(error.errors(), problems, strict=True)
        ]
        raise ConfigError("\n".join(lines)) from None


def _why(problem: Mapping[str, Any]) -> str:
    """What a reader of the message may not know of task files, "" for most problems."""
    if problem["type"] == "missing" and tuple(problem["loc"]) in (("policy", "type"), ("user", "type")):
        return f"; such a block needs a type, e.g. -T {problem['loc'][0]}.type=openai"
    return "; YAML reads an empty value as null, which is None here" if problem["input"] is None else ""


def _place(located: LocatedYaml, location: tuple[str | int, ...], overrides: Mapping[str, Any]) -> str:
    """Where a key was given: on the command line, or in a line of the file."""
    dotted = ".".join(map(str, location))
    return "-T" if any(f"{dotted}.".startswith(f"{key}.") for key in overrides) else located.where(location)


def overlaid(data: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with dotted `overrides` on it; neither is changed."""
    result = json.loads(json.dumps(data, default=str)) if overrides else data
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        inner: Any = result
        for key in parents:
            inner = inner[_index(inner, key, dotted)] if isinstance(inner, list) else inner.setdefault(key, {})
            if not isinstance(inner, dict | list):
                raise ConfigError(f"-T {dotted}=…: {key!r} is no mapping")
        inner[_index(inner, last, dotted) if isinstance(inner, list) else last] = value
    return result


def _index(items: list[Any], key: str, dotted: str) -> int:
    if not (key.isascii() and key.isdigit() and int(key) < len(items)):
        raise ConfigError(f"-T {dotted}=…: {key!r} is no position in a list of {len(items)}, counted from 0")
    return int(key)


def load_tools(location: str, folder: Path) -> ToolRegistry:
    """The one `ToolRegistry` that a tools module defines.

    Raises:
        ConfigError: the module does not import, or defines none, or several.
    """
    if not location.endswith(".py") and ":" in location:
        registry = load_object(location, folder)
        if not isinstance(registry, ToolRegistry):
            raise ConfigError(f"{location} is {kind_of(registry)}, not a ToolRegistry")
        return registry
    module = load_module(location, folder)
    found = {name: value for name, value in vars(module).items() if isinstance(value, ToolRegistry)}
    registries = {id(registry): registry for registry in found.values()}
    if len(registries) != 1:
        names = ", ".join(found) or "none"
        raise ConfigError(f"{location} must define one ToolRegistry; found {names}")
    return next(iter(registries.values()))


def _check_prompts(task: Task) -> None:
    """Render every sample's messages once: a missing field is found before the run, not in its middle."""
    prompt = Prompt(task.definition)
    problems: list[str] = []
    for sample in task.samples:
        try:
            messages = prompt.render(sample)
        except ConfigError as error:
            problems.append(str(error))
        except pydantic.ValidationError as error:
            problems += [f"{sample.where}: messages.{line}" for line in describe_validation_error(error)]
        else:
            user = task.definition.user
            user_opens = user is not None and user.opens is not False
            if not messages and task.definition.resource_type is None and not user_opens:
                raise ConfigError(f"{task.path}: nothing to begin with; give messages or initial_user_prompt")
    if problems:
        more = [f"… and {len(problems) - 3} more"] if len(problems) > 3 else []
        raise ConfigError("\n".join([*problems[:3], *more]))


async def check_world(task: Task) -> bool:
    """Make a world for one sample of each kind of configuration, so that a wrong resource is found before the run.

    Returns:
        Whether every world offers tools; True where the task has no resource.

    Raises:
        ConfigError: the resource does not exist, refuses its configuration, or cannot be reset.
    """
    has_tools = True
    if task.definition.resource_type is None:
        return has_tools
    resource_class(task.definition.resource_type)
    kinds = {frozenset(_keys(sample.resource_config)): sample for sample in reversed(task.samples)}
    async with ServerPool():
        for sample in kinds.values():
            try:
                async with GroupStart(task.definition, sample, 0) as group:
                    start = await group.episode(0)
                    if start.world is not None:
                        try:
                            with boundary(EnvironmentFailure, "get_tools_spec"):
                                has_tools = bool(await start.world.get_tools_spec()) and has_tools
                        finally:
                            await start.world.close()
            except (ConfigError, EnvironmentFailure) as error:
                where = sample.where if sample.resource_config else task.path
                raise ConfigError(f"{where}: {_named(task.definition)}: {error}") from error
    return has_tools


def _named(definition: TaskDefinitionModel) -> str:
    kind = definition.resource_type
    return "resources" if kind == "composite" else f"resource {kind!r}"


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a configuration, dotted."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def selected(task: Task, limit: int | None = None, sample_ids: Iterable[str] = ()) -> tuple[Sample, ...]:
    """The samples to run.

    Raises:
        ConfigError: an id is not in the dataset.
    """
    by_id = {sample.id: sample for sample in task.samples}
    for sample_id in sample_ids:
        if sample_id not in by_id:
            raise ConfigError(f"no sample {sample_id!r}{did_you_mean(sample_id, by_id)}")
    chosen = tuple(by_id[sample_id] for sample_id in sample_ids) or task.samples
    return chosen[:limit] if limit is not None else chosen


def _input_files(path: Path, definition: TaskDefinitionModel, folder: Path) -> dict[str, Path]:
    """Each file that decides what a run's episodes and scores are; modules of packages are left out."""
    named = {
        "task file": str(path.resolve()),
        "dataset": definition.dataset_path,
        "tools": definition.tools_module_path,
        "reward": definition.reward_function_path,
        "redaction": definition.redact,
    }
    acting = {"resource": definition.resource_type}
    acting |= {"policy": definition.policy.type} if definition.policy else {}
    acting |= {"user": definition.user.type} if definition.user else {}
    named |= {name: value for name, value in acting.items() if value and ".py:" in value}
    files = {name: folder / value.partition(".py:")[0] for name, value in named.items() if value}
    files = {name: file if file.is_file() else file.with_name(f"{file.name}.py") for name, file in files.items()}
    configured = (definition.base_resource_config, definition.policy and definition.policy.options())
    files |= {f"file {text}": folder / text for text in _texts(configured) if len(text) < 256 and "\0" not in text}
    return {name: file for name, file in sorted(files.items()) if file.is_file()}


def _texts(value: Any) -> Iterator[str]:
    """Every text in a configuration; some of them name files."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def parse_override(text: str, option: str = "-T") -> tuple[str, Any]:
    """`key=value` from the command line; the value is YAML.

    Args:
        text: as typed.
        option: the option it was typed after, for messages.

    Raises:
        ConfigError: there is no `=`, or the value is not YAML.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"{option} {text!r}: write key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "unreadable"
        raise ConfigError(f"{option} {text!r}: the value is not YAML: {problem}") from None
