"""Draws Sokoban levels from a seed by playing backwards from a solved one, and keeps those that the solver solves.

Playing backwards pulls boxes off their goals, so a solution exists; the solver proves it, and measures the shortest one
for the bounds on the difficulty.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import NamedTuple

from reward_kit.environments.sokoban.level import Level, Position, cells, connected
from reward_kit.environments.sokoban.solver import Plan, solve
from reward_kit.errors import ConfigError, LimitError

_ROOMS = 300
_GAMES_IN_A_ROOM = 4
_NODE_LIMIT = 5_000


class BoardSpec(NamedTuple):
    """What a level must be like.

    Attributes:
        width: columns, the wall included.
        height: rows, the wall included.
        boxes: how many, and as many goals.
        wall_density: the probability that a cell inside the border is a wall.
        min_solution: the least number of moves of the shortest solution.
        max_solution: the largest one.
    """

    width: int
    height: int
    boxes: int
    wall_density: float
    min_solution: int
    max_solution: int


class Board(NamedTuple):
    """A level and one of its shortest solutions; None where the solver gave up, which no generated level has."""

    level: Level
    solution: Plan | None


@lru_cache(maxsize=512)
def generate(spec: BoardSpec, index: int) -> Board:
    """The level of this number; the same arguments always give the same.

    Raises:
        ConfigError: in 300 rooms no level with a solution of the length asked for was found.
    """
    rng = random.Random(f"sokoban {tuple(spec)} {index}")
    for _ in range(_ROOMS):
        floor = _room(rng, spec)
        if floor.bit_count() < 2 * spec.boxes + 1:
            continue
        for _ in range(_GAMES_IN_A_ROOM):
            level = _played_backwards(rng, spec, floor)
            solution = _solution(level)
            if solution is not None and spec.min_solution <= len(solution) <= spec.max_solution:
                return Board(level, solution)
    raise ConfigError(
        f"sokoban resource: min_solution: no board of {spec.width} x {spec.height} cells with {spec.boxes} boxes and a "
        f"shortest solution of {spec.min_solution} to {spec.max_solution} moves was found; widen the bounds or the room"
    )


def _solution(level: Level) -> Plan | None:
    try:
        return solve(level, level.start, _NODE_LIMIT)
    except LimitError:
        return None


def _room(rng: random.Random, spec: BoardSpec) -> int:
    """The largest connected piece of floor among random walls."""
    floor = 0
    for row in range(1, spec.height - 1):
        for column in range(1, spec.width - 1):
            if rng.random() >= spec.wall_density:
                floor |= 1 << row * spec.width + column
    largest = 0
    while floor:
        piece = connected(floor, next(cells(floor)), spec.width)
        largest = max(largest, piece, key=int.bit_count)
        floor &= ~piece
    return largest


def _played_backwards(rng: random.Random, spec: BoardSpec, floor: int) -> Level:
    """A level whose start is some pulls away from a solved position."""
    *places, player = rng.sample(list(cells(floor)), spec.boxes + 1)
    goals = sum(1 << place for place in places)
    position = Position(player, goals)
    for _ in range(rng.randint(2, 8) * spec.boxes):
        pulls = _pulls(position, floor, spec.width)
        if not pulls:
            break
        position = rng.choice(pulls)
    reach = connected(floor & ~position.boxes, position.player, spec.width)
    start = Position(rng.choice(list(cells(reach))), position.boxes)
    return Level(spec.width, spec.height, floor, goals, start)


def _pulls(position: Position, floor: int, width: int) -> list[Position]:
    """Every position that one pull, after a walk, leads to."""
    free = floor & ~position.boxes
    reach = connected(free, position.player, width)
    found = []
    for box in cells(position.boxes):
        for step in (-width, width, -1, 1):
            to = box + step
            if reach >> to & 1 and free >> to + step & 1:
                found.append(Position(to + step, position.boxes ^ (1 << box | 1 << to)))
    return found
