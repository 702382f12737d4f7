"""ALFWorld's household as a resource: `alfworld` on our fast engine, `alfworld_real` on TextWorld's.

Both play the same problems, with equal texts, commands and rewards; the real one also plays published game files. They
are two resources, because the one is copied to fork it and the other takes its commands again in a new worker process.
The reward is 1 where the goal is reached, which ends the episode, and 0 otherwise.

A limit on commands is no part of the state key: `truncated` says that the episode stopped for an outside reason.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import ForkableResource, StateSnapshot, StepOutcome, ToolSpec
from reward_kit.environments.config import read_config, task_path
from reward_kit.environments.household import generator
from reward_kit.environments.household.forms import ActionForm
from reward_kit.environments.household.native import HouseholdEngine, Tables
from reward_kit.environments.household.problem import Problem, TaskType
from reward_kit.environments.household.real import RealEngine, game_files
from reward_kit.environments.household.session import Session
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.errors import ConfigError, EnvironmentFailure


class AlfworldConfig(BaseModel):
    """The configuration of `alfworld` and `alfworld_real`."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["native", "real"] | None = Field(default=None, description="only to say which one is meant")
    split: Literal["train", "development", "held_out"] = "train"
    index: int | None = Field(default=None, ge=0, description="which problem; by default the reset's seed picks one")
    seed: int = Field(default=0, description="other seeds give other problems of the split")
    task_types: list[TaskType] | None = Field(default=None, min_length=1)
    problem: dict[str, Any] | None = Field(default=None, description="a problem of your own, as Problem.to_json gives")
    game_file: str | None = Field(default=None, description="alfworld_real: a published game.tw-pddl")
    published: bool = Field(default=False, description="alfworld_real: the split's games below ALFWORLD_DATA")
    action_form: ActionForm = "text"
    max_commands: int | None = Field(default=None, ge=1)
    task_folder: str | None = None


class _Household(ForkableResource):
    """What an agent sees of a household, whichever engine plays it."""

    takes_task_folder = True
    # Not `game_file` and `published`: a game file has a grammar, which is evaluated as Python.
    per_sample_keys = frozenset({"split", "index", "seed", "task_types", "problem", "max_commands"})
    _session: Session

    async def get_observation(self) -> Any:
        return self._session.observation()

    async def get_tools_spec(self) -> list[ToolSpec]:
        return self._session.tools_spec()

    async def state_key(self) -> str:
        return self._session.state_key()

    async def final_state(self) -> StateSnapshot:
        return self._session.final_state()

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]]:
        return self._session.admissible_actions()

    async def expert_action(self) -> Mapping[str, Any] | None:
        """The first command of a shortest plan; of a published game the planner's, while its plan is followed."""
        return self._session.expert_action()


class AlfworldResource(_Household):
    """A household on the native engine."""

    fork_kind = "native"
    never_waits = True

    def __init__(self) -> None:
        self._config = AlfworldConfig()

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._config = _read(config, "alfworld", "native")
        if self._config.game_file is not None or self._config.published:
            raise ConfigError("alfworld resource: game_file: published games need the real engine: use alfworld_real")
        _tables_for(self._config, 0)

    async def reset(self, seed: int | None = None) -> None:
        engine = HouseholdEngine(_tables_for(self._config, seed))
        view = engine.reset()
        self._session = Session(self._config.action_form, self._config.max_commands, view, view, engine)

    async def fork(self) -> ForkableResource:
        twin = AlfworldResource()
        twin._config, twin._session = self._config, self._session.copy()
        return twin

    async def checkpoint(self) -> Any:
        return self._session.copy()

    async def restore(self, state: Any) -> None:
        self._session = state.copy()

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        command = self._session.command(action_name, action_params)
        engine = self._session.engine
        assert engine is not None
        held = engine.holding
        return self._session.record(command, engine.step(command), held)


