"""Test tools from typed functions: their specifications and argument validation."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from reward_kit.environments import PythonStateResource, ToolRegistry
from reward_kit.environments.tools import parse_docstring
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError


class Address(BaseModel):
    street: str
    number: int = 1


@pytest.fixture
def registry() -> ToolRegistry:
    tools = ToolRegistry("desk")

    @tools.tool
    def book(
        guest: str, nights: int = 1, room: Literal["single", "double"] = "single", tags: list[str] | None = None
    ) -> str:
        """Book a room.

        Longer explanations are not shown.

        Args:
            guest: who comes,
                with the family name.
            nights: how many nights.
        """
        return f"{guest} {nights!r} {room} {tags}"

    @tools.tool(name="look_up", description="Find a guest.")
    async def find(address: Address, limit: Annotated[int, Field(ge=1)] = 5) -> str:
        return f"{address.street} {address.number} {limit}"

    return tools


def test_specification_has_openai_form_and_requires_parameters_without_defaults(registry) -> None:
    spec = registry.get_openai_tools()[0]
    assert spec["type"] == "function"
    assert spec["function"]["name"] == "book"
    assert spec["function"]["description"] == "Book a room."
    parameters = spec["function"]["parameters"]
    assert parameters["required"] == ["guest"]
    assert parameters["properties"]["guest"] == {"type": "string", "description": "who comes, with the family name."}
    assert parameters["properties"]["nights"] == {"type": "integer", "default": 1, "description": "how many nights."}
    assert parameters["properties"]["room"]["enum"] == ["single", "double"]
    assert "title" not in str(parameters)


async def test_arguments_reach_the_function_with_their_types(registry) -> None:
    assert await registry.get_tool("book").call({"guest": "Ada"}) == "Ada 1 single None"
    assert await registry.get_tool("look_up").call({"address": {"street": "Elm"}, "limit": 2}) == "Elm 1 2"


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("book", {}, "guest: missing"),
        ("book", {"guest": "Ada", "night": 2}, "night: unknown key; did you mean 'nights'"),
        ("book", {"guest": "Ada", "nights": "many"}, "nights: expected a whole number"),
        ("book", {"guest": "Ada", "room": "suite"}, "room: .*'single' or 'double'"),
        ("look_up", {"address": {"street": 3}}, "address.street"),
        ("look_up", {"address": {"street": "x"}, "limit": 0}, "limit: must be 1 or more"),
    ],
)
async def test_invalid_arguments_never_reach_the_function(registry, tool, arguments, message) -> None:
    with pytest.raises(ToolError, match=message):
        await registry.get_tool(tool).call(arguments)


async def test_exception_in_a_tool_is_an_environment_failure_with_its_cause() -> None:
    tools = ToolRegistry("broken")

    @tools.tool
    def divide(x: int) -> float:
        return 1 / x

    with pytest.raises(EnvironmentFailure, match="tool 'divide': ZeroDivisionError: division by zero") as caught:
        await tools.get_tool("divide").call({"x": 0})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_unknown_tool_suggests_the_nearest(registry) -> None:
    with pytest.raises(ToolError, match="did you mean 'book'"):
        registry.get_tool("bok")


async def test_resource_parameter_is_injected_and_not_in_the_schema() -> None:
    tools = ToolRegistry("world")

    @tools.tool
    def rename(world: PythonStateResource, name: str) -> None:
        """Rename."""
        world.state["name"] = name

    resource = PythonStateResource()
    await resource.setup({})
    (spec,) = tools.get_openai_tools()
    assert list(spec["function"]["parameters"]["properties"]) == ["name"]
    await tools.get_tool("rename").call({"name": "Eve"}, resource)
    assert resource.state == {"name": "Eve"}


def test_invalid_tool_is_rejected_at_registration() -> None:
    tools = ToolRegistry("bad")
    for function, message in [
        (lambda x: x, "needs a type annotation"),
        (variadic, "must not be positional-only or variadic"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tools.tool(name="bad")(function)
    tools.tool(plain)
    with pytest.raises(ConfigError, match="already contains a tool named"):
        tools.tool(plain)


def variadic(*words: str) -> None: ...


def plain(x: int) -> None: ...


def test_docstring_without_sections_is_its_first_paragraph() -> None:
    assert parse_docstring("One\nline.\n\nMore.") == ("One line.", {})
