"""ALFWorld's household as a resource: `alfworld` uses a fast native engine, `alfworld_real` uses TextWorld's engine.

Both resources play the same problems with identical texts, commands and rewards. `alfworld_real` can also play
published game files. The reward is 1 when the goal is reached, and 0 otherwise. Reaching the goal ends the episode. The
state key does not depend on `max_commands`.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from reward_kit.environments.base import (
    ForkableResource,
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
from reward_kit.environments.household_engine import (
    NOTHING,
    NOWHERE,
    HouseholdEngine,
    HouseholdView,
    Tables,
    shortest_plan,
)
from reward_kit.environments.household_problems import Problem, TaskType, generate_problem
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError

ActionForm = Literal["text", "choice", "tools"]
"""The form of the commands: free text, one of the admissible commands, or one tool per verb."""
_DESCRIPTIONS = {
    "receptacle": 'its name, such as "fridge 1"',
    "object": 'its name, such as "mug 1"',
    "knife": 'its name, such as "knife 1"',
    "thing": 'the name of a receptacle or an object, such as "fridge 1"',
}
_TEMPLATES = {
    "go_to": ("go to {receptacle}", "Go to a receptacle."),
    "open": ("open {receptacle}", "Open the receptacle before you."),
    "close": ("close {receptacle}", "Close the receptacle before you."),
    "take": ("take {object} from {receptacle}", "Take an object from the receptacle before you."),
    "move": ("move {object} to {receptacle}", "Put the object you hold into or onto the receptacle before you."),
    "clean": ("clean {object} with {receptacle}", "Clean the object you hold at a sink."),
    "heat": ("heat {object} with {receptacle}", "Heat the object you hold with a microwave."),
    "cool": ("cool {object} with {receptacle}", "Cool the object you hold with a fridge."),
    "slice": ("slice {object} with {knife}", "Slice an object before you with the knife you hold."),
    "use": ("use {object}", "Switch on a lamp before you."),
    "examine": ("examine {thing}", "Look closely at the receptacle before you, or at the object you hold."),
    "look": ("look", "Look around."),
    "inventory": ("inventory", "See what you hold."),
}
_FIELD = re.compile(r"\{(\w+)\}")
_PATTERNS = {
    name: re.compile(_FIELD.sub(r"(?P<\1>[^ ]+ [^ ]+)", template)) for name, (template, _) in _TEMPLATES.items()
}
_TOOLS: dict[str, ToolSpec] = {
    name: strict_tool(
        name,
        text,
        **{field: {"type": "string", "description": _DESCRIPTIONS[field]} for field in _FIELD.findall(template)},
    )
    for name, (template, text) in _TEMPLATES.items()
}
_COMMAND = {"type": "string", "description": "one command, in the words of the game"}
_ACT_TEXT = 'Carry out one command of the household game, such as "go to fridge 1". The command "help" lists them all.'
_ACT: dict[str, ToolSpec] = {"act": strict_tool("act", _ACT_TEXT, command=_COMMAND)}


class AlfworldConfig(ResourceConfig):
    """The configuration of `alfworld` and `alfworld_real`."""

    split: Literal["train", "development", "held_out"] = "train"
    index: int | None = Field(
        default=None, ge=0, description="the number of the problem; by default drawn from the seed"
    )
    seed: int = Field(default=0, description="seed of the problem generator")
    task_types: list[TaskType] | None = Field(default=None, min_length=1)
    problem: dict[str, Any] | None = Field(default=None, description="your own problem, as returned by Problem.to_json")
    game_file: str | None = Field(default=None, description="alfworld_real: path of a published game.tw-pddl")
    published: bool = Field(default=False, description="alfworld_real: play the split's games in ALFWORLD_DATA")
    action_form: ActionForm = "text"
    max_commands: int | None = Field(default=None, ge=1)
    task_folder: str | None = None


@dataclass
class _Changes:
    """The changes of a published game since its start.

    The changes are derived from the commands, because the game returns only text.
    """

    at: str = ""
    holding: str = ""
    doors: set[str] = field(default_factory=set)
    homes: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    marks: set[tuple[str, str]] = field(default_factory=set)

    def apply(self, command: str) -> None:
        verb, _, rest = command.partition(" ")
        thing = rest.partition(" with ")[0]
        match verb:
            case "go":
                self.at = rest.removeprefix("to ")
            case "open" | "close":
                self.doors ^= {rest}  # opening and closing a door restores its state
            case "take":
                self.holding, _, place = rest.partition(" from ")
                self.homes.setdefault(self.holding, place)
                self.moved.pop(self.holding, None)
            case "move":
                thing, place = rest.split(" to ")
                self.holding = ""
                if self.homes.get(thing) != place:
                    self.moved[thing] = place
            case "heat" | "cool":
                self.marks -= {(thing, "hot"), (thing, "cool")}
                self.marks.add((thing, "hot" if verb == "heat" else "cool"))
            case "clean" | "slice" | "use":
                self.marks.add((thing, {"clean": "clean", "slice": "sliced", "use": "used"}[verb]))

    def to_json(self) -> dict[str, Any]:
        agent, marks = {"at": self.at, "holding": self.holding}, [list(mark) for mark in sorted(self.marks)]
        return {"agent": agent, "moved": dict(self.moved), "marks": marks, "doors": sorted(self.doors)}


@dataclass(slots=True)
class Session:
    """A game in progress on one of the engines.

    `engine` is the native engine in its current state. A published game has no native engine. Instead, `game` is the
    name of the game, `changes` tracks its state, and `plan` contains the planner's remaining commands until the agent
    deviates from them. `milestones` is keyed by the number of commands.
    """

    form: ActionForm
    max_commands: int | None
    start: HouseholdView
    view: HouseholdView
    engine: HouseholdEngine | None
    changes: _Changes = field(default_factory=_Changes)
    plan: Sequence[str] | None = None
    game: str = ""
    commands: int = 0
    milestones: dict[str, int] = field(default_factory=dict)

    def command(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the command for a tool call.

        Raises:
            ToolError: the call is invalid, or the episode is over.
        """
        values = check_call(_TOOLS if self.form == "tools" else _ACT, tool, arguments)
        if self.is_over():
            raise ToolError("the episode is over; no command changes anything")
        return _TEMPLATES[tool][0].format(**values) if self.form == "tools" else str(values["command"])

    def call(self, command: str) -> dict[str, Any] | None:
        """Return the tool call for a command, or None if no tool can express the command.

        For example, no tool can express "help" if there is one tool per verb.
        """
        if self.form != "tools":
            return {"name": "act", "arguments": {"command": command}}
        for name, pattern in _PATTERNS.items():
            if match := pattern.fullmatch(command):
                return {"name": name, "arguments": match.groupdict()}
        return None

    def record(self, command: str, view: HouseholdView, held_before: int = NOWHERE) -> StepOutcome:
        """Return the outcome of a command to which the engine responded with `view`.

        `held_before` is the object that the agent held before the command.
        """
        is_valid = view.observation != NOTHING
        info: dict[str, Any] = {"is_action_valid": is_valid, "won": view.won}
        if self.engine is not None:
            reached = [name for name in self.engine.milestones(held_before) if name not in self.milestones]
            self.milestones |= dict.fromkeys(reached, self.commands)
            info["milestones"] = reached
        elif is_valid:
            self.changes.apply(command.strip())
            if self.plan is not None:
                self.plan = self.plan[1:] if self.plan and self.plan[0] == command.strip() else None
        self.commands += 1
        self.view = view
        return StepOutcome(view.observation, view.reward, view.done, self.is_truncated(), info)

    def is_truncated(self) -> bool:
        return self.max_commands is not None and self.commands >= self.max_commands

    def is_over(self) -> bool:
        return self.view.done or self.is_truncated()

    def copy(self) -> Session:
        """Return an independent copy of this session, which must use the native engine."""
        engine = self.engine.fork() if self.engine is not None else None
        return replace(self, engine=engine, milestones=dict(self.milestones))


