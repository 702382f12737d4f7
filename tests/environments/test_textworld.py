"""Test TextWorld games: configuration, commands, play and forks."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import resource_class
from reward_kit.environments import textworld as module
from reward_kit.environments.engine_process import EngineProcess, worker_command
from reward_kit.environments.textworld import OPTIONS, TextworldResource, command_line
from reward_kit.environments.textworld_worker import answer_text
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from reward_kit.processes import shared_folder

INSTALLED = find_spec("textworld") is not None
needs_textworld = pytest.mark.skipif(not INSTALLED, reason="needs the extra text-games")
COOKING = {"recipe": 2, "take": 2, "go": 6, "open": True, "cook": True, "cut": True}


OPENED: list[TextworldResource] = []


@pytest.fixture(autouse=True)
async def close_opened_resources() -> AsyncIterator[None]:
    yield
    while OPENED:
        await OPENED.pop().close()


async def made(seed: int = 0, **config: Any) -> TextworldResource:
    OPENED.append(TextworldResource())
    resource = OPENED[-1]
    await resource.setup(config)
    await resource.reset(seed)
    return resource


async def act(resource: Any, *commands: str) -> Any:
    return [await resource.step("act", {"command": command}) for command in commands][-1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def play_the_expert(resource: Any, most: int = 100) -> tuple[float, Any]:
    total, outcome = 0.0, None
    for _ in range(most):
        action = await resource.expert_action()
        if action is None:
            break
        outcome = await resource.step(action["name"], action["arguments"])
        total += outcome.reward
    return total, outcome


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "set either a game file"),
        ({"maker": "simple", "game": "a.z8"}, "set either a game file"),
        ({"game": "a.z8", "options": {"level": 1}}, "options and game_seed apply only to a maker"),
        ({"game": "a.z8", "game_seed": 1}, "options and game_seed apply only to a maker"),
        ({"maker": "coking"}, "maker: .*'cooking'"),
        ({"maker": "simple", "max_move": 3}, "did you mean 'max_moves'"),
        ({"maker": "simple", "show": ["facts"]}, r"show\.0"),
        ({"maker": "cooking", "options": {"recepe": 2}}, "options of cooking: recepe: .*did you mean 'recipe'"),
        ({"maker": "cooking", "options": {"recipe": 6}}, "recipe: must be 5 or less"),
        ({"maker": "cooking", "options": {"cut": "no"}}, "cut: expected true or false"),
        ({"maker": "cooking", "options": {"take": 2}}, "more than the recipe's 1"),
        ({"maker": "cooking", "options": {"recipe_seed": 2}}, "only if there are ingredients to find"),
        ({"maker": "coin_collector"}, "options of coin_collector: level: missing"),
        ({"maker": "coin_collector", "options": {"level": 151}}, "102 rooms, .* at most 100"),
        ({"maker": "treasure_hunter", "options": {"level": 31}}, "must be 30 or less"),
        ({"game": "game.ulx"}, "cannot play Glulx games"),
        ({"game": "game.txt"}, "'game.txt' is not a game file"),
        ({"game": "none.z8"}, "does not exist"),
        ({"game": "../none.z8", "task_folder": "/tmp"}, "outside the task's directory"),
    ],
)
async def test_invalid_configuration_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await TextworldResource().setup(config)


@pytest.mark.skipif(INSTALLED, reason="textworld is installed")
async def test_missing_textworld_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"pip install '/path/to/reward-kit\[text-games\]'"):
        await TextworldResource().setup({"maker": "simple"})


@pytest.mark.parametrize(
    "text",
    ["quit", "QUIT now", "look. restart", "take coin then undo", "look;save", "superbriefly", "transcription", "o",
     "tw-print version", "tw", "print_state", "enable print state option", "oops save"],
)  # fmt: skip
def test_interpreter_commands_are_rejected(text: str) -> None:
    with pytest.raises(ToolError, match="a command for the interpreter"):
        command_line(text)


@pytest.mark.parametrize(
    ("text", "command"),
    [("  go \n north ", "go north"), ("", ""), ("open oven", "open oven"), ("take all. look", "take all. look"),
     ("put lettuce on shelf", "put lettuce on shelf"), ("examine short bread", "examine short bread")],
)  # fmt: skip
def test_command_is_normalized_to_one_line(text: str, command: str) -> None:
    assert command_line(text) == command


@pytest.mark.parametrize("text", ["a" * 181, "é", "look\x00", "look\x1b", "\ud800"])
def test_unreadable_command_is_rejected(text: str) -> None:
    with pytest.raises(ToolError, match=r"181|ASCII"):
        command_line(text)


def test_answer_text_keeps_only_the_game_output() -> None:
    logo, space = "\n\n    ____  $$\\\n   |    \\ $$\n\n", 60 * " "
    start = f"{logo}Cook!\n\n\n\n-= Kitchen =-\nA kitchen.\n\n>{space}-= Kitchen =-0/1"
    assert answer_text(start) == "Cook!\n\n-= Kitchen =-\nA kitchen."
    end = f"You eat.\n\n\n{space}*** The End ***\n\nWould you like to RESTART, QUIT?\n>{space}-= K =-3/4"
    assert answer_text(end) == "You eat.\n\n*** The End ***"
    question = answer_text(f"Which do you mean, the red or the green?\n\n>{space}-= Kitchen =-0/8")
    assert question.endswith("?")
    assert answer_text("West of House\n\n>") == "West of House"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace TextWorld's worker by a small real one, with its own folder for games."""
    monkeypatch.setattr(module, "shared_folder", lambda name: tmp_path)
    monkeypatch.setattr(module, "_WORKER", "tests.environments.tiny_textworld")
    monkeypatch.setattr(module, "find_spec", lambda name: name)


