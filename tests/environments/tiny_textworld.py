"""A worker with TextWorld's protocol that plays a corridor of three rooms without TextWorld.

A coin lies in the last room. Entering that room gives a point, taking the coin another and wins; eating it loses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_kit.environments.engine_worker import Operations, run

ROOMS = ("Hall", "Passage", "Treasury")


def make(request: Mapping[str, Any]) -> str:
    """Make a corridor with a start that depends on the seed; count each creation."""
    folder = Path(request["folder"])
    folder.mkdir()
    (folder / "game.z8").write_text(json.dumps({"room": request["seed"] % 2, "options": request["options"]}))
    (folder / "game.json").write_text("{}")
    with (folder.parent / "made").open("a") as file:
        file.write(f"{request['maker']} {request['seed']}\n")
    return str(folder)


class Corridor:
    """A game."""

    def operations(self) -> Operations:
        """Return the supported operations."""
        return {"make": make, "load": self.load, "step": self.step}

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start the game; nothing is tracked if the file beside it is missing."""
        path = Path(request["path"])
        self.tracked = path.with_suffix(".json").is_file()
        self.room = json.loads(path.read_text())["room"]
        self.score, self.moves, self.end = 0, 0, ""
        return self.view(f"Find the coin.\n\n-= {ROOMS[self.room]} =-")

    def step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Walk, take the coin, or ask a question."""
        command = request["command"]
        if command == "go":
            return self.view("Where do you want to go?")
        if command not in self.commands():
            return self.view("That's not a verb I recognise.")
        self.moves += 1
        if command.startswith("go"):
            self.room += 1 if command == "go east" else -1
            self.score = max(self.score, int(self.room == 2))
            return self.view(f"-= {ROOMS[self.room]} =-")
        self.end = "won" if command == "take coin" else "lost"
        self.score += self.end == "won"
        return self.view(f"You {command}.")

    def commands(self) -> list[str]:
        """Return the commands that have an effect."""
        if self.end:
            return []
        return [*(["eat coin"] if self.room == 2 else []), *(["go east"] if self.room < 2 else []),
                *(["go west"] if self.room else []), *(["take coin"] if self.room == 2 else [])]  # fmt: skip

    def view(self, observation: str) -> dict[str, Any]:
        """Return the current view."""
        if not self.tracked:
            return {"observation": observation}
        plan = [command for command in self.commands() if command in ("go east", "take coin")]
        return {
            "observation": observation,
            "won": self.end == "won",
            "lost": self.end == "lost",
            "score": self.score,
            "max_score": 2,
            "moves": self.moves,
            "admissible_commands": self.commands(),
            "objective": "Find the coin.",
            "inventory": "Nothing.",
            "description": ROOMS[self.room],
            "expert": plan[0] if plan else None,
            "facts": [f"at {ROOMS[self.room]}"],
            "state": f"{self.room} {self.score} {self.end}",
        }


if __name__ == "__main__":
    run(lambda: Corridor().operations())
