"""What an agent sees after a command of a household game, the same for the native and the real engine."""

from typing import NamedTuple


class View(NamedTuple):
    """One observation of a household game, with the commands that are open next."""

    observation: str
    admissible: tuple[str, ...]
    reward: float
    done: bool
    won: bool
