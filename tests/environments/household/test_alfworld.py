"""Test the household resource: action forms, observations, forks, and the comparison with the real engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import alfworld, open_snapshot, resource_class
from reward_kit.environments import household_problems as generator
from reward_kit.environments.alfworld import AlfworldResource, RealAlfworldResource
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.household_engine import HouseholdEngine, HouseholdView, shortest_plan
from reward_kit.environments.household_problems import Problem, TaskType
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from tests.environments.household.small import household, thing

SMALL = household(
    TaskType.CLEAN,
    "cabinet",
    ["cabinet 1", "countertop 1", "sinkbasin 1"],
    [thing("knife 1", "countertop 1"), thing("mug 1", "countertop 1", "cleanable")],
)


async def made(kind: type[ForkableResource] = AlfworldResource, seed: int = 0, **config: Any) -> Any:
    resource = kind()
    await resource.setup(config)
    await resource.reset(seed)
    return resource


async def small(kind: type[ForkableResource] = AlfworldResource, **config: Any) -> Any:
    return await made(kind, problem=SMALL.to_json(), **config)


async def act(resource: ForkableResource, *commands: str) -> list[Any]:
    return [await resource.step("act", {"command": command}) for command in commands]


PLAN = (
    "go to countertop 1",
    "take mug 1 from countertop 1",
    "go to sinkbasin 1",
    "clean mug 1 with sinkbasin 1",
    "go to cabinet 1",
    "open cabinet 1",
    "move mug 1 to cabinet 1",
)


@pytest.mark.parametrize("form", ["text", "choice", "tools"])
@pytest.mark.parametrize("task_type", TaskType)
async def test_resource_passes_the_checker(form: str, task_type: TaskType) -> None:
    config = {"action_form": form, "task_types": [task_type.value], "split": "development"}
    assert await check_resource(AlfworldResource, config, steps=30) == []


async def test_command_limit_passes_the_checker() -> None:
    assert await check_resource(AlfworldResource, {"max_commands": 7}) == []


def test_both_resources_are_built_in() -> None:
    assert resource_class("alfworld") is AlfworldResource
    assert resource_class("alfworld_real") is RealAlfworldResource
    assert (AlfworldResource.fork_kind, RealAlfworldResource.fork_kind) == ("native", "replay")


@pytest.mark.parametrize("form", ["text", "choice", "tools"])
@pytest.mark.parametrize("task_type", TaskType)
async def test_expert_succeeds_in_every_action_form(form: str, task_type: TaskType) -> None:
    resource = await made(split="held_out", task_types=[task_type.value], action_form=form)
    outcomes = []
    while action := await resource.expert_action():
        outcomes.append(await resource.step(action["name"], action["arguments"]))
    assert [outcome.reward for outcome in outcomes] == [0.0] * (len(outcomes) - 1) + [1.0]
    assert outcomes[-1].terminated and not outcomes[-1].truncated and outcomes[-1].info["won"]
    assert await resource.admissible_actions() == []
    with pytest.raises(ToolError, match="over"):
        await (resource.step("look", {}) if form == "tools" else act(resource, "look"))


async def test_observation_is_the_introduction_followed_by_the_last_answer() -> None:
    resource = await small()
    first = await resource.get_observation()
    assert first.startswith("-= Welcome") and first.endswith("Your task is to: put a clean mug in cabinet.")
    await act(resource, "go to cabinet 1")
    assert await resource.get_observation() == f"{first}\n\nYou arrive at cabinet 1. The cabinet 1 is closed."


async def test_milestones_are_reported_once() -> None:
    resource = await small()
    outcomes = await act(resource, *PLAN)
    reached = [outcome.info["milestones"] for outcome in outcomes]
    assert reached == [["found"], ["taken"], [], ["transformed"], [], [], ["placed"]]
    state = json.loads((await resource.final_state()).payload)
    assert state["milestones"] == {"found": 0, "taken": 1, "transformed": 3, "placed": 6}


async def test_lamp_milestones_have_no_placement() -> None:
    things = [thing("desklamp 1", "shelf 1", "toggleable", fixed=True), thing("mug 1", "shelf 1")]
    problem = household(TaskType.LOOK_IN_LIGHT, "desklamp", ["shelf 1"], things)
    resource = await made(problem=problem.to_json())
    outcomes = await act(resource, "go to shelf 1", "use desklamp 1", "take mug 1 from shelf 1")
    assert [outcome.info["milestones"] for outcome in outcomes] == [["found"], ["transformed"], ["taken"]]
    assert outcomes[-1].terminated


async def test_dirty_object_at_its_destination_is_not_placed() -> None:
    resource = await small()
    outcomes = await act(resource, *PLAN[:2], *PLAN[4:])
    assert [outcome.info["milestones"] for outcome in outcomes][-1] == []


async def test_inadmissible_command_is_marked_invalid() -> None:
    for form, call in (
        ("text", ("act", {"command": "fly"})),
        ("choice", ("act", {"command": "fly"})),
        ("tools", ("open", {"receptacle": "cabinet 1"})),
    ):
        resource = await small(action_form=form)
        key = await resource.state_key()
        outcome = await resource.step(*call)
        assert (outcome.observation, outcome.info["is_action_valid"]) == ("Nothing happens.", False)
        assert await resource.state_key() == key


@pytest.mark.parametrize(
    ("form", "call", "message"),
    [
        ("text", ("open", {}), "unknown tool 'open'"),
        ("tools", ("act", {"command": "look"}), "unknown tool 'act'"),
        ("tools", ("opne", {"receptacle": "cabinet 1"}), "did you mean 'open'"),
        ("text", ("act", {}), "command: missing"),
        ("text", ("act", {"command": 3}), "command: must be a string"),
        ("text", ("act", {"command": "look", "why": "so"}), "unknown argument 'why'"),
    ],
)
async def test_call_that_does_not_match_its_tool_is_rejected(form: str, call: Any, message: str) -> None:
    resource = await small(action_form=form)
    with pytest.raises(ToolError, match=message):
        await resource.step(*call)


async def test_choice_form_offers_the_admissible_commands() -> None:
    resource = await small(action_form="choice")
    for command in PLAN[:3]:
        (spec,) = await resource.get_tools_spec()
        offered = spec["function"]["parameters"]["properties"]["command"]["enum"]
        assert offered == [entry["arguments"]["command"] for entry in await resource.admissible_actions()]
        assert command in offered
        await act(resource, command)


async def test_every_command_but_help_is_a_tool() -> None:
    resource = await small(action_form="tools")
    plain = await small()
    names = {spec["function"]["name"] for spec in await resource.get_tools_spec()}
    assert len(names) == 13
    for command in (*PLAN[:3], "examine mug 1", "inventory"):
        told = [(entry["name"], entry["arguments"]) for entry in await resource.admissible_actions()]
        assert len(told) == len(await plain.admissible_actions()) - 1 and {name for name, _ in told} <= names
        expert = await resource.expert_action()
        assert (expert["name"], expert["arguments"]) in told
        (outcome,) = await act(plain, command)
        verb, rest = command.split(" ", 1) if " " in command else (command, "")
        call = {"go": "go_to"}.get(verb, verb)
        (arguments,) = [
            arguments for name, arguments in told if name == call and all(value in rest for value in arguments.values())
        ]
        assert (await resource.step(call, arguments)).observation == outcome.observation


async def test_seed_selects_the_problem_unless_an_index_is_given() -> None:
    texts = {seed: await (await made(seed=seed)).get_observation() for seed in range(6)}
    assert len(set(texts.values())) > 4
    assert await (await made(seed=3)).get_observation() == texts[3]
    named = {await (await made(seed=seed, index=5)).get_observation() for seed in range(3)}
    assert len(named) == 1
    assert await (await made(index=5, seed=1)).state_key() != await (await made(index=11, seed=1)).state_key()


async def test_index_counts_within_the_task_types() -> None:
    for index, wanted in enumerate([TaskType.HEAT, TaskType.COOL, TaskType.HEAT]):
        resource = await made(
            index=index, task_types=["pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep"]
        )
        assert json.loads((await resource.final_state()).payload)["task_type"] == wanted.value


async def test_final_state_lists_every_location() -> None:
    resource = await small()
    await act(resource, *PLAN)
    state = open_snapshot(await resource.final_state())
    assert state["won"] and state["problem"] == "small" and state["commands"] == 7
    assert state["agent"] == {"at": "cabinet 1", "holding": ""} and state["open"] == ["cabinet 1"]
    assert state["things"] == {"knife 1": {"at": "countertop 1"}, "mug 1": {"at": "cabinet 1", "clean": True}}


async def test_command_limit_truncates_and_is_not_in_the_state_key() -> None:
    resource, free = await small(max_commands=2), await small()
    one, two = await act(resource, "look", "look")
    assert (one.truncated, two.truncated, two.terminated) == (False, True, False)
    assert await resource.state_key() == await free.state_key()
    assert await resource.expert_action() is None
    with pytest.raises(ToolError, match="over"):
        await act(resource, "look")


async def test_checkpoint_restores_state_milestones_and_count() -> None:
    resource = await small()
    await act(resource, *PLAN[:2])
    saved, before = await resource.checkpoint(), await resource.final_state()
    for _ in range(2):
        await act(resource, *PLAN[2:])
        await resource.restore(saved)
        assert await resource.final_state() == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"game_file": "game.tw-pddl"}, "alfworld_real"),
        ({"split": "held-out"}, "split"),
        ({"task_types": []}, "task_types"),
        ({"index": -1}, "index"),
        ({"index": 1, "problem": SMALL.to_json()}, "index and problem cannot be used together"),
        ({"problem": {**SMALL.to_json(), "things": [{"name": "mug 1", "type": "mug", "at": "shelf 9"}]}}, "shelf 9"),
        ({"problem": {**SMALL.to_json(), "things": [{"name": "mug", "type": "mug", "at": "cabinet 1"}]}}, "number"),
        ({"action_from": "text"}, "did you mean 'action_form'"),
    ],
)
async def test_invalid_configuration_is_reported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await AlfworldResource().setup(config)


class NativeWorker:
    """The native engine with the interface of TextWorld's worker."""

    changed: str | None = None

    def __init__(self) -> None:
        self.closed = False

    async def start(self) -> None:
        return

    async def load(self, source: Problem | Path) -> HouseholdView:
        self.engine = HouseholdEngine(source if isinstance(source, Problem) else SMALL)
        return self.engine.reset()

    async def step(self, command: str) -> HouseholdView:
        view = self.engine.step(command)
        return view._replace(observation="Something else.") if command == self.changed else view

    async def expert(self) -> list[str]:
        return shortest_plan(self.engine) or []

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[NativeWorker]:
    monkeypatch.setattr(alfworld, "RealEngine", NativeWorker)
    monkeypatch.setattr(NativeWorker, "changed", None)
    return NativeWorker


