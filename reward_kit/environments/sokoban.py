"""Sokoban as a resource: push every box onto a goal, one move at a time.

The reward is 1 for the move that solves the level, which ends the episode, and 0 for every other. The state key leaves
out a limit on moves: `truncated` reports that the episode stopped for an outside reason.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    check_call,
    hash_key,
    strict_tool,
)
from reward_kit.environments.config import read_config
from reward_kit.environments.sokoban_solver import (
    DIRECTIONS,
    LEGEND,
    Board,
    BoardSpec,
    Level,
    Plan,
    Position,
    generate,
    pushes_left,
    read_level,
    solve,
)
from reward_kit.errors import ConfigError, LimitError, ToolError

_NODE_LIMIT = 50_000
_TASK = "Push every box onto a goal. Walking into a box pushes it; you cannot pull one, nor push two at once."
_SPECS: dict[str, ToolSpec] = {
    "move": strict_tool(
        "move",
        "Walk one cell, pushing the box that stands there.",
        direction={"type": "string", "enum": list(DIRECTIONS)},
    )
}


class SokobanConfig(BaseModel):
    """The configuration of `sokoban`."""

    model_config = ConfigDict(extra="forbid")

    width: int = Field(default=7, ge=5, le=20, description="columns, the wall included")
    height: int = Field(default=7, ge=5, le=20, description="rows, the wall included")
    boxes: int = Field(default=2, ge=1, le=6)
    wall_density: float = Field(default=0.2, ge=0, le=0.5, description="how many of the inner cells are wall")
    min_solution: int = Field(default=8, ge=1, description="the moves of the shortest solution, at least")
    max_solution: int = Field(default=30, ge=1, description="and at most")
    index: int | None = Field(default=None, ge=0, description="which board; by default the reset's seed picks one")
    level: str | None = Field(default=None, description="a level of your own in XSB notation")
    max_moves: int | None = Field(default=None, ge=1, description="the episode is truncated after so many")

    @model_validator(mode="after")
    def _fits_together(self) -> SokobanConfig:
        drawn = self.model_fields_set - {"level", "max_moves"}
        if self.level is not None and drawn:
            raise ValueError(f"give level or {sorted(drawn)[0]}, not both")
        if self.min_solution > self.max_solution:
            raise ValueError(f"min_solution {self.min_solution} is above max_solution {self.max_solution}")
        return self


class SokobanResource(ForkableResource):
    """One level; `move(direction)` is its only tool."""

    fork_kind = "native"
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
            self._own = await anyio.to_thread.run_sync(_own_board, self._settings.level, abandon_on_cancel=True)
        await self.reset(0)

    async def reset(self, seed: int | None = None) -> None:
        board = self._own
        if board is None:
            board = await anyio.to_thread.run_sync(_drawn_board, self._settings, seed, abandon_on_cancel=True)
        level, self._plan = board
        self._level = level
        self._position = level.start
        self._steps = level.steps()
        self._name = f"{level.width} {level.floor:x} {level.goals:x}"
        self._shortest = len(self._plan) if self._plan is not None else None
        self._moves = self._pushes = 0

    async def fork(self) -> ForkableResource:
        # A step replaces the values that it changes, so copies may share them.
        return copy.copy(self)

    async def checkpoint(self) -> Any:
        return dict(vars(self))

    async def restore(self, state: Any) -> None:
        vars(self).update(state)

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
        """Return the directions in which something moves."""
        if self._is_over():
            return []
        possible = [name for name, step in self._steps.items() if self._level.move(self._position, step)]
        return [{"name": "move", "arguments": {"direction": name}} for name in possible]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the first move of a shortest solution; None if there is none, or none was found in bounded time."""
        if self._is_over():
            return None
        if self._plan is None:
            # A plan is not part of the state: the solver would find it again.
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


def _own_board(text: str) -> Board:
    """Read the level of the configuration, which must not be solved, nor be known to have no solution."""
    level = read_level(text)
    solution = _plan_from(level, level.start)
    if solution == ():
        problem = "it is solved already" if level.is_solved(level.start) else "it has no solution"
        raise ConfigError(f"sokoban resource: level: {problem}")
    return Board(level, solution)


def _drawn_board(settings: SokobanConfig, seed: int | None) -> Board:
    index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
    spec = BoardSpec(
        settings.width,
        settings.height,
        settings.boxes,
        settings.wall_density,
        settings.min_solution,
        settings.max_solution,
    )
    return generate(spec, index)


def _plan_from(level: Level, position: Position) -> Plan | None:
    """Return a shortest solution; () if there is none, None if the search was given up."""
    try:
        return solve(level, position, _NODE_LIMIT) or ()
    except LimitError:
        return None
