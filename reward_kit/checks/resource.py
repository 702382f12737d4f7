"""Check a resource with random actions, and report violations of its contract along with their likely causes.

The check is modeled on Gymnasium's `env_checker`. Do not run it in parallel with other work in the same process,
because it replaces the process's temporary directory to detect files that the resource leaves behind.
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

_MOST_WALKS = 12
"""The maximum number of random walks that search for recurring states. Three suffice unless episodes end early."""
_COMPARED_PARTS = ("state_key()", "get_observation()", "the digest of final_state()")
Snapshot = tuple[str, Any, str | None]
"""The state key, the observation and the digest of the final state, in the order of `_COMPARED_PARTS`."""


@dataclass(frozen=True, slots=True)
class Action:
    """A tool call."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """The outcome of an action and the state after the action.

    `refused` is the message of the `ToolError` that the action raised.
    """

    action: Action
    outcome: StepOutcome | None
    refused: str | None
    key: str
    observation: Any
    final: str | None

    @property
    def is_last(self) -> bool:
        """True if the action ended the episode."""
        return self.outcome is not None and (self.outcome.terminated or self.outcome.truncated)

    def difference(self, other: ActionOutcome) -> str:
        """Describe the first difference from another outcome of the same action.

        If the outcomes are equal, return "".
        """
        pairs: list[tuple[str, Any, Any]] = [("the refusal", self.refused, other.refused)]
        if self.outcome is not None and other.outcome is not None:
            for name in ("observation", "reward", "terminated", "truncated"):
                pairs.append((f"the {name}", getattr(self.outcome, name), getattr(other.outcome, name)))
        pairs += [("get_observation()", self.observation, other.observation), ("state_key()", self.key, other.key)]
        for what, one, two in pairs:
            if difference := first_difference(one, two):
                return f"{what} differs{difference}"
        return ""


@dataclass(slots=True)
class Probe:
    """The state of a check: the resource class and its configuration, the findings, and the resources to close."""

    resource_class: type[ForkableResource]
    config: Mapping[str, Any]
    seed: int
    steps: int
    kind: str = "contract"
    findings: list[Finding] = field(default_factory=list)
    opened: list[ForkableResource] = field(default_factory=list)

    @property
    def is_deterministic(self) -> bool:
        """True if the resource declares that identical actions have identical results."""
        return self.resource_class.is_deterministic_for(self.config)

    def error(self, message: str, level: Level = "error") -> None:
        """Record an error unless the same error is already recorded."""
        if all((known.level, known.message) != (level, message) for known in self.findings):
            self.findings.append(Finding(level, self.kind, message))

    def warn(self, message: str) -> None:
        """Record a warning unless the same warning is already recorded."""
        self.error(message, "warning")

    def compare(self, before: Snapshot, after: Snapshot, message: str, parts: int = 2) -> None:
        """Compare the first `parts` parts, and record an error for each difference.

        `message` is a format string with the fields `{part}` and `{difference}`.
        """
        for part, old, new in zip(_COMPARED_PARTS[:parts], before, after, strict=False):
            if difference := first_difference(old, new):
                self.error(message.format(part=part, difference=difference))

    async def resource(self) -> ForkableResource:
        """Create, set up and reset a resource."""
        made = self.resource_class()
        self.opened.append(made)
        with boundary(EnvironmentFailure, "setup"):
            await made.setup(self.config)
        with boundary(EnvironmentFailure, f"reset({self.seed})"):
            await made.reset(self.seed)
        return made

    async def fork(self, resource: ForkableResource) -> ForkableResource:
        """Fork a resource. `close_all` closes the fork."""
        with boundary(EnvironmentFailure, "fork"):
            twin = await resource.fork()
        if twin is resource:
            raise EnvironmentFailure("fork() returned the resource itself; return a new instance")
        if not isinstance(twin, ForkableResource):
            raise EnvironmentFailure(f"fork() returned {type(twin).__name__}, not a ForkableResource")
        self.opened.append(twin)
        return twin

    async def close_all(self) -> None:
        """Close all open resources."""
        while self.opened:
            resource = self.opened.pop()
            try:
                with boundary(EnvironmentFailure, "close"):
                    await resource.close()
            except RewardKitError as error:
                self.error(f"{error}; close() must not raise, even after a failed episode")

    async def act(self, resource: ForkableResource, action: Action) -> ActionOutcome:
        """Take one action, and check the outcome and the state after the action."""
        outcome: Any = None
        try:
            with boundary(EnvironmentFailure, f"step {action}"):
                outcome = await resource.step(action.name, dict(action.arguments))
        except ToolError as error:
            return ActionOutcome(action, None, str(error), *await self.snapshot(resource))
        if type(outcome).__name__ != "StepOutcome":
            raise EnvironmentFailure(f"step {action} returned {type(outcome).__name__}; return a StepOutcome")
        for name, value in (("observation", outcome.observation), ("info", dict(outcome.info))):
            if problem := not_json(value):
                self.error(
                    f"the {name} of {action} is not JSON-serializable: {problem}; convert the value before returning it"
                )
        reward = outcome.reward
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            self.error(f"the reward of {action} is {reward!r}; return a finite number or None")
        for name, flag in (("terminated", outcome.terminated), ("truncated", outcome.truncated)):
            if not isinstance(flag, bool):
                self.error(f"{name} of {action} is {flag!r}, not a bool; convert NumPy bools with bool()")
        return ActionOutcome(action, outcome, None, *await self.snapshot(resource))

    async def snapshot(self, resource: ForkableResource) -> Snapshot:
        """Return the state key, the observation and the digest of the final state."""
        with boundary(EnvironmentFailure, "state_key"):
            key = await resource.state_key()
        with boundary(EnvironmentFailure, "get_observation"):
            observation = await resource.get_observation()
        with boundary(EnvironmentFailure, "final_state"):
            final = await resource.final_state()
        if not isinstance(key, str):
            raise EnvironmentFailure(f"state_key() returned {type(key).__name__}; return a str")
        if final is not None and not isinstance(final, StateSnapshot):
            raise EnvironmentFailure(f"final_state() returned {type(final).__name__}; return a StateSnapshot or None")
        if problem := not_json(observation):
            self.error(
                f"the result of get_observation() is not JSON-serializable: {problem}; the episode stores the "
                "result as "
                "JSON"
            )
        return key, observation, final.digest if final else None

    async def walk(
        self, resource: ForkableResource, rng: random.Random, count: int, beside: ForkableResource | None = None
    ) -> list[ActionOutcome]:
        """Take up to `count` random actions.

        The walk stops when the episode ends or when an action also changes the resource `beside`.
        """
        seen: list[ActionOutcome] = []
        key = await beside.state_key() if beside else ""
        for _ in range(count):
            with boundary(EnvironmentFailure, "admissible_actions"):
                admissible = await resource.admissible_actions()
            # Include inadmissible actions, because agents also take them.
            if admissible and rng.random() < 0.5:
                chosen = rng.choice(list(admissible))
                action = Action(chosen["name"], chosen["arguments"])
            else:
                with boundary(EnvironmentFailure, "get_tools_spec"):
                    specs = await resource.get_tools_spec()
                if not specs:
                    break
                function = rng.choice(specs)["function"]
                action = Action(function["name"], sample_arguments(function.get("parameters") or {}, rng))
            seen.append(await self.act(resource, action))
            if seen[-1].is_last or (beside and await beside.state_key() != key):
                break
        return seen

    async def unfinished(self, rng: random.Random, count: int) -> ForkableResource:
        """Create a resource and take up to `count` random actions that do not end its episode."""
        resource = await self.resource()
        walked = await self.walk(resource, rng, count)
        if not walked or not walked[-1].is_last:
            return resource
        resource = await self.resource()
        await self.repeat(resource, walked[:-1])
        return resource

    async def repeat(self, resource: ForkableResource, walked: list[ActionOutcome]) -> str:
        """Repeat the actions and describe the first outcome that differs. If all outcomes are equal, return ""."""
        for number, before in enumerate(walked):
            if difference := before.difference(await self.act(resource, before.action)):
                return f"step {number}, {before.action}: {difference}"
        return ""


def not_json(value: Any) -> str:
    """Return the reason why a value cannot be serialized as JSON, or "" if it can."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return first_difference(_plain(value), same).removeprefix(": ")


