"""Sokoban as a resource, an optimal solver, and a level generator."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import anyio.to_thread
from pydantic import ConfigDict, Field, model_validator

from reward_kit.environments.base import (
    CopyForkResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    check_call,
    hash_key,
    strict_tool,
    tools_by_name,
)
from reward_kit.environments.config import ResourceConfig, read_config
from reward_kit.errors import ConfigError, LimitError, ToolError

LARGEST_SIDE = 40
LEGEND = "# wall, @ you, + you on a goal, $ box, * box on a goal, . goal; a blank is floor."
DIRECTIONS = ("up", "down", "left", "right")
_ROOMS = 300
_GAMES_IN_A_ROOM = 4
_SOLVER_NODES = 5_000
_NODE_LIMIT = 50_000
_MARKS = {" ": (0, 0, 0), "-": (0, 0, 0), "_": (0, 0, 0), ".": (1, 0, 0), "$": (0, 1, 0), "*": (1, 1, 0)}
_MARKS |= {"@": (0, 0, 1), "+": (1, 0, 1)}


class Position(NamedTuple):
    """The player's cell, and the set of cells that contain a box."""

    player: int
    boxes: int


@dataclass(frozen=True, slots=True)
class Level:
    """A level. `floor` and `goals` are sets of cells; `floor` contains every cell that is not a wall."""

    width: int
    height: int
    floor: int
    goals: int
    start: Position

    def steps(self) -> dict[str, int]:
        return {"up": -self.width, "down": self.width, "left": -1, "right": 1}

    def move(self, position: Position, step: int) -> Position | None:
        """Return the position after the player takes one step and pushes any box in the way.

        Return None if the player cannot move.
        """
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
        return not position.boxes & ~self.goals

    def text(self, position: Position) -> str:
        """Return the board in XSB notation, with one line per row."""
        shown = []
        for cell in range(self.width * self.height):
            goal = self.goals >> cell & 1
            if cell == position.player:
                shown.append("+" if goal else "@")
            elif position.boxes >> cell & 1:
                shown.append("*" if goal else "$")
            else:
                shown.append("." if goal else " " if self.floor >> cell & 1 else "#")
        return "\n".join("".join(shown[row * self.width :][: self.width]) for row in range(self.height))


