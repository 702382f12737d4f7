"""Parse a task file, apply overrides, and validate the definition.

`parse_task` is the first of the three steps before a run (parse, resolve, plan). The code and files to which a task
refers are not loaded or executed here. Each error is one line that contains the file, line, key and value.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from reward_kit.errors import ConfigError, describe_read_error
from reward_kit.limited_yaml import LimitedLoader, YamlLimitError
from reward_kit.loading import is_built_in
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.task_folders import FOLDER_FILES, derive_task_file
from reward_kit.safe_input import YAML_BYTES, format_size
from reward_kit.validation import describe_validation_error

KeyPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=pydantic.BaseModel)
_OVERRIDE_SOURCE: ContextVar[str] = ContextVar("_OVERRIDE_SOURCE", default="-T")
_PYTHON = "overrides"
_HINTS = {
    "mapping values are not allowed here": (
        "; put a string that contains ': ' in quotes, and align the keys of a block"
    ),
    "found character '\\t'": "; indent YAML with spaces, not tabs",
    "found character '@'": "; put a value that starts with @ in quotes",
    "found character '`'": "; put a value that starts with ` in quotes",
    "expected ',' or": "; an earlier bracket is not closed",
    "found unexpected end of stream": "; an earlier quote is not closed",
    "expected <block end>": "; align the keys of a block",
}
"""The usual fix for each of PyYAML's messages."""


class _Loader(LimitedLoader):
    """A YAML loader that keeps dates as strings, for use in prompts and JSON files."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in LimitedLoader.yaml_implicit_resolvers.items()
}


class LocatedYaml:
    """A YAML document: its `data`, its `source` bytes, and the line of every key and list item.

    For the task folder of another library, the document is derived from the folder (`task_folders`).

    Raises:
        ConfigError: the file does not exist or is not YAML; the message contains the line.
    """

    is_written = True
    is_derived = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.is_dir() or path.name in FOLDER_FILES:
                self.path, self.source = derive_task_file(path)
                self.is_derived = True
            else:
                with path.open("rb") as file:
                    self.source = file.read(YAML_BYTES + 1)
            if len(self.source) > YAML_BYTES:
                problem = f"the file is larger than the limit of {format_size(YAML_BYTES)}"
                raise ConfigError(f"{path}: {problem}; store a dataset as JSONL")
            text = self.source.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {describe_read_error(path, error)}") from None
        self._lines: dict[KeyPath, int] = {}
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            self._locate(node, ())
            self.data: Any = loader.construct_document(node) if node is not None else None
        except yaml.YAMLError as error:
            # Errors from the reader have a position in the text; all others have a mark.
            mark, position = getattr(error, "problem_mark", None), getattr(error, "position", 0)
            line = mark.line if mark else text.count("\n", 0, position)
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            if isinstance(error, YamlLimitError):
                raise ConfigError(f"{path}:{line + 1}: {problem}") from None
            hint = next((text for phrase, text in _HINTS.items() if phrase in problem), "")
            raise ConfigError(f"{path}:{line + 1}: not YAML: {problem}{hint}") from None
        except RecursionError:
            raise ConfigError(f"{path}: a value is nested too deeply or contains itself") from None

    def where(self, location: KeyPath) -> str:
        """Return `file:line` of `location`, or of its nearest parent that is in the file."""
        if self.is_derived or not self.is_written:
            return str(self.path)
        while location and location not in self._lines:
            location = location[:-1]
        return f"{self.path}:{self._lines.get(location, 1)}"

    @classmethod
    def from_values(cls, data: Mapping[str, Any], path: Path) -> LocatedYaml:
        """Create a document from Python values. It has no file or line numbers."""
        made = object.__new__(cls)
        made.path, made.data, made._lines, made.is_written = path, dict(data), {}, False
        try:
            made.source = json.dumps(data, indent=2, default=repr).encode("utf-8", "backslashreplace") + b"\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from None
        except RecursionError:
            raise ConfigError(f"{path}: a value is nested too deeply") from None
        return made

    def part(self, key: str) -> LocatedYaml:
        """Return the value of a key as a document that has the same file and lines."""
        inner = object.__new__(LocatedYaml)
        inner.path, inner.source, inner.data = self.path, self.source, self.data[key]
        inner._lines = {path[1:]: line for path, line in self._lines.items() if path[:1] == (key,)}
        return inner

    def _locate(self, node: yaml.Node | None, path: KeyPath) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in seen:
                    raise ConfigError(f"{self.path}:{key.start_mark.line + 1}: duplicate key {name!r}")
                seen.add(name)
                self._lines[(*path, name)] = key.start_mark.line + 1
                self._locate(value, (*path, name))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._lines[(*path, index)] = value.start_mark.line + 1
                self._locate(value, (*path, index))


@contextmanager
def error_context(located: LocatedYaml, *location: str | int) -> Iterator[None]:
    """Add the line and the key to any ConfigError raised in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{located.where(location)}: {'.'.join(map(str, location))}: {error}") from error


