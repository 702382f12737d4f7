"""From a task file to a task that can run: validated keys, samples, tools, reward.

Everything that can be wrong is found here, before anything is written: each problem is one line that names the file,
the line, the key and the value, and the command leaves with exit code 2.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from reward_kit.agent.samples import Prompt, PromptError, Sample
from reward_kit.agent.starts import GroupStart
from reward_kit.earlier_tasks import notes_on
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.composite import CompositeConfig, part_for_tool, read_parts
from reward_kit.environments.config import check_row_config, read_config
from reward_kit.environments.registry import resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, EnvironmentFailure, boundary, did_you_mean, kind_of
from reward_kit.loading import is_built_in, load_module, load_object
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.environment import NO_KEY
from reward_kit.providers.traffic import CURRENT_TRAFFIC, key_variable_for
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice, load_reward
from reward_kit.reward_agent.remote_client import check_named_by_file, is_address
from reward_kit.reward_agent.scoring import Reward, check_parameters, check_truth
from reward_kit.rewards.judging.client import JudgeClients
from reward_kit.rewards.judging.options import client_options
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.datasets import check_dataset, read_samples
from reward_kit.runs.inputs import TASK_FILE, digests_of, inputs_of
from reward_kit.runs.task_file import LocatedYaml, about, as_given, given_by, keys_of_user, overlaid
from reward_kit.runs.task_objects import Given, live_reward
from reward_kit.task_parts import CreditModel
from reward_kit.typed_interface import RewardSpec
from reward_kit.validation import describe_validation_error

Model = TypeVar("Model", bound=pydantic.BaseModel)

_OF_OPTION = re.compile(r"reward '[^']*'(?: has no|,) option '([^']+)'")

_SINGLE_BRACES = re.compile(r"(?<!\{)\{ *(\w+) *\}(?!\})")

_OF_SANDBOX = re.compile(r"sandbox\.(\w+)")


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A task with everything loaded that its file names.

    Attributes:
        definition: the validated file.
        located: the file, with its lines.
        samples: its initial conditions, in dataset order.
        rollouts_per_sample: how many episodes each gets.
        tools: the task's own tools, None where it has none.
        reward: the reward function, None where the task only collects. Unless it runs in this process, it is known from
            behind its walls and not loaded here.
        notes: lines for the user about what was loaded.
        inputs: the files and folders that decide what a run's episodes and scores are, as `inputs_of` finds them.
        digests: their SHA-256, to notice a change before a resume, and those of what was given.
        given: the Python objects that it was made of, where no file describes it.
        of_user: the dotted keys that the user gave, on the command line or in Python, and no file; "" for all of them.
            With the `base_url` of a run, unless that comes from an earlier run's file.
    """

    definition: TaskDefinitionModel
    located: LocatedYaml
    samples: tuple[Sample, ...]
    rollouts_per_sample: int
    tools: ToolRegistry | None = None
    reward: Reward | None = None
    inputs: Mapping[str, Path] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    given: Given = field(default_factory=Given)
    of_user: frozenset[str] = frozenset()

    @property
    def path(self) -> Path:
        """The task file."""
        return self.located.path

    @property
    def folder(self) -> Path:
        """Where the task file lies; what it names is relative to it."""
        return self.path.resolve().parent


def load_task(path: Path, overrides: Mapping[str, Any] | None = None, *, stored: Collection[str] = ()) -> LoadedTask:
    """Load a task file and everything it names.

    Args:
        path: the YAML file.
        overrides: keys laid over the file's, dotted for inner ones (`limits.wall_time_s`).
        stored: those of them that come from an earlier run's file, and "base_url" if that run's does. They lead no key
            anywhere, just as the task file.

    Raises:
        ConfigError: something is wrong; the message has one line per problem.
    """
    located = LocatedYaml(path)
    if isinstance(located.data, dict) and {"task", "updates"} <= located.data.keys():
        raise ConfigError(f"{path} is a train file, for `reward-kit train`; the task that it names is a task file")
    return task_of(located, overrides, stored=stored)


