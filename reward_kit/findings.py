"""`Finding`: what a checker of a contract says; the checkers of environments and of episodes share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A single problem.

    Attributes:
        level: "error" breaks the contract; "warning" may be meant, or could not be checked.
        message: what is wrong and the likely cause.
    """

    level: Level
    message: str
