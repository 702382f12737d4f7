"""The worker process that generates TextWorld games and plays one game at a time.

The requests (see `engine_worker`) are `{"op": "make", "maker", "options", "seed", "folder"}`, `{"op": "load", "path",
"seed"}` and `{"op": "step", "command"}`. The worker responds to the last two with a view (`textworld.View`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from reward_kit.environments.base import hash_key
from reward_kit.environments.engine_worker import Operations, run
from reward_kit.errors import ConfigError, boundary

_LOGO = re.compile(r"\A(?:[ _|\\/$<>]*\n)+")
_STATUS_LINE = re.compile(r">?[ ]{10,}-= .+? =-\s*-?\d+/\d+\s*\Z")
_PROMPT = re.compile(r"\n>\s*\Z")
_AT_THE_END = re.compile(r"\s*Would you like to RESTART\b.*\Z", re.DOTALL)
_CENTERED = re.compile(r"^[ ]{10,}", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")
_ASKED_FOR = ("won", "lost", "score", "max_score", "moves", "objective", "inventory", "description")
_TRACKED = ("admissible_commands", "policy_commands", "facts")


def answer_text(feedback: str) -> str:
    """Return the game's text without TextWorld's logo, the status line, the prompt and the offer to restart."""
    text = _STATUS_LINE.sub("", _LOGO.sub("", feedback))
    text = _AT_THE_END.sub("", _PROMPT.sub("", text))
    return _BLANK_LINES.sub("\n\n", _CENTERED.sub("", text)).strip()


def make(request: Mapping[str, Any]) -> str:
    """Generate a game in a directory, as `game.z8` and `game.json`. An existing directory is left unchanged."""
    folder = Path(request["folder"])
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    aside.mkdir()
    maker, options, seed = request["maker"], request["options"], request["seed"]
    try:
        with boundary(ConfigError, f"textworld: {maker} cannot make a game with the options {options} and seed {seed}"):
            _make(maker, options, seed, aside / "game.z8")
        aside.rename(folder)
    except OSError:
        # If a different worker has generated the same game in the meantime, use that game.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return str(folder)


def _make(maker: str, options: Mapping[str, Any], seed: int, path: Path) -> None:
    textworld = import_module("textworld")
    # The makers also use this global random number generator.
    textworld.g_rng.set_seed(seed)
    settings = textworld.GameOptions()
    settings.seeds, settings.path, settings.file_ext = seed, str(path), ".z8"
    if maker != "custom":
        challenges = import_module("textworld.challenges").CHALLENGES
        game = challenges[f"tw-{maker}"][1](dict(options), settings)
        import_module("textworld.generator").compile_game(game, settings)
        return
    # The names that `tw-make` uses for the options of a custom game.
    settings.nb_rooms, settings.nb_objects = options["world_size"], options["nb_objects"]
    settings.nb_parallel_quests = options["nb_parallel_quests"]
    length, breadth = options["quest_length"], options["quest_breadth"]
    chaining, grammar = settings.chaining, settings.grammar
    chaining.min_length = length or options["quest_min_length"]
    chaining.max_length = length or options["quest_max_length"]
    chaining.min_depth = options["quest_min_depth"]
    chaining.max_depth = length or options["quest_max_depth"]
    chaining.min_breadth = breadth or options["quest_min_breadth"]
    chaining.max_breadth = breadth or options["quest_max_breadth"]
    grammar.allowed_variables_numbering = options["entity_numbering"]
    for name in ("theme", "include_adj", "only_last_action", "blend_instructions", "blend_descriptions"):
        setattr(grammar, name, options[name])
    textworld.make(settings)


class Player:
    """Plays one game at a time."""

    def __init__(self) -> None:
        self._textworld = import_module("textworld")
        self._env: Any = None
        self._walkthrough: list[str] = []

    def operations(self) -> Operations:
        return {"make": make, "load": self.load, "step": self.step}

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        path = Path(request["path"])
        is_tracked = path.with_suffix(".json").is_file()
        asked_for = (*_ASKED_FOR, *(_TRACKED if is_tracked else ()))
        infos = self._textworld.EnvInfos(**dict.fromkeys(asked_for, True), extras=["walkthrough"])
        with boundary(ConfigError, f"textworld: {path} is not a playable game"):
            self._env = self._textworld.start(str(path), infos)
            self._env.seed(request["seed"])
            state = self._env.reset()
        self._walkthrough = list(state.get("extra.walkthrough") or ()) if is_tracked else []
        return self._view(state)

    def step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        command = request["command"]
        self._walkthrough = self._walkthrough[1:] if self._walkthrough[:1] == [command] else []
        return self._view(self._env.step(command)[0])

    def _view(self, state: Mapping[str, Any]) -> dict[str, Any]:
        view = {name: state.get(name) for name in (*_ASKED_FOR, "admissible_commands")}
        plan = state.get("policy_commands") or self._walkthrough
        name = None
        if (progression := state.get("_game_progression")) is not None:
            # These facts use the entities' ids, since some entities have no name. Quests are added, as they are not
            # facts.
            quests = [f"{quest.nb_completions} {quest.failed}" for quest in progression.quest_progressions]
            name = hash_key(*sorted(str(fact) for fact in state["_facts"]), *quests)
        return {
            **view,
            "observation": answer_text(state["feedback"]),
            "expert": plan[0] if plan else None,
            "facts": sorted(str(fact) for fact in state.get("facts") or ()),
            "state": name,
        }


if __name__ == "__main__":
    run(lambda: Player().operations())