def task_of(
    located: LocatedYaml,
    overrides: Mapping[str, Any] | None = None,
    given: Given | None = None,
    *,
    stored: Collection[str] = (),
) -> LoadedTask:
    """`load_task` of a document that is read already, which may be a part of another file, or come from Python.

    Args:
        located: the document.
        overrides: keys laid over it.
        given: what stands in the place of things that it would name.
        stored: as `load_task` takes it.

    Raises:
        ConfigError: something is wrong; the message has one line per problem.
    """
    path, given = located.path, given or Given()
    of_user = frozenset({*(overrides or {}), "base_url"}) - {*stored} if located.is_written else frozenset({""})
    given.refuse(overrides or {})
    definition = read_definition(located, overrides)
    has_dataset = definition.dataset_path is not None or given.rows is not None
    _refuse_unused(located, definition, has_dataset)
    if definition.credit is not None:
        located_assigner(located, definition.credit, overrides or {})
    folder = path.resolve().parent
    definition = with_surroundings(located, definition, folder)
    with about(located, "tools_module_path"):
        named = definition.tools_module_path
        tools = given.tools or (load_tools(named, folder) if named else None)
        check_tools(tools, definition)
    reward, notes = _reward_of(located, definition, folder, overrides or {}, given, of_user)
    if definition.dataset_path is not None:
        with about(located, "dataset_path"):
            check_dataset(folder / definition.dataset_path)
    samples = tuple(read_samples(definition, folder, given.rows))
    check_samples(definition, samples)
    with about(located, "reward_function_path"):
        _check_reward(reward, samples)
    task = LoadedTask(
        definition=definition,
        located=located,
        samples=samples,
        rollouts_per_sample=definition.num_rollouts_per_sample if has_dataset else definition.num_rollouts,
        tools=tools,
        reward=reward,
        inputs=(inputs := inputs_of(path if located.is_written else None, folder, definition, reward)),
        digests={**digests_of(inputs), **given.digests(), TASK_FILE: hashlib.sha256(located.source).hexdigest()},
        notes=(*notes_on(located.data), *_notes_on_prompts(definition, samples), *notes),
        given=given,
        of_user=of_user,
    )
    _check_prompts(definition, located, samples)
    return task


def read_task(path: Path) -> tuple[TaskDefinitionModel, tuple[Sample, ...]]:
    """Read a task file and its dataset, without importing or executing anything that they name.

    Raises:
        ConfigError: a key, a row or a template is wrong.
    """
    located = LocatedYaml(path)
    definition = read_definition(located)
    _refuse_unused(located, definition, definition.dataset_path is not None)
    samples = tuple(read_samples(definition, path.resolve().parent))
    _check_prompts(definition, located, samples)
    return definition, samples


def read_definition(located: LocatedYaml, overrides: Mapping[str, Any] | None = None) -> TaskDefinitionModel:
    """The keys of a task file, checked without loading or executing anything that they name.

    Args:
        located: the document.
        overrides: keys laid over it.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or the file loosens the sandbox.
    """
    definition = validated(located, overrides or {}, TaskDefinitionModel, "a task file")
    _refuse_looser_sandbox(located, definition, overrides or {})
    return definition


def _refuse_looser_sandbox(located: LocatedYaml, definition: TaskDefinitionModel, overrides: Mapping[str, Any]) -> None:
    """Reject what a task file asks for beyond the default sandbox; only the command line and Python code may ask."""
    from reward_kit.sandbox.limits import Limits

    if not located.is_written:
        return
    sandbox, usual, folder = definition.sandbox, Limits(), located.path.resolve().parent
    is_built_in_reward = is_built_in(definition.reward_function_path or "")
    looser: dict[tuple[str, ...], Any] = {
        ("level",): sandbox.level if sandbox.level == "in_process" and not is_built_in_reward else None,
        ("back_end",): sandbox.back_end,
        ("install_requirements",): sandbox.install_requirements or None,
        ("read_paths",): [one for one in sandbox.read_paths if not (folder / one).resolve().is_relative_to(folder)],
    }
    for name, value in sandbox.limits.model_dump(exclude_none=True, exclude={"cpu_s"}).items():
        looser["limits", name] = value if value > getattr(usual, name) else None
    for keys, value in looser.items():
        dotted = ".".join(("sandbox", *keys))
        if value and not any(f"{dotted}.".startswith(f"{key}.") for key in overrides):
            value = json.dumps(value) if not isinstance(value, str) else value
            raise ConfigError(
                f"{located.where(('sandbox', *keys))}: {dotted}: {value} loosens the sandbox, which a task file cannot "
                f"do; remove it and give {as_given(dotted, shlex.quote(value))} (of `train`: -T task.{dotted}=…)"
            )


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
        install_requirements=asked.install_requirements,
        back_end=asked.back_end,
    )
    return load_reward(definition.reward_function_path, folder, choice, definition.reward_options)