class _Household(ForkableResource):
    """The engine-independent parts of both resources."""

    takes_task_folder = True
    # `game_file` and `published` are excluded, because a game file has a grammar that is evaluated as Python.
    per_sample_keys = frozenset({"split", "index", "seed", "task_types", "problem", "max_commands"})
    _session: Session

    async def get_observation(self) -> Any:
        """Return the description of the room, the task, and the response to the last command."""
        start, view = self._session.start.observation, self._session.view.observation
        return start if not self._session.commands else f"{start}\n\n{view}"

    async def get_tools_spec(self) -> list[ToolSpec]:
        session = self._session
        if session.form == "tools":
            return list(_TOOLS.values())
        if session.form == "choice":
            return [strict_tool("act", _ACT_TEXT, command={**_COMMAND, "enum": list(session.view.admissible)})]
        return list(_ACT.values())

    async def state_key(self) -> str:
        session = self._session
        if session.engine is not None:
            return session.engine.state_key()
        return hash_key(session.game, canonical_json(session.changes.to_json()))

    async def final_state(self) -> StateSnapshot:
        session = self._session
        view, engine = session.view, session.engine
        facts: dict[str, Any] = {"won": view.won, "commands": session.commands, "observation": view.observation}
        if engine is None:
            return StateSnapshot.from_json(facts | {"game_file": session.game, **session.changes.to_json()})
        tables, problem = engine.tables, engine.tables.problem
        names = ["", *(item.name for item in tables.receptacles)]
        place_of = {number: place for place, held in enumerate(engine.contents) for number in tables.members(held)}
        masks = {"clean": engine.clean, "hot": engine.hot, "cool": engine.cool}
        masks |= {"sliced": engine.sliced, "used": engine.toggled}
        things = {
            thing.name: {
                "at": names[place_of[number] + 1] if number in place_of else "hand",
                **{name: True for name, mask in masks.items() if mask >> number & 1},
            }
            for number, thing in enumerate(tables.things)
        }
        holding = tables.things[engine.holding].name if engine.holding >= 0 else ""
        return StateSnapshot.from_json(
            facts
            | {
                "problem": problem.id,
                "task_type": problem.task_type.value,
                "goal": problem.goal,
                "milestones": dict(session.milestones),
                "agent": {"at": names[engine.at + 1], "holding": holding},
                "things": things,
                "open": [item.name for place, item in enumerate(tables.receptacles) if engine.opened >> place & 1],
            }
        )

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]]:
        session = self._session
        if session.is_over():
            return []
        return [call for command in session.view.admissible if (call := session.call(command))]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the first command of a shortest plan.

        For a published game, return the planner's next command if it is still valid.
        """
        session = self._session
        if session.is_over():
            return None
        plan = session.plan if session.engine is None else shortest_plan(session.engine)
        call = session.call(plan[0]) if plan and plan[0] in session.view.admissible else None
        return {"type": "tool_call", **call} if call else None


class AlfworldResource(_Household):
    """A household that uses the native engine."""

    fork_kind = "native"
    never_waits = True

    def __init__(self) -> None:
        self._config = AlfworldConfig()

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._config = _read(config, "alfworld")
        if self._config.game_file is not None or self._config.published:
            raise ConfigError(
                "alfworld resource: game_file: published games need TextWorld's engine; use the resource alfworld_real"
            )
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
    """A household that uses TextWorld's engine, which runs in a worker process.

    For a generated problem, the native engine runs in parallel and provides the state key and the expert. If the two
    engines differ in anything that the agent sees, the episode fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings = AlfworldConfig()
        self._real = RealEngine()

    async def _setup(self, config: Mapping[str, Any]) -> None:
        self._settings = _read(config, "alfworld_real")
        if self._settings.published:
            _published_game(self._settings, 0)
        elif self._settings.game_file is None:
            _tables_for(self._settings, 0)
        await self._real.start()

    async def _reset(self, seed: int) -> None:
        settings = self._settings
        if settings.game_file is not None or settings.published:
            path = _published_game(settings, seed) if settings.published else _game_file(settings)
            view = await self._real.load(path)
            # The planner may take seconds, so it runs only once, and only if the native expert cannot be used.
            plan = await self._real.expert()
            game = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
            self._session = Session(settings.action_form, settings.max_commands, view, view, None, plan=plan, game=game)
            return
        tables = _tables_for(settings, seed)
        engine = HouseholdEngine(tables)
        view = await self._real.load(tables.problem)
        _compare("at the start", view, engine.reset())
        self._session = Session(settings.action_form, settings.max_commands, view, view, engine)

    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        command = self._session.command(action_name, action_params)
        view = await self._real.step(command)
        engine = self._session.engine
        if engine is None:
            return self._session.record(command, view)
        held = engine.holding
        _compare(f"after {command!r}", view, engine.step(command))
        return self._session.record(command, view, held)

    async def close(self) -> None:
        await self._real.close()


