"""What an agent needs to be told of each toy-text environment: names for its actions, and its state as plain text.

Gymnasium's own rendering marks the agent by a terminal colour, which is nothing in plain text, and shows the last
action, which is no part of the state. Nothing here imports gymnasium; environments are read through their attributes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_PLACES = ("R", "G", "Y", "B")
_PLACE_NAMES = ("R (red)", "G (green)", "Y (yellow)", "B (blue)")


class Family(ABC):
    """The knowledge about one kind of environment. Every method takes the unwrapped environment."""

    actions: tuple[str, ...] = ()
    legend: str = ""
    has_table = True

    @abstractmethod
    def text(self, env: Any, observation: Any) -> str:
        """The state as the agent is shown it; equal states have equal text."""

    @abstractmethod
    def state(self, env: Any, observation: Any) -> Any:
        """All that decides the future beside the configuration and the noise, as a JSON value."""

    @abstractmethod
    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        """Whether the goal is reached; None where the environment has none."""

    def admissible(self, env: Any, count: int) -> list[int]:
        """The actions that make sense now."""
        return list(range(count))


class FrozenLake(Family):
    actions = ("left", "down", "right", "up")
    legend = "S start, F frozen, H hole, G goal; you are in the [brackets]. Reach G without falling into H."

    def text(self, env: Any, observation: Any) -> str:
        return _grid([[cell.decode() for cell in row] for row in env.desc], int(env.s))

    def state(self, env: Any, observation: Any) -> Any:
        return int(env.s)

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return bool(env.desc.reshape(-1)[int(env.s)] == b"G")


class CliffWalking(Family):
    actions = ("up", "right", "down", "left")
    legend = (
        "S start, G goal, C cliff (it costs 100 and leads back to S); you are in the [brackets]. Each move costs 1."
    )

    def text(self, env: Any, observation: Any) -> str:
        cells = [["C" if cliff else "." for cliff in row] for row in env._cliff]
        cells[-1][0], cells[-1][-1] = "S", "G"
        return _grid(cells, int(env.s))

    def state(self, env: Any, observation: Any) -> Any:
        return int(env.s)

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return terminated


class Taxi(Family):
    actions = ("south", "north", "east", "west", "pickup", "dropoff")
    legend = (
        "T is your taxi, | a wall, : a way through; R, G, Y and B are the stops. Pick the passenger up and drop them "
        "off at the destination. Each step costs 1, a wrong pickup or dropoff 10."
    )

    def text(self, env: Any, observation: Any) -> str:
        row, column, passenger, destination = env.decode(int(env.s))
        cells = [[cell.decode() for cell in line] for line in env.desc]
        cells[1 + row][2 * column + 1] = "T"
        where = "in the taxi" if passenger == 4 else f"at {_PLACE_NAMES[passenger]}"
        here = [_PLACES[index] for index, place in enumerate(env.locs) if tuple(place) == (row, column)]
        lines = ["".join(line) for line in cells]
        lines.append(f"The taxi is in row {row}, column {column}{f', at {here[0]}' if here else ''}.")
        lines.append(f"The passenger is {where}; the destination is {_PLACE_NAMES[destination]}.")
        return "\n".join(lines)

    def state(self, env: Any, observation: Any) -> Any:
        # A fickle passenger changes their mind once; whether that is still to come is hidden, and decides the future.
        return [int(env.s), bool(getattr(env, "fickle_step", False))]

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return terminated

    def admissible(self, env: Any, count: int) -> list[int]:
        return [int(action) for action in np.flatnonzero(env.action_mask(int(env.s)))]


class Blackjack(Family):
    """Cards are drawn with replacement: both hands are the whole state, and the order of one's own is none of it."""

    actions = ("stick", "hit")
    legend = "Come closer to 21 than the dealer without going over. An ace counts 1 or 11, a picture card 10."
    has_table = False

    def text(self, env: Any, observation: Any) -> str:
        total, _, usable_ace = observation
        cards = " ".join(_card(card) for card in sorted(env.player))
        ace = ", with an ace counted as 11" if usable_ace else ""
        return f"Your hand: {cards} ({int(total)}{ace}). The dealer shows {_card(env.dealer[0])}."

    def state(self, env: Any, observation: Any) -> Any:
        return {"player": sorted(int(card) for card in env.player), "dealer": [int(card) for card in env.dealer]}

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return terminated and reward is not None and reward > 0


class Unknown(Family):
    """Best effort for any other environment with discrete actions: its table's state, or else its last observation."""

    has_table = False

    def text(self, env: Any, observation: Any) -> str:
        if env.render_mode == "ansi":
            drawn = env.render()
            return plain_text(drawn if isinstance(drawn, str) else str(drawn))
        return str(to_json(observation))

    def state(self, env: Any, observation: Any) -> Any:
        return to_json(env.s if hasattr(env, "s") else observation)

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return None


FAMILIES: dict[str, Family] = {
    "FrozenLakeEnv": FrozenLake(),
    "CliffWalkingEnv": CliffWalking(),
    "TaxiEnv": Taxi(),
    "BlackjackEnv": Blackjack(),
}
UNKNOWN = Unknown()


def blackjack_strategy(total: int, dealer: int, usable_ace: bool) -> int:
    """Basic strategy where one can only stick (0) or hit (1); `dealer` is the card shown, an ace is 1."""
    if usable_ace:
        return int(total <= 17 or (total == 18 and dealer in (1, 9, 10)))
    if total <= 11:
        return 1
    if total == 12:
        return int(dealer not in (4, 5, 6))
    return int(total <= 16 and dealer not in (2, 3, 4, 5, 6))


def plain_text(text: str) -> str:
    """Terminal text without its colour codes; what was coloured stands in brackets."""
    return _COLOURED.sub(r"[\1]", text).replace("\x1b", "").strip("\n")


def to_json(value: Any) -> Any:
    """An observation as a JSON value."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _card(card: int) -> str:
    return "A" if card == 1 else str(int(card))


def _grid(cells: list[list[str]], position: int) -> str:
    row, column = divmod(position, len(cells[0]))
    shown = [[f" {cell} " for cell in line] for line in cells]
    shown[row][column] = f"[{cells[row][column]}]"
    return "\n".join("".join(line).rstrip() for line in shown)
