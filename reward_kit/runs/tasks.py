"""Resolve the references of a task to resources, tools, rewards, samples and files.

`load_task` parses a task file and resolves it with `resolve_task`. Both functions report all errors before anything is
written. Each error is one line that contains the file, line, key and value.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from reward_kit.agent.samples import Prompt, PromptError, Sample
from reward_kit.agent.starts import GroupStart
from reward_kit.agent.tool_execution import Toolbox
from reward_kit.display_text import pluralize
from reward_kit.environments.config import check_row_config, read_config, resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, EnvironmentFailure, did_you_mean, type_name
from reward_kit.legacy_tasks import upgrade_notes
from reward_kit.loading import load_module, load_object
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.keys import NO_KEY, complete_model
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, key_variable_for
from reward_kit.reward_agent.loading import LoadedReward, SandboxChoice, load_reward
from reward_kit.reward_agent.named_rewards import NamedRewards, RewardPart, each_reward
from reward_kit.reward_agent.scoring import Reward, check_parameters, check_truth, rename_to_truth
from reward_kit.runs.datasets import check_dataset, read_samples
from reward_kit.runs.inputs import TASK_FILE, find_inputs, hash_path
from reward_kit.runs.task_file import (
    LocatedYaml,
    error_context,
    error_location,
    format_override,
    overridden_keys,
    override_source,
    parse_task,
)
from reward_kit.runs.task_objects import TaskObjects, wrap_reward_object
from reward_kit.task_parts import CreditModel
from reward_kit.typed_interface import RewardSpec
from reward_kit.validation import describe_validation_error

if TYPE_CHECKING:
    from reward_kit.rl_processing import CreditAssigner

_OF_OPTION = re.compile(r"reward '[^']*'(?: has no|,) option '([^']+)'")
_OF_SANDBOX = re.compile(r"sandbox\.(\w+)")
_SINGLE_BRACES = re.compile(r"(?<!\{)\{ *(\w+) *\}(?!\})")
_COMPOSITE = "composite"


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A loaded task, including all objects to which its file refers.

    Attributes:
        definition: the validated content of the file.
        located: the content of the file with line numbers.
        samples: the samples, in the order of the dataset.
        rollouts_per_sample: the number of episodes per sample.
        tools: the task's own tools, or None.
        reward: the reward function; None if episodes are only collected. The reward is loaded only if it runs in this
            process.
        notes: notes for the user about what was loaded.
        inputs: the input files and directories, from `find_inputs`.
        digests: the SHA-256 of the inputs and of Python objects, compared before a run is resumed.
        objects: the Python objects of a task that has no file.
        of_user: the dotted keys that the user set on the command line or in Python; "" means all keys. `base_url` is
            included unless it comes from the file of an earlier run.
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
    objects: TaskObjects = field(default_factory=TaskObjects)
    of_user: frozenset[str] = frozenset()

    @property
    def path(self) -> Path:
        """The task file."""
        return self.located.path

    @property
    def folder(self) -> Path:
        """The directory of the task file, to which paths in the file are relative."""
        return self.path.resolve().parent


def load_task(path: Path, overrides: Mapping[str, Any] | None = None, *, stored: Collection[str] = ()) -> LoadedTask:
    """Parse a task file, and resolve all its references.

    Args:
        path: the YAML file.
        overrides: the keys to override; nested keys are dotted, such as `limits.wall_time_s`.
        stored: the names of overrides that come from the file of an earlier run, including "base_url" if it does. Like
            the task file, these overrides cannot send an API key to an address.

    Raises:
        ConfigError: the task is invalid; the message has one line per problem.
    """
    located = LocatedYaml(path)
    if isinstance(located.data, dict) and "task" in located.data and {"updates", "max_env_steps"} & located.data.keys():
        raise ConfigError(f"{path} is a train file; use `reward-kit train`, or pass the task file to which it refers")
    return resolve_task(located, overrides, stored=stored)


def resolve_task(
    located: LocatedYaml,
    overrides: Mapping[str, Any] | None = None,
    objects: TaskObjects | None = None,
    *,
    stored: Collection[str] = (),
) -> LoadedTask:
    """Parse a task document, which may come from a different file or from Python, and resolve all its references."""
    overrides, objects = overrides or {}, objects or TaskObjects()
    folder = located.path.resolve().parent
    of_user = frozenset({*overrides, "base_url"}) - {*stored} if located.is_written else frozenset({""})
    objects.reject_overrides(overrides)
    definition = parse_task(located, overrides, has_rows=objects.rows is not None)
    if definition.credit is not None:
        credit = locate_credit(definition.credit, folder)
        make_located_assigner(located, credit, overrides)
        definition = definition.model_copy(update={"credit": credit})
    definition = complete_resource_config(located, definition, folder)
    with error_context(located, "tools_module_path"):
        named = definition.tools_module_path
        tools = objects.tools or (load_tools(named, folder) if named else None)
        check_tools(tools, definition)
    reward, notes = _resolve_reward(located, definition, overrides, objects, of_user)
    if definition.dataset_path is not None:
        with error_context(located, "dataset_path"):
            check_dataset(folder / definition.dataset_path)
    samples = tuple(read_samples(definition, folder, objects.rows))
    check_samples(definition, samples)
    if reward is not None:
        fields = {key for sample in samples for key in sample.row}
        for index, (name, one) in enumerate(each_reward(reward).items()):
            with error_context(located, *(("rewards", index) if name else ("reward_function_path",))):
                check_parameters(one)
                check_truth(one, [sample.ground_truth for sample in samples], fields)
                notes = (*notes, *_note_missing_truths(one, samples))
    inputs = find_inputs(
        located.path if located.is_written and not located.is_derived else None, folder, definition, reward
    )
    digests = {name: hash_path(path) for name, path in inputs.items()}
    has_dataset = definition.dataset_path is not None or objects.rows is not None
    return LoadedTask(
        definition=definition,
        located=located,
        samples=samples,
        rollouts_per_sample=definition.num_rollouts_per_sample if has_dataset else definition.num_rollouts,
        tools=tools,
        reward=reward,
        inputs=inputs,
        digests={**digests, **objects.digests(), TASK_FILE: hashlib.sha256(located.source).hexdigest()},
        notes=(*upgrade_notes(located.data), *_check_prompts(definition, located, samples), *notes),
        objects=objects,
        of_user=of_user,
    )


def _note_missing_truths(reward: Reward, samples: Sequence[Sample]) -> list[str]:
    """Return a note if some samples have no ground truth although the reward requires one."""
    missing = [sample for sample in samples if sample.ground_truth is None]
    if not missing or "ground_truth" not in reward.required:
        return []
    first, share = missing[0], f"{len(missing)} of {pluralize(len(samples), 'sample')}"
    where = first.where or first.id
    return [f"{where}: no ground_truth, which reward {reward.id!r} requires{rename_to_truth(first.row)} ({share})"]


def read_task(path: Path) -> tuple[TaskDefinitionModel, tuple[Sample, ...]]:
    """Read a task file and its dataset, but do not import or execute the code to which they refer."""
    located = LocatedYaml(path)
    definition = parse_task(located)
    samples = tuple(read_samples(definition, located.path.resolve().parent))
    _check_prompts(definition, located, samples)
    return definition, samples


def load_task_reward(definition: TaskDefinitionModel, folder: Path) -> LoadedReward | None:
    """Load the reward of a task, if it has one, in the way that its sandbox level requires."""
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
    return load_reward(definition.reward_function_path, folder, choice, definition.reward_options)


def _resolve_reward(
    located: LocatedYaml,
    definition: TaskDefinitionModel,
    overrides: Mapping[str, Any],
    objects: TaskObjects,
    of_user: Collection[str],
) -> tuple[Reward | None, Sequence[str]]:
    """Load the reward of the task and return it with notes. Errors include the line of the key."""
    if definition.rewards is None:
        return _resolve_one_reward(located, definition, overrides, objects.reward, of_user)
    parts, notes = {}, dict[str, None]()
    for index, entry in enumerate(definition.rewards):
        keys = {"reward_function_path": entry.reward_function_path, "reward_options": entry.reward_options}
        own, live = definition.model_copy(update=keys), objects.rewards.get(entry.name)
        reward, more = _resolve_one_reward(located, own, overrides, live, of_user, ("rewards", index))
        assert reward is not None  # Each entry names a reward
        parts[entry.name] = RewardPart(reward, entry.weight)
        notes.update(dict.fromkeys(more))
    return NamedRewards(parts), tuple(notes)


def _resolve_one_reward(
    located: LocatedYaml,
    definition: TaskDefinitionModel,
    overrides: Mapping[str, Any],
    live: Any,
    of_user: Collection[str],
    section: tuple[str | int, ...] = (),
) -> tuple[Reward | None, Sequence[str]]:
    """Load a reward and return it with notes.

    `section` is the key of the reward in the task file. `live` is the reward object, or None.
    """
    path, options = definition.reward_function_path or "", definition.reward_options
    prefix = ".".join(map(str, section))
    try:
        if live is not None:
            here, note = wrap_reward_object(live, definition)
            return here, (note,)
        if path.startswith(("http://", "https://")) and not overridden_keys(prefix, ["reward_function_path"], of_user):
            from reward_kit.reward_agent.remote import check_named_by_file

            check_named_by_file(path)
        client = options.get("client")
        named = client.get("api_key_env") if isinstance(client, Mapping) else None
        block = f"{prefix}.reward_options" if prefix else "reward_options"
        typed = overridden_keys(block, ["base_url"], of_user)
        typed |= overridden_keys(f"{block}.client", ["api_key_env"], of_user)
        settings = {"base_url": options.get("base_url"), "api_key_env": named}
        if isinstance(model := options.get("model"), str):  # a judge may name its provider
            settings = complete_model(model, settings)[1]
        try:
            variable = key_variable_for(CURRENT_PROVIDER_SESSION.get(), settings, typed, is_default=named is None)
        except ConfigError as error:
            raise ConfigError(f"client.api_key_env: {error}") from error
        loaded = load_task_reward(definition, located.path.resolve().parent)
    except ConfigError as error:
        key: tuple[str | int, ...] = ("reward_function_path",)
        message = f"reward_function_path: {error}"
        if str(error).startswith("client.api_key_env: "):
            key, message = ("reward_options", "client", "api_key_env"), f"reward_options.{error}"
        elif match := _OF_OPTION.match(str(error)):
            key, message = ("reward_options", match[1]), f"reward_options.{match[1]}: {error}"
        elif match := _OF_SANDBOX.match(str(error)):
            key, message = ("sandbox", match[1]), str(error)
        if section and key[0] != "sandbox":
            key, message = (*section, *key), f"{prefix}.{message}"
        raise ConfigError(f"{error_location(located, key, overrides)}: {message}") from error
    if loaded is None:
        return None, ()
    reward = loaded.reward
    if variable == NO_KEY and isinstance(reward, RewardSpec):
        from reward_kit.rewards.judge_client import JudgeClients, client_options

        if JudgeClients in reward.resources.values():  # A file must not send a judge's key to this address
            client = client_options(reward.options.get("client")).model_copy(update={"api_key_env": NO_KEY})
            reward = replace(reward, options={**reward.options, "client": client})
    return reward, loaded.notes


def locate_credit(credit: CreditModel, folder: Path) -> CreditModel:
    """Return a `credit:` block in which the files of the estimator and the state hash have absolute paths."""
    if not credit_code(credit):
        return credit
    from reward_kit.credit.state_hashes import locate_references

    located: dict[str, Any] = {"estimator": locate_references(credit.estimator, folder)}
    if "state_hash" in credit.options():
        located["state_hash"] = locate_references(credit.options()["state_hash"], folder)
    return credit.model_copy(update=located)


def credit_code(credit: CreditModel) -> list[str]:
    """Return the references to functions in the estimator and the state hash of a `credit:` block."""
    state_hash = credit.options().get("state_hash")
    if state_hash is None and ":" not in credit.estimator:
        return []
    from reward_kit.credit.state_hashes import hash_references

    return [*hash_references(credit.estimator), *hash_references(state_hash)]


def credit_code_arguments(credit: CreditModel) -> str:
    """Return the arguments of `reward-kit credit` that name the functions of a `credit:` block."""
    from reward_kit.credit.state_hashes import hash_references

    arguments = ["--estimator", credit.estimator] if hash_references(credit.estimator) else []
    if code := hash_references(credit.options().get("state_hash")):
        arguments += ["-O", f"state_hash={json.dumps(code) if len(code) > 1 else code[0]}"]
    return shlex.join(arguments)


def make_assigner(credit: CreditModel) -> CreditAssigner:
    """Create the assigner of a `credit:` block."""
    from reward_kit.rl_processing import CreditAssigner

    return CreditAssigner(credit.estimator, step_rewards=credit.step_rewards, **credit.options())


def make_located_assigner(located: LocatedYaml, credit: CreditModel, overrides: Mapping[str, Any]) -> CreditAssigner:
    """Create the assigner of a `credit:` block. Errors include the line of the block."""
    if "credit.estimator" in overrides:
        _refuse_leftover_options(located, credit, overrides)
    try:
        return make_assigner(credit)
    except ConfigError as error:
        keys = ["estimator", *credit.options()]
        of_keys = rf"\b({'|'.join(map(re.escape, keys))})\b"
        text = str(error).replace("state hash", "state_hash")
        named = re.search(rf"option '{of_keys}'", text) or re.search(of_keys, text)
        key = ("credit", named[1]) if named else ("credit",)
        raise ConfigError(f"{error_location(located, key, overrides)}: {'.'.join(key)}: {error}") from error


def _refuse_leftover_options(located: LocatedYaml, credit: CreditModel, overrides: Mapping[str, Any]) -> None:
    """Raise an error that names all options in the file that do not apply to the estimator of an override."""
    from reward_kit.credit.estimators import get_estimator, option_parameters
    from reward_kit.credit.own_estimators import OwnEstimator

    try:
        estimator = get_estimator(credit.estimator)
    except ConfigError:  # the caller reports an unknown estimator
        return
    known = option_parameters(credit.estimator, estimator if isinstance(estimator, OwnEstimator) else None)
    written = located.data.get("credit") or {}
    block = dict(written) if isinstance(written, Mapping) else {}
    unused = [key for key in block if key in credit.options() and key not in known and f"credit.{key}" not in overrides]
    if not unused:
        return
    name = str(overrides["credit.estimator"])
    kept = {key: value for key, value in block.items() if key not in unused and key != "estimator"}
    keys, noun = ", ".join(f"credit.{key}" for key in unused), "option" if len(unused) == 1 else "options"
    raise ConfigError(
        f"{located.where(('credit', unused[0]))}: {keys}: the estimator {name} has no such {noun}; replace the block "
        f"with {format_override('credit', {'estimator': name, **kept})}"
    )


def load_tools(location: str, folder: Path) -> ToolRegistry:
    """Load the `ToolRegistry` of a tools module. The module must define exactly one."""
    if not location.endswith(".py") and ":" in location:
        registry = load_object(location, folder)
        if not isinstance(registry, ToolRegistry):
            raise ConfigError(f"{location} is {type_name(registry)}, not a ToolRegistry")
        return registry
    module = load_module(location, folder)
    found = {name: value for name, value in vars(module).items() if isinstance(value, ToolRegistry)}
    registries = {id(registry): registry for registry in found.values()}
    if len(registries) != 1:
        names = ", ".join(found) or "none"
        raise ConfigError(f"{location} must define exactly one ToolRegistry; found {names}")
    return next(iter(registries.values()))


def _check_prompts(definition: TaskDefinitionModel, located: LocatedYaml, samples: Sequence[Sample]) -> list[str]:
    """Render the messages of all samples to detect missing fields before the run.

    Returns:
        A note for each column name in single braces. Such a name is not replaced and would be visible to the agent.
    """
    prompt = Prompt(definition)
    problems: list[str] = []
    unfit: dict[str, list[str]] = {}  # Report each template problem once, with the first row
    for sample in samples:
        try:
            messages = prompt.render(sample)
        except PromptError as error:
            problem = f"{located.where(error.key)}: {'.'.join(map(str, error.key))}: {error.problem}"
            unfit.setdefault(problem, []).append(sample.location)
        except ConfigError as error:
            problems.append(str(error))
        except pydantic.ValidationError as error:
            problems += [f"{sample.where}: messages.{line}" for line in describe_validation_error(error)]
        else:
            user = definition.user
            user_opens = user is not None and user.opens is not False
            has_observation = definition.resource_type is not None and definition.observation
            if not messages and not has_observation and not user_opens:
                raise ConfigError(f"{located.path}: the task has no first message; set messages or initial_user_prompt")
    for problem, places in unfit.items():
        others = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
        problems.append(f"{problem}{' In' if problem.endswith('?') else '; in'} {places[0]}{others}")
    if problems:
        more = [f"… and {len(problems) - 3} more"] if len(problems) > 3 else []
        raise ConfigError("\n".join([*problems[:3], *more]))
    columns = {name for sample in samples for name in sample.row}
    texts = [definition.initial_user_prompt or "", *(message.text for message in definition.messages)]
    braced = dict.fromkeys(name for text in texts for name in _SINGLE_BRACES.findall(text) if name in columns)
    return [
        f"the prompt contains {{{name}}} in single braces, which are not replaced; write {{{{ {name} }}}}"
        for name in braced
    ]


def select_samples(task: LoadedTask, limit: int | None = None, sample_ids: Iterable[str] = ()) -> tuple[Sample, ...]:
    """Return the samples to run."""
    by_id = {sample.id: sample for sample in task.samples}
    for sample_id in sample_ids:
        if sample_id not in by_id:
            raise ConfigError(f"no sample {sample_id!r}{did_you_mean(sample_id, by_id)}")
    chosen = tuple(by_id[sample_id] for sample_id in sample_ids) or task.samples
    return chosen[:limit] if limit is not None else chosen


def complete_resource_config(
    located: LocatedYaml, definition: TaskDefinitionModel, folder: Path
) -> TaskDefinitionModel:
    """Add the task directory and the task's `resource_server` to the configurations of its resources."""
    base, server = definition.base_resource_config, definition.resource_server
    is_composite = definition.resource_type == _COMPOSITE
    parts: list[tuple[str, str, dict[str, Any]]] = []  # Reference, name, configuration
    if is_composite:
        from reward_kit.environments.composite import CompositeConfig

        with error_context(located, "base_resource_config"):
            read = read_config(CompositeConfig, base, "composite")
        parts = [(part.type, part.name, part.config) for part in read.resources]
    elif definition.resource_type is not None:
        parts = [(definition.resource_type, definition.resource_type, base)]
    # Setting task_folder would change the directory that paths must not leave.
    configs: list[Any] = [base, *(config for *_, config in parts), *(base.values() if is_composite else ())]
    if any(isinstance(config, Mapping) and "task_folder" in config for config in configs):
        block = next((name for name in ("base_resource_config", "resources") if name in located.data), "")
        raise ConfigError(
            f"{located.where((block, 'task_folder'))}: task_folder is always the directory of the task file; remove it"
        )
    resources: list[dict[str, Any]] = []
    takers: list[dict[str, Any]] = []
    for index, (location, name, config) in enumerate(parts):
        with error_context(located, *(("resources", index) if is_composite else ("resource_type",))):
            location = str(folder / location) if location.partition(":")[0].endswith(".py") else location
            kind = resource_class(location)
        resources.append({"type": location, "name": name, "config": dict(config)})
        if kind.takes_task_folder:
            resources[-1]["config"]["task_folder"] = str(folder)
        if kind.takes_resource_server:
            takers.append(resources[-1])
    if server is not None:
        names = [repr(resource["name"]) for resource in takers or resources]
        if not resources:
            why = "the task has no resource_type"
        elif not takers:
            why = f"resource {', '.join(names)} does not start a server"
        elif len(takers) > 1:
            why = f"{' and '.join(names)} could start the server; move the key into the config of one of them"
        else:
            why = "base_resource_config has its own resource_server" if "resource_server" in takers[0]["config"] else ""
        if why:
            raise ConfigError(f"{located.where(('resource_server',))}: resource_server has no effect: {why}")
        takers[0]["config"]["resource_server"] = server.model_dump(exclude_defaults=True)
    if is_composite:
        return definition.model_copy(update={"base_resource_config": {**base, "resources": resources}})
    changes = [{"resource_type": item["type"], "base_resource_config": item["config"]} for item in resources]
    return definition.model_copy(update=changes[0]) if changes else definition