class RealAlfworldResource(_Household, ReplayForkResource):
    """A household on TextWorld's engine, in a worker process of its own.

    Of a generated problem the native engine plays along: it gives the state key and the expert, and where the two
    differ in anything the agent sees, the episode fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings = AlfworldConfig()
        self._worker: RealEngine | None = None

    async def _setup(self, config: Mapping[str, Any]) -> None:
        self._settings = _read(config, "alfworld_real", "real")
        if self._settings.published:
            _published_game(self._settings, 0)
        elif self._settings.game_file is None:
            _tables_for(self._settings, 0)
        worker = RealEngine()
        await worker.start()
        self._worker = worker

    async def _reset(self, seed: int) -> None:
        settings = self._settings
        if settings.game_file is not None or settings.published:
            path = _published_game(settings, seed) if settings.published else _game_file(settings)
            view = await self._real().load(path)
            # The planner may take seconds, so it is asked once, where there is no expert of our own.
            plan = await self._real().expert()
            game = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
            self._session = Session(settings.action_form, settings.max_commands, view, view, None, plan=plan, game=game)
            return
        tables = _tables_for(settings, seed)
        engine = HouseholdEngine(tables)
        view = await self._real().load(tables.problem)
        _compare("at the start", view, engine.reset())
        self._session = Session(settings.action_form, settings.max_commands, view, view, engine)

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        command = self._session.command(action_name, action_params)
        view = await self._real().step(command)
        engine = self._session.engine
        if engine is None:
            return self._session.record(command, view)
        held = engine.holding
        _compare(f"after {command!r}", view, engine.step(command))
        return self._session.record(command, view, held)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    def _real(self) -> RealEngine:
        if self._worker is None:
            raise EnvironmentFailure("alfworld_real: closed, or not set up")
        return self._worker


def _read(config: Mapping[str, Any], resource: str, engine: str) -> AlfworldConfig:
    settings = read_config(AlfworldConfig, config, resource)
    if settings.engine not in (None, engine):
        other = "alfworld_real" if engine == "native" else "alfworld"
        raise ConfigError(f"{resource} resource: engine: the {settings.engine} engine is the resource {other}")
    named = [name for name in ("index", "problem", "game_file") if getattr(settings, name) is not None]
    if settings.published:
        named = ["published", *(name for name in named if name != "index")]
    if len(named) > 1:
        raise ConfigError(f"{resource} resource: {' and '.join(named)} each name the problem; keep one")
    return settings


def _tables_for(settings: AlfworldConfig, seed: int | None) -> Tables:
    """The problem of the configuration, or the one that a reset's seed picks."""
    if settings.problem is not None:
        return _own_problem(settings.problem)
    index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
    types = settings.task_types or list(TaskType)
    return _generated(settings.split, index, settings.seed, types[index % len(types)])


@lru_cache(maxsize=512)
def _generated(split: str, index: int, seed: int, task_type: TaskType) -> Tables:
    return Tables(generator.problem(split, index, seed, task_type))


def _own_problem(data: Mapping[str, Any]) -> Tables:
    problem = Problem.from_json(data)
    try:
        return Tables(problem)
    except (KeyError, ValueError) as error:
        text = 'names are "<type> <number>", and each thing is at one of the receptacles'
        raise ConfigError(f"alfworld resource: problem: {text}: {error}") from None


def _game_file(settings: AlfworldConfig) -> Path:
    """A game file, as the task names it or below `ALFWORLD_DATA`."""
    path, data = settings.game_file or "", os.environ.get("ALFWORLD_DATA")
    if data:
        root = Path(data).expanduser().resolve()
        found = (root / path).resolve()
        if found.is_file() and found.is_relative_to(root):
            return found
    return task_path(path, settings.task_folder, "game_file")


_PUBLISHED_SPLITS = {"train": "train", "development": "valid_seen", "held_out": "valid_unseen"}


def _published_game(settings: AlfworldConfig, seed: int) -> Path:
    """The game of the configuration's index, or the one that a reset's seed picks, among the split's published ones."""
    folder, types = _PUBLISHED_SPLITS[settings.split], [kind.value for kind in settings.task_types or TaskType]
    games = [path for path in game_files() if folder in path.parts and any(kind in str(path) for kind in types)]
    if not games:
        raise ConfigError(
            f"alfworld_real resource: published: ALFWORLD_DATA names no {folder} game of {', '.join(types)}"
        )
    index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
    return games[index % len(games)]


def _compare(where: str, real: Any, native: Any) -> None:
    for name, one, other in zip(real._fields, real, native, strict=True):
        if one != other:
            raise EnvironmentFailure(
                f"alfworld_real: {where}: the engines differ in {name}: {str(one)[:300]!r}, native {str(other)[:300]!r}"
            )
