"""One episode in a household as an agent meets it, whichever engine plays: actions in, outcomes and facts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reward_kit.environments.base import StateSnapshot, StepOutcome, ToolSpec
from reward_kit.environments.household.expert import shortest_plan
from reward_kit.environments.household.forms import ActionForm, call_of, command_of, tools_spec
from reward_kit.environments.household.milestones import milestones
from reward_kit.environments.household.native import NOTHING, NOWHERE, HouseholdEngine
from reward_kit.environments.household.tracker import Tracker
from reward_kit.environments.household.view import View
from reward_kit.errors import ToolError


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
