"""`ToolRegistry`, which creates tools from typed Python functions.

Pydantic derives the JSON schema from the signature and the docstring. A parameter is required only if it has no
default. Arguments are validated before the function runs, so a function always receives the annotated types. A
parameter annotated with `ForkableResource` or a subclass receives the episode's resource (the matching one if the task
has multiple resources) and is hidden from the agent.

A tool raises a `ToolError` to report a mistake to the agent. Any other exception is treated as a bug in the tool and
ends the episode with an error.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import anyio.to_thread
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import ForkableResource, StepOutcome, ToolSpec, tool_spec
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, boundary, did_you_mean, type_name
from reward_kit.validation import describe_validation_error

ToolFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, and the schema of its arguments."""

    name: str
    function: ToolFunction
    spec: ToolSpec
    arguments: type[BaseModel]
    resource_parameters: Mapping[str, type[ForkableResource]]

    def parse(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to the types in the signature.

        Raises:
            ToolError: an argument is invalid. The message names all invalid arguments.
        """
        try:
            parsed = self.arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = "; ".join(describe_validation_error(error, self.arguments))
            raise ToolError(f"tool {self.name!r}: {problems}") from None
        return {name: getattr(parsed, name) for name in self.arguments.model_fields}

    async def call(self, arguments: Mapping[str, Any], resource: ForkableResource | None = None) -> Any:
        """Validate `arguments` and run the function. A synchronous function runs in a thread.

        Raises:
            ToolError: the arguments are invalid, or the function raised a `ToolError`. The agent sees the error
                message.
            EnvironmentFailure: the function raised any other exception, which ends the episode.
        """
        with boundary(EnvironmentFailure, f"tool {self.name!r}"):
            values = self.parse(arguments)
            for name, kind in self.resource_parameters.items():
                values[name] = resource.seen_by_tool(kind, name) if resource is not None else None
            if inspect.iscoroutinefunction(self.function):
                return await self.function(**values)
            result = await anyio.to_thread.run_sync(lambda: self.function(**values), abandon_on_cancel=True)
            return await result if isinstance(result, Awaitable) else result


class ToolRegistry:
    """A named set of tools.

    Example:
        ```python
        registry = ToolRegistry("calculator")

        @registry.tool
        def add(x: int, y: int = 1) -> int:
            '''Add two numbers.

            Args:
                x: the first number.
                y: the second number.
            '''
            return x + y
        ```
    """

    def __init__(self, name: str, description: str | None = None) -> None:
        self.name = name
        self.description = description
        self._tools: dict[str, Tool] = {}

    @overload
    def tool(self, function: ToolFunction, /) -> ToolFunction: ...

    @overload
    def tool(
        self, /, *, name: str | None = None, description: str | None = None, parameters: Mapping[str, Any] | None = None
    ) -> Callable[[ToolFunction], ToolFunction]: ...

    def tool(
        self,
        function: ToolFunction | None = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Any:
        """Register a function. This method can be used as a decorator, with or without arguments.

        Args:
            function: the function, which may be synchronous or asynchronous.
            name: the name of the tool. The default is the name of the function.
            description: the description that the agent sees. The default is the first paragraph of the docstring.
            parameters: a JSON schema to show instead of the derived schema. The arguments are still validated against
                the signature.

        Raises:
            ConfigError: the name is already in use, or a parameter has no type or is positional-only or variadic.
        """

        def register(target: ToolFunction) -> ToolFunction:
            made = make_tool(target, name or target.__name__, description, parameters)
            if made.name in self._tools:
                raise ConfigError(f"registry {self.name!r} already contains a tool named {made.name!r}")
            self._tools[made.name] = made
            return target

        return register if function is None else register(function)

    def get_tool(self, name: str) -> Tool:
        """Return the tool with this name.

        Raises:
            ToolError: the tool is unknown. The message suggests the most similar name.
        """
        if name not in self._tools:
            raise ToolError(f"unknown tool {name!r}{did_you_mean(name, self._tools)}")
        return self._tools[name]

    def get_tools(self) -> dict[str, Tool]:
        """Return all tools, keyed by name."""
        return dict(self._tools)

    def get_openai_tools(self) -> list[ToolSpec]:
        """Return all tools in OpenAI format, in the order of registration."""
        return [tool.spec for tool in self._tools.values()]


class tool:
    """Declare a typed method of a `ForkableResource` as a tool. The class then needs no `step` or `get_tools_spec`.

    The schema is derived from the signature and the docstring, as in a `ToolRegistry`. The tool's name is the name of
    the method. Arguments are validated and converted to their annotated types before the method runs. The method
    returns an observation or a `StepOutcome`, and may be a coroutine. `ToolError` and other exceptions have the same
    meaning as in `step`.

    Example:
        ```python
        class Counter(ForkableResource):
            @tool
            async def add(self, number: int = 1) -> str:
                '''Add to the count.'''
                self.count += number
                return f"the count is {self.count}"
        ```
    """

    def __init__(self, method: ToolFunction) -> None:
        if not inspect.isfunction(method):
            raise ConfigError(f"@tool takes no arguments and decorates a method, got {type_name(method)}")
        self._method, self.__doc__ = method, method.__doc__

    def __set_name__(self, owner: type[ForkableResource], name: str) -> None:
        # Set the methods before the class is complete, so that they no longer count as abstract.
        if owner.step is ForkableResource.step:
            owner.step = _call_method  # type: ignore[method-assign]
        if owner.get_tools_spec is ForkableResource.get_tools_spec:
            owner.get_tools_spec = _method_specs  # type: ignore[method-assign]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self._method.__get__(instance, owner)

    @classmethod
    def methods(cls, kind: type) -> dict[str, Tool]:
        """Return the tools that a class and its bases declare as methods, keyed by name.

        The tools of the bases come first.
        """
        if "_method_tools" not in vars(kind):
            names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
            members = {name: inspect.getattr_static(kind, name) for name in names}
            made: dict[str, Tool] = {}
            for name, member in members.items():
                if isinstance(member, cls):
                    with boundary(ConfigError, f"tool {kind.__name__}.{name}"):
                        made[name] = make_tool(member._method, name, is_method=True)
            kind._method_tools = made  # type: ignore[attr-defined]
        return kind._method_tools  # type: ignore[attr-defined, no-any-return]


async def _method_specs(self: ForkableResource) -> list[ToolSpec]:
    return [known.spec for known in tool.methods(type(self)).values()]


async def _call_method(self: ForkableResource, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
    tools = tool.methods(type(self))
    if action_name not in tools:
        raise ToolError(f"unknown tool {action_name!r}{did_you_mean(action_name, tools)}")
    result = tools[action_name].function(self, **tools[action_name].parse(action_params))
    if inspect.isawaitable(result):
        result = await result
    return result if isinstance(result, StepOutcome) else StepOutcome(result)


def make_tool(
    function: ToolFunction,
    name: str,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    *,
    is_method: bool = False,
) -> Tool:
    """Create a tool from a typed function. The first parameter of a method is skipped."""
    hints = typing.get_type_hints(function, include_extras=True)
    summary, argument_docs = parse_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    resource_parameters: dict[str, type[ForkableResource]] = {}
    for parameter in list(inspect.signature(function).parameters.values())[is_method:]:
        annotation = hints.get(parameter.name, Any)
        if isinstance(annotation, type) and issubclass(annotation, ForkableResource):
            resource_parameters[parameter.name] = annotation
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} must not be positional-only or variadic")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} needs a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (annotation, Field(default, description=argument_docs.get(parameter.name)))
    try:
        arguments = pydantic.create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except pydantic.errors.PydanticUserError as error:
        problem = str(error).splitlines()[0].split(" Set `")[0]
        raise ConfigError(f"tool {name!r}: an annotation has no JSON schema: {problem}") from None
    schema = parameters
    if not schema:
        schema = {"properties": {}, **_without_titles(arguments.model_json_schema())}
    spec = tool_spec(name, description or summary, schema)
    return Tool(name, function, spec, arguments, resource_parameters)


def _without_titles(node: Any) -> Any:
    """Return a JSON schema without the titles that pydantic adds."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if not (key == "title" and isinstance(value, str))}
    return {
        key: {name: _without_titles(inner) for name, inner in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in kept.items()
    }


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ARGUMENT = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a Google-style docstring, and the descriptions of its arguments, keyed by name."""
    summary: list[str] = []
    arguments: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            depth = len(line) - len(line.lstrip())
            entry = _ARGUMENT.match(line)
            if entry and (not current or depth <= indent):
                current, indent = entry[1], depth
                arguments[current] = entry[2].strip()
            elif current and line.strip():
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    paragraph = "\n".join(summary).strip().split("\n\n")[0]
    return " ".join(paragraph.split()), arguments
