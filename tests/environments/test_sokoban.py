"""Test Sokoban: rules, shortest solutions, generated boards, and the resource."""

from __future__ import annotations

import random
from collections import deque

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import SokobanResource, open_snapshot
from reward_kit.environments.sokoban import (
    DIRECTIONS,
    Level,
    Position,
    SokobanConfig,
    generate,
    pushes_left,
    read_level,
    solve,
)
from reward_kit.errors import ConfigError, LimitError, ToolError

CORRIDOR = "#######\n#@ $ .#\n#######"
LOST = "######\n#@  .#\n#$   #\n######"
TWO = "########\n#      #\n#@ $ $ #\n#.    .#\n########"


def board(width, height, boxes, density, least, most) -> SokobanConfig:
    """Return the configuration of a generated board."""
    sizes = {"width": width, "height": height, "boxes": boxes, "wall_density": density}
    return SokobanConfig(**sizes, min_solution=least, max_solution=most)


async def made(seed=0, **config) -> SokobanResource:
    resource = SokobanResource()
    await resource.setup(config)
    await resource.reset(seed)
    return resource


async def move(resource, *directions):
    for direction in directions:
        outcome = await resource.step("move", {"direction": direction})
    return outcome


async def play_expert(resource) -> tuple[float, int]:
    total, moves = 0.0, 0
    while action := await resource.expert_action():
        outcome = await resource.step(action["name"], action["arguments"])
        total, moves = total + outcome.reward, moves + 1
    return total, moves


def play(level: Level, moves) -> Position:
    position = level.start
    for name in moves:
        position = level.move(position, level.steps()[name])
        assert position is not None
    return position


def fewest_moves(level: Level) -> int | None:
    """Return the solution length by breadth-first search over single moves."""
    seen, queue = {level.start}, deque([(level.start, 0)])
    while queue:
        position, moves = queue.popleft()
        if level.is_solved(position):
            return moves
        for step in level.steps().values():
            after = level.move(position, step)
            if after is not None and after not in seen:
                seen.add(after)
                queue.append((after, moves + 1))
    return None


def test_level_is_parsed_and_shown_in_one_notation() -> None:
    text = "#######\n#+ $ *#\n# .$  #\n#######"
    level = read_level(text)
    assert level.text(level.start) == text
    assert (level.width, level.height, level.start.boxes.bit_count()) == (7, 4, 3)
    assert read_level(text.replace(" ", "-")) == level


