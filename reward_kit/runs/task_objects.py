"""Tasks defined by Python objects (rewards, tools, rows and policies) rather than by references in a task file.

A reward object runs in this process without a sandbox. A run that uses objects cannot be resumed, since no file
describes the task. The source code of the objects is copied into the run if it is available.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.errors import ConfigError, EpisodeError, RewardKitError, type_name
from reward_kit.loading import load_object
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.loading import load_in_process
from reward_kit.typed_interface import RewardSpec


def source_text(value: Any) -> str:
    """Return the source text of a function, a class or an instance's class; "" if unknown."""
    if not isinstance(value, type):
        while isinstance(value, functools.partial):
            value = value.func
        value = value if inspect.isroutine(value) else type(value)
    try:
        return inspect.getsource(inspect.unwrap(value))
    except (OSError, TypeError):
        return _notebook_class_source(value) if isinstance(value, type) else ""


def _notebook_class_source(kind: type) -> str:
    """Return the source of a class that was defined in a notebook cell.

    The cell is found through the methods of the class.
    """
    codes = (
        getattr(inspect.unwrap(item), "__code__", None) for item in vars(kind).values() if inspect.isfunction(item)
    )
    for code in codes:
        text = "".join(linecache.getlines(code.co_filename)) if code is not None else ""
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:  # a cell may contain notebook commands, which are not Python
            continue
        classes = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
        if (node := next(classes, None)) is not None:
            return ast.get_source_segment(text, node) or ""
    return ""


LivePolicy = AgentPolicy | type[AgentPolicy]
_UNCONFINED_NOTE = (
    "reward {0!r} is a Python object and runs in_process, unconfined; to run it in the sandbox, write it "
    "to a file and pass its name, e.g. reward='reward.py:{0}'"
)


class InputCopy(NamedTuple):
    """A text that is copied into a run: the suffix of its file name, and its content."""

    suffix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class TaskObjects:
    """The Python objects of a task.

    Attributes:
        reward: the reward function or class.
        rewards: if the task has multiple rewards, those that are objects, keyed by name.
        tools: the task's tools.
        rows: the rows of its dataset.
        policy: the default policy of runs.
        names: the name of each object, keyed by parameter, for `run.json`; empty for a task from a file.
        copies: source texts for the run's inputs, keyed by name.
    """

    reward: Any = None
    tools: ToolRegistry | None = None
    rows: Sequence[Mapping[str, Any]] | None = None
    policy: LivePolicy | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    copies: Mapping[str, InputCopy] = field(default_factory=dict)
    rewards: Mapping[str, Any] = field(default_factory=dict)

    def reject_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Raise a ConfigError for an override of a key that a Python object replaces."""
        objects = {
            "reward": (self.reward, "reward_function_path", "custom_reward_function"),
            "rewards": (self.rewards or None, "rewards"),
            "tools": (self.tools, "tools_module_path"),
            "dataset": (self.rows, "dataset_path"),
            "policy": (self.policy, "policy"),
        }
        for name, (value, *keys) in objects.items():
            for key in overrides:
                if value is not None and key.partition(".")[0] in keys:
                    raise ConfigError(f"overrides: {key} has no effect: the task's {name} is given in Python")

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each copy."""
        return {name: hashlib.sha256(copy.content).hexdigest() for name, copy in self.copies.items()}


def wrap_reward_object(reward: Any, definition: TaskDefinitionModel) -> tuple[RewardSpec, str]:
    """Wrap a reward object for calls in this process. Also return a note that the reward is not sandboxed."""
    spec = load_in_process(reward, definition.reward_options)
    sandbox = definition.sandbox
    asked = next((key for key in sandbox.model_fields_set if getattr(sandbox, key) not in (None, "in_process")), None)
    setting = f"sandbox.{asked}" if asked is not None else f"@reward_function(sandbox={spec.sandbox!r})"
    if asked is not None or spec.sandbox in ("warm", "isolated"):
        raise ConfigError(
            f"{setting} requires a reward in a file, but reward {spec.id!r} is a Python "
            "object, which runs in_process. Write "
            f"it to a file, in a notebook with %%writefile reward.py, and pass reward='reward.py:{spec.id}'"
        )
    return spec, _UNCONFINED_NOTE.format(spec.id)


def check_rows(dataset: Any) -> list[dict[str, Any]]:
    """Validate the rows of a dataset and return a copy."""
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        raise ConfigError(f"dataset: expected the path of a file or a list of rows, got {type_name(dataset)}")
    rows = list(dataset)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise ConfigError(f"dataset[{index}]: expected a dict with string keys, got {row!r:.80}")
        try:
            to_json_value(row)  # each episode stores its row
        except (EpisodeError, RecursionError) as error:
            problem = error if isinstance(error, EpisodeError) else "it is nested too deeply or contains itself"
            raise ConfigError(f"dataset[{index}]: {problem}") from None
    if not rows:
        raise ConfigError("dataset: the list has no rows")
    return [dict(row) for row in rows]


def is_policy_object(policy: object) -> TypeGuard[LivePolicy]:
    """Return True for a policy object or class, and False for a name."""
    return isinstance(policy, AgentPolicy) or (isinstance(policy, type) and issubclass(policy, AgentPolicy))


def object_reference(value: Any) -> str:
    """Return `module:name` of a function, a class or an instance's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def resource_reference(kind: Any) -> str:
    """Return the reference from which a resource class can be loaded in this process."""
    if not (isinstance(kind, type) and issubclass(kind, ForkableResource)):
        raise ConfigError(f"resource: expected a name or a subclass of ForkableResource, got {type_name(kind)}")
    reference = object_reference(kind)
    try:
        is_found = load_object(reference) is kind
    except RewardKitError:
        is_found = False
    if not is_found:
        raise ConfigError(f"resource: {reference} cannot be found by its name; define the class outside functions")
    return reference


def copy_sources(objects: Mapping[str, Any]) -> dict[str, InputCopy]:
    """Return copies of the source code of those objects for which it is available."""
    texts = {name: source_text(one) for name, one in objects.items()}
    return {name: InputCopy(".py", text.encode("utf-8", "backslashreplace")) for name, text in texts.items() if text}


def copy_rows(rows: Sequence[Mapping[str, Any]]) -> InputCopy:
    """Return a copy of dataset rows as JSON lines, encoded as in episodes."""
    lines = (json.dumps(to_json_value(row), ensure_ascii=False) for row in rows)
    return InputCopy(".jsonl", "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))


def placeholder_path(folder: Path | None, name: str) -> Path:
    """Return a placeholder path for a task without a file. Paths are relative to the placeholder's directory."""
    return (folder or Path()) / f"Task {name!r}".replace("/", "-").replace("\0", "")