class RealEngine(EngineProcess):
    """TextWorld's engine, which plays one game at a time. `worker` is the command that starts its worker process."""

    def __init__(self, worker: Sequence[str] | None = None) -> None:
        super().__init__("household engine", worker or worker_command("reward_kit.environments.household_worker"))

    async def load(self, source: Problem | Path) -> HouseholdView:
        """Start the game for a problem, or the game in the `game.tw-pddl` file at an absolute path."""
        if isinstance(source, Path):
            return _view(await self.ask({"op": "load", "path": str(source)}))
        return _view(await self.ask({"op": "load", "problem": source.to_json()}))  # noqa: ASYNC240 - not a path

    async def step(self, command: str) -> HouseholdView:
        """Execute one command. A command that is not admissible changes nothing."""
        return _view(await self.ask({"op": "step", "command": command}))

    async def expert(self) -> list[str]:
        """Return the planner's commands to the goal, or [] if it finds no plan.

        Call this method before the first step.
        """
        return list(await self.ask({"op": "expert"}))


def _view(answer: Mapping[str, Any]) -> HouseholdView:
    commands = tuple(answer["commands"])
    return HouseholdView(answer["observation"], commands, float(answer["reward"]), answer["done"], answer["won"])


def game_files() -> list[Path]:
    """Return the sorted paths of the published games below `ALFWORLD_DATA`.

    Games that cannot be solved in the text domain are excluded.
    """
    folder = os.environ.get("ALFWORLD_DATA")
    if not folder:
        return []
    root = Path(folder).expanduser().absolute()
    if not root.is_dir():
        raise ConfigError(f"ALFWORLD_DATA: no such directory: {root}")
    games = sorted(root.rglob("game.tw-pddl"))
    return [path for path in games if not any(word in str(path.relative_to(root)) for word in ("movable", "Sliced"))]


