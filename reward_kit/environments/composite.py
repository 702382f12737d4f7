"""A resource that combines multiple resources for one task, such as a database and a directory.

Most operations apply to all parts concurrently. A step goes to the part whose tool was called. The composite forks in a
way that all of its parts support. It is deterministic only if every part is deterministic.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel, ConfigDict

from reward_kit.environments.base import ForkableResource, ForkKind, StateSnapshot, StepOutcome, ToolSpec, hash_key
from reward_kit.environments.config import deep_merge, read_config, resource_class
from reward_kit.environments.snapshots import compose
from reward_kit.errors import ConfigError, EnvironmentFailure, RewardKitError, ToolError, boundary, did_you_mean
from reward_kit.task_parts import ResourceParts

_STRENGTH: dict[ForkKind, int] = {"none": 0, "replay": 1, "native": 2}
_CLOSE_SECONDS = 60.0
_LONGEST_NAME = 64
_DIGEST = 8
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class ToolNames:
    """Unique names for the tools of multiple parts.

    If names clash, each affected tool is prefixed with the name of its part.

    `names` maps each (part, tool) to its unique name, and `tools` is the inverse. Each call to `offer` replaces both
    mappings, so a copy made with `copy.copy` is not affected by later calls.
    """

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], str] = {}
        self.tools: dict[str, tuple[str, str]] = {}
        self._clashed: frozenset[str] = frozenset()
        self._pairs: list[tuple[str, str]] = []

    def offer(self, specs: Mapping[str, Sequence[ToolSpec]]) -> list[ToolSpec]:
        """Return the tools of all parts under unique names of at most 64 characters. `specs` is keyed by part name."""
        pairs = [(part, spec["function"]["name"]) for part, offered in specs.items() for spec in offered]
        if pairs != self._pairs:
            self._pairs = pairs
            while True:
                self.names = {pair: self._name(*pair) for pair in pairs}
                count = Counter(self.names.values())
                twice = frozenset(name for name in count if count[name] > 1)
                if not twice:
                    break
                # A prefixed name may equal the name of a different tool. A digest then makes it unique.
                self._clashed |= twice
            self.tools = {name: pair for pair, name in self.names.items()}
        renamed = []
        for pair, spec in zip(pairs, (spec for offered in specs.values() for spec in offered), strict=True):
            function, name = spec["function"], self.names[pair]
            is_own = function["name"] == name
            renamed.append(spec if is_own else {**spec, "function": {**function, "name": name}})
        return renamed

    def _name(self, part: str, tool: str) -> str:
        if tool not in self._clashed:
            return tool
        name = f"{part}_{tool}"
        if len(name) <= _LONGEST_NAME and name not in self._clashed:
            return name
        return f"{name[: _LONGEST_NAME - _DIGEST - 1]}_{hash_key(part, tool)[:_DIGEST]}"


class CompositeConfig(BaseModel):
    """The configuration of `composite`.

    Every key other than `resources` is the name of a part, and its value overrides keys in that part's configuration.
    """

    model_config = ConfigDict(extra="allow")

    resources: ResourceParts


class CompositeResource(ForkableResource):
    """Multiple resources that are set up, reset, forked and closed together. They are listed in `parts`."""

    # Used while the configuration is unknown. If a part cannot be forked, it raises an error later.
    fork_kind = "native"

    def __init__(self) -> None:
        self._parts: dict[str, ForkableResource] = {}
        self._names = ToolNames()

    @classmethod
    def fork_kind_for(cls, config: Mapping[str, Any]) -> ForkKind:
        """Return the most restrictive fork kind of any part. "none" is the most restrictive, followed by "replay"."""
        if "resources" not in config:
            return cls.fork_kind
        kinds = [kind.fork_kind_for(own) for kind, own in read_parts(config).values()]
        return min(kinds, key=_STRENGTH.__getitem__)

    @classmethod
    def is_deterministic_for(cls, config: Mapping[str, Any]) -> bool:
        """Return True if every part is deterministic."""
        if "resources" not in config:
            return cls.deterministic
        return all(kind.is_deterministic_for(own) for kind, own in read_parts(config).values())

    @classmethod
    def per_sample_keys_for(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Return the keys of all parts. Each key is prefixed with the name of its part."""
        parts = read_parts(config) if "resources" in config else {}
        keys = {name: kind.per_sample_keys_for(own) for name, (kind, own) in parts.items()}
        return frozenset(f"{name}.{key}" for name, own in keys.items() for key in own)

    @classmethod
    def keys_refused_to_rows(
        cls, config: Mapping[str, Any], row: Mapping[str, Any]
    ) -> Iterator[tuple[str, type[ForkableResource]]]:
        """Yield the keys that a part rejects, and every key that is not the name of a part, including `resources`."""
        parts = read_parts(config) if "resources" in config else {}
        for name, value in row.items():
            if name in parts and isinstance(value, Mapping):
                kind, own = parts[name]
                yield from ((f"{name}.{key}", owner) for key, owner in kind.keys_refused_to_rows(own, value))
            else:
                yield str(name), cls

    @property
    def parts(self) -> Mapping[str, ForkableResource]:
        """A read-only mapping from names to parts.

        Raises:
            EnvironmentFailure: the composite is closed, or was not set up.
        """
        if not self._parts:
            raise EnvironmentFailure("the composite resource is closed, or was not set up")
        return MappingProxyType(self._parts)

    async def setup(self, config: Mapping[str, Any]) -> None:
        described = read_parts(config)
        for name, (kind, _) in described.items():
            with _part_errors(name):
                self._parts[name] = kind()
        await _each(self._parts, lambda name, part: part.setup(described[name][1]))

    async def reset(self, seed: int | None = None) -> None:
        self._names = ToolNames()
        await _each(self.parts, lambda name, part: part.reset(None if seed is None else _part_seed(seed, name)))

    async def reseed_noise(self, seed: int) -> None:
        await _each(self.parts, lambda name, part: part.reseed_noise(_part_seed(seed, name)))

    async def fork(self) -> ForkableResource:
        twin, forks = type(self)(), dict[str, ForkableResource]()

        async def fork_part(name: str, part: ForkableResource) -> None:
            forks[name] = await part.fork()

        try:
            await _each(self.parts, fork_part)
        except BaseException:
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                for failure in await _close_all(forks):
                    _logger.warning("%s", failure)
            raise
        twin._parts, twin._names = {name: forks[name] for name in self._parts}, copy.copy(self._names)
        return twin

    async def checkpoint(self) -> Any:
        return await _each(self.parts, lambda _, part: part.checkpoint()), copy.copy(self._names)

    async def restore(self, state: Any) -> None:
        states, names = state
        await _each(self.parts, lambda name, part: part.restore(states[name]))
        self._names = copy.copy(names)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        if action_name not in self._names.tools:
            await self.get_tools_spec()
            if action_name not in self._names.tools:
                raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, self._names.tools)}")
        part, tool = self._names.tools[action_name]
        with _part_errors(part):
            return await self.parts[part].step(tool, action_params)

    async def get_tools_spec(self) -> list[ToolSpec]:
        """Return the tools of all parts.

        A tool whose name clashes with the name of a different tool, or clashed earlier, is named `<part>_<tool>`.
        """
        specs: dict[str, list[ToolSpec]] = {}
        for name, part in self.parts.items():
            with _part_errors(name):
                specs[name] = await part.get_tools_spec()
        return self._names.offer(specs)

    async def get_observation(self) -> Any:
        """Return the observations of the parts.

        If more than one part has an observation, each observation gets a heading.
        """
        observed = await _each(self.parts, lambda _, part: part.get_observation())
        shown = {name: value for name, value in observed.items() if value is not None and value != ""}
        if len(shown) < 2:
            return next(iter(shown.values()), None)
        return "\n\n".join(
            f"## {name}\n\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for name, value in shown.items()
        )

    async def state_key(self) -> str:
        keys = []
        for name, part in self.parts.items():
            with _part_errors(name):
                keys.append(await part.state_key())
        # Known only now, since an `http` part learns it from the server's answers.
        self.state_key_covers_results = all(part.state_key_covers_results for part in self.parts.values())
        return hash_key(*keys)

    async def final_state(self) -> StateSnapshot | None:
        """Return a snapshot of kind "composite" with the final states of the parts that have one."""
        states = await _each(self.parts, lambda _, part: part.final_state())
        kept = {name: snapshot for name, snapshot in states.items() if snapshot is not None}
        return compose(kept) if kept else None

    async def close(self) -> None:
        """Close every part, even if closing some parts fails. Then raise the first failure."""
        parts, self._parts = self._parts, {}
        for failure in await _close_all(parts):
            raise failure

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the actions of all parts that can list their actions, or None if no part can."""
        listed = await _each(self.parts, lambda _, part: part.admissible_actions())
        if all(actions is None for actions in listed.values()):
            return None
        return [
            {**action, "name": await self._tool_name(part, action["name"])}
            for part, actions in listed.items()
            for action in actions or ()
        ]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the expert action of the first part that has one."""
        for name, part in self.parts.items():
            with _part_errors(name):
                action = await part.expert_action()
            if action is None:
                continue
            if action.get("type") == "tool_call":
                return {**action, "name": await self._tool_name(name, action["name"])}
            if action.get("type") == "tool_calls":
                calls = [{**call, "name": await self._tool_name(name, call["name"])} for call in action["calls"]]
                return {**action, "calls": calls}
            return action
        return None

    def seen_by_tool(self, kind: type[ForkableResource], parameter: str) -> ForkableResource:
        """Return the part to pass to a task's tool; see `part_for_tool`."""
        name = part_for_tool({name: type(part) for name, part in self.parts.items()}, kind, parameter)
        return self if name is None else self.parts[name]

    async def _tool_name(self, part: str, tool: str) -> str:
        if (part, tool) not in self._names.names:
            await self.get_tools_spec()
        return self._names.names.get((part, tool), tool)


