"""Test the JSON resource: its four tools, validation, and isolation."""

from __future__ import annotations

import json

import pytest

from reward_kit.environments import PythonStateResource, ToolRegistry, open_snapshot
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError

SHOP = {"orders": [{"id": 1, "total": 5}], "user": {"name": "Ada"}, "note": "x"}


async def make_resource(state=SHOP, **config) -> PythonStateResource:
    made = PythonStateResource()
    await made.setup({"initial_state": state, **config})
    await made.reset(0)
    return made


async def call(resource, name, **arguments):
    return (await resource.step(name, arguments)).observation


async def state_of(resource):
    return open_snapshot(await resource.final_state())


async def test_initial_observation_is_none() -> None:
    assert await (await make_resource()).get_observation() is None


@pytest.mark.parametrize(
    ("path", "value"), [("", SHOP), ("orders.0.total", 5), ("user", {"name": "Ada"}), ("orders.0", SHOP["orders"][0])]
)
async def test_get_state_reads_a_path(path, value) -> None:
    assert await call(await make_resource(), "get_state", path=path) == value


async def test_get_state_without_a_path_is_the_whole_state() -> None:
    assert await call(await make_resource(), "get_state") == SHOP


async def test_set_value_replaces_and_creates_missing_objects() -> None:
    resource = await make_resource()
    await call(resource, "set_value", path="orders.0.total", value=7)
    await call(resource, "set_value", path="a.b.c", value=[1])
    state = await state_of(resource)
    assert state["orders"][0]["total"] == 7
    assert state["a"] == {"b": {"c": [1]}}


async def test_set_value_sets_a_value_and_does_not_merge_its_argument() -> None:
    # The predecessor's update_state advertised {updates: {}} and merged that word into the state.
    resource = await make_resource({"a": {"b": 1}})
    await call(resource, "set_value", path="a", value={"updates": {"c": 2}})
    assert await state_of(resource) == {"a": {"updates": {"c": 2}}}


async def test_append_and_delete_change_the_state() -> None:
    resource = await make_resource()
    await call(resource, "append_value", path="orders", value={"id": 2})
    await call(resource, "delete_value", path="orders.0")
    await call(resource, "delete_value", path="user.name")
    assert await state_of(resource) == {"orders": [{"id": 2}], "user": {}, "note": "x"}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("get_stat", {}, "did you mean 'get_state'"),
        ("get_state", {"pth": "a"}, "unknown argument 'pth'; did you mean 'path'?"),
        ("get_state", {"path": 3}, "must be a string"),
        ("get_state", {"path": "user.nam"}, "did you mean 'name'"),
        ("get_state", {"path": "orders.7"}, "not a valid index for a list with 1 items"),
        ("get_state", {"path": "orders.-1"}, "not a valid index"),
        ("get_state", {"path": "note.x"}, "cannot be looked up in text"),
        ("set_value", {"path": "a"}, "value: missing"),
        ("set_value", {"value": 1}, "path: missing"),
        ("set_value", {"path": "", "value": 1}, "the path is empty"),
        ("set_value", {"path": "note.deep", "value": 1}, "cannot be looked up in text"),
        ("set_value", {"path": "orders.9", "value": 1}, "not a valid index"),
        ("set_value", {"path": "a", "value": float("nan")}, "not a JSON number"),
        ("set_value", {"path": "a", "value": {1: 2}}, "not a string"),
        ("set_value", {"path": "a", "value": {1, 2}}, "set is not a JSON value"),
        ("set_value", {"path": ".".join("a" * 40), "value": 1}, "more than 32 parts"),
        ("append_value", {"path": "user", "value": 1}, "an object, not a list"),
        ("delete_value", {"path": "nothing"}, "unknown key 'nothing'"),
    ],
)
async def test_rejected_call_gives_the_reason_and_changes_nothing(name, arguments, message) -> None:
    resource = await make_resource()
    before = await resource.state_key()
    with pytest.raises(ToolError, match=message.replace("?", r"\?")):
        await resource.step(name, arguments)
    assert await resource.state_key() == before
    assert await state_of(resource) == SHOP