def _read(config: Mapping[str, Any], resource: str) -> AlfworldConfig:
    settings = read_config(AlfworldConfig, config, resource)
    named = [name for name in ("index", "problem", "game_file") if getattr(settings, name) is not None]
    if settings.published:
        named = ["published", *(name for name in named if name != "index")]
    if len(named) > 1:
        raise ConfigError(f"{resource} resource: {' and '.join(named)} cannot be used together; set only one of them")
    return settings


def _tables_for(settings: AlfworldConfig, seed: int | None) -> Tables:
    """Return the tables for the configured problem.

    If neither a problem nor an index is configured, the seed passed to the reset selects a problem.
    """
    if settings.problem is None:
        index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
        types = settings.task_types or list(TaskType)
        return _generated(settings.split, index, settings.seed, types[index % len(types)])
    problem = Problem.from_json(settings.problem)
    try:
        return Tables(problem)
    except (KeyError, ValueError) as error:
        text = 'names must be "<type> <number>", and each thing must be at one of the receptacles'
        raise ConfigError(f"alfworld resource: problem: {text}: {error}") from None


@lru_cache(maxsize=512)
def _generated(split: str, index: int, seed: int, task_type: TaskType) -> Tables:
    return Tables(generate_problem(split, index, seed, task_type))


def _game_file(settings: AlfworldConfig) -> Path:
    """Return the path of the task's game file. The configured path may be relative to `ALFWORLD_DATA`."""
    path, data = settings.game_file or "", os.environ.get("ALFWORLD_DATA")
    if data:
        root = Path(data).expanduser().resolve()
        file = (root / path).resolve()
        if file.is_file() and file.is_relative_to(root):
            return file
    return task_path(path, settings.task_folder, "game_file")


def _published_game(settings: AlfworldConfig, seed: int) -> Path:
    """Return the split's game with the configured index.

    If no index is configured, the seed passed to the reset selects a game.
    """
    folder = {"train": "train", "development": "valid_seen", "held_out": "valid_unseen"}[settings.split]
    types = [kind.value for kind in settings.task_types or TaskType]
    games = [path for path in game_files() if folder in path.parts and any(kind in str(path) for kind in types)]
    if not games:
        raise ConfigError(
            f"alfworld_real resource: published: ALFWORLD_DATA has no {folder} game of type {', '.join(types)}"
        )
    index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
    return games[index % len(games)]


def _compare(where: str, real: HouseholdView, native: HouseholdView) -> None:
    for name, one, other in zip(real._fields, real, native, strict=True):
        if one != other:
            raise EnvironmentFailure(
                f"alfworld_real: {where}: the engines differ in {name}: {str(one)[:300]!r}, native {str(other)[:300]!r}"
            )