def _reward_of(
    located: LocatedYaml,
    definition: TaskDefinitionModel,
    folder: Path,
    overrides: Mapping[str, Any],
    given: Given,
    of_user: Collection[str],
) -> tuple[Reward | None, Sequence[str]]:
    """The task's reward, and notes on it; what is wrong with its walls or an option is told with that key's line."""
    path = definition.reward_function_path or ""
    try:
        if given.reward is not None:
            reward, note = live_reward(given.reward, definition)
            return reward, (note,)
        if is_address(path) and not keys_of_user("", ["reward_function_path"], of_user):
            check_named_by_file(path)
        variable = judges_key(definition.reward_options, of_user)
        loaded = load_tasks_reward(definition, folder)
        if loaded is None:
            return None, ()
        return with_judges_key(loaded.reward, variable), loaded.notes
    except ConfigError as error:
        key: tuple[str, ...] = ("reward_function_path",)
        told = f"reward_function_path: {error}"
        if str(error).startswith("client.api_key_env: "):
            key, told = ("reward_options", "client", "api_key_env"), f"reward_options.{error}"
        elif found := _OF_OPTION.match(str(error)):
            key, told = ("reward_options", found[1]), f"reward_options.{found[1]}: {error}"
        elif found := _OF_SANDBOX.match(str(error)):
            key, told = ("sandbox", found[1]), str(error)
        raise ConfigError(f"{place_of(located, key, overrides)}: {told}") from error


def assigner_of(credit: CreditModel) -> CreditAssigner:
    """What a `credit:` block asks for.

    Raises:
        ConfigError: the estimator is unknown, or refuses one of its keys.
    """
    return CreditAssigner(credit.estimator, step_rewards=credit.step_rewards, **credit.options())


def located_assigner(located: LocatedYaml, credit: CreditModel, overrides: Mapping[str, Any]) -> CreditAssigner:
    """`assigner_of` the `credit:` block of a file.

    Raises:
        ConfigError: what the estimator refuses, told with its key's own line, where the message names one of the keys.
    """
    try:
        return assigner_of(credit)
    except ConfigError as error:
        keys = ["estimator", *credit.options()]
        told = re.search(rf"\b({'|'.join(map(re.escape, keys))})\b", str(error).replace("state hash", "state_hash"))
        key = ("credit", told[1]) if told else ("credit",)
        raise ConfigError(f"{place_of(located, key, overrides)}: {'.'.join(key)}: {error}") from error


def _refuse_unused(located: LocatedYaml, definition: TaskDefinitionModel, has_dataset: bool) -> None:
    """A key that would have no effect is an error, not a silent no-op."""
    given = definition.model_fields_set
    unused = {
        "num_rollouts": "a task with a dataset counts num_rollouts_per_sample" if has_dataset else "",
        "num_rollouts_per_sample": "" if has_dataset else "a task without a dataset counts num_rollouts",
        "base_resource_config": "" if definition.resource_type else "the task has no resource_type",
        "sandbox": "" if definition.reward_function_path else "the task has no reward_function_path",
        "reward_options": "" if definition.reward_function_path else "the task has no reward_function_path",
        "credit": "" if definition.reward_function_path else "the task has no reward_function_path",
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
    fields = (key for sample in samples for key in sample.row)
    check_truth(reward, (sample.ground_truth for sample in samples), fields)


def validated(located: LocatedYaml, overrides: Mapping[str, Any], model: type[Model], what: str) -> Model:
    """A file's data, with overrides laid over it, as a model.

    Args:
        located: the file.
        overrides: keys laid over the file's, dotted for inner ones.
        model: the model.
        what: what such a file is called, for messages.

    Raises:
        ConfigError: it does not fit; a line for each problem, with its place and the nearest key.
    """
    if not isinstance(located.data, dict):
        raise ConfigError(f"{located.path}: {what} is a mapping of keys, this one is {located.data!r:.60}")
    data = overlaid(located.data, overrides)
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, model)
        lines = [
            f"{place_of(located, tuple(problem['loc']), overrides)}: {text}{_why(problem)}"
            for problem, text in zip(error.errors(), problems, strict=True)
        ]
        raise ConfigError("\n".join(lines)) from None


