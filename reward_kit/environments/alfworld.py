"""The three forms in which an agent may give its commands: free text, a choice among those open now, or tools.

A form turns a tool call into the command that the engines take, and a command into the tool call.
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

from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import read_config, task_path
from reward_kit.environments.engine_process import EngineProcess, worker_command
from reward_kit.environments.household_engine import (
    NOTHING,
    NOWHERE,
    HouseholdEngine,
    Tables,
    View,
    milestones,
    shortest_plan,
)
from reward_kit.environments.household_problems import Problem, TaskType, generate_problem
from reward_kit.environments.replay import ReplayForkResource
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, did_you_mean

ActionForm = Literal["text", "choice", "tools"]

_ACT = "act"

_ACT_TEXT = 'Carry out one command of the household game, such as "go to fridge 1". The command "help" lists them all.'

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

_PARAMETERS = {name: _FIELD.findall(template) for name, (template, _) in _TEMPLATES.items()}


def tools_spec(form: ActionForm, admissible: Sequence[str]) -> list[ToolSpec]:
    """The tools of a form, where `admissible` are the commands open now."""
    if form == "tools":
        return [tool_spec(name, text, _schema(_PARAMETERS[name])) for name, (_, text) in _TEMPLATES.items()]
    schema = _schema(["command"])
    if form == "choice":
        schema["properties"]["command"]["enum"] = list(admissible)
    return [tool_spec(_ACT, _ACT_TEXT, schema)]


def command_of(form: ActionForm, tool: str, arguments: Mapping[str, Any]) -> str:
    """The command that a tool call means.

    Raises:
        ToolError: there is no such tool, or its arguments are not what its schema says.
    """
    parameters = _PARAMETERS if form == "tools" else {_ACT: ["command"]}
    if tool not in parameters:
        raise ToolError(f"unknown tool {tool!r}{did_you_mean(tool, parameters)}")
    for name in arguments:
        if name not in parameters[tool]:
            raise ToolError(f"{tool}: unknown argument {name!r}{did_you_mean(str(name), parameters[tool])}")
    for name in parameters[tool]:
        if not isinstance(arguments.get(name), str):
            raise ToolError(f"{tool}: {name}: {'must be text' if name in arguments else 'missing'}")
    return _TEMPLATES[tool][0].format(**arguments) if form == "tools" else str(arguments["command"])


def call_of(form: ActionForm, command: str) -> dict[str, Any] | None:
    """The tool call for a command, as `{"name", "arguments"}`; None where the form has none ("help" among tools)."""
    if form != "tools":
        return {"name": _ACT, "arguments": {"command": command}}
    for name, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(command):
            return {"name": name, "arguments": found.groupdict()}
    return None


def _schema(parameters: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": _DESCRIPTIONS[name]} for name in parameters},
        "required": list(parameters),
        "additionalProperties": False,
    }


_DESCRIPTIONS = {
    "command": "one command, in the words of the game",
    "receptacle": 'its name, such as "fridge 1"',
    "object": 'its name, such as "mug 1"',
    "knife": 'its name, such as "knife 1"',
    "thing": 'the name of a receptacle or an object, such as "fridge 1"',
}

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


@dataclass(slots=True)
class Session:
    """What has happened since the reset.

    Attributes:
        form: how the agent gives its commands.
        max_commands: after so many the episode is truncated; None for no limit.
        start: the first view.
        view: the present view.
        engine: the native engine in the present state, None for a published game.
        tracker: what is known of the state of a published game.
        plan: the planner's commands for a published game that are still to be given, None after another command.
        game: names the published game.
        commands: how many were given, the inadmissible ones included.
        milestones: each one that was reached, with the number of its command, counted from 0.
    """

    form: ActionForm
    max_commands: int | None
    start: View
    view: View
    engine: HouseholdEngine | None
    tracker: Tracker = field(default_factory=Tracker)
    plan: Sequence[str] | None = None
    game: str = ""
    commands: int = 0
    milestones: dict[str, int] = field(default_factory=dict)

    def command(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The command that a tool call means.

        Raises:
            ToolError: the call is wrong, or the episode is over.
        """
        command = command_of(self.form, tool, arguments)
        if self.is_over():
            raise ToolError("the episode is over; no command changes anything")
        return command

    def record(self, command: str, view: View, held_before: int = NOWHERE) -> StepOutcome:
        """What a command did: `view` is what came of it, and `engine`, where there is one, has taken it already.

        Args:
            command: as the engine got it.
            view: its answer.
            held_before: what the native engine's agent held before it.
        """
        is_valid = view.observation != NOTHING
        reached: list[str] = []
        if self.engine is not None:
            reached = [name for name in milestones(self.engine, held_before) if name not in self.milestones]
        elif is_valid:
            self._follow(command.strip())
        self.milestones |= dict.fromkeys(reached, self.commands)
        self.commands += 1
        self.view = view
        info: dict[str, Any] = {"is_action_valid": is_valid, "won": view.won}
        if self.engine is not None:
            info["milestones"] = reached
        return StepOutcome(view.observation, view.reward, view.done, self._is_out_of_commands(), info)

    def is_over(self) -> bool:
        """Whether the game or its commands have come to an end."""
        return self.view.done or self._is_out_of_commands()

    def observation(self) -> str:
        """The room and the task, and what came of the last command."""
        return self.start.observation if not self.commands else f"{self.start.observation}\n\n{self.view.observation}"

    def tools_spec(self) -> list[ToolSpec]:
        """The tools of the form."""
        return tools_spec(self.form, self.view.admissible)

    def admissible_actions(self) -> list[dict[str, Any]]:
        """Every tool call that does something now."""
        if self.is_over():
            return []
        return [call for command in self.view.admissible if (call := call_of(self.form, command))]

    def expert_action(self) -> dict[str, Any] | None:
        """The first command of a shortest plan; for a published game the planner's, while its plan is followed."""
        if self.is_over():
            return None
        plan = self.plan if self.engine is None else shortest_plan(self.engine)
        call = call_of(self.form, plan[0]) if plan and plan[0] in self.view.admissible else None
        return {"type": "tool_call", **call} if call else None

    def state_key(self) -> str:
        """The name of the present state."""
        return self.engine.state_key() if self.engine is not None else self.tracker.key(self.game)

    def final_state(self) -> StateSnapshot:
        """The state for reward functions."""
        facts: dict[str, Any] = {"won": self.view.won, "commands": self.commands, "observation": self.view.observation}
        if self.engine is None:
            facts |= {"game_file": self.game, **self.tracker.changes()}
        else:
            problem = self.engine.tables.problem
            facts |= {"problem": problem.id, "task_type": problem.task_type.value, "goal": problem.goal}
            facts |= {"milestones": dict(self.milestones), **_world(self.engine)}
        return StateSnapshot.from_json(facts)

    def copy(self) -> Session:
        """An independent session in this state, of a native engine."""
        engine = self.engine.fork() if self.engine is not None else None
        return replace(self, engine=engine, milestones=dict(self.milestones))

    def _is_out_of_commands(self) -> bool:
        return self.max_commands is not None and self.commands >= self.max_commands

    def _follow(self, command: str) -> None:
        self.tracker.apply(command)
        if self.plan is not None:
            self.plan = self.plan[1:] if self.plan and self.plan[0] == command else None