async def test_deeply_nested_values_are_rejected() -> None:
    value: list = []
    for _ in range(5_000):
        value = [value]
    with pytest.raises(ToolError, match="nested"):
        await call(await make_resource(), "set_value", path="a", value=value)


async def test_deepest_allowed_value_can_be_read_and_hashed() -> None:
    resource = await make_resource({})
    value: list = []
    for _ in range(31):
        value = [value]
    await call(resource, "set_value", path=".".join("a" * 32), value=value)
    assert json.dumps(await call(resource, "get_state"))
    assert await resource.state_key()


async def test_state_is_isolated_from_arguments_and_observations() -> None:
    resource, given = await make_resource(), {"tags": ["new"]}
    await call(resource, "set_value", path="user", value=given)
    await call(resource, "append_value", path="orders", value=given)
    given["tags"].append("changed by the caller")
    shown = await call(resource, "get_state", path="user")
    shown["tags"].append("changed by the reader")
    state = await state_of(resource)
    assert state["user"] == state["orders"][-1] == {"tags": ["new"]}


async def test_state_key_depends_on_the_state_only() -> None:
    resource = await make_resource()
    first = await resource.state_key()
    await call(resource, "get_state")
    assert await resource.state_key() == first
    await call(resource, "set_value", path="note", value="y")
    assert await resource.state_key() != first
    await call(resource, "set_value", path="note", value="x")
    assert await resource.state_key() == first


async def test_changes_through_the_state_property_change_the_key() -> None:
    resource = await make_resource()
    first = await resource.state_key()
    resource.state["note"] = "changed from outside"
    assert await resource.state_key() != first


async def test_fork_and_origin_are_independent() -> None:
    origin = await make_resource()
    fork = await origin.fork()
    await call(fork, "append_value", path="orders", value=1)
    await call(origin, "set_value", path="user.name", value="Bob")
    assert (await state_of(origin))["orders"] == SHOP["orders"]
    assert (await state_of(fork))["user"]["name"] == "Ada"


async def test_reset_restores_the_configured_state() -> None:
    resource = await make_resource()
    first = await resource.state_key()
    await call(resource, "delete_value", path="orders")
    await resource.reset(1)
    assert await resource.state_key() == first


async def test_only_configured_tools_are_offered() -> None:
    resource = await make_resource(tools=["get_state"])
    assert [spec["function"]["name"] for spec in await resource.get_tools_spec()] == ["get_state"]
    with pytest.raises(ToolError, match="unknown tool 'set_value'"):
        await call(resource, "set_value", path="a", value=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"inital_state": {}}, "inital_state: unknown key; did you mean 'initial_state'"),
        ({"initial_state": [1]}, "initial_state"),
        ({"initial_state": {"a": float("inf")}}, "not a JSON number"),
        ({"tools": ["get_sate"]}, "did you mean 'get_state'"),
    ],
)
async def test_invalid_configuration_is_one_clear_error(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await PythonStateResource().setup(config)


class Shop(PythonStateResource):
    registry = ToolRegistry("shop")


@Shop.registry.tool
def buy(shop: Shop, item: str, count: int = 1) -> str:
    """Buy an item."""
    shop.state["bought"] = shop.state.get("bought", 0) + count
    if item == "nothing":
        raise ToolError("sold out")
    if item == "bug":
        raise ValueError("a bug")
    return f"{count} {item}"


async def test_subclass_defines_its_own_tools() -> None:
    shop = Shop()
    await shop.setup({"initial_state": {}})
    specs = await shop.get_tools_spec()
    assert [spec["function"]["name"] for spec in specs] == ["buy"]
    before = await shop.state_key()
    assert await call(shop, "buy", item="tea", count=2) == "2 tea"
    assert await shop.state_key() != before


async def test_subclass_tool_that_raises_leaves_the_state_unchanged() -> None:
    shop = Shop()
    await shop.setup({"initial_state": {"bought": 1}})
    with pytest.raises(ToolError, match="sold out"):
        await call(shop, "buy", item="nothing")
    assert await state_of(shop) == {"bought": 1}
    with pytest.raises(EnvironmentFailure, match="tool 'buy': ValueError: a bug"):
        await call(shop, "buy", item="bug")
    assert await state_of(shop) == {"bought": 1}
