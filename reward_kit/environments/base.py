"""The interface of all environments.

A resource is one private environment. Call `setup(config)` once, `reset(seed)` to go to an initial state, `step` until
the episode ends, and then `close`. `fork` returns an independent copy in the same state, so that all episodes of a
group can begin in the same state. `fork_kind` declares how the copy is made:

- `native`: the state is copied. Changes in one copy are never visible in another.
- `replay`: the recorded actions are repeated in a new environment, and every observation is compared with the recorded
  observation (`environments/replay.py`).
- `none`: the resource acts on something external that cannot be copied. Each episode of a group then starts from a
  separate reset, and the group is recorded as unverified.

`state_key` identifies the state for credit assignment: two states with the same key have the same future. The key
covers everything that affects future outcomes, and excludes time, step counts, session ids and noise. `check_resource`
verifies these declarations.
"""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

from reward_kit.errors import ConfigError, ToolError, did_you_mean

ForkKind = Literal["native", "replay", "none"]
"""The way in which a resource forks: it copies its state, repeats the actions, or cannot be forked."""
ToolSpec = dict[str, Any]
"""A tool in OpenAI format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
_SET_BY_RUNNER = frozenset({"task_folder", "resource_server"})
"""Keys that a row can never set, even if a resource lists them in `per_sample_keys`."""


_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one action.

    Attributes:
        observation: what the agent sees: text, or a value to show to the agent as JSON.
        reward: the environment's reward, or None if it defines no reward.
        terminated: True if the task has ended, in success or in failure.
        truncated: True if the environment stopped the episode for a reason outside the task, such as a time limit.
        info: additional JSON-compatible values. `is_action_valid: False` marks an action that could not be executed.
    """

    observation: Any
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A stored final state.

    Its `kind` ("json", "sqlite", "files" or "composite") determines the format of `payload`.
    """

    kind: str
    payload: bytes

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the payload in hexadecimal. The snapshot is stored under this digest."""
        return hashlib.sha256(self.payload).hexdigest()

    @classmethod
    def from_json(cls, value: Any) -> StateSnapshot:
        """Return a snapshot of a JSON value."""
        return cls("json", canonical_json(value).encode("utf-8", "surrogatepass"))