def read_parts(config: Mapping[str, Any]) -> dict[str, tuple[type[ForkableResource], dict[str, Any]]]:
    """Return the class and the configuration of each part, keyed by name.

    Raises:
        ConfigError: a key is not the name of a part, a type does not exist, or a part is itself a composite.
    """
    settings = read_config(CompositeConfig, config, "composite")
    over, names = settings.model_extra or {}, [part.name for part in settings.resources]
    for key, value in over.items():
        if key not in names:
            raise ConfigError(f"composite resource: unknown part {key!r}{did_you_mean(key, names)}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"composite resource: {key}: must be a mapping, got {value!r:.80}")
    parts = {}
    for part in settings.resources:
        with _part_errors(part.name):
            kind = resource_class(part.type)
            if issubclass(kind, CompositeResource):
                raise ConfigError("a composite cannot contain another composite; put all resources into one list")
        parts[part.name] = (kind, deep_merge(part.config, over.get(part.name, {})))
    return parts


def part_for_tool(
    kinds: Mapping[str, type[ForkableResource]], wanted: type[ForkableResource], parameter: str
) -> str | None:
    """Return the name of the part to pass to a tool parameter annotated with `wanted`, or None for the composite.

    If exactly one part is an instance of `wanted`, that part is chosen. Otherwise, the part with the same name as the
    parameter is chosen. A parameter annotated with `ForkableResource` receives the composite unless a part has the same
    name as the parameter.

    Raises:
        ConfigError: no part matches, or multiple parts match and none of them has the same name as the parameter.
    """
    if issubclass(CompositeResource, wanted):
        return parameter if wanted is ForkableResource and parameter in kinds else None
    fitting = [name for name, kind in kinds.items() if issubclass(kind, wanted)]
    if len(fitting) == 1:
        return fitting[0]
    # A class loaded from a file is a different object from the one that the tool's module imported by name.
    if parameter in (fitting or kinds):
        return parameter
    parts = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
    problem = "multiple resources are" if fitting else "no resource is"
    raise ConfigError(
        f"parameter {parameter!r} is annotated with {wanted.__name__}, but {problem} of that class: {parts}; "
        "name the parameter after one of these resources"
    )


class _part_errors:
    """Context manager that adds the name of the part to errors.

    A `ToolError` is left unchanged, because the agent reads it.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ToolError):
            return
        if isinstance(error, RewardKitError | NotImplementedError):
            raise type(error)(f"part {self._name!r}: {error}") from error.__cause__ or error
        boundary(EnvironmentFailure, f"part {self._name!r}").__exit__(kind, error, trace)


async def _each(
    parts: Mapping[str, ForkableResource], call: Callable[[str, ForkableResource], Awaitable[_T]]
) -> dict[str, _T]:
    """Call a function concurrently for every part, and return the results.

    The first failure cancels the other calls.
    """
    done: dict[str, _T] = {}

    async def call_part(name: str) -> None:
        with _part_errors(name):
            done[name] = await call(name, parts[name])

    if len(parts) == 1:
        await call_part(*parts)
        return done
    try:
        async with anyio.create_task_group() as group:
            for name in parts:
                group.start_soon(call_part, name)
    except ExceptionGroup as failed:
        error: Exception = failed
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
    return {name: done[name] for name in parts}


async def _close_all(parts: Mapping[str, ForkableResource]) -> list[RewardKitError]:
    """Close every part, and return the failures."""
    failures: list[RewardKitError] = []

    async def close_part(name: str, part: ForkableResource) -> None:
        try:
            with boundary(EnvironmentFailure, f"part {name!r}: close"):
                await part.close()
        except RewardKitError as error:
            failures.append(error)

    await _each(parts, close_part)
    return failures


def _part_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed for the part `name`. Parts of the same class receive different seeds."""
    return int(hash_key("part", str(seed), name)[:16], 16) >> 1
