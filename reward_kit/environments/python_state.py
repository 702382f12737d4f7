"""A world that is one JSON value, for tasks about data and for tests of everything else: it costs microseconds a step.

Paths are dotted: `orders.0.total` is the key "total" of the first item of the list "orders". A key that itself contains
a dot cannot be reached by a path.

Subclass it for a world with its own tools:

    class Shop(PythonStateResource):
        registry = ToolRegistry("shop")

    @Shop.registry.tool
    def buy(shop: Shop, item: str) -> str:
        '''Buy one item.'''
        shop.state["basket"].append(item)
        return "bought"

A tool that raises leaves the state as it was. Keep everything in `self.state`; what a subclass keeps elsewhere is
copied by `fork` but is neither in the state key nor in a checkpoint.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import read_config
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, ToolError, did_you_mean

_MAX_DEPTH = 32
_MISSING = object()

_PATH = {"type": "string", "description": "a dotted path such as orders.0.total"}
_VALUE = {"description": "any JSON value"}


def _spec(name: str, description: str, required: list[str], **properties: Any) -> ToolSpec:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    return tool_spec(name, description, schema)


_WHOLE = {"type": "string", "description": "a dotted path; empty for the whole state", "default": ""}
_SPECS: dict[str, ToolSpec] = {
    "get_state": _spec("get_state", "Read the value at a path of the state.", [], path=_WHOLE),
    "set_value": _spec(
        "set_value",
        "Set the value at a path. Objects that are missing on the way are made.",
        ["path", "value"],
        path=_PATH,
        value=_VALUE,
    ),
    "delete_value": _spec("delete_value", "Remove the key or the list item at a path.", ["path"], path=_PATH),
    "append_value": _spec(
        "append_value", "Append a value to the list at a path.", ["path", "value"], path=_PATH, value=_VALUE
    ),
}


class PythonStateConfig(BaseModel):
    """The configuration of `python_state`."""

    model_config = ConfigDict(extra="forbid")

    initial_state: dict[str, Any] = Field(default_factory=dict)
    tools: list[str] | None = Field(default=None, description="the built-in tools to offer, by default all")

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
    """A private JSON state with four tools, or those of a subclass's `registry`."""

    fork_kind = "native"
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
        """The state itself; what is changed in it counts at once."""
        # Whoever holds the state may change it, so the key that was computed before is no longer known to be right.
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
        self._replace(self._initial)

    async def reset(self, seed: int | None = None) -> None:
        self._replace(self._initial)

    async def fork(self) -> ForkableResource:
        # What never changes is shared, so that a fork costs as much as its state.
        shared = {id(value): value for value in (self._specs, self._initial, self._offered)}
        return copy.deepcopy(self, shared)

    async def checkpoint(self) -> Any:
        return copy_json(self._state)

    async def restore(self, state: Any) -> None:
        self._replace(state)

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
        return await self._own_tool(action_name, action_params)

    async def _own_tool(self, name: str, arguments: Mapping[str, Any]) -> StepOutcome:
        own = self.registry.get_tools() if self.registry else {}
        if name not in own:
            raise ToolError(f"unknown tool {name!r}{did_you_mean(name, [*self._offered, *own])}")
        before = copy.deepcopy(self._state)
        try:
            result = await own[name].call(arguments, self)
        except BaseException:
            self._state, self._key = before, None
            raise
        self._key = None
        return result if isinstance(result, StepOutcome) else StepOutcome(result)

    def _built_in(self, name: str, arguments: Mapping[str, Any]) -> Any:
        path, value = _checked(name, arguments)
        if name == "get_state":
            return copy_json(_lookup(self._state, path))
        if not path:
            raise ToolError(f"{name}: the path is empty; name a key")
        self._key = None
        if name == "set_value":
            _set(self._state, path, copy_json(value))
            return f"{path} is set"
        if name == "append_value":
            target = _lookup(self._state, path)
            if not isinstance(target, list):
                raise ToolError(f"{path!r} is {_kind(target)}, not a list")
            target.append(copy_json(value))
            return f"{path} has {len(target)} items"
        _delete(self._state, path)
        return f"{path} is deleted"

    def _replace(self, state: Mapping[str, Any]) -> None:
        self._state = copy_json(state)
        self._key = None


