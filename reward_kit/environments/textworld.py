"""TextWorld's games as a resource with a single tool, `act(command)`, which takes the game's text commands.

A generated game is determined by a seed and the options of its maker, which are the options of `tw-make` in TextWorld
1.7, written with underscores. The state of a game file is tracked if TextWorld's `.json` file is next to it. Otherwise,
the history serves as the state key. The reward for a command is the score that it gains, divided by the maximum score.
The state key ignores the number of turns, but includes a question from the game that has not been answered yet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from reward_kit.environments.base import (
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    check_call,
    hash_key,
    strict_tool,
)
from reward_kit.environments.config import ResourceConfig, read_config, task_path
from reward_kit.environments.engine_process import EngineProcess, worker_command
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.errors import ConfigError, ToolError, install_hint
from reward_kit.processes import shared_folder

Maker = Literal["cooking", "coin_collector", "treasure_hunter", "simple", "custom"]
Section = Literal["objective", "description", "inventory", "admissible_commands"]
LONGEST_COMMAND = 180
"""Maximum number of characters in a command. The interpreter's line buffer is hardly larger, and silently drops the
rest.
"""
_MOST_ROOMS = 100
_MAKING_TIMEOUT = 300.0
_WORKER = "reward_kit.environments.textworld_worker"
_SPECS: dict[str, ToolSpec] = {
    "act": strict_tool(
        "act",
        'Carry out one command of the game, such as "go north" or "take apple from table". "help" lists the verbs.',
        command={"type": "string", "description": "one command, in the words of the game"},
    )
}
_TITLES: dict[str, str] = {
    "objective": "Objective",
    "description": "Room",
    "inventory": "Inventory",
    "admissible_commands": "Commands",
}
# Commands to the interpreter. They quit the game, change it without updating the tracked state, write files, change
# later responses, or are left over from TextWorld's compiler (`print_state` reveals everything).
_REFUSED = (
    "quit q restart restore undo oops o save script unscript noscript transcript brief superbrief verbose short long "
    "normal notify verify version print_state enable disable restrict tw"
)
# The interpreter reads the first nine letters of a word.
_REFUSED_WORDS = frozenset(word[:9] for word in _REFUSED.split())
_COMMANDS = re.compile(r"[.,;]|\bthen\b")
_FIRST_WORD = re.compile(r"[a-z_]+")


class _Options(ResourceConfig):
    model_config = ConfigDict(strict=True)


class CookingOptions(_Options):
    """The task is to cook a meal according to the cookbook in the kitchen.

    The game is from the First TextWorld Problems competition.
    """

    recipe: int = Field(default=1, ge=1, le=5, description="number of ingredients")
    take: int = Field(default=0, ge=0, description="ingredients to find; the player starts with the other ingredients")
    go: Literal[1, 6, 9, 12] = Field(default=1, description="number of rooms")
    open: bool = Field(default=False, description="whether containers and doors start closed")
    cook: bool = False
    cut: bool = False
    drop: bool = Field(default=False, description="whether to limit the number of things that the player can carry")
    recipe_seed: int = Field(
        default=0, ge=0, description="a value above 0 selects a different recipe in the same house"
    )
    split: Literal["train", "valid", "test"] | None = Field(default=None, description="the split whose foods are used")

    @model_validator(mode="after")
    def _fits(self) -> CookingOptions:
        if self.take > self.recipe:
            raise ValueError(f"take: {self.take} is more than the recipe's {self.recipe} ingredients")
        if self.recipe_seed and not self.take:
            raise ValueError(
                "recipe_seed: a different recipe is possible only if there are ingredients to find; set take"
            )
        return self


class CoinCollectorOptions(_Options):
    """The task is to find a coin at the end of a chain of `(level - 1) % 100 + 1` rooms.

    From level 101, the house has dead ends.
    """

    level: int = Field(ge=1, le=300)

    @field_validator("level")
    @classmethod
    def _fits(cls, level: int) -> int:
        rooms = ((level - 1) // 100 + 1) * ((level - 1) % 100 + 1)
        if rooms > _MOST_ROOMS:
            raise ValueError(f"would have {rooms} rooms, but TextWorld's games have at most {_MOST_ROOMS}")
        return level


class TreasureHunterOptions(_Options):
    """The task is to take one of two things.

    From level 11, the things are behind doors and in containers. From level 21, the doors and containers are locked.
    """

    level: int = Field(ge=1, le=30)


class SimpleOptions(_Options):
    """The task is to leave a locked bedroom and put food on the stove. The house is always the same."""

    rewards: Literal["dense", "balanced", "sparse"] = "dense"
    goal: Literal["detailed", "brief", "none"] = "detailed"
    test: bool = Field(default=False, description="use foods that do not occur in other games")


class CustomOptions(_Options):
    """A house and quests that are drawn at random.

    `ambiguous_instructions` is not offered, because it fails in TextWorld 1.7.
    """

    world_size: int = Field(default=5, ge=1, le=_MOST_ROOMS)
    nb_objects: int = Field(default=10, ge=1)
    nb_parallel_quests: int = Field(default=1, ge=1)
    quest_length: int | None = Field(
        default=None, ge=1, description="sets the minimum and maximum length and the depth"
    )
    quest_breadth: int | None = Field(default=None, ge=1, description="sets the minimum and maximum breadth")
    quest_min_length: int = Field(default=1, ge=1)
    quest_max_length: int = Field(default=5, ge=1)
    quest_min_breadth: int = Field(default=1, ge=1)
    quest_max_breadth: int = Field(default=5, ge=1)
    quest_min_depth: int = Field(default=1, ge=1)
    quest_max_depth: int = Field(default=5, ge=1)
    theme: Literal["house", "basic"] = "house"
    include_adj: bool = False
    only_last_action: bool = False
    blend_instructions: bool = False
    blend_descriptions: bool = False
    entity_numbering: bool = False


OPTIONS: dict[Maker, type[_Options]] = {
    "cooking": CookingOptions,
    "coin_collector": CoinCollectorOptions,
    "treasure_hunter": TreasureHunterOptions,
    "simple": SimpleOptions,
    "custom": CustomOptions,
}


class TextworldConfig(ResourceConfig):
    """The configuration of `textworld`."""

    game: str | None = Field(default=None, description="a game file (.z1 to .z8), relative to the task's directory")
    maker: Maker | None = None
    options: dict[str, Any] = Field(default_factory=dict, description="the options of the maker")
    game_seed: int | None = Field(
        default=None, ge=0, lt=2**32, description="seed of the maker; defaults to the seed of the reset"
    )
    max_moves: int | None = Field(default=None, ge=1, description="the episode is truncated after this many commands")
    show: list[Section] = Field(default_factory=list, description="sections to show after the response")
    task_folder: str | None = None

    @model_validator(mode="after")
    def _is_one_game(self) -> TextworldConfig:
        if (self.game is None) == (self.maker is None):
            raise ValueError("set either a game file (game) or a maker")
        if self.game is not None and (self.options or self.game_seed is not None):
            raise ValueError("options and game_seed apply only to a maker; remove them for a game file")
        return self


@dataclass(frozen=True, slots=True)
class View:
    """A response from the game. Unknown and untracked values are `None`.

    `moves` is the number of executed game actions, `expert` is the next command of a winning plan, `facts` contains the
    true facts in sorted order, and `state` identifies the game's state.
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
        return bool(self.won or self.lost)

    def section(self, name: Section) -> str | None:
        value: Any = getattr(self, name)
        return ", ".join(value) if isinstance(value, list) else value