class ForkableResource(ABC):
    """A private environment that can be forked.

    Subclass it, and check the subclass with `reward-kit check module:Class`.

    A subclass defines `step` and `get_tools_spec`, or declares its tools as methods with `@tool`.

    Attributes:
        fork_kind: how `fork` works; see the module docstring.
        deterministic: whether the same seed and actions produce the same observations, rewards and state keys.
        never_waits: whether the methods never await anything. In that case, the runner sets no time limit, because it
            could not interrupt the methods.
        takes_task_folder: whether to add the directory of the task file as the configuration key `task_folder`. Paths
            are relative to this directory, and paths outside it are rejected.
        takes_resource_server: whether to add the task's `resource_server` as the configuration key `resource_server`.
        has_cheap_state: whether `final_state` takes little time and memory. In that case, the runner also calls
            `final_state` at the start of a group and records the changes that each episode made.
        state_key_covers_results: whether the state key also covers what the agent has learned from tool results. This
            is the case, for example, in a game whose observations show the state. If it is False, as for a database,
            the default state hash for credit assignment also compares the set of results seen so far. In a subclass
            that defines `state_key`, the default is True.
        per_sample_keys: the configuration keys that a dataset row may set in its `resource_config`. A dotted name
            (`env_kwargs.desc`) declares one key of a mapping. Rows are untrusted, so list only keys whose entire value
            is data (a level, a seed, an initial state), and never a key whose value is a command, an address, a path or
            the name of code.
    """

    fork_kind: ClassVar[ForkKind] = "none"
    deterministic: ClassVar[bool] = True
    never_waits: ClassVar[bool] = False
    has_cheap_state: ClassVar[bool] = False
    takes_task_folder: ClassVar[bool] = False
    takes_resource_server: ClassVar[bool] = False
    per_sample_keys: ClassVar[frozenset[str]] = frozenset()
    state_key_covers_results: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__abstractmethods__:
            raise TypeError(f"{cls.__name__} {describe_missing_methods(cls)}")
        if cls.__init__ is object.__init__:
            return super().__new__(cls, *args, **kwargs)  # Python then raises the error for superfluous arguments
        return super().__new__(cls)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.fork_kind not in get_args(ForkKind):
            known = ", ".join(map(repr, get_args(ForkKind)))
            raise ConfigError(f"{cls.__name__}.fork_kind must be one of {known}, got {cls.fork_kind!r}")
        if "state_key" in vars(cls) and "state_key_covers_results" not in vars(cls):
            cls.state_key_covers_results = True  # the author chose this key, so it replaces that of the base class

    @classmethod
    def fork_kind_for(cls, config: Mapping[str, Any]) -> ForkKind:
        """Return how an environment with this configuration forks.

        Override this method if the fork kind depends on the configuration.
        """
        return cls.fork_kind

    @classmethod
    def is_deterministic_for(cls, config: Mapping[str, Any]) -> bool:
        """Return True if an environment with this configuration is deterministic.

        Override this method if that depends on the configuration.
        """
        return cls.deterministic

    @classmethod
    def per_sample_keys_for(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Return the keys that a row may set, given the task's configuration.

        Override this method if the keys depend on the configuration.
        """
        return cls.per_sample_keys

    @classmethod
    def keys_refused_to_rows(
        cls, config: Mapping[str, Any], row: Mapping[str, Any]
    ) -> Iterator[tuple[str, type[ForkableResource]]]:
        """Yield the dotted keys that a row may not set in its `resource_config`, and the class that rejects each key.

        Raises:
            ConfigError: `per_sample_keys` is not a set of names.
        """
        allowed: Any = cls.per_sample_keys_for(config)
        if isinstance(allowed, str) or not all(isinstance(key, str) for key in allowed):
            raise ConfigError(f"{cls.__name__}.per_sample_keys must be a set of names, got {allowed!r:.80}")
        paths = {tuple(key.split(".")) for key in allowed}
        return ((key, cls) for key in _undeclared(row, {path for path in paths if path[0] not in _SET_BY_RUNNER}))

    async def setup(self, config: Mapping[str, Any]) -> None:
        """Build the environment from the task's `base_resource_config`. This method is called once, before all others.

        The default implementation is for a resource without options.

        Raises:
            ConfigError: a key is unknown or a value is invalid. The message names the key.
        """
        if config:
            raise ConfigError(f"{type(self).__name__} has no options; got {', '.join(map(str, config))}")

    @abstractmethod
    async def reset(self, seed: int | None = None) -> None:
        """Go to an initial state. The same seed always leads to the same state."""

    async def fork(self) -> ForkableResource:
        """Return an independent environment in the current state.

        Raises:
            NotImplementedError: `fork_kind` is "none".
        """
        raise NotImplementedError(f"{type(self).__name__} declares fork_kind {self.fork_kind!r} and cannot be forked")

    async def checkpoint(self) -> Any:
        """Return the state as a value that can be passed to `restore` and is not changed by later steps."""
        raise NotImplementedError(f"{type(self).__name__} cannot be checkpointed")

    async def restore(self, state: Any) -> None:
        """Return to the state that `checkpoint` returned."""
        raise NotImplementedError(f"{type(self).__name__} cannot be restored")

    @abstractmethod
    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        """Execute one tool call.

        Raises:
            ToolError: the call cannot be executed, for example because the tool is unknown or the arguments are
                invalid. The state is unchanged, and the agent receives the message. Any other exception ends the
                episode.
        """

    async def get_observation(self) -> Any:
        """Return the first observation for an agent that starts in the current state, or None."""
        return None

    @abstractmethod
    async def get_tools_spec(self) -> list[ToolSpec]:
        """Return the tools that can be called in the current state, in OpenAI format."""

    @abstractmethod
    async def state_key(self) -> str:
        """Return the key of the current state. States with equal keys have equal futures."""

    async def final_state(self) -> StateSnapshot | None:
        """Return the state that reward functions receive, or None.

        This method is called before `close`.
        """
        return None

    async def close(self) -> None:
        """Release all resources. This method is called exactly once, even if `setup` or a later call failed."""
        return

    async def reseed_noise(self, seed: int) -> None:
        """Draw all further randomness from `seed`. A deterministic environment need not override this method."""
        return

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]] | None:
        """Return all sensible actions in this state as `{"name", "arguments"}`, or None if they cannot be listed."""
        return None

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the action that an expert would take now, or None if the resource has no expert."""
        return None

    def seen_by_tool(self, kind: type[ForkableResource], parameter: str) -> ForkableResource:
        """Return the resource to pass to one of the task's tools.

        The tool receives the resource in the parameter named `parameter`, which is annotated with `kind`.
        """
        return self


def describe_missing_methods(kind: type[ForkableResource]) -> str:
    """Describe the methods that an abstract class lacks.

    If `get_tools_spec` is one of them, also explain how to declare tools.
    """
    missing = sorted(kind.__abstractmethods__)
    fix = "; declare its tools as methods with @tool, or define these methods"
    return f"is abstract: it does not define {', '.join(missing)}{fix if 'get_tools_spec' in missing else ''}"


class CopyForkResource(ForkableResource):
    """Base class for resources that reassign their attributes but never mutate the values.

    Copies can therefore share the values.
    """

    fork_kind = "native"

    async def fork(self) -> ForkableResource:
        return copy.copy(self)

    async def checkpoint(self) -> Any:
        return dict(vars(self))

    async def restore(self, state: Any) -> None:
        vars(self).update(state)


def _undeclared(row: Mapping[str, Any], allowed: set[tuple[str, ...]]) -> Iterator[str]:
    """Yield the dotted keys of `row` that are not covered by a path in `allowed`."""
    for key, value in row.items():
        below = {path[1:] for path in allowed if path[0] == key}
        if () in below:
            continue
        if below and isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in _undeclared(value, below))
        else:
            yield str(key)


