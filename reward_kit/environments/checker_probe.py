"""How the checker drives a resource: worlds that are always closed, random actions, and what was seen of them."""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reward_kit.display_text import first_difference
from reward_kit.environments.base import ForkableResource, StateSnapshot, StepOutcome
from reward_kit.environments.composite import CompositeResource
from reward_kit.environments.sampling import sample_arguments
from reward_kit.errors import EnvironmentFailure, RewardKitError, ToolError, boundary
from reward_kit.findings import Finding


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one action did, and the state after it; `refused` is the message of a `ToolError`."""

    action: Action
    outcome: StepOutcome | None
    refused: str | None
    key: str
    observation: Any
    final: str | None

    @property
    def is_last(self) -> bool:
        """Whether the world was over with it."""
        return self.outcome is not None and (self.outcome.terminated or self.outcome.truncated)

    def difference(self, other: Seen) -> str:
        """Where another run of the same action differs, "" where it does not."""
        pairs: list[tuple[str, Any, Any]] = [("the refusal", self.refused, other.refused)]
        if self.outcome is not None and other.outcome is not None:
            for name in ("observation", "reward", "terminated", "truncated"):
                pairs.append((f"the {name}", getattr(self.outcome, name), getattr(other.outcome, name)))
        pairs += [("get_observation()", self.observation, other.observation), ("state_key()", self.key, other.key)]
        for what, one, two in pairs:
            if found := first_difference(one, two):
                return f"{what} differs{found}"
        return ""


@dataclass(slots=True)
class Probe:
    """One check of one resource class: its configuration, its findings, and the worlds to close."""

    resource_class: type[ForkableResource]
    config: Mapping[str, Any]
    seed: int
    steps: int
    findings: list[Finding] = field(default_factory=list)
    worlds: list[ForkableResource] = field(default_factory=list)

    def error(self, message: str) -> None:
        """Record an error, once."""
        self._add(Finding("error", message))

    def warn(self, message: str) -> None:
        """Record a warning, once."""
        self._add(Finding("warning", message))

    def _add(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    async def world(self, seed: int | None = None) -> ForkableResource:
        """A new world, set up and reset."""
        made = self.resource_class()
        self.worlds.append(made)
        with boundary(EnvironmentFailure, "setup"):
            await made.setup(self.config)
        with boundary(EnvironmentFailure, f"reset({self.seed if seed is None else seed})"):
            await made.reset(self.seed if seed is None else seed)
        return made

    async def fork(self, world: ForkableResource) -> ForkableResource:
        """A fork that will be closed."""
        with boundary(EnvironmentFailure, "fork"):
            twin = await world.fork()
        if twin is world:
            raise EnvironmentFailure("fork() returned the resource itself; return a new, independent instance")
        if not isinstance(twin, ForkableResource):
            raise EnvironmentFailure(f"fork() returned {type(twin).__name__}, not a ForkableResource")
        self.worlds.append(twin)
        return twin

    async def close_all(self) -> None:
        """Close every world that is still open."""
        while self.worlds:
            world = self.worlds.pop()
            try:
                with boundary(EnvironmentFailure, "close"):
                    await world.close()
            except RewardKitError as error:
                self.error(f"{error}; close() must not fail, also where the episode did")

    async def act(self, world: ForkableResource, action: Action) -> Seen:
        """Take one action and look at everything."""
        outcome, refused = None, None
        try:
            with boundary(EnvironmentFailure, f"step {action}"):
                outcome = await world.step(action.name, dict(action.arguments))
        except ToolError as error:
            refused = str(error)
        else:
            self._check_outcome(outcome, action)
        return Seen(action, outcome, refused, *await self.look(world))

    async def look(self, world: ForkableResource) -> tuple[str, Any, str | None]:
        """The state key, the observation and the digest of the final state."""
        with boundary(EnvironmentFailure, "state_key"):
            key = await world.state_key()
        with boundary(EnvironmentFailure, "get_observation"):
            observation = await world.get_observation()
        with boundary(EnvironmentFailure, "final_state"):
            final = await world.final_state()
        if not isinstance(key, str):
            raise EnvironmentFailure(f"state_key() returned {type(key).__name__}; it must be text")
        if final is not None and not isinstance(final, StateSnapshot):
            raise EnvironmentFailure(f"final_state() returned {type(final).__name__}; return a StateSnapshot or None")
        if problem := not_json(observation):
            self.error(f"get_observation() is not JSON-safe: {problem}; it is stored in the episode as JSON")
        return key, observation, final.digest if final else None

    async def walk(
        self, world: ForkableResource, rng: random.Random, count: int, beside: ForkableResource | None = None
    ) -> list[Seen]:
        """Up to `count` random actions, ending where the world does, or where one moves the world `beside` it too."""
        seen: list[Seen] = []
        key = await beside.state_key() if beside else ""
        for _ in range(count):
            action = await self.random_action(world, rng)
            if action is None:
                break
            seen.append(await self.act(world, action))
            if seen[-1].is_last or (beside and await beside.state_key() != key):
                break
        return seen

    async def unfinished(self, rng: random.Random, count: int) -> ForkableResource:
        """A world after up to `count` random actions that is not over: little can be seen in one that is."""
        world = await self.world()
        walked = await self.walk(world, rng, count)
        if not walked or not walked[-1].is_last:
            return world
        world = await self.world()
        await self.repeat(world, walked[:-1])
        return world

    async def random_action(self, world: ForkableResource, rng: random.Random) -> Action | None:
        """An admissible action, or one that fits a tool's schema; None where there is no tool."""
        with boundary(EnvironmentFailure, "admissible_actions"):
            admissible = await world.admissible_actions()
        # Also inadmissible ones: what an agent does need not make sense.
        if admissible and rng.random() < 0.5:
            chosen = rng.choice(list(admissible))
            return Action(chosen["name"], chosen["arguments"])
        with boundary(EnvironmentFailure, "get_tools_spec"):
            specs = await world.get_tools_spec()
        if not specs:
            return None
        function = rng.choice(specs)["function"]
        return Action(function["name"], sample_arguments(function.get("parameters") or {}, rng))

    async def repeat(self, world: ForkableResource, walked: list[Seen]) -> tuple[int, str]:
        """Take the same actions in `world`: the number of the first one that differs and how, (-1, "") for none."""
        for number, before in enumerate(walked):
            if found := before.difference(await self.act(world, before.action)):
                return number, f"step {number}, {before.action}: {found}"
        return -1, ""

    def _check_outcome(self, outcome: Any, action: Action) -> None:
        if type(outcome).__name__ != "StepOutcome":
            raise EnvironmentFailure(f"step {action} returned {type(outcome).__name__}; return a StepOutcome")
        for name, value in (("observation", outcome.observation), ("info", dict(outcome.info))):
            if problem := not_json(value):
                self.error(f"the {name} of {action} is not JSON-safe: {problem}; convert it before it is returned")
        reward = outcome.reward
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            self.error(f"the reward of {action} is {reward!r}; it must be a finite float, or None")
        for name, flag in (("terminated", outcome.terminated), ("truncated", outcome.truncated)):
            if not isinstance(flag, bool):
                self.error(f"{name} of {action} is {flag!r}, not a bool; NumPy's bool must be converted")


CONTRACT = [name for name, given in vars(ForkableResource).items() if inspect.iscoroutinefunction(given)]
"""The methods of a resource that are awaited."""


def plain_methods(kind: type[ForkableResource]) -> list[str]:
    """The methods that are awaited and are plain functions, which may be right only where they return a coroutine."""
    return [name for name in CONTRACT if not inspect.iscoroutinefunction(inspect.unwrap(getattr(kind, name)))]


async def shows_all(world: ForkableResource) -> bool:
    """Whether its final state, where it has one, is not only that of some of its parts."""
    if not isinstance(world, CompositeResource):
        return True
    return None not in [await part.final_state() for part in world.parts.values()]


def not_json(value: Any) -> str:
    """Why a value is no JSON value, "" where it is one."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return first_difference(_plain(value), same).removeprefix(": ")


def _plain(value: Any) -> Any:
    """Tuples as lists, which is how JSON brings them back."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