def check_tools(tools: ToolRegistry | None, definition: TaskDefinitionModel) -> None:
    """Raise a ConfigError if a tool requires a resource that the task does not have."""
    asking = {name: tool for name, tool in (tools.get_tools() if tools else {}).items() if tool.resource_parameters}
    if asking and definition.resource_type is None:
        name = next(iter(asking))
        raise ConfigError(f"tool {name!r} needs a resource, but the task has no resource_type")
    if definition.resource_type != _COMPOSITE:
        return
    from reward_kit.environments.composite import part_for_tool, read_parts

    kinds = {name: kind for name, (kind, _) in read_parts(definition.base_resource_config).items()}
    for name, tool in asking.items():
        for parameter, wanted in tool.resource_parameters.items():
            try:
                part_for_tool(kinds, wanted, parameter)
            except ConfigError as error:
                raise ConfigError(f"tool {name!r}: {error}") from None


def check_samples(definition: TaskDefinitionModel, samples: Sequence[Sample]) -> None:
    """Raise a ConfigError if a row sets a key that cannot be set per sample, or refers to an unknown resource."""
    if definition.resource_type is None:
        if unused := next((sample for sample in samples if sample.resource_config), None):
            raise ConfigError(f"{unused.where}: resource_config has no effect: the task has no resource_type")
        return
    kind, base = resource_class(definition.resource_type), definition.base_resource_config
    is_composite = definition.resource_type == _COMPOSITE
    names: Mapping[str, Any] = {}
    if is_composite:
        from reward_kit.environments.composite import read_parts

        names = read_parts(base)
    for sample in samples:
        for key in sample.resource_config if is_composite else ():
            if key not in names and key != "resources":
                near = did_you_mean(str(key), names)
                raise ConfigError(f"{sample.where}: resource_config: unknown resource {key!r}{near}")
        check_row_config(kind, base, sample.resource_config, sample.where)