def tool_spec(name: str, description: str, parameters: Mapping[str, Any] | None = None) -> ToolSpec:
    """Return a tool in OpenAI format. `parameters` is a JSON schema, by default a schema without properties."""
    schema = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def tools_by_name(*specs: ToolSpec) -> dict[str, ToolSpec]:
    """Return a mapping from tool names to tools."""
    return {spec["function"]["name"]: spec for spec in specs}


def strict_tool(name: str, description: str, /, **properties: Mapping[str, Any]) -> ToolSpec:
    """Return a tool that accepts only these parameters. A parameter is required unless its schema has a default."""
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [key for key, given in properties.items() if "default" not in given]:
        schema["required"] = required
    return tool_spec(name, description, {**schema, "additionalProperties": False})


def check_call(specs: Mapping[str, ToolSpec], tool: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call to one of the strict tools in `specs`, with defaults filled in.

    Only strings and enumerations are checked. The caller must check the types of all other arguments.

    Raises:
        ToolError: the tool is unknown, or an argument is unknown, missing or invalid.
    """
    if tool not in specs:
        raise ToolError(f"unknown tool {tool!r}{did_you_mean(tool, specs)}")
    known: Mapping[str, Mapping[str, Any]] = specs[tool]["function"]["parameters"]["properties"]
    for name in given:
        if name not in known:
            raise ToolError(f"{tool}: unknown argument {name!r}{did_you_mean(str(name), known)}")
    arguments = {}
    for name, schema in known.items():
        if name not in given and "default" not in schema:
            raise ToolError(f"{tool}: {name}: missing")
        value = arguments[name] = given.get(name, schema.get("default"))
        if "enum" in schema and value not in schema["enum"]:
            raise ToolError(f"{tool}: {name}: {value!r:.80} is not one of {', '.join(schema['enum'])}")
        if schema.get("type") == "string" and not isinstance(value, str):
            raise ToolError(f"{tool}: {name}: must be a string, got {value!r:.80}")
    return arguments


def check_schema(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Validate the arguments of a server's tool against the tool's schema.

    Raises:
        ToolError: an argument is unknown or missing, or is not a JSON value.
    """
    name, schema = spec["function"]["name"], spec["function"]["parameters"]
    properties = schema.get("properties", {})
    is_closed = not schema.get("additionalProperties") and not any(key in schema for key in _COMBINING)
    for key in arguments:
        if is_closed and key not in properties:
            raise ToolError(f"{name}: unknown argument {key!r}{did_you_mean(str(key), properties)}")
    for key in schema.get("required", ()):
        if key not in arguments:
            raise ToolError(f"{name}: {key}: missing")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        problem = "not valid Unicode text" if isinstance(error, UnicodeError) else f"not JSON: {error}"
        raise ToolError(f"{name}: the arguments are {problem}") from None


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_json(value: Any) -> str:
    """Return the canonical JSON of a value, which has sorted keys, no spaces and unescaped Unicode.

    Equal values produce equal strings.
    """
    return _CANONICAL.encode(value)


def hash_key(*parts: str) -> str:
    """Return a 128-bit hash of a sequence of strings.

    Moving a character from one string to the next changes the hash.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
