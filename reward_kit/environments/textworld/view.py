"""What is known of a game after a command, as the worker tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reward_kit.environments.textworld.options import Section


@dataclass(frozen=True, slots=True)
class View:
    """One answer of the game.

    Attributes:
        observation: what the game said.
        won: the game was won; False where nobody knows.
        lost: it can no longer be won, and is over.
        score: the points so far, None where the game does not tell.
        max_score: those of a won game.
        moves: how many of the game's actions were carried out; None where they are not tracked.
        admissible_commands: every command that does something now, sorted; None where they are not tracked.
        objective: what is to be done, None where the game does not tell; as `inventory` and `description`.
        inventory: what the player carries.
        description: of the room.
        expert: the next command of a winning plan, None where there is none.
        facts: what holds, sorted; empty where it is not tracked.
        state: the name of the game's state, None where it is not tracked.
    """

    observation: str
    won: bool | None = None
    lost: bool | None = None
    score: int | None = None
    max_score: int | None = None
    moves: int | None = None
    admissible_commands: list[str] | None = None
    objective: str | None = None
    inventory: str | None = None
    description: str | None = None
    expert: str | None = None
    facts: list[str] = field(default_factory=list)
    state: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the game has come to an end."""
        return bool(self.won or self.lost)

    def section(self, name: Section) -> str | None:
        """What is shown under this name, None where it is not known."""
        value: Any = getattr(self, name)
        return ", ".join(value) if isinstance(value, list) else value
