"""The state of a published game, of which only texts are seen: what the commands that were carried out have changed.

Two sequences of commands that lead to one state give one key, because whatever is put back as it was at the start is
forgotten. Nothing is changed by a game itself, so this is all there is to know.
"""

from __future__ import annotations

from typing import Any

from reward_kit.environments.base import canonical_json, hash_key

_WITH = {"clean": "clean", "heat": "hot", "cool": "cool", "slice": "sliced", "use": "used"}


class Tracker:
    """What differs from the start of a game."""

    def __init__(self) -> None:
        self._at = ""
        self._holding = ""
        self._doors: set[str] = set()
        self._homes: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._marks: set[tuple[str, str]] = set()

    def apply(self, command: str) -> None:
        """Note a command that the game carried out."""
        verb, _, rest = command.partition(" ")
        if verb == "go":
            self._at = rest.removeprefix("to ")
        elif verb in ("open", "close"):
            # A door moved twice stands as it stood.
            self._doors ^= {rest}
        elif verb == "take":
            self._holding, _, place = rest.partition(" from ")
            self._homes.setdefault(self._holding, place)
            self._places.pop(self._holding, None)
        elif verb == "move":
            self._put(*rest.split(" to "))
        elif verb in _WITH:
            self._mark(rest.partition(" with ")[0], _WITH[verb])

    def changes(self) -> dict[str, Any]:
        """What differs now, as a JSON value."""
        return {
            "agent": {"at": self._at, "holding": self._holding},
            "moved": dict(self._places),
            "marks": [list(mark) for mark in sorted(self._marks)],
            "doors": sorted(self._doors),
        }

    def key(self, game: str) -> str:
        """The name of the present state of a game."""
        return hash_key(game, canonical_json(self.changes()))

    def _put(self, thing: str, place: str) -> None:
        self._holding = ""
        if self._homes.get(thing) != place:
            self._places[thing] = place

    def _mark(self, thing: str, mark: str) -> None:
        if mark in ("hot", "cool"):
            self._marks -= {(thing, "hot"), (thing, "cool")}
        self._marks.add((thing, mark))