def _world(engine: HouseholdEngine) -> dict[str, Any]:
    """Where everything is, and in which state."""
    tables = engine.tables
    places = ["", *(item.name for item in tables.receptacles)]
    at = {number: place for place, content in enumerate(engine.contents) for number in tables.members(content)}
    marks = {
        "clean": engine.clean,
        "hot": engine.hot,
        "cool": engine.cool,
        "sliced": engine.sliced,
        "used": engine.toggled,
    }
    things = {
        thing.name: {
            "at": places[at[number] + 1] if number in at else "hand",
            **{name: True for name, mask in marks.items() if mask >> number & 1},
        }
        for number, thing in enumerate(tables.things)
    }
    held = tables.things[engine.holding].name if engine.holding >= 0 else ""
    return {
        "agent": {"at": places[engine.at + 1], "holding": held},
        "things": things,
        "open": [item.name for place, item in enumerate(tables.receptacles) if engine.opened >> place & 1],
    }


GAME_FILE = "game.tw-pddl"

_WORKER = "reward_kit.environments.household_worker"

_UNPLAYABLE = ("movable", "Sliced")


def game_files(folder: str | Path | None = None) -> list[Path]:
    """The published games under a folder, by default under `ALFWORLD_DATA`, sorted; none where that is not set.

    Games with movable receptacles or sliced objects are left out: they ask for what the text domain cannot do.

    Raises:
        ConfigError: there is no such folder.
    """
    named = os.environ.get("ALFWORLD_DATA", "") if folder is None else folder
    if not named:
        return []
    root = Path(named).expanduser()
    if not root.is_dir():
        raise ConfigError(f"ALFWORLD_DATA: no folder {root}")
    found = sorted(root.rglob(GAME_FILE))
    return [path for path in found if not any(word in str(path.relative_to(root)) for word in _UNPLAYABLE)]