def _why(problem: Mapping[str, Any]) -> str:
    """What a reader of the message may not know of task files, "" for most problems."""
    if problem["type"] == "missing" and tuple(problem["loc"]) in (("policy", "type"), ("user", "type")):
        key = f"{problem['loc'][0]}.type"
        return f"; such a block needs a type, e.g. {as_given(key, 'openai')}"
    return "; YAML reads an empty value as null, which is None here" if problem["input"] is None else ""


def place_of(located: LocatedYaml, location: tuple[str | int, ...], overrides: Mapping[str, Any]) -> str:
    """Where a key was given: on the command line, or in a line of the file."""
    dotted = ".".join(map(str, location))
    is_new = bool(location) and location[0] not in located.data  # nothing but an override can have brought it
    is_given = any(f"{dotted}.".startswith(f"{key}.") or (is_new and key.startswith(f"{dotted}.")) for key in overrides)
    return given_by() if is_given else located.where(location)


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


def _check_prompts(definition: TaskDefinitionModel, located: LocatedYaml, samples: Sequence[Sample]) -> None:
    """Render every sample's messages once: a missing field is found before the run, not in its middle."""
    prompt = Prompt(definition)
    problems: list[str] = []
    unfit: dict[str, list[str]] = {}  # what is wrong with a template is told once, whomever it fails on
    for sample in samples:
        try:
            messages = prompt.render(sample)
        except PromptError as error:
            told = f"{located.where(error.key)}: {'.'.join(map(str, error.key))}: {error.problem}"
            unfit.setdefault(told, []).append(sample.place)
        except ConfigError as error:
            problems.append(str(error))
        except pydantic.ValidationError as error:
            problems += [f"{sample.where}: messages.{line}" for line in describe_validation_error(error)]
        else:
            user = definition.user
            user_opens = user is not None and user.opens is not False
            if not messages and definition.resource_type is None and not user_opens:
                raise ConfigError(f"{located.path}: nothing to begin with; give messages or initial_user_prompt")
    for told, places in unfit.items():
        others = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
        problems.append(f"{told}{' In' if told.endswith('?') else '; in'} {places[0]}{others}")
    if problems:
        more = [f"… and {len(problems) - 3} more"] if len(problems) > 3 else []
        raise ConfigError("\n".join([*problems[:3], *more]))


def _notes_on_prompts(definition: TaskDefinitionModel, samples: Sequence[Sample]) -> list[str]:
    """A column in single braces is no template and reaches the agent as it stands, which is hardly meant."""
    columns = {name for sample in samples for name in sample.row}
    texts = [definition.initial_user_prompt or "", *(message.text for message in definition.messages)]
    found = dict.fromkeys(name for text in texts for name in _SINGLE_BRACES.findall(text) if name in columns)
    return [f"the prompt has {{{name}}} as it stands; a column is written {{{{ {name} }}}}" for name in found]


def selected(task: LoadedTask, limit: int | None = None, sample_ids: Iterable[str] = ()) -> tuple[Sample, ...]:
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


_COMPOSITE = "composite"


@dataclass(slots=True)
class _Resource:
    """One resource of a task: what names its class, its own name, its class and its configuration."""

    location: str
    name: str
    kind: type[ForkableResource]
    config: dict[str, Any]