def cells(members: int) -> Iterator[int]:
    """Yield the cells of a set in ascending order."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def read_level(text: str) -> Level:
    """Parse a level in XSB notation (http://sokobano.de/wiki/index.php?title=Level_format).

    `-` and `_` also represent floor. Cells that the player can never reach become walls.

    Raises:
        ConfigError: the level is invalid.
    """
    rows = [row.rstrip() for row in text.strip("\n").splitlines()]
    width, height = max((len(row) for row in rows), default=0), len(rows)
    if not 3 <= width <= LARGEST_SIDE or not 3 <= height <= LARGEST_SIDE:
        raise ConfigError(
            f"sokoban resource: level: got {width} columns and {height} rows; "
            f"both numbers must be between 3 and {LARGEST_SIDE}"
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
        raise ConfigError(f"sokoban resource: level: must have exactly one player (@ or +), got {len(players)}")
    border = sum(
        1 << cell
        for cell in range(width * height)
        if cell // width in (0, height - 1) or cell % width in (0, width - 1)
    )
    inside = connected(floor & ~border, players[0], width)
    around = inside | inside << 1 | inside >> 1 | inside << width | inside >> width
    if not inside or around & floor & border:
        raise ConfigError("sokoban resource: level: the wall around the player has a gap; close it with #")
    if (boxes | goals) & ~inside:
        raise ConfigError("sokoban resource: level: the player cannot reach one of the boxes or goals")
    if not boxes or boxes.bit_count() != goals.bit_count():
        counts = f"{boxes.bit_count()} boxes and {goals.bit_count()} goals"
        raise ConfigError(f"sokoban resource: level: {counts}; the numbers must be equal and at least 1")
    return Level(width, height, inside, goals, Position(players[0], boxes))


def connected(free: int, cell: int, width: int) -> int:
    """Return the part of `free` that is connected to `cell`.

    `free` must not contain cells on the border of the grid.
    """
    region = 1 << cell & free
    while True:
        wider = (region | region << 1 | region >> 1 | region << width | region >> width) & free
        if wider == region:
            return region
        region = wider


Plan = tuple[str, ...]
_Arrival = tuple[Position, int]  # the position before a push, and the direction of the push


def solve(level: Level, start: Position, node_limit: int) -> Plan | None:
    """Find a solution with the fewest moves by A* search.

    The result is () if the level is already solved, and None if it cannot be solved.

    Raises:
        LimitError: `node_limit` positions were expanded without finding a solution or proving that none exists.
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
        walks, free = _walks(level, position), level.floor & ~position.boxes
        for box in cells(position.boxes):
            for step in (-level.width, level.width, -1, 1):
                if box - step not in walks or not free >> box + step & 1:
                    continue
                after = Position(box, position.boxes ^ (1 << box | 1 << box + step))
                total = cost[position] + walks[box - step] + 1
                if after.boxes not in bounds:
                    bounds[after.boxes] = pushes_left(level, after.boxes)
                if bounds[after.boxes] == math.inf or total >= cost.get(after, math.inf):
                    continue
                cost[after], arrivals[after] = total, (position, step)
                # Of two equally promising positions, the one that is closer to the end comes first.
                heapq.heappush(frontier, (total + bounds[after.boxes], -total, next(order), after))
    return None


def pushes_left(level: Level, boxes: int) -> float:
    """Return a lower bound on the number of pushes needed for a solution, or inf if the level can no longer be solved.

    The bound ignores collisions between boxes. It is the cost of the cheapest assignment of boxes to goals, which is
    found by dynamic programming over the sets of used goals.
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
    """For each goal, return the cells from which a single box can be pushed to it, and the number of pushes."""
    tables = []
    for goal in cells(goals):
        distances = {goal: 0}
        queue = deque([goal])
        while queue:
            cell = queue.popleft()
            for step in (-width, width, -1, 1):
                # The box was pushed from `before` by a player who stood one cell further back.
                before, player = cell - step, cell - 2 * step
                if floor >> before & 1 and floor >> player & 1 and before not in distances:
                    distances[before] = distances[cell] + 1
                    queue.append(before)
        tables.append(distances)
    return tuple(tables)


def _walks(level: Level, position: Position) -> dict[int, int]:
    """Return the cells that the player can reach without pushing a box, and the number of moves to each cell."""
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
    """Return the moves of a solution. Before each push, the player takes a shortest walk to the cell behind the box."""
    names = {step: name for name, step in level.steps().items()}
    backwards: list[int] = []
    position = end
    while position != start:
        before, step = arrivals[position]
        backwards.append(step)
        # The player now stands where the box was. The walk led to the cell behind the box.
        cell, distances = position.player - step, _walks(level, before)
        while cell != before.player:
            walked = next(step for step in names if distances.get(cell - step, math.inf) == distances[cell] - 1)
            backwards.append(walked)
            cell -= walked
        position = before
    return tuple(names[step] for step in reversed(backwards))


class SokobanConfig(ResourceConfig):
    """The configuration of `sokoban`."""

    model_config = ConfigDict(frozen=True)

    width: int = Field(default=7, ge=5, le=20, description="columns, including the wall")
    height: int = Field(default=7, ge=5, le=20, description="rows, including the wall")
    boxes: int = Field(default=2, ge=1, le=6)
    wall_density: float = Field(default=0.2, ge=0, le=0.5, description="fraction of the inner cells that are walls")
    min_solution: int = Field(default=8, ge=1, description="minimum number of moves in the shortest solution")
    max_solution: int = Field(default=30, ge=1, description="maximum number of moves in the shortest solution")
    index: int | None = Field(default=None, ge=0, description="the number of the board; by default drawn from the seed")
    level: str | None = Field(default=None, description="your own level in XSB notation")
    max_moves: int | None = Field(default=None, ge=1, description="the episode is truncated after this many moves")

    @model_validator(mode="after")
    def _fits_together(self) -> SokobanConfig:
        drawn = self.model_fields_set - {"level", "max_moves"}
        if self.level is not None and drawn:
            raise ValueError(f"set either level or {sorted(drawn)[0]}")
        if self.min_solution > self.max_solution:
            raise ValueError(f"min_solution {self.min_solution} is above max_solution {self.max_solution}")
        return self


class Board(NamedTuple):
    """A level, and one of its shortest solutions.

    The solution is `None` only if the solver gave up on a configured level.
    """

    level: Level
    solution: Plan | None


@lru_cache(maxsize=512)
def generate(spec: SokobanConfig, index: int) -> Board:
    """Generate the level determined by the arguments. `index` is the number of the level.

    Raises:
        ConfigError: no level with a solution of the required length was found in 300 rooms.
    """
    sizes = (spec.width, spec.height, spec.boxes, spec.wall_density, spec.min_solution, spec.max_solution)
    rng = random.Random(f"sokoban {sizes} {index}")
    for _ in range(_ROOMS):
        floor = _draw_room(rng, spec)
        if floor.bit_count() < 2 * spec.boxes + 1:
            continue
        for _ in range(_GAMES_IN_A_ROOM):
            level = _play_backwards(rng, spec, floor)
            solution = _plan_from(level, level.start, _SOLVER_NODES)
            if solution is not None and spec.min_solution <= len(solution) <= spec.max_solution:
                return Board(level, solution)
    raise ConfigError(
        f"sokoban resource: min_solution: no board of {spec.width} x {spec.height} cells with {spec.boxes} boxes and a "
        f"shortest solution of {spec.min_solution} to {spec.max_solution} moves was found; widen the bounds or the room"
    )


def _draw_room(rng: random.Random, spec: SokobanConfig) -> int:
    """Return the largest connected area of floor among randomly placed walls."""
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


def _play_backwards(rng: random.Random, spec: SokobanConfig, floor: int) -> Level:
    """Return a level whose initial position is reached by pulling boxes away from the goals of a solved position."""
    *places, player = rng.sample(list(cells(floor)), spec.boxes + 1)
    goals = sum(1 << place for place in places)
    position = Position(player, goals)
    for _ in range(rng.randint(2, 8) * spec.boxes):
        # Collect every position that a walk and one pull lead to.
        free = floor & ~position.boxes
        reach = connected(free, position.player, spec.width)
        pulls = []
        for box in cells(position.boxes):
            for step in (-spec.width, spec.width, -1, 1):
                to = box + step
                if reach >> to & 1 and free >> to + step & 1:
                    pulls.append(Position(to + step, position.boxes ^ (1 << box | 1 << to)))
        if not pulls:
            break
        position = rng.choice(pulls)
    reach = connected(floor & ~position.boxes, position.player, spec.width)
    start = Position(rng.choice(list(cells(reach))), position.boxes)
    return Level(spec.width, spec.height, floor, goals, start)


_TASK = "Push every box onto a goal. Walking into a box pushes it; you cannot pull one, nor push two at once."
_DIRECTION = {"type": "string", "enum": list(DIRECTIONS)}
_SPECS = tools_by_name(strict_tool("move", "Walk one cell, pushing the box that stands there.", direction=_DIRECTION))


class SokobanResource(CopyForkResource):
    """A level with a single tool, `move(direction)`."""

    per_sample_keys = frozenset(SokobanConfig.model_fields)

    def __init__(self) -> None:
        self._settings = SokobanConfig()
        self._own: Board | None = None
        self._level: Level
        self._steps: dict[str, int] = {}
        self._name = ""
        self._shortest: int | None = None
        self._position: Position
        self._plan: Plan | None = None
        self._moves = 0
        self._pushes = 0

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._settings = read_config(SokobanConfig, config, "sokoban")
        if self._settings.level is not None:
            level = read_level(self._settings.level)
            plan = await anyio.to_thread.run_sync(_plan_from, level, level.start, abandon_on_cancel=True)
            if plan == ():
                problem = "it is solved already" if level.is_solved(level.start) else "it has no solution"
                raise ConfigError(f"sokoban resource: level: {problem}")
            self._own = Board(level, plan)
        await self.reset(0)

    async def reset(self, seed: int | None = None) -> None:
        board, settings = self._own, self._settings
        if board is None:
            index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
            board = await anyio.to_thread.run_sync(generate, settings, index, abandon_on_cancel=True)
        level, self._plan = board
        self._level = level
        self._position = level.start
        self._steps = level.steps()
        self._name = f"{level.width} {level.floor:x} {level.goals:x}"
        self._shortest = len(self._plan) if self._plan is not None else None
        self._moves = self._pushes = 0

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        direction = check_call(_SPECS, action_name, action_params)["direction"]
        if self._is_over():
            raise ToolError("the episode is over; no move changes anything")
        before, after = self._position, self._level.move(self._position, self._steps[direction])
        self._moves += 1
        if after is not None:
            self._pushes += after.boxes != before.boxes
            self._position = after
            self._plan = self._plan[1:] if self._plan and self._plan[0] == direction else None
        board = self._level.text(self._position)
        text = board if after is not None else f"{board}\nNothing moves: the way is blocked."
        solved = self._is_solved()
        info = {
            "is_action_valid": after is not None,
            "solved": solved,
            "boxes_on_goals": self._on_goals(),
            "deadlocked": pushes_left(self._level, self._position.boxes) == math.inf,
        }
        return StepOutcome(text, float(solved), solved, self._is_out_of_moves() and not solved, info)

    async def get_observation(self) -> Any:
        return f"{self._level.text(self._position)}\n\n{LEGEND}\n{_TASK}"

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_SPECS.values())

    async def state_key(self) -> str:
        return hash_key(self._name, f"{self._position.player} {self._position.boxes:x}")

    async def final_state(self) -> StateSnapshot:
        return StateSnapshot.from_json(
            {
                "level": self._level.text(self._level.start),
                "board": self._level.text(self._position),
                "solved": self._is_solved(),
                "boxes": self._position.boxes.bit_count(),
                "boxes_on_goals": self._on_goals(),
                "moves": self._moves,
                "pushes": self._pushes,
                "shortest_solution": self._shortest,
            }
        )

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]]:
        """Return the directions in which the player can move."""
        if self._is_over():
            return []
        possible = [name for name, step in self._steps.items() if self._level.move(self._position, step)]
        return [{"name": "move", "arguments": {"direction": name}} for name in possible]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the first move of a shortest solution, or None if no solution was found within the limit."""
        if self._is_over():
            return None
        if self._plan is None:
            # The plan is not part of the state, because the solver would find the same plan again.
            level, position = self._level, self._position
            self._plan = await anyio.to_thread.run_sync(_plan_from, level, position, abandon_on_cancel=True)
        if not self._plan:
            return None
        return {"type": "tool_call", "name": "move", "arguments": {"direction": self._plan[0]}}

    def _on_goals(self) -> int:
        return (self._position.boxes & self._level.goals).bit_count()

    def _is_solved(self) -> bool:
        return self._level.is_solved(self._position)

    def _is_out_of_moves(self) -> bool:
        return self._settings.max_moves is not None and self._moves >= self._settings.max_moves

    def _is_over(self) -> bool:
        return self._is_solved() or self._is_out_of_moves()


def _plan_from(level: Level, position: Position, node_limit: int = _NODE_LIMIT) -> Plan | None:
    """Return a shortest solution.

    The result is () if the level is solved or can no longer be solved, and None if the solver gave up.
    """
    try:
        return solve(level, position, node_limit) or ()
    except LimitError:
        return None
