"""TextWorld's games as a resource: `act(command)` is the only tool, in the words of the game.

A game is made by one of TextWorld's own makers, offline and from a seed: the same maker, options and seed give the
same game. Or it is a game file, to whose name the `.json` that TextWorld writes beside it belongs: with it, the state
is tracked. Every world plays in a worker process of its own and forks by replay.

The reward of a command is the score it gained, as a part of the game's highest score: the rewards of a game that was
won add up to 1. Winning and losing terminate, `max_moves` truncates.

The state key names the facts that hold and the quests that were completed. It leaves out turns, the order in which
things lie and what "it" means; but where the game has asked something, the question is part of it. The key of a game
that is not tracked is its history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reward_kit.environments.base import (
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import read_config, task_path
from reward_kit.environments.engine_process import EngineProcess, worker_command
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.environments.textworld.options import OPTIONS, TextworldConfig
from reward_kit.environments.textworld.text import asks, command_line
from reward_kit.environments.textworld.view import View
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, did_you_mean, how_to_install
from reward_kit.processes import shared_folder
from reward_kit.validation import describe_validation_error

_TOOL = "act"
_SPEC = tool_spec(
    _TOOL,
    'Carry out one command of the game, such as "go north" or "take apple from table". "help" lists the verbs.',
    {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "one command, in the words of the game"}},
        "required": ["command"],
        "additionalProperties": False,
    },
)
_WORKER = "reward_kit.environments.textworld.worker"
_MAKING_TIMEOUT = 300.0
_TITLES = {
    "objective": "Objective",
    "description": "Room",
    "inventory": "Inventory",
    "admissible_commands": "Commands",
}


class TextworldResource(ReplayForkResource):
    """One game, in a worker process of its own."""

    takes_task_folder = True
    # Not `game`: a game file runs in an interpreter, and its grammar is evaluated as Python.
    per_sample_keys = frozenset({"maker", "options", "game_seed", "max_moves"})

    def __init__(self) -> None:
        super().__init__()
        self._settings = TextworldConfig(maker="simple")
        self._engine: EngineProcess | None = None
        self._game_id = ""
        self._start = self._view = View("")
        self._commands: list[str] = []

    async def _setup(self, config: Mapping[str, Any]) -> None:
        self._settings = _read(config)
        if self._settings.game is not None:
            _game_file(self._settings)
        if find_spec("textworld") is None:
            raise ConfigError(
                f"the textworld resource needs textworld; {how_to_install('text-games')}, with Python 3.11 or 3.12, "
                "where TextWorld runs"
            )
        # Some of a game's texts, and the order of a plan's commands, come from sets of texts.
        engine = EngineProcess("textworld", worker_command(_WORKER), environment={"PYTHONHASHSEED": "0"})
        await engine.start()
        self._engine = engine

    async def _reset(self, seed: int) -> None:
        if self._settings.game is not None:
            path = _game_file(self._settings)
            self._game_id = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            path = await self._made(seed)
        # The interpreter's generator has 16 bits, and 0 stands for one that cannot be repeated.
        request = {"op": "load", "path": str(path), "seed": seed % 2**15 + 1}
        self._start = self._view = View(**await self._worker().ask(request))
        self._commands = []
        unknown = [name for name in self._settings.show if self._view.section(name) is None]
        if unknown:
            raise ConfigError(
                f"textworld resource: show: {', '.join(unknown)} cannot be told of {self._settings.game}, which has no "
                f"{path.with_suffix('.json').name} beside it"
            )
        if self._view.state is None:
            self._game_id = hash_key(self._game_id, str(request["seed"]))

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        command = _command(action_name, action_params)
        if self._is_over():
            raise ToolError("the episode is over; no command changes anything")
        before, self._view = self._view, View(**await self._worker().ask({"op": "step", "command": command}))
        self._commands.append(command)
        info: dict[str, Any] = {"score": self._view.score, "max_score": self._view.max_score, "won": self._view.won}
        if self._view.moves is not None and before.moves is not None:
            info["is_action_valid"] = self._view.moves > before.moves
        text = self._shown(self._view.observation)
        reward = _reward(before, self._view)
        return StepOutcome(text, reward, self._view.is_over, self._is_out_of_moves(), info)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def get_observation(self) -> Any:
        """The beginning, and what came of the last command."""
        start = self._start.observation
        return self._shown(start if not self._commands else f"{start}\n\n{self._view.observation}")

    async def get_tools_spec(self) -> list[ToolSpec]:
        return [_SPEC]

    async def state_key(self) -> str:
        if self._view.state is None:
            return hash_key(self._game_id, *self._commands)
        question = self._view.observation if asks(self._view.observation) else ""
        return hash_key(self._game_id, self._view.state, question)

    async def final_state(self) -> StateSnapshot:
        view = self._view
        facts: dict[str, Any] = {"won": bool(view.won), "lost": bool(view.lost), "score": view.score}
        facts |= {
            "max_score": view.max_score,
            "commands": list(self._commands),
            "observation": view.observation,
            "objective": view.objective,
        }
        return StateSnapshot.from_json({**facts, "inventory": view.inventory, "facts": view.facts})

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]] | None:
        """Every command that does something now; None where the game is not tracked."""
        if self._is_over():
            return []
        commands = self._view.admissible_commands
        return None if commands is None else [_call(command) for command in commands]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """The next command of TextWorld's own plan, from wherever the game is; None where it knows none.

        Of games without such a plan (cooking with `drop`) it is that of the maker's walkthrough, while it is followed.
        """
        command = self._view.expert
        return None if command is None or self._is_over() else {"type": "tool_call", **_call(command)}

    async def _made(self, seed: int) -> Path:
        """The file of the game that the maker makes; one that this process has had made already is taken again."""
        settings = self._settings
        game_seed = seed % 2**32 if settings.game_seed is None else settings.game_seed
        self._game_id = hash_key(str(settings.maker), canonical_json(settings.options), str(game_seed))
        folder = shared_folder("textworld-games") / self._game_id
        if not folder.is_dir():
            request = {"op": "make", "maker": settings.maker, "options": settings.options, "seed": game_seed}
            await self._worker().ask({**request, "folder": str(folder)}, _MAKING_TIMEOUT)
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

    def _worker(self) -> EngineProcess:
        if self._engine is None:
            raise EnvironmentFailure("textworld: closed, or not set up")
        return self._engine


def _read(config: Mapping[str, Any]) -> TextworldConfig:
    settings = read_config(TextworldConfig, config, "textworld")
    if settings.maker is None:
        return settings
    model = OPTIONS[settings.maker]
    try:
        options = model.model_validate(settings.options)
    except ValidationError as error:
        problems = "; ".join(describe_validation_error(error, model))
        raise ConfigError(f"textworld resource: options of {settings.maker}: {problems}") from None
    return settings.model_copy(update={"options": options.model_dump()})


def _game_file(settings: TextworldConfig) -> Path:
    path = task_path(settings.game or "", settings.task_folder, "game")
    if path.suffix == ".ulx":
        raise ConfigError(f"textworld resource: game: {path.name!r}: TextWorld 1.7 plays no Glulx games, only .z8")
    if path.suffix not in {f".z{version}" for version in range(1, 9)}:
        raise ConfigError(f"textworld resource: game: {path.name!r} is no game file (.z1 to .z8)")
    if not path.is_file():
        raise ConfigError(f"textworld resource: game: no file {path}")
    return path


def _command(tool: str, arguments: Mapping[str, Any]) -> str:
    """The command that a tool call means.

    Raises:
        ToolError: there is no such tool, its arguments are wrong, or the command is not one for the game.
    """
    if tool != _TOOL:
        raise ToolError(f"unknown tool {tool!r}{did_you_mean(tool, [_TOOL])}")
    for name in arguments:
        if name != "command":
            raise ToolError(f"{_TOOL}: unknown argument {name!r}{did_you_mean(str(name), ['command'])}")
    if not isinstance(arguments.get("command"), str):
        raise ToolError(f"{_TOOL}: command: {'must be text' if 'command' in arguments else 'missing'}")
    return command_line(arguments["command"])


def _call(command: str) -> dict[str, Any]:
    return {"name": _TOOL, "arguments": {"command": command}}


def _reward(before: View, after: View) -> float | None:
    """The score gained, as a part of the highest score; None where the game keeps none."""
    if before.score is None or after.score is None or not after.max_score:
        return None
    return (after.score - before.score) / after.max_score