def copy_json(value: Any, depth: int = 0) -> Any:
    """An independent copy of a JSON value.

    Raises:
        ToolError: it is no JSON value (NaN and infinity are none), or is nested too deeply.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ToolError(f"{value} is no JSON number")
    # A path adds at most _MAX_DEPTH levels above a value of at most as many, and reading copies both.
    if depth > 2 * _MAX_DEPTH:
        raise ToolError("the value is nested too deeply")
    if isinstance(value, list | tuple):
        return [copy_json(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ToolError(f"the key {key!r} of an object is not text")
        return {key: copy_json(item, depth + 1) for key, item in value.items()}
    raise ToolError(f"{type(value).__name__} is no JSON value")


def _checked(name: str, arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """The path and the value of a call; the value is `_MISSING` where the tool takes none."""
    takes_value = name in ("set_value", "append_value")
    for key in arguments:
        if key != "path" and not (takes_value and key == "value"):
            known = ["path", "value"] if takes_value else ["path"]
            raise ToolError(f"{name}: unknown argument {key!r}{did_you_mean(str(key), known)}")
    path = arguments.get("path", "" if name == "get_state" else _MISSING)
    value = arguments.get("value", _MISSING)
    if path is _MISSING or (takes_value and value is _MISSING):
        raise ToolError(f"{name}: {'path' if path is _MISSING else 'value'}: missing")
    if not isinstance(path, str):
        raise ToolError(f"{name}: path: must be text, got {path!r}")
    if path.count(".") >= _MAX_DEPTH:
        raise ToolError(f"{name}: path: more than {_MAX_DEPTH} parts")
    if takes_value and _depth(value) > _MAX_DEPTH:
        raise ToolError(f"{name}: value: nested more than {_MAX_DEPTH} levels deep")
    return path, value


def _depth(value: Any, limit: int = _MAX_DEPTH + 1) -> int:
    """How deep a value is nested, counted up to `limit`."""
    if limit == 0 or not isinstance(value, list | tuple | dict):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, limit - 1) for item in items), default=0)


def _lookup(state: dict[str, Any], path: str) -> Any:
    found: Any = state
    for part in path.split(".") if path else []:
        found = _child(found, part, path)
    return found


def _child(parent: Any, part: str, path: str) -> Any:
    if isinstance(parent, dict):
        if part not in parent:
            raise ToolError(f"{path!r}: there is no {part!r}{did_you_mean(part, parent)}")
        return parent[part]
    if isinstance(parent, list):
        return parent[_index(parent, part, path)]
    raise ToolError(f"{path!r}: {part!r} leads into {_kind(parent)}, not an object or a list")


def _index(items: list[Any], part: str, path: str) -> int:
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(items)):
        raise ToolError(f"{path!r}: {part!r} is no index of a list of {len(items)} items")
    return int(part)


def _set(state: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split(".")
    parent: Any = state
    for position, part in enumerate(way):
        if isinstance(parent, dict) and part not in parent:
            # Everything from here on is new, so nothing can fail after this change.
            for missing in reversed([*way[position + 1 :], last]):
                value = {missing: value}
            parent[part] = value
            return
        parent = _child(parent, part, path)
    if isinstance(parent, dict):
        parent[last] = value
    elif isinstance(parent, list):
        parent[_index(parent, last, path)] = value
    else:
        raise ToolError(f"{path!r}: {last!r} leads into {_kind(parent)}, not an object or a list")


def _delete(state: dict[str, Any], path: str) -> None:
    way, _, last = path.rpartition(".")
    parent = _lookup(state, way)
    _child(parent, last, path)
    del parent[int(last) if isinstance(parent, list) else last]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
