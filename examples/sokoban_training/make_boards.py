"""Generate `boards.jsonl` for training and `held_out.jsonl` for evaluation, without common boards.

python make_boards.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from reward_kit.environments.sokoban import Level, Plan, Position, solve

HERE = Path(__file__).parent
SIDE = 7
"""Columns and rows, including the wall."""

MOVES = range(3, 13)
"""The permitted lengths of the shortest solution."""

HELD_OUT, TRAINED = {"straight": 64, "turn": 192}, {"straight": 1_000, "turn": 2_000}
"""The numbers of boards of each kind."""


class Board(NamedTuple):
    level: Level
    kind: str

    @property
    def text(self) -> str:
        return self.level.text(self.level.start)


def boards() -> Iterator[Board]:
    """Yield every solvable board with one box in the empty room."""
    inside = [row * SIDE + column for row in range(1, SIDE - 1) for column in range(1, SIDE - 1)]
    floor = sum(1 << cell for cell in inside)
    for player, box, goal in permutations(inside, 3):
        level = Level(SIDE, SIDE, floor, 1 << goal, Position(player, 1 << box))
        plan = solve(level, level.start, node_limit=5_000)
        if plan and len(plan) in MOVES:
            yield Board(level, kind(level, plan))


def kind(level: Level, plan: Plan) -> str:
    """Return "straight" if the solution pushes in one direction only, else "turn"."""
    position, pushes = level.start, set[str]()
    for direction in plan:
        after = level.move(position, level.steps()[direction])
        assert after is not None
        if after.boxes != position.boxes:
            pushes.add(direction)
        position = after
    return "straight" if len(pushes) == 1 else "turn"


def split() -> tuple[list[Board], list[Board], list[Board]]:
    """Return the held-out boards, the boards for training, and the boards for demonstrations, without common boards."""
    shuffled = list(boards())
    random.Random(0).shuffle(shuffled)
    held_out, trained, rest = list[Board](), list[Board](), list[Board]()
    left = [dict(HELD_OUT), dict(TRAINED)]
    for board in shuffled:
        for counts, chosen in zip(left, (held_out, trained), strict=True):
            if counts[board.kind]:
                counts[board.kind] -= 1
                chosen.append(board)
                break
        else:
            rest.append(board)
    return held_out, trained, rest


def main() -> None:
    held_out, trained, _ = split()
    for name, part in (("held_out.jsonl", held_out), ("boards.jsonl", trained)):
        numbered = enumerate(part)
        rows = [
            {"id": f"{board.kind}-{number}", "kind": board.kind, "resource_config": {"level": board.text}}
            for number, board in numbered
        ]
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