def with_surroundings(located: LocatedYaml, definition: TaskDefinitionModel, folder: Path) -> TaskDefinitionModel:
    """The definition with what its resources need of the task file: its folder, and the server it names.

    Args:
        located: the task file, for messages.
        definition: what it says.
        folder: where it lies.

    Raises:
        ConfigError: a resource does not exist, or the server belongs to none of them, or to several.
    """
    resources = _resources(located, definition, folder)
    _refuse_task_folder(located, definition, resources)
    for resource in resources:
        if resource.kind.takes_task_folder:
            resource.config["task_folder"] = str(folder)
    if definition.resource_server is not None:
        _give_server(located, definition, resources)
    if not resources:
        return definition
    only, config = resources[0], dict(definition.base_resource_config)
    if definition.resource_type != _COMPOSITE:
        return definition.model_copy(update={"resource_type": only.location, "base_resource_config": only.config})
    parts = [{"type": part.location, "name": part.name, "config": part.config} for part in resources]
    return definition.model_copy(update={"base_resource_config": {**config, "resources": parts}})


def _resources(located: LocatedYaml, definition: TaskDefinitionModel, folder: Path) -> list[_Resource]:
    name, config = definition.resource_type, definition.base_resource_config
    if name is None:
        return []
    if name != _COMPOSITE:
        with about(located, "resource_type"):
            return [_resource(name, name, config, folder)]
    found = []
    with about(located, "base_resource_config"):
        parts = read_config(CompositeConfig, config, "composite").resources
    for index, part in enumerate(parts):
        with about(located, "resources", index):
            found.append(_resource(part.type, part.name, part.config, folder))
    return found


def _resource(location: str, name: str, config: dict[str, Any], folder: Path) -> _Resource:
    if location.partition(":")[0].endswith(".py"):
        location = str(folder / location)
    return _Resource(location, name, resource_class(location), dict(config))


def _refuse_task_folder(located: LocatedYaml, definition: TaskDefinitionModel, resources: Sequence[_Resource]) -> None:
    """Reject a task file that sets `task_folder`, which would move the folder that its paths must stay in."""
    configs: list[Mapping[str, Any]] = [definition.base_resource_config, *(resource.config for resource in resources)]
    if definition.resource_type == _COMPOSITE:  # also what is laid over a part, below the part's name
        configs += [config for config in definition.base_resource_config.values() if isinstance(config, Mapping)]
    if any("task_folder" in config for config in configs):
        block = next((name for name in ("base_resource_config", "resources") if name in located.data), "")
        raise ConfigError(
            f"{located.where((block, 'task_folder'))}: task_folder: always the task file's own folder; remove this key"
        )


def _give_server(located: LocatedYaml, definition: TaskDefinitionModel, resources: Sequence[_Resource]) -> None:
    """Put the task's server into the configuration of the resource that starts it."""
    assert definition.resource_server is not None
    takers = [resource for resource in resources if resource.kind.takes_resource_server]
    if not resources:
        why = "the task has no resource_type"
    elif not takers:
        why = f"resource {', '.join(repr(resource.name) for resource in resources)} starts no server"
    elif len(takers) > 1:
        why = f"{' and '.join(repr(taker.name) for taker in takers)} could both start it; put it into one's config"
    elif "resource_server" in takers[0].config:
        why = "base_resource_config has one of its own"
    else:
        takers[0].config["resource_server"] = definition.resource_server.model_dump(exclude_defaults=True)
        return
    raise ConfigError(f"{located.where(('resource_server',))}: resource_server has no effect: {why}")


def check_tools(tools: ToolRegistry | None, definition: TaskDefinitionModel) -> None:
    """Refuse a tool that asks for a resource which the task does not have.

    Raises:
        ConfigError: the tool is named, and what its parameter asks for.
    """
    asking = {name: tool for name, tool in (tools.get_tools() if tools else {}).items() if tool.resource_parameters}
    if asking and definition.resource_type is None:
        name = next(iter(asking))
        raise ConfigError(f"tool {name!r} asks for the episode's resource, and the task has no resource_type")
    if definition.resource_type != _COMPOSITE:
        return
    kinds = {name: kind for name, (kind, _) in read_parts(definition.base_resource_config).items()}
    for name, tool in asking.items():
        for parameter, wanted in tool.resource_parameters.items():
            try:
                part_for_tool(kinds, wanted, parameter)
            except ConfigError as error:
                raise ConfigError(f"tool {name!r}: {error}") from None


