"""Check a resource: drive it with random actions, and report what breaks its contract with the probable cause.

Written in the manner of Gymnasium's `env_checker`. Run it on its own, not beside other work in one process: while it
runs, the directory for temporary files is a private one, to see what is left there.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_kit.checks.findings import Finding, Level
from reward_kit.display_text import first_difference
from reward_kit.environments.base import ForkableResource, StateSnapshot, StepOutcome
from reward_kit.environments.composite import CompositeResource
from reward_kit.environments.sampling import sample_arguments
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, EnvironmentFailure, RewardKitError, ToolError, boundary
from reward_kit.processes import remove_folder, temporary_folder, temporary_root


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@dataclass(frozen=True, slots=True)
class Seen:
    """The outcome of one action and the state after it; `refused` is the message of a `ToolError`."""

    action: Action
    outcome: StepOutcome | None
    refused: str | None
    key: str
    observation: Any
    final: str | None

    @property
    def is_last(self) -> bool:
        """The action ended the episode."""
        return self.outcome is not None and (self.outcome.terminated or self.outcome.truncated)

    def difference(self, other: Seen) -> str:
        """Return where another run of the same action differs; "" if it does not."""
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
    kind: str = "contract"
    findings: list[Finding] = field(default_factory=list)
    worlds: list[ForkableResource] = field(default_factory=list)

    @property
    def is_deterministic(self) -> bool:
        """The resource declares that equal actions have equal results."""
        return self.resource_class.is_deterministic_for(self.config)

    def error(self, message: str) -> None:
        """Record an error, once."""
        self._add("error", message)

    def warn(self, message: str) -> None:
        """Record a warning, once."""
        self._add("warning", message)

    def _add(self, level: Level, message: str) -> None:
        if all((known.level, known.message) != (level, message) for known in self.findings):
            self.findings.append(Finding(level, self.kind, message))

    async def world(self) -> ForkableResource:
        """Return a new resource, set up and reset."""
        made = self.resource_class()
        self.worlds.append(made)
        with boundary(EnvironmentFailure, "setup"):
            await made.setup(self.config)
        with boundary(EnvironmentFailure, f"reset({self.seed})"):
            await made.reset(self.seed)
        return made

    async def fork(self, world: ForkableResource) -> ForkableResource:
        """Return a fork, which `close_all` closes."""
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
        """Return the state key, the observation and the digest of the final state."""
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
        """Take up to `count` random actions, until the episode ends or one also moves the resource `beside` it."""
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
        """Return a resource after up to `count` random actions whose episode goes on: one that ended shows little."""
        world = await self.world()
        walked = await self.walk(world, rng, count)
        if not walked or not walked[-1].is_last:
            return world
        world = await self.world()
        await self.repeat(world, walked[:-1])
        return world

    async def random_action(self, world: ForkableResource, rng: random.Random) -> Action | None:
        """Return an admissible action, or one that fits a tool's schema; None without tools."""
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
        """Take the same actions in `world`; return the number of the first that differs and how, or (-1, "")."""
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
    """Return the awaited methods that are plain functions, which are right only if they return a coroutine."""
    return [name for name in CONTRACT if not inspect.iscoroutinefunction(inspect.unwrap(getattr(kind, name)))]


async def shows_all(world: ForkableResource) -> bool:
    """Return whether a final state, if there is one, covers all parts of the resource."""
    if not isinstance(world, CompositeResource):
        return True
    return None not in [await part.final_state() for part in world.parts.values()]


def not_json(value: Any) -> str:
    """Return why a value cannot be written as JSON; "" if it can."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return first_difference(_plain(value), same).removeprefix(": ")


def _plain(value: Any) -> Any:
    """Return a value with tuples as lists, which is how JSON brings them back."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_MOST_WALKS = 12
"""Walks for states that return. Three are enough, but where worlds end early."""
_LOOKED_AT = ("state_key()", "get_observation()", "the digest of final_state()")


async def check_resource(
    resource_class: type[ForkableResource], config: Mapping[str, Any], *, seed: int = 0, steps: int = 20
) -> list[Finding]:
    """Prove what a resource declares, with random actions that fit its tools.

    Args:
        resource_class: the class, which is made without arguments.
        config: what `setup` gets.
        seed: of the resets and of the random actions.
        steps: the length of each random walk.

    Returns:
        The problems, [] if there are none. "error" breaks the contract.

    Raises:
        ConfigError: `setup` refuses the configuration.
    """
    probe = Probe(resource_class, config, seed, steps)
    for name in plain_methods(resource_class):
        probe.warn(f"{name} is a plain function, and it is awaited; write `async def {name}`")
    async with _watched_folders(probe), ServerPool():
        try:
            await probe.world()
        except ConfigError:
            await probe.close_all()
            raise
        except RewardKitError as error:
            probe.error(f"{error}; nothing else can be checked before setup and reset work")
        else:
            for check in (_check_config, _check_tools):
                await _run(check, probe)
            # The random actions of all other checks come from the tools' specifications.
            if not any(finding.level == "error" for finding in probe.findings):
                for check in _CHECKS:
                    await _run(check, probe)
        await probe.close_all()
    return probe.findings