class TextworldResource(ReplayForkResource):
    """A game that runs in a separate worker process."""

    takes_task_folder = True
    # `game` is excluded: a game file runs in an interpreter, and its grammar is evaluated as Python.
    per_sample_keys = frozenset({"maker", "options", "game_seed", "max_moves"})

    def __init__(self) -> None:
        super().__init__()
        self._settings = TextworldConfig(maker="simple")
        # Some of a game's texts, and the order of a plan's commands, depend on the order of sets of strings.
        self._engine = EngineProcess("textworld", worker_command(_WORKER), environment={"PYTHONHASHSEED": "0"})
        self._game_id = ""
        self._start = self._view = View("")
        self._commands: list[str] = []

    async def _setup(self, config: Mapping[str, Any]) -> None:
        settings = self._settings = read_config(TextworldConfig, config, "textworld")
        if settings.maker is not None:
            part = f"options of {settings.maker}: "
            options = read_config(OPTIONS[settings.maker], settings.options, "textworld", part)
            settings.options = options.model_dump()
        else:
            _game_file(settings)
        if find_spec("textworld") is None:
            raise ConfigError(
                f"the textworld resource needs textworld; {install_hint('text-games')}. TextWorld "
                "requires Python 3.11 or 3.12"
            )
        await self._engine.start()

    async def _reset(self, seed: int) -> None:
        if self._settings.game is not None:
            path = _game_file(self._settings)
            self._game_id = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            path = await self._make(seed)
        # The interpreter's seed has 16 bits, and 0 stands for a random seed.
        request = {"op": "load", "path": str(path), "seed": seed % 2**15 + 1}
        self._start = self._view = View(**await self._engine.ask(request))
        self._commands = []
        if unknown := [name for name in self._settings.show if self._view.section(name) is None]:
            raise ConfigError(
                f"textworld resource: show: {', '.join(unknown)} not available for {self._settings.game}, "
                f"because there is no {path.with_suffix('.json').name} next to it"
            )
        if self._view.state is None:
            self._game_id = hash_key(self._game_id, str(request["seed"]))

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        command = command_line(check_call(_SPECS, action_name, action_params)["command"])
        if self._is_over():
            raise ToolError("the episode is over; no command changes anything")
        before, self._view = self._view, View(**await self._engine.ask({"op": "step", "command": command}))
        self._commands.append(command)
        info: dict[str, Any] = {"score": self._view.score, "max_score": self._view.max_score, "won": self._view.won}
        if self._view.moves is not None and before.moves is not None:
            info["is_action_valid"] = self._view.moves > before.moves
        reward = None
        if before.score is not None and self._view.score is not None and self._view.max_score:
            reward = (self._view.score - before.score) / self._view.max_score
        text = self._shown(self._view.observation)
        return StepOutcome(text, reward, self._view.is_over, self._is_out_of_moves(), info)

    async def close(self) -> None:
        await self._engine.close()

    async def get_observation(self) -> Any:
        """Return the introduction and the response to the last command."""
        start = self._start.observation
        return self._shown(start if not self._commands else f"{start}\n\n{self._view.observation}")

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_SPECS.values())

    async def state_key(self) -> str:
        if self._view.state is None:
            return hash_key(self._game_id, *self._commands)
        # The game asked "Which do you mean, …?", and the next command is the answer.
        question = self._view.observation if self._view.observation.endswith("?") else ""
        return hash_key(self._game_id, self._view.state, question)

    async def final_state(self) -> StateSnapshot:
        names = ("score", "max_score", "observation", "objective", "inventory", "facts")
        facts = {name: getattr(self._view, name) for name in names}
        ends = {"won": bool(self._view.won), "lost": bool(self._view.lost)}
        return StateSnapshot.from_json({**facts, **ends, "commands": self._commands})

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]] | None:
        """Return every command that has an effect in the current state, or None if the game is not tracked."""
        if self._is_over():
            return []
        commands = self._view.admissible_commands
        return None if commands is None else [{"name": "act", "arguments": {"command": name}} for name in commands]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the next command of TextWorld's plan for the current state, or None if it has no plan.

        For games without such a plan (cooking with `drop`), the maker's walkthrough is used until the agent deviates
        from it.
        """
        if self._view.expert is None or self._is_over():
            return None
        return {"type": "tool_call", "name": "act", "arguments": {"command": self._view.expert}}

    async def _make(self, seed: int) -> Path:
        """Return the path of the maker's game. Each game is created once per process."""
        settings = self._settings
        game_seed = seed % 2**32 if settings.game_seed is None else settings.game_seed
        self._game_id = hash_key(str(settings.maker), canonical_json(settings.options), str(game_seed))
        folder = shared_folder("textworld-games") / self._game_id
        if not folder.is_dir():
            request = {"op": "make", "maker": settings.maker, "options": settings.options, "seed": game_seed}
            await self._engine.ask({**request, "folder": str(folder)}, _MAKING_TIMEOUT)
        return folder / "game.z8"

    def _shown(self, text: str) -> str:
        if self._view.is_over:
            return text
        sections = [f"{_TITLES[name]}: {self._view.section(name)}" for name in self._settings.show]
        return "\n\n".join([text, *sections])

    def _is_out_of_moves(self) -> bool:
        return self._settings.max_moves is not None and len(self._commands) >= self._settings.max_moves

    def _is_over(self) -> bool:
        return self._view.is_over or self._is_out_of_moves()