async def test_game_is_played_to_its_end(tiny: None) -> None:
    resource = await made(0, maker="simple", show=["inventory", "admissible_commands"])
    start = "Find the coin.\n\n-= Hall =-\n\nInventory: Nothing.\n\nCommands: go east"
    assert await resource.get_observation() == start
    outcome = await act(resource, "go east")
    assert outcome.observation == "-= Passage =-\n\nInventory: Nothing.\n\nCommands: go east, go west"
    assert (outcome.reward, outcome.terminated, outcome.info["is_action_valid"]) == (0.0, False, True)
    assert await resource.get_observation() == f"Find the coin.\n\n-= Hall =-\n\n{outcome.observation}"
    assert (await act(resource, "dance")).info["is_action_valid"] is False
    assert (await act(resource, "go east")).reward == 0.5
    assert await resource.admissible_actions() == [
        {"name": "act", "arguments": {"command": command}} for command in ("eat coin", "go west", "take coin")
    ]
    outcome = await act(resource, "take coin")
    assert (outcome.observation, outcome.reward, outcome.terminated) == ("You take coin.", 0.5, True)
    assert await resource.admissible_actions() == [] and await resource.expert_action() is None
    with pytest.raises(ToolError, match="the episode is over"):
        await act(resource, "look")
    final = json.loads((await resource.final_state()).payload)
    assert (final["won"], final["lost"], final["score"], final["max_score"]) == (True, False, 2, 2)
    assert final["commands"] == ["go east", "dance", "go east", "take coin"] and final["facts"] == ["at Treasury"]
    await resource.close()
    with pytest.raises(EnvironmentFailure, match="closed or never set up"):
        await resource.reset(0)


async def test_loss_and_move_limit_end_a_game(tiny: None) -> None:
    resource = await made(1, maker="simple", max_moves=2)
    assert not (await act(resource, "go east")).truncated
    outcome = await act(resource, "eat coin")
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (0.0, True, True)
    await resource.reset(1)
    outcome = await act(resource, "dance", "dance")
    assert (outcome.terminated, outcome.truncated) == (False, True)
    assert await resource.expert_action() is None
    await resource.close()


async def test_fork_replays_commands_without_making_the_game_again(tiny: None, tmp_path: Path) -> None:
    resource = await made(0, maker="simple", options={"goal": "none"}, game_seed=11)
    await act(resource, "go east")
    twin = await resource.fork()
    assert await twin.state_key() == await resource.state_key()
    assert (await play_the_expert(twin))[1].terminated
    assert (await act(resource, "go west")).observation == "-= Passage =-"
    assert (tmp_path / "made").read_text() == "simple 11\n"
    await twin.close()
    await resource.close()