async def _run(check: Callable[[Probe], Awaitable[None]], probe: Probe) -> None:
    probe.kind = check.__name__.removeprefix("_check_").replace("_", "-")
    try:
        with boundary(EnvironmentFailure, "check"):
            await check(probe)
    except RewardKitError as error:
        probe.error(str(error))
    await probe.close_all()


async def _check_config(probe: Probe) -> None:
    world = probe.resource_class()
    probe.worlds.append(world)
    try:
        with boundary(EnvironmentFailure, "setup with an unknown key"):
            await world.setup({**probe.config, "no_such_key": 1})
    except ConfigError:
        return
    except RewardKitError as error:
        probe.warn(f"{error}; raise ConfigError and name the key")
        return
    probe.warn("setup accepts the unknown key 'no_such_key'; a misspelt key would be ignored in silence")


async def _check_tools(probe: Probe) -> None:
    world = await probe.world()
    specs: Any = await world.get_tools_spec()
    if not isinstance(specs, list):
        probe.error(f"get_tools_spec() returned {type(specs).__name__}; return a list of tools")
        return
    if not specs:
        probe.warn(f"get_tools_spec() returned {specs!r}; without tools an agent can do nothing here")
        return
    names = [name for spec in specs if (name := _tool_name(probe, spec))]
    for name in {name for name in names if names.count(name) > 1}:
        probe.error(f"two tools are called {name!r}; an agent cannot tell them apart")


def _tool_name(probe: Probe, spec: Any) -> str:
    """Return the name of a tool; "" if its specification is wrong, which is recorded."""
    form = 'the OpenAI form is {"type": "function", "function": {"name", "description", "parameters"}}'
    function = spec.get("function") if isinstance(spec, Mapping) else None
    if not isinstance(function, Mapping) or spec.get("type") != "function":
        probe.error(f"the tool {str(spec)[:200]} is not in OpenAI form: {form}")
        return ""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        probe.error(f"the tool {str(spec)[:200]} has no name: {form}")
        return ""
    if not function.get("description"):
        probe.warn(f"tool {name!r} has no description; an agent chooses by it")
    parameters = function.get("parameters", {"type": "object"})
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        probe.error(f"tool {name!r}: parameters must be a JSON schema of type object, got {parameters!r}")
        return ""
    properties = parameters.get("properties", {})
    for required in parameters.get("required", ()):
        if required not in properties:
            probe.error(f"tool {name!r}: {required!r} is required but is none of its properties")
    return name


async def _check_reset(probe: Probe) -> None:
    if not probe.is_deterministic:
        return
    one, two = await probe.world(), await probe.world()
    first = await probe.look(one)
    _compare(probe, first, await probe.look(two), "two worlds that were reset with one seed")
    await probe.walk(one, random.Random(probe.seed), probe.steps)
    await one.reset(probe.seed)
    _compare(probe, first, await probe.look(one), "a world and the same world, reset again with its seed after a walk")


def _compare(probe: Probe, first: tuple[Any, ...], second: tuple[Any, ...], which: str) -> None:
    cause = "reset() must draw all randomness from its seed and clear everything that a walk changed"
    for what, old, new in zip(_LOOKED_AT[:2], first, second, strict=False):
        if found := first_difference(old, new):
            probe.error(f"{which} differ in {what}{found}; {cause}")


