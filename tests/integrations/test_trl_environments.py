"""Test resources as TRL environments: reset with a row, a method for each tool, and the resource's reward."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from examples.trl_locks.locks import COMBINATIONS, CombinationLock
from reward_kit.environments.base import ForkableResource, StateSnapshot, StepOutcome, ToolSpec, tool_spec
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from reward_kit.integrations.trl.environments import EnvironmentFactory, environment_factory, tool_method


def factory(**options: Any) -> EnvironmentFactory:
    return environment_factory(CombinationLock, {"lock": 0}, **options)


def tools_of(environment: Any) -> list[str]:
    """Return the tools as TRL finds them: public methods of the class, except those of its interface."""
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [name for name, _ in found if name not in ("reset", "get_reward") and not name.startswith("_")]


def test_episode_is_played_by_method_calls() -> None:
    made = factory()
    environment: Any = made()
    assert tools_of(environment) == ["dial"]
    assert type(environment).__name__ == "CombinationLock"
    assert environment.reset() == "lock0 place0"
    assert environment.get_reward() is None  # nothing was given yet, and that is not zero
    said = [environment.dial(colour=colour) for colour in ("white", *COMBINATIONS[0])]
    assert said == ["lock0 place0", "lock0 place1", "lock0 place2", "open"]
    assert environment.get_reward() == 3.0
    with pytest.raises(ToolError, match="the episode is over"):
        environment.dial(colour="red")
    assert environment.reset() == "lock0 place0"
    assert environment.get_reward() is None
    made.close()


def test_instances_are_independent_and_share_a_start_state() -> None:
    made = factory()
    first, second = made(), made()
    row = {"prompt": [{"role": "user", "content": "Open it."}], "resource_config": {"lock": 1, "unused": None}}
    assert [one.reset(**row) for one in (first, second)] == ["\n\nlock1 place0"] * 2
    one: Any = first
    assert one.dial(colour="white") == "lock1 place1"
    other: Any = second
    assert other.dial(colour="red") == "lock1 place0"
    made.close()


def test_row_configuration_can_be_json_text() -> None:
    made = factory()
    environment = made()
    assert environment.reset(resource_config=json.dumps({"lock": 2})) == "lock2 place0"
    with pytest.raises(ConfigError, match="resource_config must be a mapping of keys, got"):
        environment.reset(resource_config="[1]")
    with pytest.raises(ConfigError, match="resource_config is not JSON"):
        environment.reset(resource_config="{")
    made.close()


def test_get_reward_is_absent_without_environment_rewards() -> None:
    made = factory(gives_reward=False)
    assert not hasattr(made(), "get_reward")
    assert tools_of(made()) == ["dial"]
    made.close()


class FailingResource(CombinationLock):
    """A resource that fails and cannot be forked."""

    fork_kind = "none"
    live = 0

    async def setup(self, config: Mapping[str, Any]) -> None:
        await super().setup(config)
        FailingResource.live += 1

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        if action_params.get("colour") == "black":
            raise ToolError("no such colour")
        raise ValueError("broken for good")

    async def close(self) -> None:
        FailingResource.live -= 1


def test_environment_failure_leaves_the_rollout_unscored_and_closes_resources() -> None:
    made = environment_factory(FailingResource, {"lock": 0})
    environment: Any = made()
    environment.reset()
    with pytest.raises(ToolError, match="no such colour"):
        environment.dial(colour="black")
    assert environment._play.failure is None
    with pytest.raises(EnvironmentFailure, match="broken for good"):
        environment.dial(colour="red")
    assert environment.get_reward() is None
    assert environment._play.failure.failure_class == "crash"
    assert environment._play.final_state() is None
    with pytest.raises(ToolError, match="the episode is over"):
        environment.dial(colour="red")
    environment.reset()
    assert FailingResource.live == 1
    made.close()
    assert FailingResource.live == 0


class UnreadableState(CombinationLock):
    """A resource whose state never returns, or fails."""

    never_waits = False
    broken = False

    async def final_state(self) -> StateSnapshot:
        if self.broken:
            raise RuntimeError("the server is gone")
        await asyncio.sleep(60)
        raise AssertionError("never")


def test_unreadable_final_state_fails_only_its_environment() -> None:
    made = environment_factory(UnreadableState, {"lock": 0}, time_limit_s=0.1)
    slow, broken = made(), made()
    for environment in (slow, broken):
        environment.reset()
    assert slow._play is not None and broken._play is not None
    broken._play._world.broken = True  # type: ignore[attr-defined]
    assert slow._play.final_state() is broken._play.final_state() is None
    assert slow._play.failure is not None and slow._play.failure.failure_class == "timeout"
    assert (
        "final_state of an UnreadableState: timed out: no response within 0.1 s (time_limit_s)"
        in slow._play.failure.message
    )
    assert broken._play.failure is not None and "the server is gone" in broken._play.failure.message
    assert slow.get_reward() is None  # type: ignore[attr-defined]
    made.close()
    made.close()  # nothing is left to close


class UnequalForks(CombinationLock):
    """A resource whose forks differ from their origin."""

    async def fork(self) -> CombinationLock:
        copy = await super().fork()
        copy._place += 1
        return copy


def test_fork_with_a_different_state_is_rejected() -> None:
    with pytest.raises(EnvironmentFailure, match="UnequalForks: a fork has the state key"):
        environment_factory(UnequalForks, {"lock": 0})


class Toolless(CombinationLock):
    fork_kind = "none"

    async def get_tools_spec(self) -> list[ToolSpec]:
        return []


def test_unsuitable_task_is_rejected_at_construction() -> None:
    with pytest.raises(ConfigError, match="Toolless has no tools in this configuration"):
        environment_factory(Toolless, {"lock": 0})
    with pytest.raises(ConfigError, match="unknown resource 'sqllite'; did you mean 'sqlite'"):
        environment_factory("sqllite")
    with pytest.raises(EnvironmentFailure, match="setup of CombinationLock"):
        environment_factory(CombinationLock)  # the lock is in the rows, and there is no example
    environment_factory(CombinationLock, example={"resource_config": {"lock": 1}}).close()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("python_state", {"initial_state": {"a": 1}}),
        ("filesystem", {"files": {"a.txt": "a"}}),
        ("sokoban", {}),
        ("webshop", {}),
        ("alfworld", {}),
        ("gymnasium", {"env_id": "FrozenLake-v1"}),
    ],
)
def test_trl_reads_the_schemas_of_our_tools_from_the_methods(name: str, config: dict[str, Any]) -> None:
    made = environment_factory(name, config)
    environment = made()
    read = {
        spec["function"]["name"]: get_json_schema(getattr(environment, spec["function"]["name"])) for spec in made.tools
    }
    for spec in made.tools:
        function = read[spec["function"]["name"]]["function"]
        assert function["description"] == " ".join(spec["function"]["description"].split())
        ours = spec["function"]["parameters"]
        assert function["parameters"].get("required", []) == list(ours.get("required", []))
        theirs = function["parameters"]["properties"]
        assert theirs.keys() == ours["properties"].keys()
        for key, schema in ours["properties"].items():
            kept = {k: v for k, v in schema.items() if k in ("type", "enum")}
            assert {k: v for k, v in theirs[key].items() if k in ("type", "enum")} == kept
    made.close()


def called(self: Any, name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, dict(arguments)])


def test_every_parameter_type_is_in_the_schema() -> None:
    properties = {
        "late": {"type": "string", "default": "x", "description": "Returns: nothing\nat all"},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "many": {"type": "array", "items": {"type": "integer"}},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "some": {"type": ["number", "string"]},
        "free": {"description": "anything"},
    }
    schema = {"type": "object", "properties": properties, "required": ["kind", "many"]}
    method = tool_method(tool_spec("do_it", "Do it.\n\nArgs: none", schema), called)
    kind = type("Thing", (), {"do_it": method})
    read = get_json_schema(kind().do_it)["function"]  # type: ignore[attr-defined]
    assert read["name"] == "do_it" and read["description"] == "Do it. Args none"
    assert read["parameters"]["required"] == ["kind", "many"]
    assert read["parameters"]["properties"] == {
        "late": {"type": "string", "description": "Returns nothing at all"},
        "kind": {"type": "string", "enum": ["a", "b"], "description": "kind"},
        "many": {"type": "array", "items": {"type": "integer"}, "description": "many"},
        "either": {"type": ["integer", "string"], "description": "either"},
        "some": {"type": ["number", "string"], "description": "some"},
        "free": {"description": "anything"},
    }
    assert kind().do_it(kind="a") == '["do_it", {"kind": "a"}]'  # type: ignore[attr-defined]
    assert inspect.signature(kind().do_it).parameters["late"].default == "x"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["reset", "get_reward", "_hidden", "two words", "class"])
def test_invalid_method_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"tool '{name}' cannot become a method"):
        tool_method(tool_spec(name, "d"), called)
    with pytest.raises(ConfigError, match="parameter 'a-b' cannot be"):
        tool_method(tool_spec("ok", "d", {"type": "object", "properties": {"a-b": {}}}), called)


def test_resource_can_be_loaded_from_a_file(tmp_path: Path) -> None:
    source = Path(inspect.getfile(CombinationLock)).read_text()
    (tmp_path / "own_lock.py").write_text(source)
    made = environment_factory(f"{tmp_path / 'own_lock.py'}:CombinationLock", {"lock": 3})
    assert made().reset() == "lock3 place0"
    assert issubclass(made.kind, ForkableResource)
    made.close()
