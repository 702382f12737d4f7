"""Sokoban's rules: a level that never changes, the small position that does, and the XSB notation of both.

Cells are numbered row by row, and a set of cells is an integer whose bits are the cells. The border of a level is wall
all around, so that a step never leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from reward_kit.errors import ConfigError

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
