"""Python objects of a task, instead of names in a task file: reward, tools, rows, policies; and their source texts.

A Python object lives in this process, so a reward that is one is not confined. No file describes it, so a run with one
is not resumed; its source text is kept with the run as far as Python knows it.
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
    """The source text of a function, a class or an instance's class; "" where Python does not know it."""
    if not isinstance(value, type):
        while isinstance(value, functools.partial):
            value = value.func
        value = value if inspect.isroutine(value) else type(value)
    try:
        return inspect.getsource(inspect.unwrap(value))
    except (OSError, TypeError):
        return _class_in_a_cell(value) if isinstance(value, type) else ""


def _class_in_a_cell(kind: type) -> str:
    """The text of a class of which only its methods know the cell that it was written in."""
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in vars(kind).values() if inspect.isfunction(one))
    for code in codes:
        text = "".join(linecache.getlines(code.co_filename)) if code is not None else ""
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:  # a cell may hold commands of the notebook
            continue
        found = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
        if (node := next(found, None)) is not None:
            return ast.get_source_segment(text, node) or ""
    return ""


LivePolicy = AgentPolicy | type[AgentPolicy]
_WITHOUT_WALLS = (
    "reward {0!r} is a Python object and runs in_process, unconfined; write it to a file and name it, "
    "e.g. reward='reward.py:{0}', and it runs in the sandbox"
)


class InputCopy(NamedTuple):
    """A text that is kept with a run: how the name of its file ends, and its content."""

    suffix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class TaskObjects:
    """The Python objects of a task.

    Attributes:
        reward: the reward function or class.
        tools: the task's tools.
        rows: its dataset.
        policy: acts if a run names no policy.
        names: what each object is called, by its parameter, for `run.json`; empty for a task that a file describes.
        kept: texts that tell what a run came from, by what they are.
    """

    reward: Any = None
    tools: ToolRegistry | None = None
    rows: Sequence[Mapping[str, Any]] | None = None
    policy: LivePolicy | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, InputCopy] = field(default_factory=dict)

    def reject_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Refuse a key laid over the task's where the task has a Python object in its place."""
        objects = {
            "reward": (self.reward, "reward_function_path", "custom_reward_function"),
            "tools": (self.tools, "tools_module_path"),
            "dataset": (self.rows, "dataset_path"),
            "policy": (self.policy, "policy"),
        }
        for name, (value, *keys) in objects.items():
            for key in overrides:
                if value is not None and key.partition(".")[0] in keys:
                    raise ConfigError(f"overrides: {key} has no effect: the task's {name} is a Python object")

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each text that is kept."""
        return {name: hashlib.sha256(kept.content).hexdigest() for name, kept in self.kept.items()}


def live_reward(reward: Any, definition: TaskDefinitionModel) -> tuple[RewardSpec, str]:
    """Return a reward that is a Python object, ready to be called here, and a note on its confinement."""
    spec = load_in_process(reward, definition.reward_options)
    sandbox = definition.sandbox
    asked = next((key for key in sandbox.model_fields_set if getattr(sandbox, key) not in (None, "in_process")), None)
    setting = f"sandbox.{asked}" if asked is not None else f"@reward_function(sandbox={spec.sandbox!r})"
    if asked is not None or spec.sandbox in ("warm", "isolated"):
        raise ConfigError(
            f"{setting} needs a reward in a file; reward {spec.id!r} is a Python object, which runs in_process. Write "
            f"it to a file, in a notebook with %%writefile reward.py, and give reward='reward.py:{spec.id}'"
        )
    return spec, _WITHOUT_WALLS.format(spec.id)


def given_rows(dataset: Any) -> list[dict[str, Any]]:
    """A dataset that is given as rows."""
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        raise ConfigError(f"dataset: expected a file's path or a list of rows, got {type_name(dataset)}")
    rows = list(dataset)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise ConfigError(f"dataset[{index}]: a row is a dict of fields with names, this one is {row!r:.80}")
        try:
            to_json_value(row)  # each episode keeps its row
        except (EpisodeError, RecursionError) as error:
            problem = error if isinstance(error, EpisodeError) else "it is nested too deeply, or contains itself"
            raise ConfigError(f"dataset[{index}]: {problem}") from None
    if not rows:
        raise ConfigError("dataset: the list has no rows")
    return [dict(row) for row in rows]


def is_live(policy: object) -> TypeGuard[LivePolicy]:
    """Return True for a policy that is a Python object, not the name of one."""
    return isinstance(policy, AgentPolicy) or (isinstance(policy, type) and issubclass(policy, AgentPolicy))


def object_reference(value: Any) -> str:
    """`module:name` of a function, a class or an instance, as Python knows it."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def named_resource(kind: Any) -> str:
    """The reference by which a resource's class is found again in this process."""
    if not (isinstance(kind, type) and issubclass(kind, ForkableResource)):
        raise ConfigError(f"resource: expected a name or a subclass of ForkableResource, got {type_name(kind)}")
    reference = object_reference(kind)
    try:
        is_found = load_object(reference) is kind
    except RewardKitError:
        is_found = False
    if not is_found:
        raise ConfigError(f"resource: {reference} cannot be found by its name; define the class outside of functions")
    return reference


def copy_sources(objects: Mapping[str, Any]) -> dict[str, InputCopy]:
    """The source texts of these objects, as far as Python knows them."""
    texts = {name: source_text(one) for name, one in objects.items()}
    return {name: InputCopy(".py", text.encode("utf-8", "backslashreplace")) for name, text in texts.items() if text}


def copy_rows(rows: Sequence[Mapping[str, Any]]) -> InputCopy:
    """A dataset that was given as rows; what JSON does not know has the form that it has in an episode."""
    lines = (json.dumps(to_json_value(row), ensure_ascii=False) for row in rows)
    return InputCopy(".jsonl", "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))


def placeholder_path(folder: Path | None, name: str) -> Path:
    """Return a path that stands for the file of a task without one; its folder is where names are looked up."""
    return (folder or Path()) / f"Task {name!r}".replace("/", "-").replace("\0", "")
