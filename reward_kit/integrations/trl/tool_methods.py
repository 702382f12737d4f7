"""A resource's tools as methods that TRL can read: their signatures and docstrings become the schemas again."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError

_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_SCALARS = (str, int, float, bool, type(None))
_TAKEN = ("reset", "get_reward")
_HEADINGS = ("Args:", "Returns:", "Raises:")


def tool_method(spec: ToolSpec, call: Callable[[Any, str, Mapping[str, Any]], str]) -> Callable[..., str]:
    """A method of the tool's name, whose signature and docstring say what the tool's schema says.

    Arguments are handed on as they come; the world checks them.

    Args:
        spec: the tool in OpenAI form.
        call: is called with the method's object, the tool's name and the arguments.

    Raises:
        ConfigError: the tool or a parameter has a name that no method can have.
    """
    function = spec["function"]
    name, schema = function["name"], function.get("parameters") or {}
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    if not _is_name(name) or name.startswith("_") or name in _TAKEN:
        raise ConfigError(f"tool {name!r} cannot be a method of an environment of TRL; give it another name")
    if wrong := next((each for each in properties if not _is_name(each) or each == "self"), None):
        raise ConfigError(f"tool {name!r}: parameter {wrong!r} cannot be one of a method of an environment of TRL")

    def method(self: Any, **arguments: Any) -> str:
        return call(self, name, arguments)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    # By keyword, so that those without a default may stand behind those with one.
    parameters += [
        inspect.Parameter(
            each,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each in required else properties[each].get("default"),
            annotation=hint_of(properties[each]),
        )
        for each in properties
    ]
    method.__name__ = method.__qualname__ = name
    method.__annotations__ = {each: hint_of(properties[each]) for each in properties}
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__doc__ = _docstring(function.get("description") or name, properties)
    return method


def hint_of(schema: Mapping[str, Any]) -> Any:
    """The Python type whose JSON schema this is, as far as a type can say it; `Any` where it cannot."""
    values = schema.get("enum")
    if values and all(isinstance(value, _SCALARS) for value in values):
        return Literal[tuple(values)]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return Union[tuple(hint_of(option) for option in options)]  # noqa: UP007 - only known now
    kind = schema.get("type")
    if isinstance(kind, list):
        return Union[tuple(_TYPES.get(each, Any) for each in kind)]  # noqa: UP007 - only known now
    if kind == "array" and isinstance(schema.get("items"), Mapping) and schema["items"]:
        return list[hint_of(schema["items"])]  # type: ignore[misc]
    return _TYPES.get(kind or "", Any)


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def _docstring(description: str, properties: Mapping[str, Mapping[str, Any]]) -> str:
    said = [_in_one_line(description)]
    if properties:
        said += ["", "Args:"]
        said += [f"    {name}: {_in_one_line(each.get('description') or name)}" for name, each in properties.items()]
    return "\n".join(said)


def _in_one_line(text: str) -> str:
    """Without line breaks, and without what would begin a section of a docstring."""
    line = " ".join(text.split())
    for heading in _HEADINGS:
        line = line.replace(heading, heading.removesuffix(":"))
    return line
