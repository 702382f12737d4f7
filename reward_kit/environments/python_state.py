"""A resource whose state is a JSON value. Parts of it are addressed by dotted paths such as `orders.0.total`.

A step takes microseconds.

Subclass it for a resource with its own tools:

    class Shop(PythonStateResource):
        registry = ToolRegistry("shop")

    @Shop.registry.tool
    def buy(shop: Shop, item: str) -> str:
        '''Buy one item.'''
        shop.state["basket"].append(item)
        return "bought"

A tool that raises an exception leaves the state unchanged. Keep all state in `self.state`: `fork` also copies other
attributes of a subclass, but they are not part of the state key or of a checkpoint.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    check_call,
    hash_key,
    strict_tool,
    tools_by_name,
)
from reward_kit.environments.config import ResourceConfig, read_config
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, ToolError, did_you_mean

_MAX_DEPTH = 32
_WHOLE = {"type": "string", "description": "a dotted path; empty for the whole state", "default": ""}
_PATH = {"type": "string", "description": "a dotted path such as orders.0.total"}
_VALUE = {"description": "any JSON value"}
_SET = "Set the value at a path. Objects that are missing on the way are made."
_SPECS = tools_by_name(
    strict_tool("get_state", "Read the value at a path of the state.", path=_WHOLE),
    strict_tool("set_value", _SET, path=_PATH, value=_VALUE),
    strict_tool("delete_value", "Remove the key or the list item at a path.", path=_PATH),
    strict_tool("append_value", "Append a value to the list at a path.", path=_PATH, value=_VALUE),
)


class PythonStateConfig(ResourceConfig):
    """The configuration of `python_state`."""

    initial_state: dict[str, Any] = Field(default_factory=dict)
    tools: list[str] | None = Field(
        default=None, description="names of the built-in tools to offer; defaults to all of them"
    )

    @field_validator("initial_state")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            return {str(key): copy_json(item) for key, item in value.items()}
        except ToolError as error:
            raise ValueError(str(error)) from None

    @field_validator("tools")
    @classmethod
    def _are_known(cls, names: list[str] | None) -> list[str] | None:
        for name in names or []:
            if name not in _SPECS:
                raise ValueError(f"unknown tool {name!r}{did_you_mean(name, _SPECS)}")
        return names


class PythonStateResource(ForkableResource):
    """A private JSON state. Its tools are four built-in tools, or the tools in a subclass's `registry`."""

    fork_kind = "native"
    has_cheap_state = True
    state_key_covers_results = False
    per_sample_keys = frozenset({"initial_state"})
    registry: ClassVar[ToolRegistry | None] = None

    def __init__(self) -> None:
        self._initial: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._key: str | None = None
        self._specs: list[ToolSpec] = []
        self._offered: frozenset[str] = frozenset()

    @property
    def state(self) -> dict[str, Any]:
        """The state itself, not a copy. Changes to it take effect immediately."""
        # The caller may change the state, so the cached key may be outdated.
        self._key = None
        return self._state

    async def setup(self, config: Mapping[str, Any]) -> None:
        settings = read_config(PythonStateConfig, config, "python_state")
        own = self.registry.get_openai_tools() if self.registry else []
        names = settings.tools if settings.tools is not None else ([] if own else list(_SPECS))
        taken = {spec["function"]["name"] for spec in own} & set(names)
        if taken:
            raise ConfigError(f"python_state resource: tools: {sorted(taken)[0]!r} is also a tool of the registry")
        self._offered = frozenset(names)
        self._specs = [_SPECS[name] for name in names] + own
        self._initial = settings.initial_state
        await self.restore(self._initial)

    async def reset(self, seed: int | None = None) -> None:
        await self.restore(self._initial)

    async def fork(self) -> ForkableResource:
        # Share the constant parts, so that a fork copies only the state.
        shared = {id(value): value for value in (self._specs, self._initial, self._offered)}
        return copy.deepcopy(self, shared)

    async def checkpoint(self) -> Any:
        return copy_json(self._state)

    async def restore(self, state: Any) -> None:
        self._state, self._key = copy_json(state), None

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(self._specs)

    async def state_key(self) -> str:
        if self._key is None:
            self._key = hash_key(canonical_json(self._state))
        return self._key

    async def final_state(self) -> StateSnapshot:
        return StateSnapshot.from_json(self._state)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        if action_name in self._offered:
            return StepOutcome(self._built_in(action_name, action_params))
        own = self.registry.get_tools() if self.registry else {}
        if action_name not in own:
            raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, [*self._offered, *own])}")
        before = copy.deepcopy(self._state)
        try:
            result = await own[action_name].call(action_params, self)
        except BaseException:
            self._state, self._key = before, None
            raise
        self._key = None
        return result if isinstance(result, StepOutcome) else StepOutcome(result)

    def _built_in(self, name: str, arguments: Mapping[str, Any]) -> Any:
        given = check_call(_SPECS, name, arguments)
        path, value = given["path"], given.get("value")
        if path.count(".") >= _MAX_DEPTH:
            raise ToolError(f"{name}: path: more than {_MAX_DEPTH} parts")
        value = copy_json(value, _MAX_DEPTH)
        if name == "get_state":
            return copy_json(_lookup(self._state, path))
        if not path:
            raise ToolError(f"{name}: the path is empty; specify a key")
        self._key = None
        if name == "set_value":
            _set(self._state, path, value)
            return f"{path} is set"
        if name == "append_value":
            target = _lookup(self._state, path)
            if not isinstance(target, list):
                raise ToolError(f"{path!r} is {_kind(target)}, not a list")
            target.append(value)
            return f"{path} has {len(target)} items"
        way, _, last = path.rpartition(".")
        parent = _lookup(self._state, way)
        _child(parent, last, path)
        del parent[int(last) if isinstance(parent, list) else last]
        return f"{path} is deleted"