def _game_file(settings: TextworldConfig) -> Path:
    path = task_path(settings.game or "", settings.task_folder, "game")
    if path.suffix == ".ulx":
        raise ConfigError(f"textworld resource: game: {path.name!r}: TextWorld 1.7 cannot play Glulx games; use .z8")
    if path.suffix not in {f".z{version}" for version in range(1, 9)}:
        raise ConfigError(f"textworld resource: game: {path.name!r} is not a game file (.z1 to .z8)")
    if not path.is_file():
        raise ConfigError(f"textworld resource: game: file {path} does not exist")
    return path


def command_line(text: str) -> str:
    """Return a valid command for the game.

    Raises:
        ToolError: the command is too long, not plain ASCII, or meant for the interpreter.
    """
    command = " ".join(text.split())
    if len(command) > LONGEST_COMMAND:
        raise ToolError(f"a command can have at most {LONGEST_COMMAND} characters, got {len(command)}")
    if not (command.isascii() and command.isprintable()):
        raise ToolError("a command must be plain ASCII text")
    for part in _COMMANDS.split(command.lower()):
        word = _FIRST_WORD.match(part.strip())
        if word and word[0][:9] in _REFUSED_WORDS:
            raise ToolError(f"{word[0]!r} is a command for the interpreter, not for the game, and is not allowed")
    return command