async def test_state_key_includes_the_state_and_an_open_question(tiny: None) -> None:
    resource = await made(0, maker="simple")
    start = await resource.state_key()
    await act(resource, "dance", "go east", "go west")
    assert await resource.state_key() == start
    await act(resource, "go")
    assert await resource.state_key() != start
    other = await made(2, maker="simple")
    assert await other.state_key() != start
    for opened in (resource, other):
        await opened.close()


async def test_untracked_game_is_identified_by_its_history(tiny: None, tmp_path: Path) -> None:
    (tmp_path / "game.z8").write_text('{"room": 0}')
    resource = await made(0, game="game.z8", task_folder=str(tmp_path))
    start = await resource.state_key()
    outcome = await act(resource, "go east")
    assert (outcome.reward, "is_action_valid" in outcome.info) == (None, False)
    assert await resource.admissible_actions() is None and await resource.expert_action() is None
    await act(resource, "go west")
    assert await resource.state_key() != start
    await resource.reset(1)
    assert await resource.state_key() != start
    await resource.close()
    with pytest.raises(ConfigError, match=r"show: inventory not available for game.z8, because there is no game\.json"):
        await made(0, game="game.z8", task_folder=str(tmp_path), show=["inventory"])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("command", {"command": "look"}, "unknown tool 'command'"),
        ("act", {"comand": "look"}, "did you mean 'command'"),
        ("act", {}, "command: missing"),
        ("act", {"command": 1}, "must be a string"),
        ("act", {"command": "restart"}, "interpreter"),
    ],
)
async def test_invalid_call_is_rejected(name: str, arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        await TextworldResource().step(name, arguments)


@needs_textworld
def test_options_match_those_of_the_makers() -> None:
    challenges = import_module("textworld.challenges").CHALLENGES
    for maker, model in OPTIONS.items():
        if maker != "custom":
            parser = argparse.ArgumentParser(add_help=False)
            add_arguments: Callable[[argparse.ArgumentParser], Any] = challenges[f"tw-{maker}"][2]
            add_arguments(parser)
            assert {action.dest for action in parser._actions} == set(model.model_fields)


@needs_textworld
async def test_equal_seeds_make_equal_games_in_every_process(tmp_path: Path) -> None:
    games = []
    for number, seed in enumerate((3, 3, 4)):
        worker = EngineProcess("textworld", worker_command(module._WORKER), environment={"PYTHONHASHSEED": "0"})
        await worker.start()
        options = OPTIONS["cooking"].model_validate(COOKING).model_dump()
        folder = str(tmp_path / str(number))
        await worker.ask({"op": "make", "maker": "cooking", "options": options, "seed": seed, "folder": folder})
        await worker.close()
        games.append((tmp_path / str(number) / "game.json").read_bytes())
    assert games[0] == games[1] != games[2]


@needs_textworld
async def test_impossible_game_is_rejected_and_leaves_nothing(tmp_path: Path) -> None:
    worker = EngineProcess("textworld", worker_command(module._WORKER))
    await worker.start()
    request = {"op": "make", "maker": "coin_collector", "options": {"level": 400}, "seed": 5}
    with pytest.raises(ConfigError, match=r"cannot make a game with the options {'level': 400} and seed 5: ValueError"):
        await worker.ask({**request, "folder": str(tmp_path / "game")})
    assert names(tmp_path) == []
    (tmp_path / "game.z8").write_text("no game")
    (tmp_path / "game.json").write_text("{}")
    request = {"op": "load", "path": str(tmp_path / "game.z8"), "seed": 1}
    with pytest.raises(ConfigError, match=r"game\.z8 is not a game that can be played"):
        await worker.ask(request)
    (tmp_path / "game.json").unlink()
    # The interpreter ends the whole process.
    with pytest.raises(EnvironmentFailure, match=r"the worker died .*\n?.*Story file read error"):
        await worker.ask(request)
    await worker.close()


@needs_textworld
async def test_game_file_is_played_with_and_without_its_json(tmp_path: Path) -> None:
    maker = await made(2, maker="treasure_hunter", options={"level": 2})
    folder = shared_folder("textworld-games") / maker._game_id
    await maker.close()
    for name in ("game.z8", "game.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "bare.z8").write_bytes((folder / "game.z8").read_bytes())
    resource = await made(0, game="game.z8", task_folder=str(tmp_path))
    plan = []
    while action := await resource.expert_action():
        plan.append(action["arguments"]["command"])
        outcome = await act(resource, plan[-1])
    assert outcome.terminated and json.loads((await resource.final_state()).payload)["won"]
    await resource.close()
    bare = await made(0, game="bare.z8", task_folder=str(tmp_path))
    last = await act(bare, *plan)
    assert last.reward is None and "*** The End ***" in last.observation
    await bare.close()
    assert names(tmp_path) == ["bare.z8", "game.json", "game.z8"]


@needs_textworld
async def test_fork_of_a_real_game_is_independent() -> None:
    resource = await made(1, maker="cooking", options=COOKING)
    for _ in range(4):
        await act(resource, (await resource.expert_action())["arguments"]["command"])
    twin = await resource.fork()
    key = await resource.state_key()
    assert await twin.state_key() == key
    assert (await play_the_expert(twin))[1].info["won"]
    assert await resource.state_key() == key
    await twin.close()
    await resource.close()


@needs_textworld
@pytest.mark.campaign
@pytest.mark.parametrize(
    "config",
    [
        {"maker": "cooking", "options": COOKING, "show": ["inventory", "admissible_commands"]},
        {"maker": "coin_collector", "options": {"level": 5}},
        {"maker": "treasure_hunter", "options": {"level": 12}, "max_moves": 15},
        {"maker": "simple", "game_seed": 1},
        {"maker": "custom", "options": {"quest_length": 3}, "show": ["objective", "description"]},
    ],
)
async def test_resource_passes_the_checker(config: dict[str, Any]) -> None:
    assert await check_resource(resource_class("textworld"), config) == []


@needs_textworld
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("maker", "options"),
    [
        ("cooking", COOKING),
        ("cooking", {"recipe": 3, "take": 3, "go": 9, "open": True, "cook": True, "cut": True, "split": "test"}),
        ("cooking", {**COOKING, "drop": True}),
        ("coin_collector", {"level": 110}),
        ("treasure_hunter", {"level": 25}),
        ("simple", {"rewards": "sparse"}),
        ("custom", {"quest_length": 4}),
    ],
)
async def test_expert_wins_and_rewards_sum_to_one(maker: str, options: dict[str, Any]) -> None:
    resource = await made(0, maker=maker, options=options)
    won, games = 0, 10 if maker == "cooking" else 4
    for seed in range(games):
        await resource.reset(seed)
        total, outcome = await play_the_expert(resource)
        won += outcome.info["won"]
        assert outcome.terminated == outcome.info["won"] and total == pytest.approx(float(outcome.info["won"]))
    # A custom game may have a "locker" and a "type 0 locker", and no words that name the first one alone.
    assert won >= games - (maker == "custom")


@needs_textworld
@pytest.mark.campaign
@pytest.mark.parametrize("maker", ["cooking", "simple"])
async def test_equal_keys_have_equal_futures(maker: str) -> None:
    resource = await made(7, maker=maker, options=COOKING if maker == "cooking" else {})
    futures: dict[tuple[str, str], tuple[Any, ...]] = {}
    returned = 0
    for walk in range(20):
        rng = random.Random(walk)
        await resource.reset(7)
        while len(resource._commands) < 40 and (open_now := await resource.admissible_actions()):
            before = await resource.state_key()
            command = rng.choice(list(open_now))["arguments"]["command"]
            outcome = await act(resource, command)
            text = outcome.observation.partition("*** The End ***")[0]
            after = await resource.state_key(), await resource.expert_action()
            future = (text, outcome.reward, outcome.terminated, *after)
            returned += (before, command) in futures
            assert futures.setdefault((before, command), future) == future
    assert returned > 100
    await resource.close()


@needs_textworld
@pytest.mark.campaign
def test_expert_solves_the_example_and_random_does_not(tmp_path: Path) -> None:
    task = str(Path(__file__).parents[2] / "examples" / "textworld_cooking" / "task.yaml")
    command = [sys.executable, "-m", "reward_kit.cli.main", "run", task, "--policy", "expert", "--policy", "random"]
    done = subprocess.run([*command, "-n", "1", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expert, chance = json.loads(done.stdout)["policies"]
    assert (expert["episodes"], expert["score"]["mean"], expert["errors"]) == (10, 1.0, {})
    assert chance["score"]["mean"] < 0.3 and not chance["errors"]