def test_unreachable_cells_become_walls() -> None:
    level = read_level("  ####\n###  #\n#@ $.#\n######")
    assert level.text(level.start) == "######\n###  #\n#@ $.#\n######"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 columns and 0 rows"),
        ("#" * 41 + "\n#\n#", "41 columns"),
        ("#####\n#@$?#\n#####", r"unknown mark '\?' in row 2"),
        ("#####\n# $.#\n#####", "exactly one player .*got 0"),
        ("######\n#@@$.#\n######", "exactly one player .*got 2"),
        ("#####\n#@ .#\n#####", "0 boxes and 1 goals"),
        ("######\n#@$$.#\n######", "2 boxes and 1 goals"),
        ("#####\n#@$. \n#####", "has a gap"),
        ("########\n#@ #$.##\n########", "the player cannot reach one of the boxes or goals"),
    ],
)
def test_invalid_level_is_rejected(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_level(text)


def test_boxes_are_pushed_and_never_pulled() -> None:
    level = read_level(CORRIDOR)
    position = play(level, ["right", "right", "left"])
    assert level.text(position) == "#######\n# @ $.#\n#######"


@pytest.mark.parametrize(
    "text", ["#####\n#.@$#\n#####", "######\n#@$$ #\n# .. #\n######", "#####\n#@$*#\n#.  #\n#####", "###\n#@#\n###"]
)
def test_walls_and_a_second_box_stop_the_player(text) -> None:
    level = read_level(text) if "$" in text else Level(3, 3, 1 << 4, 0, Position(4, 0))
    assert level.move(level.start, level.steps()["right"]) is None


@pytest.mark.parametrize("seed", range(40))
def test_solution_is_as_short_as_breadth_first_search(seed) -> None:
    rng = random.Random(seed)
    cells = [rng.choice("  #") for _ in range(16)]
    for mark, place in zip("@$$..", rng.sample(range(16), 5), strict=True):
        cells[place] = mark
    rows = ["######", *("#" + "".join(cells[4 * row :][:4]) + "#" for row in range(4)), "######"]
    try:
        level = read_level("\n".join(rows))
    except ConfigError:
        return
    solution, expected = solve(level, level.start, 10_000), fewest_moves(level)
    assert (None if solution is None else len(solution)) == expected
    if solution is None:
        return
    assert level.is_solved(play(level, solution))
    pushes, position = 0, level.start
    for name in solution:
        after = level.move(position, level.steps()[name])
        pushes, position = pushes + (after.boxes != position.boxes), after
    assert pushes_left(level, level.start.boxes) <= pushes


def test_box_in_a_corner_is_detected_as_lost() -> None:
    level = read_level(LOST)
    assert pushes_left(level, level.start.boxes) == float("inf")
    assert solve(level, level.start, 1) is None


def test_two_boxes_that_need_one_goal_are_detected_as_lost() -> None:
    both_at_the_wall = read_level("#######\n#@   .#\n#     #\n#.$ $ #\n#######")
    assert pushes_left(both_at_the_wall, both_at_the_wall.start.boxes) == float("inf")
    one_at_the_wall = read_level("#######\n#@   .#\n#   $ #\n#.$   #\n#######")
    assert pushes_left(one_at_the_wall, one_at_the_wall.start.boxes) == 3


def test_long_search_raises_a_limit_error() -> None:
    level = generate(board(8, 8, 3, 0.2, 15, 50), 0).level
    with pytest.raises(LimitError, match="within 3 positions"):
        solve(level, level.start, 3)


@pytest.mark.parametrize("spec", [board(7, 7, 2, 0.2, 8, 30), board(6, 5, 1, 0.0, 3, 9), board(8, 8, 3, 0.3, 12, 40)])
def test_generated_boards_match_their_specification_and_are_solvable(spec) -> None:
    boards = [generate(spec, index) for index in range(20)]
    for level, solution in boards:
        text = level.text(level.start)
        assert read_level(text) == level
        assert (level.width, level.height, level.start.boxes.bit_count()) == (spec.width, spec.height, spec.boxes)
        assert solution is not None
        assert spec.min_solution <= len(solution) <= spec.max_solution
        assert level.is_solved(play(level, solution))
    assert len({level for level, _ in boards}) > 15


def test_board_is_reproducible_by_its_number() -> None:
    spec = board(7, 7, 2, 0.2, 8, 30)
    first = generate(spec, 5)
    generate.cache_clear()
    assert generate(spec, 5) == first
    assert generate(spec, 6) != first


@pytest.mark.parametrize("config", [{}, {"width": 8, "boxes": 3, "max_moves": 12}, {"level": TWO}])
async def test_resource_passes_the_checker(config) -> None:
    assert await check_resource(SokobanResource, config, steps=40) == []


async def test_expert_solves_fifty_boards_in_the_fewest_moves() -> None:
    for seed in range(50):
        resource = await made(seed)
        total, moves = await play_expert(resource)
        final = open_snapshot(await resource.final_state())
        assert (total, final["solved"], final["moves"], final["shortest_solution"]) == (1.0, True, moves, moves)
        assert 0 < final["pushes"] <= moves


async def test_expert_recovers_from_a_detour() -> None:
    resource = await made(level="########\n#@     #\n#  $   #\n#     .#\n########")
    await move(resource, "right", "left", "down")
    total, moves = await play_expert(resource)
    assert (total, moves) == (1.0, 7)


async def test_expert_of_a_lost_board_has_no_action_and_the_episode_continues() -> None:
    resource = await made(level="#####\n#   #\n# $.#\n# @ #\n#####")
    outcome = await move(resource, "up")
    assert (outcome.terminated, outcome.reward, outcome.info["deadlocked"]) == (False, 0.0, True)
    assert await resource.expert_action() is None
    assert await resource.admissible_actions()


async def test_random_moves_rarely_solve_a_board() -> None:
    solved = 0
    for seed in range(30):
        resource, rng = await made(seed, max_moves=40), random.Random(seed)
        while actions := await resource.admissible_actions():
            chosen = rng.choice(actions)
            solved += (await resource.step(chosen["name"], chosen["arguments"])).terminated
    assert solved <= 5


async def test_last_push_ends_the_episode_with_its_reward() -> None:
    resource = await made(level=CORRIDOR)
    outcome = await move(resource, "right", "right")
    assert (outcome.reward, outcome.terminated, outcome.info["solved"], outcome.info["boxes_on_goals"]) == (
        0,
        False,
        False,
        0,
    )
    outcome = await move(resource, "right")
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (1.0, True, False)
    assert outcome.observation == "#######\n#   @*#\n#######"
    assert await resource.admissible_actions() == []
    assert await resource.expert_action() is None
    with pytest.raises(ToolError, match="the episode is over"):
        await move(resource, "left")


async def test_move_into_a_wall_changes_nothing_and_is_invalid() -> None:
    resource = await made(level=CORRIDOR)
    key = await resource.state_key()
    outcome = await move(resource, "up")
    assert outcome.info["is_action_valid"] is False
    assert outcome.observation.endswith("the way is blocked.")
    assert await resource.state_key() == key
    assert (await move(resource, "right")).info["is_action_valid"] is True
    assert {call["arguments"]["direction"] for call in await resource.admissible_actions()} == {"left", "right"}


async def test_move_limit_truncates() -> None:
    resource = await made(level=CORRIDOR, max_moves=2)
    assert not (await move(resource, "up")).truncated
    outcome = await move(resource, "up")
    assert (outcome.truncated, outcome.terminated) == (True, False)
    assert await resource.admissible_actions() == []
    assert await resource.expert_action() is None


async def test_solution_with_the_last_move_is_not_a_truncation() -> None:
    outcome = await move(await made(level=CORRIDOR, max_moves=3), "right", "right", "right")
    assert (outcome.truncated, outcome.terminated) == (False, True)


async def test_state_key_depends_on_the_board_only() -> None:
    resource = await made(level=CORRIDOR, max_moves=50)
    first = await resource.state_key()
    await move(resource, "right")
    assert await resource.state_key() != first
    await move(resource, "left")
    assert await resource.state_key() == first
    assert await (await made(level=CORRIDOR.replace("$ .", "$. "))).state_key() != first
    assert await (await made(level=CORRIDOR.replace("#@ $ .#", "#@ $ .##"))).state_key() != first


async def test_board_follows_the_seed_unless_an_index_is_given() -> None:
    one, same, other = [await (await made(seed)).get_observation() for seed in (1, 1, 2)]
    assert one == same != other
    numbered = [await (await made(seed, index=7)).get_observation() for seed in (1, 2)]
    assert numbered[0] == numbered[1]


async def test_fork_and_checkpoint_keep_the_remaining_moves() -> None:
    resource = await made(level=CORRIDOR, max_moves=2)
    await move(resource, "right")
    saved, fork = await resource.checkpoint(), await resource.fork()
    assert (await move(fork, "right")).truncated
    assert (await move(resource, "up")).truncated
    await resource.restore(saved)
    assert (await move(resource, "right")).truncated
    assert await resource.state_key() == await fork.state_key()


async def test_first_observation_explains_the_symbols_and_the_task() -> None:
    text = await (await made(level=CORRIDOR)).get_observation()
    assert text.startswith(CORRIDOR)
    assert "$ box" in text and "Push every box onto a goal" in text
    (spec,) = await (await made()).get_tools_spec()
    assert spec["function"]["parameters"]["properties"]["direction"]["enum"] == list(DIRECTIONS)


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("mvoe", {"direction": "up"}, "did you mean 'move'"),
        ("move", {}, "direction: missing"),
        ("move", {"direction": "north"}, "'north' is not one of"),
        ("move", {"direction": ["up"]}, "is not one of"),
        ("move", {"direction": "up", "times": 2}, "unknown argument 'times'"),
    ],
)
async def test_invalid_call_is_rejected_and_changes_nothing(tool, arguments, message) -> None:
    resource = await made()
    before = await resource.state_key()
    with pytest.raises(ToolError, match=message):
        await resource.step(tool, arguments)
    assert await resource.state_key() == before
    assert open_snapshot(await resource.final_state())["moves"] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"box": 2}, "did you mean 'boxes'"),
        ({"boxes": 9}, "boxes"),
        ({"min_solution": 20, "max_solution": 10}, "min_solution 20 is above max_solution 10"),
        ({"width": 5, "height": 5, "boxes": 1, "min_solution": 90, "max_solution": 99}, "no board of 5 x 5 cells"),
        ({"level": CORRIDOR, "boxes": 2}, "set either level or boxes"),
        ({"level": "#####\n#@$ #\n#####"}, "1 boxes and 0 goals"),
        ({"level": "####\n#@*#\n####"}, "solved already"),
        ({"level": LOST}, "no solution"),
    ],
)
async def test_invalid_configuration_is_one_clear_error(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await SokobanResource().setup(config)