def check_samples(definition: TaskDefinitionModel, samples: Sequence[Sample]) -> None:
    """Reject a sample whose row sets more than per-sample data, or a resource that the task does not have.

    Raises:
        ConfigError: the message has the row's line, the key, and the keys that a row may set.
    """
    if definition.resource_type is None:
        if unused := next((sample for sample in samples if sample.resource_config), None):
            raise ConfigError(f"{unused.where}: resource_config has no effect: the task has no resource_type")
        return
    kind, base = resource_class(definition.resource_type), definition.base_resource_config
    is_composite = definition.resource_type == _COMPOSITE
    names = read_parts(base) if is_composite else {}
    for sample in samples:
        for key in sample.resource_config if is_composite else ():
            if key not in names and key != "resources":
                near = did_you_mean(str(key), names)
                raise ConfigError(f"{sample.where}: resource_config: no resource is called {key!r}{near}")
        check_row_config(kind, base, sample.resource_config, sample.where)


async def check_world(definition: TaskDefinitionModel, samples: Sequence[Sample], located: LocatedYaml) -> bool:
    """Make a world for one sample of each kind of configuration, so that a wrong resource is found before the run.

    Args:
        definition: of the task.
        samples: its initial conditions.
        located: its file, for messages.

    Returns:
        Whether every world offers tools; True where the task has no resource.

    Raises:
        ConfigError: the resource does not exist, refuses its configuration, or cannot be reset.
    """
    has_tools = True
    if definition.resource_type is None:
        return has_tools
    resource_class(definition.resource_type)
    kinds = {frozenset(_keys(sample.resource_config)): sample for sample in reversed(samples)}
    async with ServerPool():
        for sample in kinds.values():
            try:
                async with GroupStart(definition, sample, 0) as group:
                    start = await group.episode(0)
                    if start.world is not None:
                        try:
                            with boundary(EnvironmentFailure, "get_tools_spec"):
                                has_tools = bool(await start.world.get_tools_spec()) and has_tools
                        finally:
                            await start.world.close()
            except (ConfigError, EnvironmentFailure) as error:
                told = str(error).removeprefix(f"{definition.resource_type} resource: ")
                where = sample.where if sample.resource_config else _where(located, told.partition(":")[0])
                raise ConfigError(f"{where}: {_named(definition)}: {told}") from error
    return has_tools


def _where(located: LocatedYaml, key: str) -> str:
    """The line of a key of the resource's configuration, or of what names the resource where there is none."""
    blocks = ("base_resource_config", "resources", "resource_type")
    block = next((name for name in blocks if name in located.data), "")
    return located.where((block, key))


def _named(definition: TaskDefinitionModel) -> str:
    kind = definition.resource_type
    return "resources" if kind == "composite" else f"resource {kind!r}"


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a configuration, dotted."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def judges_key(reward_options: Mapping[str, Any], of_user: Collection[str]) -> str | None:
    """The variable of a judge's key, as `key_variable_for` allows it.

    Args:
        reward_options: of the task.
        of_user: the dotted keys of the task that the user gave, and no file.

    Raises:
        ConfigError: the file names a variable that is not configured for that origin.
    """
    client = reward_options.get("client")
    named = client.get("api_key_env") if isinstance(client, Mapping) else None
    typed = keys_of_user("reward_options", ["base_url"], of_user)
    typed |= keys_of_user("reward_options.client", ["api_key_env"], of_user)
    block = {"base_url": reward_options.get("base_url"), "api_key_env": named}
    try:
        variable: str | None = key_variable_for(CURRENT_TRAFFIC.get(), block, typed)
    except ConfigError as error:
        raise ConfigError(f"client.api_key_env: {error}") from error
    return variable


def with_judges_key(reward: Reward, variable: str | None) -> Reward:
    """The reward; a judge sends no key where the file must not lead it."""
    if variable != NO_KEY or not isinstance(reward, RewardSpec) or JudgeClients not in reward.resources.values():
        return reward
    client = client_options(reward.options.get("client")).model_copy(update={"api_key_env": NO_KEY})
    return replace(reward, options={**reward.options, "client": client})
