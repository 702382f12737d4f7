"""Solves Sokoban in the fewest moves, and knows some of the positions that cannot be solved any more.

A* (Hart, Nilsson and Raphael 1968) over pushes: an edge is a walk to a box and one push of it, and costs its moves. The
heuristic is the least number of pushes that bring each box to a goal of its own, were the other boxes not there: never
more than the moves that are needed, and infinite only where no solution is left. It is consistent, so the first
solution that is taken from the frontier is one of the shortest.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from functools import lru_cache
from itertools import count

from reward_kit.environments.sokoban.level import Level, Position, cells
from reward_kit.errors import LimitError

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
