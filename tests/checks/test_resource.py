"""Test that `check_resource` passes valid resources and names the fault of broken ones."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import (
    FilesystemResource,
    ForkableResource,
    GymnasiumResource,
    PythonStateResource,
    ReplayForkResource,
    SqliteResource,
    StateSnapshot,
    StepOutcome,
    tool_spec,
)
from reward_kit.errors import ConfigError, ToolError
from reward_kit.processes import temporary_folder

SEED_SQL = "CREATE TABLE t (a); INSERT INTO t VALUES (1), (2);"
GOOD = [
    (PythonStateResource, {"initial_state": {"a": 1, "list": [1], "alpha": {"x": 1}}}),
    (FilesystemResource, {"files": {"a": "x", "b/c": "y"}}),
    (SqliteResource, {"seed_sql": SEED_SQL}),
    (GymnasiumResource, {"env_id": "FrozenLake-v1"}),
    (GymnasiumResource, {"env_id": "Taxi-v4"}),
    (GymnasiumResource, {"env_id": "Blackjack-v1"}),
    (GymnasiumResource, {"env_id": "CliffWalkingSlippery-v1"}),
    (GymnasiumResource, {"env_id": "FrozenLake-v1", "random_map": {"size": 4}}),
]


@pytest.mark.parametrize(("resource_class", "config"), GOOD)
async def test_built_in_resources_pass(resource_class, config) -> None:
    assert await check_resource(resource_class, config, seed=2) == []


class Ring(ForkableResource):
    """Five places in a ring with a counter on each: a correct resource, and the base of broken ones."""

    fork_kind = "native"

    async def setup(self, config) -> None:
        if config:
            raise ConfigError(f"unknown keys {sorted(config)}")

    async def reset(self, seed=None) -> None:
        self.place, self.moves, self.visits = (seed or 0) % 5, 0, [0] * 5

    async def fork(self) -> ForkableResource:
        twin = type(self)()
        twin.place, twin.moves, twin.visits = self.place, self.moves, list(self.visits)
        return twin

    async def checkpoint(self):
        return (self.place, list(self.visits))

    async def restore(self, state) -> None:
        self.place, self.visits = state[0], list(state[1])

    def apply(self, by: int) -> None:
        self.place = (self.place + by) % 5
        self.moves += 1

    async def step(self, action_name, action_params) -> StepOutcome:
        if action_name != "move":
            raise ToolError(f"unknown tool {action_name!r}")
        if action_params.keys() != {"by"} or action_params["by"] not in (-1, 0, 1, 2):
            raise ToolError("by: must be -1, 0, 1 or 2")
        if action_params["by"] == 2:
            raise ToolError("too far")
        self.apply(action_params["by"])
        return StepOutcome({"place": self.place}, reward=0.0)

    async def get_observation(self):
        return {"place": self.place}

    async def get_tools_spec(self):
        schema = {"type": "object", "properties": {"by": {"enum": [-1, 0, 1, 2]}}, "required": ["by"]}
        return [tool_spec("move", "Move along the ring.", schema)]

    async def state_key(self) -> str:
        return str(self.place)

    async def final_state(self):
        return StateSnapshot.from_json(self.place)


async def messages(resource_class, level=None) -> str:
    found = await check_resource(resource_class, {})
    return "\n".join(f"{finding.level}: {finding.message}" for finding in found if level in (None, finding.level))


async def test_valid_example_resource_passes() -> None:
    assert await messages(Ring) == ""


class CountsSteps(Ring):
    async def state_key(self) -> str:
        return f"{self.place} {self.moves}"

    async def fork(self):
        twin = await super().fork()
        twin.moves = self.moves
        return twin


class CountsStepsAndShowsNoFinalState(CountsSteps):
    async def final_state(self):
        return None

    async def checkpoint(self):
        raise NotImplementedError


class CountsQuestions(Ring):
    async def state_key(self) -> str:
        self.moves += 1
        return f"{self.place} {self.moves}"


class ForgetsOnReset(Ring):
    async def reset(self, seed=None) -> None:
        if not hasattr(self, "place"):
            await super().reset(seed)


class IgnoresItsSeed(Ring):
    async def reset(self, seed=None) -> None:
        await super().reset(random.SystemRandom().randrange(10**6))

    async def state_key(self) -> str:
        return str(id(self))


class Noisy(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        outcome = await super().step(action_name, action_params)
        return StepOutcome({**outcome.observation, "noise": random.random()}, 0.0)


class SharesItsState(Ring):
    async def reset(self, seed=None) -> None:
        self.shared = {"place": (seed or 0) % 5}

    @property
    def place(self):
        return self.shared["place"]

    def apply(self, by: int) -> None:
        self.shared["place"] = (self.place + by) % 5

    async def fork(self):
        twin = type(self)()
        twin.shared = self.shared
        return twin

    async def checkpoint(self):
        raise NotImplementedError


class SharesADoor(ForkableResource):
    """Going through the door twice returns to the start, so the end of a long walk hides the shared state."""

    fork_kind = "native"

    async def setup(self, config) -> None:
        if config:
            raise ConfigError(f"unknown keys {sorted(config)}")

    async def reset(self, seed=None) -> None:
        self.inside = [False]

    async def fork(self):
        twin = type(self)()
        twin.inside = self.inside
        return twin

    async def step(self, action_name, action_params) -> StepOutcome:
        if action_name != "go" or action_params:
            raise ToolError("there is one tool, go, without arguments")
        self.inside[0] = not self.inside[0]
        return StepOutcome("gone")

    async def get_tools_spec(self):
        return [tool_spec("go", "Go through the door.")]

    async def state_key(self) -> str:
        return str(self.inside[0])


class SharesUntilItIsOver(SharesADoor):
    """Ends after three moves and then rejects all, so that nothing is observable after the end."""

    async def reset(self, seed=None) -> None:
        await super().reset(seed)
        self.left = 3

    async def fork(self):
        twin = await super().fork()
        twin.left = self.left
        return twin

    async def step(self, action_name, action_params) -> StepOutcome:
        if not self.left:
            raise ToolError("it is over")
        outcome = await super().step(action_name, action_params)
        self.left -= 1
        return StepOutcome(outcome.observation, terminated=not self.left)

    async def state_key(self) -> str:
        return f"{self.inside[0]} {self.left}"


class CountsStepsAndEndsSoon(CountsSteps):
    """Nearly every move is the last, so that a walk rarely returns to an earlier state."""

    async def get_tools_spec(self):
        schema = {"type": "object", "properties": {"by": {"enum": [-1, *[1] * 30, 0]}}, "required": ["by"]}
        return [tool_spec("move", "Move along the ring.", schema)]

    async def step(self, action_name, action_params) -> StepOutcome:
        outcome = await super().step(action_name, action_params)
        return StepOutcome(outcome.observation, terminated=action_params["by"] != 0)


class ForksItself(Ring):
    async def fork(self):
        return self


class ForksTheStart(Ring):
    async def fork(self):
        twin = type(self)()
        await twin.reset(0)
        return twin


class CheckpointsAReference(Ring):
    async def reset(self, seed=None) -> None:
        await super().reset(seed)
        self.box = [self.place]

    async def fork(self):
        twin = await super().fork()
        twin.box = [self.place]
        return twin

    def apply(self, by: int) -> None:
        super().apply(by)
        self.box[0] = self.place

    async def checkpoint(self):
        return self.box

    async def restore(self, state) -> None:
        self.place = state[0]


class ChangesOnRefusal(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        if action_params.get("by") == 2:
            self.place = (self.place + 2) % 5
        return await super().step(action_name, action_params)


class KnowsNoUnknownTool(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        if action_name != "move":
            raise KeyError(action_name)
        return await super().step(action_name, action_params)


class AcceptsAnything(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        return StepOutcome(None)


class FlatTools(Ring):
    async def get_tools_spec(self):
        return [{"name": "move", "description": "Move.", "parameters": {"type": "object", "properties": {}}}]


class RequiresWhatItDoesNotHave(Ring):
    async def get_tools_spec(self):
        return [tool_spec("move", "Move.", {"type": "object", "properties": {}, "required": ["by"]})]


class TwinTools(Ring):
    async def get_tools_spec(self):
        return 2 * await super().get_tools_spec()


class ForgetsToReturn(Ring):
    async def step(self, action_name, action_params) -> None:
        await super().step(action_name, action_params)


class ForgetsAsync(Ring):
    def reset(self, seed=None) -> None:
        self.place = 0


class OneTool(Ring):
    async def get_tools_spec(self):
        return (await super().get_tools_spec())[0]


class SpeaksNumpy(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        outcome = await super().step(action_name, action_params)
        return StepOutcome({"place": np.int64(outcome.observation["place"])}, 0.0)


class RewardsNothingness(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        return StepOutcome((await super().step(action_name, action_params)).observation, float("nan"))


class NumpyFlags(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        await super().step(action_name, action_params)
        return StepOutcome(None, 0.0, terminated=np.bool_(False))


class ReturnsAPair(Ring):
    async def step(self, action_name, action_params):
        return (await super().step(action_name, action_params)).observation, 0.0


class AcceptsUnknownKeys(Ring):
    async def setup(self, config) -> None:
        return None


class FinalStateOfTheMoment(Ring):
    ticks = itertools.count()

    async def final_state(self):
        return StateSnapshot.from_json(next(self.ticks))


class FinalStateIsNoSnapshot(Ring):
    async def final_state(self):
        return {"place": self.place}


class OffersWhatItRefuses(Ring):
    async def admissible_actions(self):
        return [{"name": "move", "arguments": {"by": 2}}]


class OffersAnotherForm(Ring):
    async def admissible_actions(self):
        return [{"tool": "move", "by": 1}]


class StrangeExpert(Ring):
    async def expert_action(self):
        return {"move": 1}


class ClosesOnlyAfterSetup(Ring):
    built = False

    async def setup(self, config) -> None:
        await super().setup(config)
        self.built = True

    async def fork(self):
        twin = await super().fork()
        twin.built = self.built
        return twin

    async def close(self) -> None:
        if not self.built:
            raise RuntimeError("nothing to close")


class LeavesFiles(Ring):
    async def setup(self, config) -> None:
        await super().setup(config)
        Path(tempfile.mkdtemp()).joinpath("left").touch()


class LeavesAFolder(Ring):
    async def setup(self, config) -> None:
        await super().setup(config)
        temporary_folder("left-")


class LeavesFilesHere(Ring):
    async def setup(self, config) -> None:
        await super().setup(config)
        os.makedirs(".rk_temp_dbs", exist_ok=True)  # noqa: PTH103


class RefusesEverything(Ring):
    async def step(self, action_name, action_params) -> StepOutcome:
        raise ToolError("no")


class KeyIsANumber(Ring):
    async def state_key(self):
        return self.place


class NoTools(Ring):
    async def get_tools_spec(self):
        return []


class RaisesOnReset(Ring):
    async def reset(self, seed=None) -> None:
        raise ZeroDivisionError("oh")


FAULTS = [
    (CountsSteps, "error: states with the same observation and final state have different keys", "step counts"),
    (CountsStepsAndShowsNoFinalState, "warning: observations recur, but state keys do not", "step counts"),
    (CountsQuestions, "error: state_key() changed without an action", "must not change the state"),
    (
        ForgetsOnReset,
        "after two resets of the same resource with the same seed differ in state_key()",
        "undo all changes",
    ),
    (IgnoresItsSeed, "error: two resources reset with the same seed differ", "derive all randomness from its seed"),
    (Noisy, "error: the same seed and actions produced different results at step", "deterministic = False"),
    (SharesItsState, "error: actions in a fork changed the original", "shares state"),
    (SharesADoor, "error: actions in a fork changed the original", "shares state"),
    (SharesUntilItIsOver, "error: actions in a fork changed the original", "shares state"),
    (CountsStepsAndEndsSoon, "error: states with the same observation and final state have different keys", "counts"),
    (ForksItself, "error: fork() returned the resource itself", "return a new instance"),
    (ForksTheStart, "error: a fork differs from the original in state_key()", "copy the whole state"),
    (
        CheckpointsAReference,
        "error: after restore(), state_key() differs from its value at checkpoint()",
        "must not change it",
    ),
    (ChangesOnRefusal, "raised ToolError but changed the state key", "must not change the state"),
    (KnowsNoUnknownTool, "error: an unknown tool, no_such_tool(): KeyError", "raise ToolError"),
    (
        AcceptsAnything,
        "error: an unknown tool (no_such_tool()) was accepted",
        "raise ToolError to show the agent its mistake",
    ),
    (AcceptsAnything, "error: an unknown argument (move(no_such_argument=1)) was accepted", "ToolError"),
    (FlatTools, "is not in OpenAI's format", '{"type": "function", "function": {"name", "description", "parameters"}}'),
    (RequiresWhatItDoesNotHave, "error: tool 'move': required argument 'by' is missing from the properties", ""),
    (TwinTools, "error: two tools have the name 'move'", "rename one"),
    (SpeaksNumpy, "is not JSON-serializable: Object of type int64", "convert the value"),
    (RewardsNothingness, "is nan; return a finite number or None", ""),
    (NumpyFlags, "not a bool", "convert NumPy bools"),
    (ForgetsToReturn, "returned NoneType; return a StepOutcome", ""),
    (ForgetsAsync, "error: reset(0): TypeError", "warning: reset is not a coroutine function"),
    (OneTool, "error: get_tools_spec() returned dict; return a list of tools", ""),
    (ReturnsAPair, "returned tuple; return a StepOutcome", ""),
    (AcceptsUnknownKeys, "warning: setup accepted the unknown key", "ignored silently"),
    (FinalStateOfTheMoment, "final_state() returned different bytes on each call", "leave out the time"),
    (FinalStateIsNoSnapshot, "final_state() returned dict; return a StateSnapshot or None", ""),
    (OffersWhatItRefuses, "move(by=2), which admissible_actions() or expert_action() returned, was refused", "too far"),
    (OffersAnotherForm, "admissible_actions() returned", "return dicts with the"),
    (StrangeExpert, "expert_action() returned {'move': 1}", "not an action"),
    (ClosesOnlyAfterSetup, "error: close: RuntimeError: nothing to close", "close() must not raise"),
    (LeavesAFolder, "temporary files were not removed (left-", "remove them in close()"),
    (LeavesFiles, "temporary files were not removed", "remove them in close()"),
    (LeavesFilesHere, "'.rk_temp_dbs' was left in the working directory", "temporary directory"),
    (RefusesEverything, "warning: every random action was refused (the last: no)", "admissible_actions()"),
    (KeyIsANumber, "state_key() returned int; return a str", ""),
    (NoTools, "warning: get_tools_spec() returned []", ""),
    (
        RaisesOnReset,
        "error: reset(0): ZeroDivisionError: oh",
        "all other checks require working setup and reset methods",
    ),
]


@pytest.mark.parametrize(("resource_class", "what", "cause"), FAULTS)
async def test_fault_is_reported_with_its_cause(resource_class, what, cause, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = await messages(resource_class)
    assert what in found
    assert cause in found


class Outside(Ring):
    fork_kind = "none"
    deterministic = False


class ExternalState(Outside):
    """A resource whose external state changes when it is only observed."""

    async def get_observation(self):
        self.looks = getattr(self, "looks", random.randrange(1000)) + 1
        return self.looks


class Configured(ExternalState):
    fork_kind = "replay"
    deterministic = True

    @classmethod
    def fork_kind_for(cls, config):
        return "none"

    @classmethod
    def is_deterministic_for(cls, config):
        return False


@pytest.mark.parametrize("resource_class", [ExternalState, Configured])
async def test_declared_nondeterminism_is_only_a_warning(resource_class) -> None:
    found = await messages(resource_class)
    assert "error:" not in found
    assert "warning: get_observation() changed without an action" in found


async def test_undeclared_properties_are_reported_as_unchecked() -> None:
    found = await messages(Outside)
    assert "fork_kind = 'none': forks were not checked" in found
    assert "deterministic = False" in found
    assert "error" not in found


async def test_invalid_configuration_raises() -> None:
    with pytest.raises(ConfigError, match="env_idd"):
        await check_resource(GymnasiumResource, {"env_idd": "x"})


class Replayed(ReplayForkResource):
    async def _setup(self, config) -> None:
        if config:
            raise ConfigError("unknown")

    async def _reset(self, seed) -> None:
        self.rng, self.sum = random.Random(seed), 0

    async def _step(self, action_name, action_params) -> StepOutcome:
        if action_name != "throw" or action_params:
            raise ToolError("only throw()")
        self.sum += self.rng.randint(1, 6)
        return StepOutcome(self.sum)

    async def get_tools_spec(self):
        return [tool_spec("throw", "Throw.")]

    async def state_key(self) -> str:
        return str(self.sum)


async def test_resource_that_forks_by_replay_passes() -> None:
    assert await messages(Replayed) == ""


async def test_every_resource_is_closed_exactly_once() -> None:
    counts: dict[int, int] = {}
    alive = []

    class Counted(Ring):
        def __init__(self) -> None:
            alive.append(self)

        async def close(self) -> None:
            counts[id(self)] = counts.get(id(self), 0) + 1

    await check_resource(Counted, {})
    assert len(counts) == len(alive)
    assert set(counts.values()) == {1}
