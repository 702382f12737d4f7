"""From a task file to a task that can run: validated keys, samples, tools, reward.

Everything that can be wrong is found here, before anything is written: each problem is one line that names the file,
the line, the key and the value, and the command leaves with exit code 2.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from reward_kit.agent.samples import Prompt, PromptError, Sample
from reward_kit.earlier_tasks import notes_on
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, did_you_mean, kind_of
from reward_kit.loading import is_built_in, load_module, load_object
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice, load_reward
from reward_kit.reward_agent.remote import check_named_by_file, is_address
from reward_kit.reward_agent.scoring import Reward, check_parameters, check_truth
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.datasets import check_dataset, read_samples
from reward_kit.runs.given import Given, live_reward
from reward_kit.runs.inputs import TASK_FILE, digests_of, inputs_of
from reward_kit.runs.judge_keys import judges_key, with_judges_key
from reward_kit.runs.overrides import as_given, given_by, keys_of_user, overlaid
from reward_kit.runs.resources import check_samples, check_tools, with_surroundings
from reward_kit.runs.yaml_lines import LocatedYaml, about
from reward_kit.task_parts import CreditModel
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
    from reward_kit.sandbox.program import Limits

    if not located.is_written:
        return
    sandbox, usual, folder = definition.sandbox, Limits(), located.path.resolve().parent
    is_built_in_reward = is_built_in(definition.reward_function_path or "")
    looser: dict[tuple[str, ...], Any] = {
        ("level",): sandbox.level if sandbox.level == "in_process" and not is_built_in_reward else None,
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
