"""Sokoban's rules: a level that never changes, the small position that does, and the XSB notation of both.

Cells are numbered row by row, and a set of cells is an integer whose bits are the cells. The border of a level is wall
all around, so that a step never leaves it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from reward_kit.errors import ConfigError, LimitError

LARGEST_SIDE = 40

LEGEND = "# wall, @ you, + you on a goal, $ box, * box on a goal, . goal; a blank is floor."

DIRECTIONS = ("up", "down", "left", "right")

_MARKS = {" ": (0, 0, 0), "-": (0, 0, 0), "_": (0, 0, 0), ".": (1, 0, 0), "$": (0, 1, 0), "*": (1, 1, 0)}

_MARKS |= {"@": (0, 0, 1), "+": (1, 0, 1)}


class Position(NamedTuple):
    """Where the player and the boxes are: a cell, and a set of cells."""

    player: int
    boxes: int


@dataclass(frozen=True, slots=True)
class Level:
    """One level. `floor` and `goals` are sets of cells; `floor` holds every cell that is no wall."""

    width: int
    height: int
    floor: int
    goals: int
    start: Position

    def steps(self) -> dict[str, int]:
        """What each direction adds to a cell's number."""
        return {"up": -self.width, "down": self.width, "left": -1, "right": 1}

    def move(self, position: Position, step: int) -> Position | None:
        """The position after one step of the player, who pushes a box that is in the way; None where nothing moves."""
        player, boxes = position
        target = player + step
        if not self.floor >> target & 1:
            return None
        if boxes >> target & 1:
            beyond = target + step
            if not (self.floor & ~boxes) >> beyond & 1:
                return None
            boxes ^= 1 << target | 1 << beyond
        return Position(target, boxes)

    def is_solved(self, position: Position) -> bool:
        """Whether every box stands on a goal."""
        return not position.boxes & ~self.goals

    def text(self, position: Position) -> str:
        """The board in XSB notation, a line for each row."""
        shown = [self._mark(position, cell) for cell in range(self.width * self.height)]
        return "\n".join("".join(shown[row * self.width :][: self.width]) for row in range(self.height))

    def _mark(self, position: Position, cell: int) -> str:
        goal = self.goals >> cell & 1
        if cell == position.player:
            return "+" if goal else "@"
        if position.boxes >> cell & 1:
            return "*" if goal else "$"
        if goal:
            return "."
        return " " if self.floor >> cell & 1 else "#"