async def test_real_resource_passes_the_checker(stand_in: type[NativeWorker]) -> None:
    assert await check_resource(RealAlfworldResource, {"split": "development"}) == []


async def test_real_resource_is_forked_by_replaying_commands(stand_in: type[NativeWorker]) -> None:
    resource = await small(RealAlfworldResource)
    await act(resource, *PLAN[:4])
    twin = await resource.fork()
    outcomes = await act(twin, *PLAN[4:])
    assert outcomes[-1].terminated and not json.loads((await resource.final_state()).payload)["won"]
    await twin.close()
    await resource.close()


async def test_engine_difference_ends_the_episode(
    stand_in: type[NativeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "changed", PLAN[1])
    resource = await small(RealAlfworldResource)
    with pytest.raises(EnvironmentFailure, match="differ in observation: 'Something else"):
        await act(resource, *PLAN[:2])


async def test_published_game_is_played_by_its_texts(
    stand_in: type[NativeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "valid_unseen" / "trial" / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    config = {"game_file": "valid_unseen/trial/game.tw-pddl", "task_folder": "/nowhere"}
    assert await check_resource(RealAlfworldResource, config) == []
    resource = await made(RealAlfworldResource, **config)
    for command in PLAN:
        assert (await resource.expert_action())["arguments"] == {"command": command}
        (outcome,) = await act(resource, command)
        assert "milestones" not in outcome.info
    assert outcome.terminated
    monkeypatch.delenv("ALFWORLD_DATA")
    with pytest.raises(ConfigError, match="outside the task's directory"):
        await made(RealAlfworldResource, game_file="../game.tw-pddl", task_folder=str(tmp_path / "task"))


async def test_published_games_are_selected_by_split_type_and_index(
    stand_in: type[NativeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ConfigError, match="ALFWORLD_DATA has no valid_unseen game"):
        await made(RealAlfworldResource, published=True, split="held_out")
    for name in ("train/look_at_obj_in_light-a", "valid_unseen/look_at_obj_in_light-b", "valid_unseen/pick_heat-x"):
        (tmp_path / name / "trial").mkdir(parents=True)
        (tmp_path / name / "trial" / "game.tw-pddl").write_text("{}")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    config = {"published": True, "split": "held_out", "task_types": ["look_at_obj_in_light"]}
    for index in (0, 1):
        resource = await made(RealAlfworldResource, **config, index=index)
        assert json.loads((await resource.final_state()).payload)["game_file"].startswith("look_at_obj_in_light-b")
        await resource.close()
    with pytest.raises(ConfigError, match="published and game_file cannot be used together"):
        await made(RealAlfworldResource, **config, game_file="x")
    with pytest.raises(ConfigError, match="use the resource alfworld_real"):
        await made(AlfworldResource, **config)


async def test_state_keys_of_published_games_agree_with_the_native_engine(
    stand_in: type[NativeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "game.tw-pddl").write_text("{}")
    pairs = set()
    for seed in range(20):
        rng = random.Random(seed)
        ours = await small()
        theirs = await made(RealAlfworldResource, game_file=str(tmp_path / "game.tw-pddl"))
        for _ in range(40):
            command = rng.choice(await ours.admissible_actions())["arguments"]["command"]
            (outcome,) = await act(ours, command)
            assert (await act(theirs, command))[0].observation == outcome.observation
            pairs.add((await ours.state_key(), await theirs.state_key()))
            if outcome.terminated:
                break
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) > 40


async def test_expert_has_no_action_after_leaving_its_plan(stand_in: type[NativeWorker], tmp_path: Path) -> None:
    (tmp_path / "game.tw-pddl").write_text("{}")
    resource = await made(RealAlfworldResource, game_file=str(tmp_path / "game.tw-pddl"))
    await act(resource, "nonsense", PLAN[0])
    assert await resource.expert_action() is not None
    await act(resource, "go to cabinet 1")
    assert await resource.expert_action() is None


async def test_random_commands_rarely_succeed() -> None:
    wins = 0
    for index in range(120):
        engine, rng = HouseholdEngine(generator.generate_problem("development", index)), random.Random(index)
        engine.reset()
        wins += any(engine.step(rng.choice(engine.admissible())).won for _ in range(30))
    assert wins < 12