async def _check_pure(probe: Probe) -> None:
    world = await probe.world()
    await probe.walk(world, random.Random(probe.seed), max(1, probe.steps // 4))
    before = await probe.look(world)
    await world.get_tools_spec()
    await world.admissible_actions()
    await world.expert_action()
    after = await probe.look(world)
    for what, old, new in zip(_LOOKED_AT, before, after, strict=True):
        if old != new:
            # What acts on the outside may see it change; what is deterministic has nothing to excuse it.
            (probe.error if probe.is_deterministic else probe.warn)(
                f"{what} changes when nothing was done but looking; state_key, get_observation, get_tools_spec, "
                "admissible_actions, expert_action and final_state must not change the world nor contain the time"
            )


async def _check_determinism(probe: Probe) -> None:
    walked = await probe.walk(await probe.world(), random.Random(probe.seed), probe.steps)
    if walked and all(seen.refused is not None for seen in walked):
        probe.warn(
            f"every random action was refused (the last: {walked[-1].refused}); these checks prove little. Offer "
            "admissible_actions(), or schemas with enum and bounds"
        )
    if not probe.is_deterministic:
        probe.warn("deterministic = False: what depends on equal runs was not checked")
        return
    _, found = await probe.repeat(await probe.world(), walked)
    if found:
        probe.error(
            f"the same seed and actions gave another result at {found}; draw randomness from the seed of reset(), "
            "leave out the time, or declare deterministic = False"
        )


async def _check_refusals(probe: Probe) -> None:
    world = await probe.world()
    before = await probe.look(world)
    await _expect_refusal(probe, world, Action("no_such_tool", {}), "an unknown tool")
    for spec in await world.get_tools_spec():
        name = spec["function"]["name"]
        await _expect_refusal(probe, world, Action(name, {"no_such_argument": 1}), "an unknown argument")
    if await probe.look(world) != before and probe.is_deterministic:
        probe.error("a refused call changed the world; check everything before anything is changed")
    rng = random.Random(probe.seed + 1)
    key = (await probe.look(world))[0]
    for seen in await probe.walk(world, rng, probe.steps):
        if seen.refused is not None and seen.key != key and probe.is_deterministic:
            probe.error(
                f"{seen.action} raised ToolError and changed the state key; a refused call must leave the world as it "
                "was, and the key must not count calls"
            )
        key = seen.key


async def _expect_refusal(probe: Probe, world: ForkableResource, action: Action, what: str) -> None:
    try:
        with boundary(EnvironmentFailure, f"{what}, {action}"):
            await world.step(action.name, action.arguments)
    except ToolError:
        return
    except RewardKitError as error:
        probe.error(f"{error}; raise ToolError, or the episode ends where the agent could have tried again")
        return
    probe.error(f"{what} ({action}) was accepted; raise ToolError, so that the agent learns of its mistake")


async def _check_fork(probe: Probe) -> None:
    if probe.resource_class.fork_kind_for(probe.config) == "none":
        probe.warn("fork_kind = 'none': forks were not checked; the episodes of a group are not known to start equal")
        return
    rng = random.Random(probe.seed)
    world = await probe.unfinished(rng, max(1, probe.steps // 2))
    before = await probe.look(world)
    twin, still = await probe.fork(world), await probe.fork(world)
    for what, old, new in zip(_LOOKED_AT[:2], before, await probe.look(twin), strict=False):
        if found := first_difference(old, new):
            probe.error(f"a fork differs from its origin in {what}{found}; fork() must copy all of the state")
    walked = await probe.walk(twin, rng, probe.steps, beside=world)
    if await probe.look(world) != before:
        probe.error("what was done in a fork is seen in its origin; fork() shares something that it must copy")
    # The fork's fork is older than the walk, so it must not have moved either.
    if (await probe.look(still))[:2] != before[:2]:
        probe.error("what was done in one fork is seen in another; fork() shares something that it must copy")
    await _same_future(probe, world, walked)
    if (await probe.look(still))[:2] != before[:2]:
        probe.error("what was done in the origin is seen in its fork; fork() shares something that it must copy")
    await twin.close()
    probe.worlds.remove(twin)
    await _same_future(probe, still, walked)


async def _same_future(probe: Probe, world: ForkableResource, walked: list[Seen]) -> None:
    if not probe.is_deterministic:
        return
    _, found = await probe.repeat(world, walked)
    if found:
        probe.error(
            f"a fork and its origin have different futures at {found}; fork() must copy everything that decides the "
            "future, random generators included, and closing a fork must not touch the others"
        )


async def _check_checkpoint(probe: Probe) -> None:
    rng = random.Random(probe.seed)
    world = await probe.unfinished(rng, max(1, probe.steps // 2))
    before = await probe.look(world)
    try:
        saved = await world.checkpoint()
    except NotImplementedError:
        return
    walked = await probe.walk(world, rng, probe.steps)
    for attempt in ("", " a second time"):
        await world.restore(saved)
        # A resource that acts on the outside cannot put its observation back, but it can put back its key.
        compared = _LOOKED_AT[: 2 if probe.is_deterministic else 1]
        for what, old, new in zip(compared, before, await probe.look(world), strict=False):
            if found := first_difference(old, new):
                probe.error(
                    f"after restore(){attempt}, {what} is not what it was at checkpoint(){found}; a checkpoint must "
                    "hold all of the state, and what happens later must not change it"
                )
        number, found = await probe.repeat(world, walked)
        if found and probe.is_deterministic:
            probe.error(f"after restore(){attempt} the same actions give another result at {found} (action {number})")


async def _check_key_of_returning_states(probe: Probe) -> None:
    """Check that a state that returns has the key it had: a key that counts steps never does."""
    cause = "state_key() must leave out the time, step counts, session ids and noise"
    keys: dict[str, set[str]] = {}
    taken = 0
    for number in range(_MOST_WALKS):
        world = await probe.world()
        if not await shows_all(world):
            return
        start = await probe.look(world)
        walked = await probe.walk(world, random.Random(probe.seed + number), 2 * probe.steps)
        taken += len(walked)
        for key, observation, final in [start, *((seen.key, seen.observation, seen.final) for seen in walked)]:
            if final is not None:
                keys.setdefault(f"{observation!r}{final}", set()).add(key)
        if not keys and _keys_never_return(walked):
            probe.warn(f"observations return and keys never do; either much of the state is hidden, or not so: {cause}")
        await probe.close_all()
        if taken >= 6 * probe.steps:
            break
    if any(len(found) > 1 for found in keys.values()):
        probe.error(f"states with one observation and one final state have different keys; {cause}")


def _keys_never_return(walked: list[Seen]) -> bool:
    """Return whether observations return often while no key does. Constant observations prove nothing."""
    accepted = [seen for seen in walked if seen.outcome is not None]
    said = {repr((seen.outcome.observation, seen.observation)) for seen in accepted if seen.outcome is not None}
    return (
        len(accepted) >= 8 and 1 < len(said) <= len(accepted) // 2 and len({s.key for s in accepted}) == len(accepted)
    )


async def _check_actions_offered(probe: Probe) -> None:
    world = await probe.world()
    names = {spec["function"]["name"] for spec in await world.get_tools_spec()}
    admissible = await world.admissible_actions()
    for entry in admissible or ():
        if not isinstance(entry.get("arguments"), Mapping) or entry.get("name") not in names:
            probe.error(f'admissible_actions(): {entry!r} is not {{"name", "arguments"}} of one of the tools')
            return
    expert = await world.expert_action()
    offered = [Action(entry["name"], copy.deepcopy(entry["arguments"])) for entry in admissible or ()]
    if expert is not None and expert.get("type") == "tool_call":
        offered.append(Action(expert["name"], copy.deepcopy(expert["arguments"])))
    elif expert is not None and expert.get("type") not in ("text", "tool_calls", "terminate"):
        probe.error(
            f"expert_action() returned {expert!r}, which is not a policy action; see Action in policy_interface"
        )
    for action in offered[:10]:
        seen = await probe.act(await probe.world(), action)
        if seen.refused is not None:
            probe.error(f"{action} is offered by admissible_actions() or expert_action() and refused: {seen.refused}")


async def _check_final_state(probe: Probe) -> None:
    one, two = await probe.world(), await probe.world()
    walked = await probe.walk(one, random.Random(probe.seed), probe.steps)
    first, again = (await probe.look(one))[2], (await probe.look(one))[2]
    if first != again:
        probe.error("final_state() gives other bytes each time it is asked; sort what has no order, leave out the time")
    await probe.repeat(two, walked)
    if probe.is_deterministic and first != (await probe.look(two))[2]:
        probe.error("two worlds that did the same have different final states; leave out times, paths and ids")


async def _check_close(probe: Probe) -> None:
    world = await probe.world()
    await probe.walk(world, random.Random(probe.seed), 3)
    probe.worlds.remove(world)
    with boundary(EnvironmentFailure, "close"):
        await world.close()
    try:
        with boundary(EnvironmentFailure, "closing a second time"):
            await world.close()
    except RewardKitError as error:
        probe.warn(f"{error}; after a failure close() may come twice")
    unused = probe.resource_class()
    try:
        with boundary(EnvironmentFailure, "closing before setup"):
            await unused.close()
    except RewardKitError as error:
        probe.warn(f"{error}; where setup fails, close() is called all the same")


@asynccontextmanager
async def _watched_folders(probe: Probe) -> AsyncIterator[None]:
    """Watch what is left in the working directory and among the temporary files."""
    private, before = temporary_folder("check-"), tempfile.tempdir
    here, ours = _names(Path.cwd()), _names(temporary_root())
    tempfile.tempdir = str(private)
    try:
        yield
        gc.collect()
        if left := _names(private) | (_names(temporary_root()) - ours):
            probe.error(f"{len(left)} temporary files were left behind ({sorted(left)[0]}, …); remove them in close()")
        if new := _names(Path.cwd()) - here:
            probe.error(f"{sorted(new)[0]!r} was left in the working directory; use the system's temporary directory")
    finally:
        tempfile.tempdir = before
        remove_folder(private)


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


_CHECKS = (
    _check_reset,
    _check_pure,
    _check_determinism,
    _check_refusals,
    _check_fork,
    _check_checkpoint,
    _check_key_of_returning_states,
    _check_actions_offered,
    _check_final_state,
    _check_close,
)