@contextmanager
def overrides_from(source: str) -> Iterator[None]:
    """Make error messages in the block refer to this source of the overrides, instead of the option -T.

    The source is the location of a mapping in a file, or "overrides" for the parameter in Python.
    """
    token = _OVERRIDE_SOURCE.set(source)
    try:
        yield
    finally:
        _OVERRIDE_SOURCE.reset(token)


def overrides_in_python() -> AbstractContextManager[None]:
    """Make error messages in the block refer to the parameter `overrides` instead of the option -T."""
    return overrides_from(_PYTHON)


def override_source() -> str:
    """Return the name of the option or parameter that sets overrides, or their location, for error messages."""
    return _OVERRIDE_SOURCE.get()


def format_override(key: str, value: str | Mapping[str, Any] = "") -> str:
    """Format an override in the way a user writes it, for error messages."""
    source = override_source()
    if not isinstance(value, str) and source != _PYTHON:
        text = yaml.safe_dump(dict(value), default_flow_style=True, sort_keys=False, width=10_000).strip()
        return f"-T {shlex.quote(f'{key}={text}')}" if source == "-T" else f"{key}: {text}"
    if source == _PYTHON:
        return f"overrides={{{key!r}: {repr(value) if value else '…'}}}"
    return f"-T {key}={value or '…'}" if source == "-T" else f"{key}: {value or '…'}"


def parse_override(text: str, option: str = "-T") -> tuple[str, Any]:
    """Parse `key=value` from the command line. The value is YAML."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"{option} {text!r}: write key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "unreadable"
        quoted = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
        raise ConfigError(
            f"{option} {text!r}: the value is not YAML: {problem}; to pass a string, quote it: {option} {quoted}"
        ) from None


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `data` to which dotted overrides are applied."""
    result: dict[str, Any] = json.loads(json.dumps(data, default=str)) if overrides else dict(data)
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        inner: Any = result
        for key in parents:
            inner = inner[_index(inner, key, dotted)] if isinstance(inner, list) else inner.setdefault(key, {})
            if not isinstance(inner, dict | list):
                raise ConfigError(f"{format_override(dotted)}: {key!r} is not a mapping")
        inner[_index(inner, last, dotted) if isinstance(inner, list) else last] = value
    return result


def overridden_keys(section: str, names: Iterable[str], overrides: Collection[str]) -> set[str]:
    """Return the keys of a block that are set by an override, either directly or through a parent."""
    prefix = f"{section}." if section else ""
    return {name for name in names if any(not key or f"{prefix}{name}.".startswith(f"{key}.") for key in overrides)}


def _index(items: list[Any], key: str, dotted: str) -> int:
    if not (key.isascii() and key.isdigit() and int(key) < len(items)):
        raise ConfigError(f"{format_override(dotted)}: {key!r} is not an index into a list of {len(items)}")
    return int(key)


