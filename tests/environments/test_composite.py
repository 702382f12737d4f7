"""Test several resources as one: delegation to the parts, combined results, and failures."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import anyio
import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.checks import check_resource
from reward_kit.environments import (
    CompositeResource,
    FilesystemResource,
    ForkableResource,
    PythonStateResource,
    ReplayForkResource,
    SqliteResource,
    StateSnapshot,
    StepOutcome,
    ToolRegistry,
    open_snapshot,
    tool_spec,
)
from reward_kit.environments.composite import ToolNames
from reward_kit.errors import ConfigError, DeadlineError, EnvironmentFailure, ToolError
from reward_kit.models import TaskDefinitionModel

HERE = __name__
DB = {"type": "sqlite", "name": "db", "config": {"seed_sql": "CREATE TABLE t (a); INSERT INTO t VALUES (7);"}}
FILES = {"type": "filesystem", "config": {"files": {"a.txt": "one"}}}


class Dice(ReplayForkResource):
    """Rolls a number that its reset seed decides; ends at a six. Two of them show whether they share a seed."""

    async def _setup(self, config: Mapping[str, Any]) -> None:
        self.label = config.get("label", "dice")
        if set(config) - {"label"}:
            raise ConfigError(f"dice: unknown key {sorted(set(config) - {'label'})[0]!r}")
        self.closed = False

    async def _reset(self, seed: int) -> None:
        self.seed, self.rolled = seed, 0
        self.noise: int | None = None

    def _reseed(self, seed: int) -> None:
        self.noise = seed

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        if action_name != "roll" or action_params:
            raise ToolError("call roll without arguments")
        self.rolled += 1
        value = (self.seed >> self.rolled) % 6 + 1
        return StepOutcome(value, reward=float(value), terminated=value == 6)

    async def get_tools_spec(self) -> list[dict[str, Any]]:
        return [tool_spec("roll", "Roll.", {"type": "object", "properties": {}, "additionalProperties": False})]

    async def state_key(self) -> str:
        return f"{self.seed}.{self.rolled}"

    async def admissible_actions(self) -> list[dict[str, Any]]:
        return [{"name": "roll", "arguments": {}}]

    async def close(self) -> None:
        self.closed = True


class Uncopyable(PythonStateResource):
    """State that cannot be copied."""

    fork_kind = "none"
    deterministic = False

    async def fork(self) -> ForkableResource:
        raise NotImplementedError("this resource cannot be copied")

    async def checkpoint(self) -> Any:
        raise NotImplementedError("this resource cannot be copied")


class SlowFork(PythonStateResource):
    """A resource that forks slowly; `open_resources` holds every instance that is not closed."""

    open_resources: ClassVar[set[ForkableResource]] = set()
    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.open_resources.add(self)

    async def fork(self) -> ForkableResource:
        if self.seconds:
            await anyio.sleep(self.seconds)
        return await super().fork()

    async def close(self) -> None:
        await anyio.sleep(0.001)
        self.open_resources.discard(self)


class ConcurrentReset(PythonStateResource):
    """A resource whose reset waits for that of a second instance."""

    arrived: ClassVar[list[anyio.Event]] = []

    async def reset(self, seed: int | None = None) -> None:
        await super().reset(seed)
        self.arrived.append(anyio.Event())
        if len(self.arrived) == 2:
            for event in self.arrived:
                event.set()
        with anyio.fail_after(5):
            await self.arrived[0].wait()


class FailingResource(Dice):
    """A resource that fails if its label says so, shortly after the others start."""

    async def _setup(self, config: Mapping[str, Any]) -> None:
        await super()._setup(config)
        if self.label == "setup":
            raise RuntimeError("no dice today")

    async def fork(self) -> ForkableResource:
        await anyio.sleep(0.01)
        raise RuntimeError("no second dice")

    async def close(self) -> None:
        if self.label == "close":
            raise RuntimeError("the lid is stuck")

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        raise TimeoutError("rolled off the table")


DICE, OUTSIDE, FAILS = f"{HERE}:Dice", f"{HERE}:Uncopyable", f"{HERE}:FailingResource"


async def made(*parts: Mapping[str, Any], seed: int = 0, **over: Any) -> CompositeResource:
    resource = CompositeResource()
    await resource.setup({"resources": list(parts), **over})
    await resource.reset(seed)
    return resource


def names(specs: list[dict[str, Any]]) -> list[str]:
    return [spec["function"]["name"] for spec in specs]


def dice(name: str, kind: str = DICE, **config: Any) -> dict[str, Any]:
    return {"type": kind, "name": name, "config": config}


class TestConfiguration:
    def test_weakest_part_decides_the_fork_kind(self) -> None:
        kinds = {
            "native": [DB, FILES],
            "replay": [DB, dice("dice")],
            "none": [dice("dice"), {"type": OUTSIDE}, DB],
        }
        for kind, parts in kinds.items():
            assert CompositeResource.fork_kind_for({"resources": parts}) == kind
        assert CompositeResource.is_deterministic_for({"resources": [DB, FILES]})
        assert not CompositeResource.is_deterministic_for({"resources": [DB, {"type": OUTSIDE}]})

    async def test_key_with_the_name_of_a_part_overrides_its_configuration(self) -> None:
        resource = await made(DB, FILES, db={"read_only": True}, filesystem={"files": {"b.txt": "two"}})
        with pytest.raises(ToolError, match="read"):
            await resource.step("execute_sql", {"query": "DELETE FROM t"})
        assert (await resource.step("read_file", {"path": "b.txt"})).observation == "two"
        assert (await resource.step("read_file", {"path": "a.txt"})).observation == "one"
        await resource.close()

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "composite resource: resources: missing"),
            ({"resources": []}, "at least 1 item"),
            ({"resources": [DB, DB]}, "two resources are named 'db'; rename one of them"),
            ({"resources": [{"type": "sqlite", "nam": "x"}]}, "resources.0.nam: unknown key; did you mean 'name'"),
            ({"resources": [{"type": "sqlite", "name": "a b"}]}, "the name 'a b' is invalid"),
            ({"resources": [{"type": "sqlite", "name": "resources"}]}, "the name 'resources' is invalid"),
            ({"resources": [{"type": "sqlit"}]}, "part 'sqlit': unknown resource 'sqlit'; did you mean 'sqlite'"),
            ({"resources": [FILES], "filesytem": {}}, "unknown part 'filesytem'; did you mean 'filesystem'"),
            ({"resources": [DB], "db": 3}, "db: must be a mapping, got 3"),
            (
                {"resources": [DB], "db": {"max_row": 3}},
                "part 'db': sqlite resource: max_row: unknown key; did you mean",
            ),
            (
                {"resources": [{"type": "composite", "config": {"resources": [DB]}}]},
                "a composite cannot contain another composite",
            ),
        ],
    )
    async def test_error_names_its_part(self, config: dict[str, Any], message: str) -> None:
        resource = CompositeResource()
        with pytest.raises(ConfigError) as caught:
            await resource.setup(config)
        assert message in str(caught.value)
        await resource.close()


class TestTools:
    async def test_unique_tool_names_are_unchanged(self) -> None:
        resource = await made(DB, FILES)
        assert {"execute_sql", "list_tables", "list_directory"} <= set(names(await resource.get_tools_spec()))
        await resource.close()

    async def test_conflicting_tool_names_get_the_part_as_prefix(self) -> None:
        resource = await made(dice("red"), dice("blue"), DB)
        offered = names(await resource.get_tools_spec())
        assert offered[:3] == ["red_roll", "blue_roll", "execute_sql"]
        await resource.step("blue_roll", {})
        assert [resource.parts[name].rolled for name in ("red", "blue")] == [0, 1]
        with pytest.raises(ToolError, match=r"unknown tool 'roll'; did you mean '(red|blue)_roll'"):
            await resource.step("roll", {})
        await resource.close()

    async def test_step_works_without_listing_the_tools(self) -> None:
        resource = await made(dice("red"), dice("blue"))
        assert (await resource.step("red_roll", {})).reward is not None
        await resource.close()

    def test_prefixed_tool_name_stays_prefixed(self) -> None:
        tools = ToolNames()
        go, look = tool_spec("go", "Go."), tool_spec("look", "Look.")
        assert names(tools.offer({"a": [go], "b": [look]})) == ["go", "look"]
        assert names(tools.offer({"a": [go], "b": [look, go]})) == ["a_go", "look", "b_go"]
        assert names(tools.offer({"a": [go], "b": [look]})) == ["a_go", "look"]
        assert tools.tools.get("a_go") == ("a", "go") and tools.tools.get("b_go") is None

    def test_prefixed_names_are_unique_and_not_too_long(self) -> None:
        tools = ToolNames()
        long = "x" * 64
        offered = tools.offer(
            {
                "a": [tool_spec("b_go", "."), tool_spec("go", "."), tool_spec(long, ".")],
                "a_b": [tool_spec("go", "."), tool_spec("b_go", "."), tool_spec("a_go", "."), tool_spec(long, ".")],
            }
        )
        found = names(offered)
        assert len(set(found)) == len(found) == 7 and all(len(name) <= 64 for name in found)
        assert [tools.tools.get(name) for name in found] == [
            *(("a", tool) for tool in ("b_go", "go", long)),
            *(("a_b", tool) for tool in ("go", "b_go", "a_go", long)),
        ]

    def test_tool_names_refer_to_the_latest_offer(self) -> None:
        tools = ToolNames()
        spec = tool_spec("go", "Go.")
        tools.offer({"a": [spec], "b": []})
        kept = copy(tools)
        tools.offer({"a": [], "b": [spec]})
        assert (kept.tools.get("go"), tools.tools.get("go")) == (("a", "go"), ("b", "go"))
        assert spec["function"]["name"] == "go"

    async def test_end_of_one_part_ends_the_episode_with_its_own_reward(self) -> None:
        resource = await made(dice("red"), DB)
        outcomes = [await resource.step("roll", {}) for _ in range(40)]
        assert any(outcome.terminated for outcome in outcomes)
        assert [outcome.reward for outcome in outcomes] == [float(outcome.observation) for outcome in outcomes]
        await resource.close()


class TestCombinedState:
    async def test_parts_are_reset_concurrently(self) -> None:
        meets = f"{HERE}:ConcurrentReset"
        await made({"type": meets, "name": "a"}, {"type": meets, "name": "b"})
        assert len(ConcurrentReset.arrived) == 2

    async def test_parts_of_one_type_get_different_reproducible_seeds(self) -> None:
        resource = await made(dice("red"), dice("blue"), seed=5)
        seeds = {name: part.seed for name, part in resource.parts.items()}
        assert seeds["red"] != seeds["blue"]
        again = await made(dice("blue"), dice("red"), seed=5)
        assert {name: part.seed for name, part in again.parts.items()} == seeds
        await resource.reseed_noise(9)
        noise = {part.noise for part in resource.parts.values()}
        assert len(noise) == 2 and not noise & set(seeds.values())
        await again.reset()
        assert again.parts["red"].seed != again.parts["blue"].seed

    async def test_state_key_combines_the_keys_of_the_parts(self) -> None:
        one, two = [await made(dice("red"), dice("blue"), seed=1) for _ in range(2)]
        start = await one.state_key()
        await one.step("red_roll", {})
        await two.step("blue_roll", {})
        keys = {start, await one.state_key(), await two.state_key()}
        assert len(keys) == 3
        await one.step("blue_roll", {})
        await two.step("red_roll", {})
        assert await one.state_key() == await two.state_key()

    async def test_only_parts_with_an_observation_are_shown(self) -> None:
        silent = {"type": "filesystem", "name": "desk"}
        resource = await made(FILES, silent)
        assert await resource.get_observation() is None
        await resource.close()
        resource = await made(FILES, DB)
        assert (await resource.get_observation()).startswith("The schema of the SQLite database")
        await resource.close()
        resource = await made({**DB, "name": "old"}, FILES, {**DB, "name": "new"})
        first, second = (await resource.get_observation()).split("\n\n## new\n\n")
        assert first.startswith("## old\n\nThe schema") and second.startswith("The schema")
        await resource.close()

    async def test_final_state_contains_the_state_of_each_part(self) -> None:
        resource = await made(DB, FILES, dice("dice"), {"type": "python_state", "config": {"initial_state": {"k": 1}}})
        await resource.step("execute_sql", {"query": "INSERT INTO t VALUES (8)"})
        snapshot = await resource.final_state()
        assert snapshot.kind == "composite" and snapshot == await resource.final_state()
        with open_snapshot(snapshot) as state:
            assert set(state) == {"db", "filesystem", "python_state"}  # dice show none
            assert state["db"].query("SELECT sum(a) FROM t") == [(15,)]
            assert dict(state["filesystem"]) == {"a.txt": "one"} and state["python_state"] == {"k": 1}
            with pytest.raises(KeyError, match="it has no final state; did you mean 'filesystem'"):
                state["filesytem"]
            with pytest.raises(TypeError):
                state["db"] = None
        with pytest.raises(EnvironmentFailure, match="closed"):
            state["db"].tables()
        await resource.close()
        assert await (await made(dice("dice"))).final_state() is None

    async def test_admissible_actions_use_the_offered_tool_names(self) -> None:
        resource = await made(dice("red"), DB, dice("blue"))
        assert [action["name"] for action in await resource.admissible_actions()] == ["red_roll", "blue_roll"]
        await resource.close()
        resource = await made(DB, FILES)
        assert await resource.admissible_actions() is None
        await resource.close()

    async def test_first_part_with_an_expert_acts_first(self) -> None:
        asked = {"expert_queries": ["DELETE FROM t"]}
        resource = await made(FILES, {**DB, "name": "one"}, {**DB, "name": "two"}, one=asked, two=asked)
        first = await resource.expert_action()
        assert (first["type"], first["name"]) == ("tool_call", "one_execute_sql")
        await resource.step(first["name"], first["arguments"])
        second = await resource.expert_action()
        assert second["name"] == "two_execute_sql"
        await resource.step(second["name"], second["arguments"])
        assert await resource.expert_action() is None
        await resource.close()


class TestForks:
    @pytest.mark.parametrize(
        "parts",
        [
            [DB, {"type": "filesystem", "name": "desk"}],
            [{"type": "python_state", "name": "a"}, {"type": "python_state", "name": "b"}],
            [{"type": "python_state"}, dice("red"), dice("blue")],
            [dice("only")],
        ],
        ids=["native", "same type", "native and replay", "single"],
    )
    async def test_composite_passes_the_checker(self, parts: list[dict[str, Any]]) -> None:
        findings = await check_resource(CompositeResource, {"resources": parts}, steps=6)
        assert [finding.message for finding in findings if finding.level == "error"] == []

    async def test_part_that_fails_to_fork_is_named_and_other_forks_are_closed(self) -> None:
        closed: list[str] = []

        class Watched(Dice):
            async def close(self) -> None:
                closed.append(self.label)

        resource = CompositeResource()
        await resource.setup({"resources": [dice("ok"), dice("bad", FAILS)]})
        await resource.reset(1)
        resource._parts["ok"].__class__ = Watched
        with pytest.raises(EnvironmentFailure, match=r"part 'bad': RuntimeError: no second dice"):
            await resource.fork()
        assert closed == ["dice"]

    async def test_checkpoint_needs_the_support_of_every_part(self) -> None:
        resource = await made(DB, {"type": OUTSIDE})
        for call in (resource.checkpoint, resource.fork):
            with pytest.raises(NotImplementedError, match="part 'Uncopyable': this resource cannot be copied"):
                await call()
        await resource.close()

    async def test_cancelled_fork_leaves_no_resource_open(self) -> None:
        resource = await made(
            {"type": f"{HERE}:SlowFork", "name": "quick"}, {"type": f"{HERE}:SlowFork", "name": "slow"}
        )
        resource.parts["slow"].seconds = 10
        with anyio.move_on_after(0.05) as scope:
            await resource.fork()
        assert scope.cancelled_caught
        assert SlowFork.open_resources == set(resource.parts.values())
        await resource.close()
        assert not SlowFork.open_resources

    async def test_composite_object_forks_as_its_parts(self) -> None:
        resource = await made(DB, dice("dice"))
        task = TaskDefinitionModel(name="t", initial_user_prompt="x")
        worker = RLRolloutWorker(task, ScriptedPolicy([{"type": "terminate"}]), environment=resource)
        assert (await worker.collect_episode()).custom_data["failure"] is None
        await resource.close()


class TestFailures:
    async def test_failed_setup_leaves_nothing_open_after_close(self) -> None:
        resource = CompositeResource()
        parts = [dice("ok"), dice("bad", FAILS, label="setup")]
        with pytest.raises(EnvironmentFailure, match="part 'bad': RuntimeError: no dice today") as caught:
            await resource.setup({"resources": parts})
        assert isinstance(caught.value.__cause__, RuntimeError)
        ok = resource.parts["ok"]
        await resource.close()
        assert ok.closed

    async def test_every_part_is_closed_and_failures_are_raised(self) -> None:
        resource = await made(dice("bad", FAILS, label="close"), dice("ok"))
        ok = resource.parts["ok"]
        with pytest.raises(EnvironmentFailure, match="part 'bad': close: RuntimeError: the lid is stuck"):
            await resource.close()
        assert ok.closed
        await resource.close()
        with pytest.raises(EnvironmentFailure, match="closed, or was not set up"):
            await resource.state_key()

    async def test_step_error_names_the_part_and_keeps_its_class(self) -> None:
        resource = await made(DB, dice("bad", FAILS))
        with pytest.raises(DeadlineError, match="part 'bad': timed out: rolled off the table"):
            await resource.step("roll", {})
        with pytest.raises(ToolError, match=r"^execute_sql: query: missing"):
            await resource.step("execute_sql", {})
        await resource.close()


class TestTaskTools:
    @staticmethod
    async def received(function: Any, resource: ForkableResource) -> Any:
        registry = ToolRegistry("own")
        registry.tool(function)
        return await registry.get_tool(function.__name__).call({}, resource)

    async def test_parameter_receives_the_part_of_its_class(self) -> None:
        async def both(base: SqliteResource, disk: FilesystemResource) -> tuple[Any, Any]:
            return base, disk

        resource = await made(DB, FILES)
        assert await self.received(both, resource) == (resource.parts["db"], resource.parts["filesystem"])
        await resource.close()

    async def test_parameter_name_selects_among_several_parts(self) -> None:
        async def named(blue: Dice) -> Any:
            return blue

        async def any_of_them(red: ForkableResource) -> Any:
            return red

        async def all_of_them(resource: ForkableResource, red: CompositeResource) -> Any:
            return resource, red

        resource = await made(dice("red"), dice("blue"))
        assert await self.received(named, resource) is resource.parts["blue"]
        assert await self.received(any_of_them, resource) is resource.parts["red"]
        assert await self.received(all_of_them, resource) == (resource, resource)

    async def test_parameter_that_matches_no_part_or_several_is_rejected(self) -> None:
        async def several(green: Dice) -> Any:
            return green

        async def none(store: SqliteResource) -> Any:
            return store

        resource = await made(dice("red"), dice("blue"))
        with pytest.raises(
            ConfigError, match=r"annotated with Dice, but multiple resources are of that class.*red \(Dice\), blue"
        ):
            await self.received(several, resource)
        with pytest.raises(ConfigError, match="annotated with SqliteResource, but no resource is of that class"):
            await self.received(none, resource)


async def test_group_episodes_start_from_forks_and_use_all_parts() -> None:
    registry = ToolRegistry("export")

    @registry.tool
    async def export(name: str, db: SqliteResource, files: FilesystemResource) -> str:
        rows = (await db.step("execute_sql", {"query": "SELECT a FROM t"})).observation["rows"]
        return str((await files.step("write_file", {"path": name, "content": str(rows)})).observation)

    task = TaskDefinitionModel(
        name="t",
        initial_user_prompt="x",
        resources=[DB, FILES, dice("red"), dice("blue")],
        tools=["execute_sql", "export", "blue_roll"],
    )
    actions = [
        {"type": "tool_call", "name": "execute_sql", "arguments": {"query": "INSERT INTO t VALUES (1)"}},
        {"type": "tool_call", "name": "export", "arguments": {"name": "rows.txt"}},
        {"type": "tool_call", "name": "blue_roll", "arguments": {}},
    ]
    worker = RLRolloutWorker(task, ScriptedPolicy(actions), tools=registry)
    async with worker.group(Sample("t")) as group:
        first, second = [await worker.collect_episode(group, index) for index in range(2)]
    for episode in (first, second):
        facts = episode.custom_data
        assert (facts["failure"], facts["start"]["fork"], facts["start"]["verified"]) == (None, "replay", True)
        with open_snapshot(StateSnapshot(**facts["final_state"])) as state:
            assert dict(state["filesystem"]) == {"a.txt": "one", "rows.txt": "[[7], [1]]"}
    keys = [[episode.get_infos(step)["state_key"] for step in range(3)] for episode in (first, second)]
    assert keys[0] == keys[1] and len(set(keys[0])) == 3