def cells(members: int) -> Iterator[int]:
    """The cells of a set, in order."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def read_level(text: str) -> Level:
    """A level in XSB notation (http://sokobano.de/wiki/index.php?title=Level_format). `-` and `_` are floor too.

    Cells that the player can never reach, such as those around a level of ragged lines, become wall.

    Raises:
        ConfigError: it is no level: an unknown mark, not one player, not as many boxes as goals, a gap in the wall.
    """
    rows = [row.rstrip() for row in text.strip("\n").splitlines()]
    width, height = max((len(row) for row in rows), default=0), len(rows)
    if not 3 <= width <= LARGEST_SIDE or not 3 <= height <= LARGEST_SIDE:
        raise ConfigError(
            f"sokoban resource: level: {width} columns and {height} rows; each must be from 3 to {LARGEST_SIDE}"
        )
    floor = goals = boxes = 0
    players = []
    for cell, mark in enumerate("".join(row.ljust(width) for row in rows)):
        if mark == "#":
            continue
        if mark not in _MARKS:
            raise ConfigError(f"sokoban resource: level: unknown mark {mark!r} in row {cell // width + 1}; {LEGEND}")
        goal, box, player = _MARKS[mark]
        floor, goals, boxes = floor | 1 << cell, goals | goal << cell, boxes | box << cell
        players += [cell] * player
    if len(players) != 1:
        raise ConfigError(f"sokoban resource: level: {len(players)} players; there must be one @ or +")
    return _closed(Level(width, height, floor, goals, Position(players[0], boxes)))


def _closed(level: Level) -> Level:
    """The level without the cells that are out of reach."""
    border = sum(
        1 << cell
        for cell in range(level.width * level.height)
        if cell // level.width in (0, level.height - 1) or cell % level.width in (0, level.width - 1)
    )
    inside = connected(level.floor & ~border, level.start.player, level.width)
    around = inside | inside << 1 | inside >> 1 | inside << level.width | inside >> level.width
    if not inside or around & level.floor & border:
        raise ConfigError("sokoban resource: level: the wall around the player has a gap")
    boxes, goals = level.start.boxes, level.goals
    if (boxes | goals) & ~inside:
        raise ConfigError("sokoban resource: level: a box or a goal is out of the player's reach")
    if not boxes or boxes.bit_count() != goals.bit_count():
        counts = f"{boxes.bit_count()} boxes and {goals.bit_count()} goals"
        raise ConfigError(f"sokoban resource: level: {counts}; there must be as many, and at least one")
    return Level(level.width, level.height, inside, goals, level.start)


def connected(free: int, cell: int, width: int) -> int:
    """The part of `free` that is connected with `cell`; the border of the grid must not be in it."""
    region = 1 << cell & free
    while True:
        wider = (region | region << 1 | region >> 1 | region << width | region >> width) & free
        if wider == region:
            return region
        region = wider


Plan = tuple[str, ...]

_Arrival = tuple[Position, int]

"""The position before a push, and the push's step."""


def solve(level: Level, start: Position, node_limit: int) -> Plan | None:
    """A shortest way, in moves, to the solved level.

    Args:
        level: the level.
        start: the position to solve; () is returned where it is solved already.
        node_limit: how many positions may be expanded.

    Returns:
        The directions of the moves, or None where the position cannot be solved.

    Raises:
        LimitError: neither a solution nor its absence was found within `node_limit` positions.
    """
    bounds: dict[int, float] = {}
    order = count()
    cost = {start: 0}
    arrivals: dict[Position, _Arrival] = {}
    frontier = [(pushes_left(level, start.boxes), 0, next(order), start)]
    closed: set[Position] = set()
    while frontier and frontier[0][0] < math.inf:
        _, _, _, position = heapq.heappop(frontier)
        if level.is_solved(position):
            return _moves(level, start, position, arrivals)
        if position in closed:
            continue
        if len(closed) >= node_limit:
            raise LimitError(f"the level was not solved within {node_limit} positions")
        closed.add(position)
        for after, arrival, moves in _pushes(level, position):
            total = cost[position] + moves
            if after.boxes not in bounds:
                bounds[after.boxes] = pushes_left(level, after.boxes)
            if bounds[after.boxes] == math.inf or total >= cost.get(after, math.inf):
                continue
            cost[after], arrivals[after] = total, arrival
            # Of equally promising positions the one nearer to the end comes first.
            heapq.heappush(frontier, (total + bounds[after.boxes], -total, next(order), after))
    return None


def pushes_left(level: Level, boxes: int) -> float:
    """The least number of pushes that the boxes need, were they not in each other's way.

    An assignment of the boxes to the goals of least cost, by dynamic programming over the sets of goals that are taken.
    Infinite where there is none: some box can reach no goal that is left for it, and the level is lost.
    """
    tables = _push_distances(level.width, level.floor, level.goals)
    best: dict[int, float] = {0: 0}
    for box in cells(boxes):
        following: dict[int, float] = {}
        for taken, pushes in best.items():
            for goal, distances in enumerate(tables):
                if not taken >> goal & 1 and box in distances:
                    both = taken | 1 << goal
                    following[both] = min(following.get(both, math.inf), pushes + distances[box])
        best = following
    return min(best.values(), default=math.inf)


@lru_cache(maxsize=1024)
def _push_distances(width: int, floor: int, goals: int) -> tuple[dict[int, int], ...]:
    """For each goal, from which cells a lone box can be pushed to it, and in how many pushes."""
    return tuple(_distances_to(goal, width, floor) for goal in cells(goals))


def _distances_to(goal: int, width: int, floor: int) -> dict[int, int]:
    distances = {goal: 0}
    queue = deque([goal])
    while queue:
        cell = queue.popleft()
        for step in (-width, width, -1, 1):
            # The box came from `before`, pushed by a player who stood one cell further back.
            before, player = cell - step, cell - 2 * step
            if floor >> before & 1 and floor >> player & 1 and before not in distances:
                distances[before] = distances[cell] + 1
                queue.append(before)
    return distances


def _pushes(level: Level, position: Position) -> list[tuple[Position, _Arrival, int]]:
    """Every push that can be made next, and how many moves it takes with the walk before it."""
    walks = _walks(level, position)
    free = level.floor & ~position.boxes
    found = []
    for box in cells(position.boxes):
        for step in (-level.width, level.width, -1, 1):
            if box - step in walks and free >> box + step & 1:
                after = Position(box, position.boxes ^ (1 << box | 1 << box + step))
                found.append((after, (position, step), walks[box - step] + 1))
    return found


def _walks(level: Level, position: Position) -> dict[int, int]:
    """The cells that the player can reach without a push, and in how many moves."""
    free = level.floor & ~position.boxes
    distances = {position.player: 0}
    queue = deque([position.player])
    while queue:
        cell = queue.popleft()
        for step in (-level.width, level.width, -1, 1):
            if cell + step not in distances and free >> cell + step & 1:
                distances[cell + step] = distances[cell] + 1
                queue.append(cell + step)
    return distances


def _moves(level: Level, start: Position, end: Position, arrivals: dict[Position, _Arrival]) -> Plan:
    names = {step: name for name, step in level.steps().items()}
    backwards: list[int] = []
    position = end
    while position != start:
        before, step = arrivals[position]
        # The player stands where the box was; the walk led to the cell behind it.
        backwards += [step, *_walk_back(level, before, position.player - step)]
        position = before
    return tuple(names[step] for step in reversed(backwards))


def _walk_back(level: Level, position: Position, cell: int) -> list[int]:
    """The steps of a shortest walk to `cell`, the last one first."""
    distances = _walks(level, position)
    taken = []
    while cell != position.player:
        step = next(
            step
            for step in (-level.width, level.width, -1, 1)
            if distances.get(cell - step, math.inf) == distances[cell] - 1
        )
        taken.append(step)
        cell -= step
    return taken


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
