"""Several resources that serve one task, as one world: a database beside a directory, a game beside a notebook.

What is done to the world is done to each part, concurrently; a step goes to the part whose tool was called. The state
key is that of the tuple of the parts' keys. The weakest part decides how the world forks and whether it is
deterministic. A task file writes `resources:`; its parts' tools keep their names, except where two clash.

Keys and tools, which every step asks for, are asked of one part after another: most parts know them, and tasks that run
together would cost thirty times as much.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel, ConfigDict

from reward_kit.environments.base import ForkableResource, ForkKind, StateSnapshot, StepOutcome, ToolSpec, hash_key
from reward_kit.environments.config import overlaid, read_config
from reward_kit.environments.registry import resource_class
from reward_kit.environments.snapshots import compose
from reward_kit.environments.tool_names import ToolNames
from reward_kit.errors import ConfigError, EnvironmentFailure, RewardKitError, ToolError, boundary, did_you_mean
from reward_kit.task_parts import ResourceParts

_STRENGTH: dict[ForkKind, int] = {"none": 0, "replay": 1, "native": 2}
_CLOSE_SECONDS = 60.0
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class CompositeConfig(BaseModel):
    """The configuration of `composite`; every other key is a part's name, and its value is laid over that part's."""

    model_config = ConfigDict(extra="allow")

    resources: ResourceParts


class CompositeResource(ForkableResource):
    """Several worlds that are set up, reset, forked and closed together; see `parts`."""

    # Of a world that is given as it is, without its configuration; a part that cannot be forked then says so itself.
    fork_kind = "native"

    def __init__(self) -> None:
        self._parts: dict[str, ForkableResource] = {}
        self._names = ToolNames()

    @classmethod
    def fork_kind_for(cls, config: Mapping[str, Any]) -> ForkKind:
        """The weakest of the parts' ways: none, then replay, then native."""
        if "resources" not in config:
            return cls.fork_kind
        kinds = [kind.fork_kind_for(own) for kind, own in read_parts(config).values()]
        return min(kinds, key=_STRENGTH.__getitem__)

    @classmethod
    def is_deterministic_for(cls, config: Mapping[str, Any]) -> bool:
        """Whether every part is."""
        if "resources" not in config:
            return cls.deterministic
        return all(kind.is_deterministic_for(own) for kind, own in read_parts(config).values())

    @classmethod
    def per_sample_keys_for(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Those of each part, below its name."""
        parts = read_parts(config) if "resources" in config else {}
        keys = {name: kind.per_sample_keys_for(own) for name, (kind, own) in parts.items()}
        return frozenset(f"{name}.{key}" for name, own in keys.items() for key in own)

    @classmethod
    def keys_refused_to_rows(
        cls, config: Mapping[str, Any], row: Mapping[str, Any]
    ) -> Iterator[tuple[str, type[ForkableResource]]]:
        """Those that a part refuses, and every key that is not the name of a part, `resources` included."""
        parts = read_parts(config) if "resources" in config else {}
        for name, value in row.items():
            if name in parts and isinstance(value, Mapping):
                kind, own = parts[name]
                yield from ((f"{name}.{key}", owner) for key, owner in kind.keys_refused_to_rows(own, value))
            else:
                yield str(name), cls

    @property
    def parts(self) -> Mapping[str, ForkableResource]:
        """The parts by name, read-only.

        Raises:
            EnvironmentFailure: the world is closed, or was not set up.
        """
        if not self._parts:
            raise EnvironmentFailure("the composite resource is closed, or was not set up")
        return MappingProxyType(self._parts)

    async def setup(self, config: Mapping[str, Any]) -> None:
        given = read_parts(config)
        for name, (kind, _) in given.items():
            with _about_part(name):
                self._parts[name] = kind()
        await _each(self._parts, lambda name, part: part.setup(given[name][1]))

    async def reset(self, seed: int | None = None) -> None:
        self._names = ToolNames()
        await _each(self.parts, lambda name, part: part.reset(None if seed is None else _part_seed(seed, name)))

    async def reseed_noise(self, seed: int) -> None:
        await _each(self.parts, lambda name, part: part.reseed_noise(_part_seed(seed, name)))

    async def fork(self) -> ForkableResource:
        twin, made = type(self)(), dict[str, ForkableResource]()

        async def one(name: str, part: ForkableResource) -> None:
            made[name] = await part.fork()

        async with AsyncExitStack() as undo:
            undo.push_async_callback(_close_quietly, made)
            await _each(self.parts, one)
            undo.pop_all()
        twin._parts, twin._names = {name: made[name] for name in self._parts}, self._names.copy()
        return twin

    async def checkpoint(self) -> Any:
        return await _each(self.parts, lambda _, part: part.checkpoint()), self._names.copy()

    async def restore(self, state: Any) -> None:
        states, names = state
        await _each(self.parts, lambda name, part: part.restore(states[name]))
        self._names = names.copy()

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        meant = self._names.meant_by(action_name)
        if meant is None:
            await self.get_tools_spec()
            meant = self._names.meant_by(action_name)
        if meant is None:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, self._names.known())}")
        part, tool = meant
        with _about_part(part):
            return await self.parts[part].step(tool, action_params)

    async def get_tools_spec(self) -> list[ToolSpec]:
        """The tools of all parts; those whose names clash, or once did, are called `<part>_<tool>`."""
        specs: dict[str, list[ToolSpec]] = {}
        for name, part in self.parts.items():
            with _about_part(name):
                specs[name] = await part.get_tools_spec()
        return self._names.offer(specs)

    async def get_observation(self) -> Any:
        """What the parts have to tell, under a heading for each where more than one does."""
        observed = await _each(self.parts, lambda _, part: part.get_observation())
        told = {name: value for name, value in observed.items() if value is not None and value != ""}
        if len(told) < 2:
            return next(iter(told.values()), None)
        return "\n\n".join(f"## {name}\n\n{_text(value)}" for name, value in told.items())

    async def state_key(self) -> str:
        keys = []
        for name, part in self.parts.items():
            with _about_part(name):
                keys.append(await part.state_key())
        return hash_key(*keys)

    async def final_state(self) -> StateSnapshot | None:
        """The final states of the parts that have one, of kind "composite"."""
        found = await _each(self.parts, lambda _, part: part.final_state())
        shown = {name: snapshot for name, snapshot in found.items() if snapshot is not None}
        return compose(shown) if shown else None

    async def close(self) -> None:
        """Close every part, also where another cannot be closed; the first failure is raised then."""
        parts, self._parts = self._parts, {}
        failures = await _close_all(parts)
        if failures:
            raise failures[0]

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]] | None:
        """Those of all parts that can list theirs; None where no part can."""
        listed = await _each(self.parts, lambda _, part: part.admissible_actions())
        if all(actions is None for actions in listed.values()):
            return None
        return [
            {**action, "name": await self._shown(part, action["name"])}
            for part, actions in listed.items()
            for action in actions or ()
        ]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """The action of the first part that has one, in the order of the parts."""
        for name, part in self.parts.items():
            with _about_part(name):
                action = await part.expert_action()
            if action is None:
                continue
            if action.get("type") == "tool_call":
                return {**action, "name": await self._shown(name, action["name"])}
            if action.get("type") == "tool_calls":
                calls = [{**call, "name": await self._shown(name, call["name"])} for call in action["calls"]]
                return {**action, "calls": calls}
            return action
        return None

    def seen_by_tool(self, kind: type[ForkableResource], parameter: str) -> ForkableResource:
        """The part that a tool of the task's own means; see `part_for_tool`."""
        name = part_for_tool({name: type(part) for name, part in self.parts.items()}, kind, parameter)
        return self if name is None else self.parts[name]

    async def _shown(self, part: str, tool: str) -> str:
        if self._names.shown(part, tool) is None:
            await self.get_tools_spec()
        return self._names.shown(part, tool) or tool


def read_parts(config: Mapping[str, Any]) -> dict[str, tuple[type[ForkableResource], dict[str, Any]]]:
    """The class and the configuration of each part, by name.

    Raises:
        ConfigError: a key is no part's name, a type does not exist, or a part is a composite itself.
    """
    settings = read_config(CompositeConfig, config, "composite")
    over, names = settings.model_extra or {}, [part.name for part in settings.resources]
    for key, value in over.items():
        if key not in names:
            raise ConfigError(f"composite resource: no part is called {key!r}{did_you_mean(key, names)}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"composite resource: {key}: must be a mapping of keys, got {value!r:.80}")
    found = {}
    for part in settings.resources:
        with _about_part(part.name):
            kind = resource_class(part.type)
            if issubclass(kind, CompositeResource):
                raise ConfigError("a composite within a composite; put all resources into one list")
        found[part.name] = (kind, overlaid(part.config, over.get(part.name, {})))
    return found


def part_for_tool(
    kinds: Mapping[str, type[ForkableResource]], wanted: type[ForkableResource], parameter: str
) -> str | None:
    """The name of the part that a tool's parameter receives; None for the composite itself.

    It is the one part of the annotated class, else the one that the parameter is called after. A parameter that could
    be any resource and is called after none receives the composite.

    Args:
        kinds: the parts' classes by name.
        wanted: what the parameter is annotated with.
        parameter: its name.

    Raises:
        ConfigError: no part fits, or several do.
    """
    if issubclass(CompositeResource, wanted):
        return parameter if wanted is ForkableResource and parameter in kinds else None
    fitting = [name for name, kind in kinds.items() if issubclass(kind, wanted)]
    if len(fitting) == 1:
        return fitting[0]
    # A class that was loaded from a file is another one where the tool's module imported it by name.
    if parameter in (fitting or kinds):
        return parameter
    parts = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
    problem = "several resources are" if fitting else "no resource is"
    raise ConfigError(
        f"parameter {parameter!r} asks for a {wanted.__name__}, and {problem} one; the resources: {parts}. Name the "
        "parameter after the one that is meant"
    )


class _about_part:
    """Names the part in what goes wrong with it. What the agent is to read, a `ToolError`, passes unchanged."""

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
        what = f"part {self._name!r}"
        if isinstance(error, RewardKitError | NotImplementedError):
            raise type(error)(f"{what}: {error}") from error.__cause__ or error
        boundary(EnvironmentFailure, what).__exit__(kind, error, trace)


async def _each(
    parts: Mapping[str, ForkableResource], call: Callable[[str, ForkableResource], Awaitable[_T]]
) -> dict[str, _T]:
    """`call` for every part, concurrently, and what came of each; the first failure cancels the others."""
    done: dict[str, _T] = {}

    async def one(name: str) -> None:
        with _about_part(name):
            done[name] = await call(name, parts[name])

    if len(parts) == 1:
        await one(*parts)
        return done
    try:
        async with anyio.create_task_group() as group:
            for name in parts:
                group.start_soon(one, name)
    except ExceptionGroup as failed:
        error: Exception = failed
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
    return {name: done[name] for name in parts}


async def _close_all(parts: Mapping[str, ForkableResource]) -> list[RewardKitError]:
    """Close every part; what went wrong."""
    failures: list[RewardKitError] = []

    async def one(name: str, part: ForkableResource) -> None:
        try:
            with boundary(EnvironmentFailure, f"part {name!r}: close"):
                await part.close()
        except RewardKitError as error:
            failures.append(error)

    await _each(parts, one)
    return failures


async def _close_quietly(parts: Mapping[str, ForkableResource]) -> None:
    """Close what a fork that failed had made, also while it is being cancelled."""
    with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
        for failure in await _close_all(parts):
            _logger.warning("%s", failure)


def _part_seed(seed: int, name: str) -> int:
    """A 63-bit seed of its own for each part, so that two parts of one type differ."""
    return int(hash_key("part", str(seed), name)[:16], 16) >> 1


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