def copy_json(value: Any, levels: int = 2 * _MAX_DEPTH) -> Any:
    """Return an independent copy of a finite JSON value of bounded depth.

    Raises:
        ToolError: the value is not a JSON value, is not finite, or is nested too deeply.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ToolError(f"{value} is not a JSON number")
    # A path adds at most _MAX_DEPTH levels above a value with at most _MAX_DEPTH, and reading copies both.
    if levels < 0:
        raise ToolError("the value is nested too deeply")
    if isinstance(value, list | tuple):
        return [copy_json(item, levels - 1) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ToolError(f"the key {key!r} of an object is not a string")
        return {key: copy_json(item, levels - 1) for key, item in value.items()}
    raise ToolError(f"{type(value).__name__} is not a JSON value")


def _lookup(state: dict[str, Any], path: str) -> Any:
    value: Any = state
    for part in path.split(".") if path else []:
        value = _child(value, part, path)
    return value


def _child(parent: Any, part: str, path: str) -> Any:
    if isinstance(parent, dict):
        if part not in parent:
            raise ToolError(f"{path!r}: unknown key {part!r}{did_you_mean(part, parent)}")
        return parent[part]
    return parent[_index(parent, part, path)]


def _index(items: Any, part: str, path: str) -> int:
    if not isinstance(items, list):
        raise ToolError(f"{path!r}: {part!r} cannot be looked up in {_kind(items)}, only in an object or a list")
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(items)):
        raise ToolError(f"{path!r}: {part!r} is not a valid index for a list with {len(items)} items")
    return int(part)


def _set(state: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split(".")
    parent: Any = state
    for position, part in enumerate(way):
        if isinstance(parent, dict) and part not in parent:
            # All further levels are new, so nothing can fail after this change.
            for missing in reversed([*way[position + 1 :], last]):
                value = {missing: value}
            parent[part] = value
            return
        parent = _child(parent, part, path)
    parent[last if isinstance(parent, dict) else _index(parent, last, path)] = value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