def parse_task(
    located: LocatedYaml, overrides: Mapping[str, Any] | None = None, *, has_rows: bool = False
) -> TaskDefinitionModel:
    """Return the validated definition of a task, without loading or executing the code to which it refers."""
    overrides = overrides or {}
    definition = validate_model(located, overrides, TaskDefinitionModel, "a task file")
    if located.is_written:  # only the command line or Python may loosen the sandbox
        from reward_kit.sandbox.program import Limits

        sandbox, usual, folder = definition.sandbox, Limits(), located.path.resolve().parent
        paths = [reward.reward_function_path for reward in definition.rewards or ()]
        is_own_reward = not all(map(is_built_in, paths or [definition.reward_function_path or ""]))
        looser: dict[tuple[str, ...], Any] = {
            ("level",): sandbox.level if sandbox.level == "in_process" and is_own_reward else None,
            ("read_paths",): [
                path for path in sandbox.read_paths if not (folder / path).resolve().is_relative_to(folder)
            ],
        }
        for name, value in sandbox.limits.model_dump(exclude_none=True, exclude={"cpu_s"}).items():
            looser["limits", name] = value if value > getattr(usual, name) else None
        for keys, value in looser.items():
            dotted = ".".join(("sandbox", *keys))
            if value and not any(f"{dotted}.".startswith(f"{key}.") for key in overrides):
                value = json.dumps(value) if not isinstance(value, str) else value
                raise ConfigError(
                    f"{located.where(('sandbox', *keys))}: {dotted}: {value} loosens the sandbox, which a task file "
                    f"cannot do; remove it and pass {format_override(dotted, shlex.quote(value))} (for `train`: -T "
                    f"task.{dotted}=…)"
                )
    # A key that would have no effect is an error, not a silent no-op.
    has_dataset = definition.dataset_path is not None or has_rows
    unused = {
        "num_rollouts": "a task with a dataset uses num_rollouts_per_sample" if has_dataset else "",
        "num_rollouts_per_sample": "" if has_dataset else "a task without a dataset uses num_rollouts",
        "base_resource_config": "" if definition.resource_type else "the task has no resource_type",
        "nudge": "the simulated user answers text messages" if definition.user else "",
    }
    if not definition.reward_function_path and not definition.rewards:
        unused |= dict.fromkeys(("sandbox", "reward_options", "credit"), "the task has no reward_function_path")
    for key, why in unused.items():
        if why and key in definition.model_fields_set:
            raise ConfigError(f"{located.where((key,))}: {key} has no effect: {why}")
    return definition


def validate_model(located: LocatedYaml, overrides: Mapping[str, Any], model: type[Model], what: str) -> Model:
    """Validate the data of a file after applying overrides."""
    if not isinstance(located.data, dict):
        raise ConfigError(f"{located.path}: {what} must be a mapping of keys, got {located.data!r:.60}")
    data = apply_overrides(located.data, overrides)
    try:
        validated = model.model_validate(data)
    except pydantic.ValidationError as error:
        lines = []
        for problem, text in zip(error.errors(), describe_validation_error(error, model), strict=True):
            location, why = tuple(problem["loc"]), ""
            if problem["type"] == "missing" and location in (("policy", "type"), ("user", "type")):
                why = f"; the block needs a type, e.g. {format_override(f'{location[0]}.type', 'openai')}"
            elif problem["input"] is None:
                why = "; YAML reads an empty value as null, which is None here"
            lines.append(f"{error_location(located, location, overrides)}: {text}{why}")
        raise ConfigError("\n".join(lines)) from None
    lines = []
    for location, given in _booleans_as_numbers(data, validated):
        key = ".".join(map(str, location))
        lines.append(f"{error_location(located, location, overrides)}: {key}: expected a number, got {given}")
    if lines:
        raise ConfigError("\n".join(lines))
    return validated


def _booleans_as_numbers(data: Any, validated: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the location and the YAML text of each boolean that Pydantic converted to a number."""
    items: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(data, bool):
        if isinstance(validated, int | float) and not isinstance(validated, bool):
            yield (), str(data).lower()
    elif isinstance(data, Mapping):
        get = validated.get if isinstance(validated, Mapping) else partial(getattr, validated)
        items = ((key, value, get(key, None)) for key, value in data.items() if isinstance(key, str))
    elif isinstance(data, list | tuple) and isinstance(validated, list | tuple):
        items = ((index, *pair) for index, pair in enumerate(zip(data, validated, strict=False)))
    for key, value, inner in items:
        for location, given in _booleans_as_numbers(value, inner):
            yield (key, *location), given


def error_location(located: LocatedYaml, location: tuple[str | int, ...], overrides: Mapping[str, Any]) -> str:
    """Return the location of a key for error messages: the command line, or a line of the file."""
    dotted = ".".join(map(str, location))
    is_new = bool(location) and location[0] not in located.data  # set by an override
    is_given = any(f"{dotted}.".startswith(f"{key}.") or (is_new and key.startswith(f"{dotted}.")) for key in overrides)
    return override_source() if is_given else located.where(location)