class RealEngine:
    """One game at a time on TextWorld's engine. `start` first, `close` last; one request at a time.

    Args:
        timeout: seconds the worker has for one answer.
        worker: the command that starts it; by default our own, with this Python.
    """

    def __init__(self, timeout: float = 60.0, worker: Sequence[str] | None = None) -> None:
        self._engine = EngineProcess("household engine", worker or worker_command(_WORKER), timeout=timeout)
        self._moved = False
        self._plan: list[str] | None = None

    async def start(self) -> None:
        """Start the worker.

        Raises:
            ConfigError: a package is missing.
            EnvironmentFailure: the worker does not start.
        """
        await self._engine.start()

    async def load(self, source: Problem | str | Path) -> View:
        """Start the game of a problem, or of a `game.tw-pddl` file; the view of its beginning.

        Raises:
            ConfigError: there is no such file, or it is no game.
            EnvironmentFailure: the worker died or does not answer.
        """
        self._plan, self._moved = None, False
        return _view(await self._engine.ask(_load_request(source)))

    async def step(self, command: str) -> View:
        """Carry out one command; one that is not admissible changes nothing.

        Raises:
            EnvironmentFailure: the worker died or does not answer.
        """
        self._moved = True
        return _view(await self._engine.ask({"op": "step", "command": command}))

    async def expert(self) -> list[str]:
        """The planner's commands from the beginning to the goal; none where it finds no plan.

        It is asked once a game, before the first step, because it may take seconds; later calls repeat the answer.

        Raises:
            EnvironmentFailure: a step was taken before it was asked, the worker died, or it does not answer.
        """
        if self._plan is None:
            if self._moved:
                raise EnvironmentFailure("household engine: the planner is asked before the first step")
            self._plan = list(await self._engine.ask({"op": "expert"}))
        return list(self._plan)

    async def close(self) -> None:
        """End the worker, whatever it is doing."""
        await self._engine.close()


def _load_request(source: Problem | str | Path) -> dict[str, Any]:
    if isinstance(source, Problem):
        return {"op": "load", "problem": source.to_json()}
    return {"op": "load", "path": str(Path(source).expanduser().absolute())}


def _view(answer: Mapping[str, Any]) -> View:
    commands = tuple(answer["commands"])
    return View(answer["observation"], commands, float(answer["reward"]), answer["done"], answer["won"])


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
    return Tables(generate_problem(split, index, seed, task_type))


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