async def check_resource_starts(task: LoadedTask, samples: Sequence[Sample] | None = None) -> bool:
    """Start the resource once for each set of configuration keys in the samples to detect errors before the run.

    Args:
        task: the task.
        samples: the samples to consider; by default all.

    Returns:
        True if the resource has tools after every start, or if the task has no resource.

    Raises:
        ConfigError: the resource does not exist, rejects its configuration, or cannot be reset; or a name in `tools` is
            not a tool after any start.
    """
    definition, located, samples = task.definition, task.located, task.samples if samples is None else samples
    if definition.resource_type is None:
        toolbox = Toolbox(definition, None, task.tools)
        await toolbox.specs()
        _reject_missing_tools(task, [toolbox.missing])
        return True
    has_tools = True
    missing: list[Mapping[str, str]] = []
    kinds = {frozenset(_keys(sample.resource_config)): sample for sample in reversed(samples)}
    async with ServerPool():
        for sample in kinds.values():
            try:
                async with GroupStart(definition, sample, 0) as group:
                    start = await group.episode(0)
                    if start.resource is not None:
                        try:
                            toolbox = Toolbox(definition, start.resource, task.tools)
                            has_tools = bool(await toolbox.specs()) and has_tools
                            missing.append(toolbox.missing)
                        finally:
                            await group.finish(start)
            except (ConfigError, EnvironmentFailure) as error:
                kind = definition.resource_type
                problem = str(error).removeprefix(f"{kind} resource: ")
                blocks = ("base_resource_config", "resources", "resource_type")
                block = next((name for name in blocks if name in located.data), "")
                where = sample.where if sample.resource_config else located.where((block, problem.partition(":")[0]))
                called = "resources" if kind == _COMPOSITE else f"resource {kind!r}"
                raise ConfigError(f"{where}: {called}: {problem}") from error
    _reject_missing_tools(task, missing)
    return has_tools


def _reject_missing_tools(task: LoadedTask, missing: Sequence[Mapping[str, str]]) -> None:
    """Raise a ConfigError if a name in `tools` is not a tool of the resource after any start."""
    for index, name in enumerate(task.definition.tools or ()):
        if all(name in one for one in missing):
            is_in_file = "tools" in task.located.data and not any(key.split(".")[0] == "tools" for key in task.of_user)
            where = task.located.where(("tools", index)) if is_in_file else override_source()
            raise ConfigError(f"{where}: tools: {missing[0][name]}")


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of a configuration."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