def _plain(value: Any) -> Any:
    """Convert tuples to lists, as JSON does."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


async def check_resource(
    resource_class: type[ForkableResource], config: Mapping[str, Any], *, seed: int = 0, steps: int = 20
) -> list[Finding]:
    """Check that a resource fulfills the contract of `ForkableResource` by calling its tools at random.

    Args:
        resource_class: the class to check. Its constructor is called without arguments.
        config: the configuration to pass to `setup`.
        seed: the random seed for the resets and the actions.
        steps: the maximum number of actions in each random walk.

    Returns:
        The problems found. Problems with level "error" are violations of the contract.

    Raises:
        ConfigError: If `setup` rejects the configuration.
    """
    probe = Probe(resource_class, config, seed, steps)
    for name, method in vars(ForkableResource).items():
        own = inspect.unwrap(getattr(resource_class, name))
        if inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(own):
            probe.warn(f"{name} is not a coroutine function, but its result is awaited; write `async def {name}`")
    async with _watched_folders(probe), ServerPool():
        try:
            await probe.resource()
        except ConfigError:
            await probe.close_all()
            raise
        except RewardKitError as error:
            probe.error(f"{error}; all other checks require working setup and reset methods")
        else:
            for check in (_check_config, _check_tools):
                await _run(check, probe)
            # All other checks draw random actions from the tools' specifications.
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
    resource = probe.resource_class()
    probe.opened.append(resource)
    try:
        with boundary(EnvironmentFailure, "setup with an unknown key"):
            await resource.setup({**probe.config, "no_such_key": 1})
    except ConfigError:
        return
    except RewardKitError as error:
        probe.warn(f"{error}; raise a ConfigError that names the key")
        return
    probe.warn(
        "setup accepted the unknown key 'no_such_key', so misspelled keys would be ignored silently; raise a "
        "ConfigError for unknown keys"
    )


async def _check_tools(probe: Probe) -> None:
    specs: Any = await (await probe.resource()).get_tools_spec()
    if not isinstance(specs, list):
        probe.error(f"get_tools_spec() returned {type(specs).__name__}; return a list of tools")
        return
    if not specs:
        probe.warn(f"get_tools_spec() returned {specs!r}; an agent cannot act without tools")
    names = []
    for spec in specs:
        function = spec.get("function") if isinstance(spec, Mapping) else None
        is_function = isinstance(function, Mapping) and spec.get("type") == "function"
        name: Any = function.get("name") if isinstance(function, Mapping) else None
        if not is_function or function is None or not isinstance(name, str) or not name:
            problem = "has no name" if is_function else "is not in OpenAI's format"
            form = '{"type": "function", "function": {"name", "description", "parameters"}}'
            probe.error(f"the tool {str(spec)[:200]} {problem}; OpenAI's format is {form}")
            continue
        if not function.get("description"):
            probe.warn(f"tool {name!r} has no description; agents choose tools by their descriptions")
        parameters = function.get("parameters", {"type": "object"})
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
            probe.error(f"tool {name!r}: parameters must be a JSON schema of type 'object', got {parameters!r}")
            continue
        for required in parameters.get("required", ()):
            if required not in parameters.get("properties", {}):
                probe.error(f"tool {name!r}: required argument {required!r} is missing from the properties")
        names.append(name)
    for name in {name for name in names if names.count(name) > 1}:
        probe.error(f"two tools have the name {name!r}; rename one")


async def _check_reset(probe: Probe) -> None:
    if not probe.is_deterministic:
        return
    one, two = await probe.resource(), await probe.resource()
    first = await probe.snapshot(one)
    text = (
        "differ in {part}{difference}; reset() must derive all randomness from its seed and undo all changes made "
        "by the previous episode"
    )
    probe.compare(first, await probe.snapshot(two), f"two resources reset with the same seed {text}")
    await probe.walk(one, random.Random(probe.seed), probe.steps)
    await one.reset(probe.seed)
    again = "the states after two resets of the same resource with the same seed"
    probe.compare(first, await probe.snapshot(one), f"{again} {text}")


async def _check_pure(probe: Probe) -> None:
    resource = await probe.resource()
    await probe.walk(resource, random.Random(probe.seed), max(1, probe.steps // 4))
    before = await probe.snapshot(resource)
    await resource.get_tools_spec()
    await resource.admissible_actions()
    await resource.expert_action()
    for part, old, new in zip(_COMPARED_PARTS, before, await probe.snapshot(resource), strict=True):
        if old != new:
            # The state of a deterministic resource must not change by itself. External state may change.
            probe.error(
                f"{part} changed without an action; state_key, get_observation, get_tools_spec, "
                "admissible_actions, expert_action and final_state must not change the state or depend on the time",
                "error" if probe.is_deterministic else "warning",
            )


async def _check_determinism(probe: Probe) -> None:
    walked = await probe.walk(await probe.resource(), random.Random(probe.seed), probe.steps)
    if walked and all(seen.refused is not None for seen in walked):
        probe.warn(
            f"every random action was refused (the last: {walked[-1].refused}), so the checks are incomplete; define "
            "admissible_actions(), or use schemas with enums and bounds"
        )
    if not probe.is_deterministic:
        probe.warn("deterministic = False: the checks that need repeatable results were skipped")
    elif difference := await probe.repeat(await probe.resource(), walked):
        probe.error(
            f"the same seed and actions produced different results at {difference}; derive randomness from the seed of "
            "reset(), and do not depend on the time, or declare deterministic = False"
        )


async def _check_refusals(probe: Probe) -> None:
    resource = await probe.resource()
    before = await probe.snapshot(resource)
    calls = [("an unknown tool", Action("no_such_tool", {}))]
    names = [spec["function"]["name"] for spec in await resource.get_tools_spec()]
    calls += [("an unknown argument", Action(name, {"no_such_argument": 1})) for name in names]
    for what, action in calls:
        try:
            with boundary(EnvironmentFailure, f"{what}, {action}"):
                await resource.step(action.name, action.arguments)
        except ToolError:
            continue
        except RewardKitError as error:
            probe.error(f"{error}; raise ToolError to let the agent try again; other errors end the episode")
        else:
            probe.error(f"{what} ({action}) was accepted; raise ToolError to show the agent its mistake")
    if await probe.snapshot(resource) != before and probe.is_deterministic:
        probe.error("a refused call changed the state; validate all arguments before changing anything")
    key = (await probe.snapshot(resource))[0]
    for seen in await probe.walk(resource, random.Random(probe.seed + 1), probe.steps):
        if seen.refused is not None and seen.key != key and probe.is_deterministic:
            probe.error(
                f"{seen.action} raised ToolError but changed the state key; a refused call must not change the state, "
                "and the state key must not count calls"
            )
        key = seen.key


async def _check_fork(probe: Probe) -> None:
    if probe.resource_class.fork_kind_for(probe.config) == "none":
        probe.warn(
            "fork_kind = 'none': forks were not checked, and the episodes of a group may start in different states"
        )
        return
    rng = random.Random(probe.seed)
    origin = await probe.unfinished(rng, max(1, probe.steps // 2))
    before = await probe.snapshot(origin)
    twin, still = await probe.fork(origin), await probe.fork(origin)
    text = "a fork differs from the original in {part}{difference}; fork() must copy the whole state"
    probe.compare(before, await probe.snapshot(twin), text)
    shares = "fork() shares state that it must copy"
    walked = await probe.walk(twin, rng, probe.steps, beside=origin)
    if await probe.snapshot(origin) != before:
        probe.error(f"actions in a fork changed the original; {shares}")
    # The second fork was created before the walk, so it must not have changed either.
    if (await probe.snapshot(still))[:2] != before[:2]:
        probe.error(f"actions in a fork changed a different fork; {shares}")
    await _check_future(probe, origin, walked)
    if (await probe.snapshot(still))[:2] != before[:2]:
        probe.error(f"actions in the original changed a fork; {shares}")
    await twin.close()
    probe.opened.remove(twin)
    await _check_future(probe, still, walked)


async def _check_future(probe: Probe, resource: ForkableResource, walked: list[ActionOutcome]) -> None:
    if probe.is_deterministic and (difference := await probe.repeat(resource, walked)):
        probe.error(
            f"a fork and the original diverge under the same actions at {difference}; fork() must copy the whole "
            "state, including random generators, and closing a fork must not affect other forks"
        )


async def _check_checkpoint(probe: Probe) -> None:
    rng = random.Random(probe.seed)
    resource = await probe.unfinished(rng, max(1, probe.steps // 2))
    before = await probe.snapshot(resource)
    try:
        saved = await resource.checkpoint()
    except NotImplementedError:
        return
    walked = await probe.walk(resource, rng, probe.steps)
    for attempt in ("", " a second time"):
        await resource.restore(saved)
        # A resource with external state can restore its key but possibly not its observation.
        text = (
            f"after restore(){attempt}, {{part}} differs from its value at checkpoint(){{difference}}; a checkpoint "
            "must contain the whole state, and later actions must not change it"
        )
        probe.compare(before, await probe.snapshot(resource), text, parts=2 if probe.is_deterministic else 1)
        difference = await probe.repeat(resource, walked)
        if difference and probe.is_deterministic:
            probe.error(
                f"after restore(){attempt}, the same actions produced different results at {difference}; a "
                "checkpoint must "
                "contain the whole state"
            )


async def _check_key_of_returning_states(probe: Probe) -> None:
    """Check that a state has the same key whenever it recurs. A key that counts steps fails this check."""
    cause = "state_key() must not depend on the time, step counts, session ids or noise"
    keys: dict[str, set[str]] = {}
    taken = 0
    for number in range(_MOST_WALKS):
        resource = await probe.resource()
        parts = resource.parts.values() if isinstance(resource, CompositeResource) else ()
        if None in [await part.final_state() for part in parts]:
            return  # `final_state()` may be incomplete
        start = await probe.snapshot(resource)
        walked = await probe.walk(resource, random.Random(probe.seed + number), 2 * probe.steps)
        taken += len(walked)
        for key, observation, final in [start, *((seen.key, seen.observation, seen.final) for seen in walked)]:
            if final is not None:
                keys.setdefault(f"{observation!r}{final}", set()).add(key)
        accepted = [seen for seen in walked if seen.outcome is not None]
        observations = {repr((seen.outcome.observation, seen.observation)) for seen in accepted if seen.outcome}
        # Constant observations carry no information.
        often = len(accepted) >= 8 and 1 < len(observations) <= len(accepted) // 2
        if not keys and often and len({seen.key for seen in accepted}) == len(accepted):
            probe.warn(f"observations recur, but state keys do not recur; unless much of the state is hidden, {cause}")
        await probe.close_all()
        if taken >= 6 * probe.steps:
            break
    if any(len(own) > 1 for own in keys.values()):
        probe.error(f"states with the same observation and final state have different keys; {cause}")


async def _check_actions_offered(probe: Probe) -> None:
    resource = await probe.resource()
    names = {spec["function"]["name"] for spec in await resource.get_tools_spec()}
    admissible = await resource.admissible_actions()
    for entry in admissible or ():
        if not isinstance(entry.get("arguments"), Mapping) or entry.get("name") not in names:
            probe.error(
                f'admissible_actions() returned {entry!r}; return dicts with the "name" of a tool and its "arguments"'
            )
            return
    expert = await resource.expert_action()
    offered = [Action(entry["name"], copy.deepcopy(entry["arguments"])) for entry in admissible or ()]
    if expert is not None and expert.get("type") == "tool_call":
        offered.append(Action(expert["name"], copy.deepcopy(expert["arguments"])))
    elif expert is not None and expert.get("type") not in ("text", "tool_calls", "terminate"):
        probe.error(
            f"expert_action() returned {expert!r}, which is not an action; see reward_kit.agent.policy_interface.Action"
        )
    for action in offered[:10]:
        seen = await probe.act(await probe.resource(), action)
        if seen.refused is not None:
            probe.error(
                f"{action}, which admissible_actions() or expert_action() returned, was refused: {seen.refused}"
            )


async def _check_final_state(probe: Probe) -> None:
    one, two = await probe.resource(), await probe.resource()
    walked = await probe.walk(one, random.Random(probe.seed), probe.steps)
    first, again = (await probe.snapshot(one))[2], (await probe.snapshot(one))[2]
    if first != again:
        probe.error("final_state() returned different bytes on each call; sort unordered data, and leave out the time")
    await probe.repeat(two, walked)
    if probe.is_deterministic and first != (await probe.snapshot(two))[2]:
        probe.error(
            "two resources have different final states after the same actions; leave out the time, paths and ids"
        )


async def _check_close(probe: Probe) -> None:
    resource = await probe.resource()
    await probe.walk(resource, random.Random(probe.seed), 3)
    probe.opened.remove(resource)
    with boundary(EnvironmentFailure, "close"):
        await resource.close()
    try:
        with boundary(EnvironmentFailure, "close before setup"):
            await probe.resource_class().close()
    except RewardKitError as error:
        probe.warn(f"{error}; close() must not raise, because it is called even if setup fails")


@asynccontextmanager
async def _watched_folders(probe: Probe) -> AsyncIterator[None]:
    """Report files that are left in the working directory or the temporary directory."""
    private, before = temporary_folder("check-"), tempfile.tempdir
    here, ours = _names(Path.cwd()), _names(temporary_root())
    tempfile.tempdir = str(private)
    try:
        yield
        gc.collect()
        if left := _names(private) | (_names(temporary_root()) - ours):
            probe.error(f"{len(left)} temporary files were not removed ({sorted(left)[0]}, …); remove them in close()")
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
