"""Test the real engine with generated problems and game files."""

import json
import re
from importlib import resources
from importlib.util import find_spec

import pytest

from reward_kit.environments.alfworld import RealEngine, game_files
from reward_kit.environments.household_problems import TaskType, generate_problem
from reward_kit.environments.household_worker import PACKAGES, game_data, pddl_name
from reward_kit.errors import ConfigError

INSTALLED = all(find_spec(name) for name in PACKAGES)
needs_engine = pytest.mark.skipif(not INSTALLED, reason="needs the extra text-games")


@pytest.fixture
async def engine():
    started = RealEngine()
    await started.start()
    yield started
    await started.close()


@needs_engine
@pytest.mark.parametrize("task_type", list(TaskType))
async def test_planner_solves_a_generated_problem(engine, task_type):
    drawn = generate_problem("train", 0, seed=1, task_type=task_type)
    view = await engine.load(drawn)
    assert view.observation.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    assert view.observation.endswith(f"Your task is to: {drawn.goal}")
    assert all(f"a {item.name}" in view.observation for item in drawn.receptacles)
    plan = await engine.expert()
    assert plan
    for command in plan:
        assert not view.done and command in view.admissible
        view = await engine.step(command)
    assert (view.reward, view.done, view.won) == (1.0, True, True)


@needs_engine
async def test_inadmissible_action_changes_nothing(engine):
    start = await engine.load(generate_problem("train", 0))
    view = await engine.step("take the moon from sidetable 1")
    assert view == start._replace(observation="Nothing happens.")


@needs_engine
async def test_engine_plays_consecutive_games(engine):
    views = [await engine.load(generate_problem("train", index)) for index in (0, 1, 0)]
    assert views[0] == views[2] != views[1]


@needs_engine
async def test_published_game_file_is_played_with_its_own_names(engine, tmp_path):
    """The file has simulator identifiers, which the package's own code numbers."""
    drawn = generate_problem("train", 0)
    data = resources.files("alfworld.data")
    game = game_data(drawn, data.joinpath("alfred.pddl").read_text(), data.joinpath("alfred.twl2").read_text())
    for item in (*drawn.receptacles, *drawn.things):
        name = pddl_name(item.name)
        game["pddl_problem"] = re.sub(rf"\b{name}\b", name.replace("_", "_bar__plus_00_dot_"), game["pddl_problem"])
    path = tmp_path / "game.tw-pddl"
    path.write_text(json.dumps(game))
    view = await engine.load(path)
    assert "a sidetable 1" in view.observation
    view = [await engine.step(command) for command in await engine.expert()][-1]
    assert view.won


@needs_engine
async def test_invalid_game_file_is_rejected_and_the_engine_continues(engine, tmp_path):
    (tmp_path / "game.tw-pddl").write_text('{"grammar": ""}')
    with pytest.raises(ConfigError, match="pddl_domain, pddl_problem missing"):
        await engine.load(tmp_path / "game.tw-pddl")
    with pytest.raises(ConfigError, match="no such game file"):
        await engine.load(tmp_path / "none")
    assert "sidetable" in (await engine.load(generate_problem("train", 0))).observation


@pytest.mark.skipif(INSTALLED, reason="the packages are installed")
async def test_missing_packages_name_the_extra():
    engine = RealEngine()
    with pytest.raises(ConfigError, match=r"pip install '/path/to/reward-kit\[text-games\]'"):
        await engine.start()


def test_game_files_unsupported_by_the_text_domain_are_skipped(tmp_path, monkeypatch):
    for folder in ("b/trial_1", "a/trial_2", "pick_and_place_with_movable_recep-x/trial_3", "AppleSliced/trial_4"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "game.tw-pddl").write_text("{}")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert [str(path.parent.relative_to(tmp_path)) for path in game_files()] == ["a/trial_2", "b/trial_1"]
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="ALFWORLD_DATA: no such directory"):
        game_files()
    monkeypatch.delenv("ALFWORLD_DATA")
    assert game_files() == []
