"""The tools of a turn as action formats need them: names, schemas, and the calls that can be listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from reward_kit.environments.base import ToolSpec

MAX_LISTED = 10_000
"""Calls that are listed at most; of more a grammar is made."""


@dataclass(frozen=True)
class Tool:
    """One tool that can be called now.

    Attributes:
        name: as in its specification.
        schema: of its arguments, a JSON schema of an object.
    """

    name: str
    schema: Mapping[str, Any]

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of each parameter."""
        found: Mapping[str, Any] = self.schema.get("properties") or {}
        return found

    @cached_property
    def text_parameter(self) -> str | None:
        """The name of its parameter, where it has one alone and that takes a text."""
        if len(self.parameters) != 1:
            return None
        ((name, schema),) = self.parameters.items()
        values = _values(schema)
        is_text = schema.get("type") == "string" or (values and all(isinstance(value, str) for value in values))
        return name if is_text else None

    def listed_calls(self) -> list[dict[str, Any]] | None:
        """All arguments that it can be called with; None where they cannot be listed."""
        required = set(self.schema.get("required") or ())
        choices: list[list[tuple[str, Any] | None]] = []
        for name, schema in self.parameters.items():
            values = _values(schema)
            if values is None:
                return None
            left_out: list[tuple[str, Any] | None] = [] if name in required else [None]
            choices.append([*left_out, *((name, value) for value in values)])
        if not required <= self.parameters.keys() or prod(map(len, choices)) > MAX_LISTED:
            return None
        return [dict(filter(None, pairs)) for pairs in product(*choices)]


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values of a schema; None where they cannot be listed."""
    if "enum" in schema:
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    closed: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    return closed.get(str(schema.get("type")))


def tools_of(specs: Sequence[ToolSpec] | None) -> list[Tool]:
    """The tools of these specifications."""
    functions = [spec["function"] for spec in specs or ()]
    return [Tool(function["name"], function.get("parameters") or {"type": "object"}) for function in functions]


def all_calls(tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]] | None:
    """Every call of every tool, as name and arguments; None where they cannot be listed."""
    listed = [(tool.name, tool.listed_calls()) for tool in tools]
    calls = [(name, arguments) for name, arguments in listed if arguments is not None]
    if len(calls) < len(listed) or sum(len(arguments) for _, arguments in calls) > MAX_LISTED:
        return None
    return ((name, arguments) for name, each in calls for arguments in each)
