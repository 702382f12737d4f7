"""The contract of `base` as a program: it drives a resource and says what is wrong with it, and why it probably is.

Written in the manner of Gymnasium's `env_checker`. Run it on its own, not beside other work in one process: while it
runs, the place for temporary files is a directory of its own, to see what is left there.
"""

from __future__ import annotations

import copy
import gc
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from reward_kit.display_text import first_difference
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.checker_probe import Action, Probe, Seen, plain_methods, shows_all
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, EnvironmentFailure, RewardKitError, ToolError, boundary
from reward_kit.findings import Finding
from reward_kit.processes import remove_folder, temporary_folder, temporary_root

__all__ = ["Finding", "check_resource"]

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
        What is wrong, [] where nothing was found. "error" breaks the contract.

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
    """The name of a tool; "" where its specification is wrong, which is recorded."""
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


def _is_deterministic(probe: Probe) -> bool:
    return probe.resource_class.is_deterministic_for(probe.config)


async def _check_reset(probe: Probe) -> None:
    if not _is_deterministic(probe):
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
            (probe.error if _is_deterministic(probe) else probe.warn)(
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
    if not _is_deterministic(probe):
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
    if await probe.look(world) != before and _is_deterministic(probe):
        probe.error("a refused call changed the world; check everything before anything is changed")
    rng = random.Random(probe.seed + 1)
    key = (await probe.look(world))[0]
    for seen in await probe.walk(world, rng, probe.steps):
        if seen.refused is not None and seen.key != key and _is_deterministic(probe):
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
    if not _is_deterministic(probe):
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
        # What acts on the outside is told of it: its observation cannot be put back, its key can.
        compared = _LOOKED_AT[: 2 if _is_deterministic(probe) else 1]
        for what, old, new in zip(compared, before, await probe.look(world), strict=False):
            if found := first_difference(old, new):
                probe.error(
                    f"after restore(){attempt}, {what} is not what it was at checkpoint(){found}; a checkpoint must "
                    "hold all of the state, and what happens later must not change it"
                )
        number, found = await probe.repeat(world, walked)
        if found and _is_deterministic(probe):
            probe.error(f"after restore(){attempt} the same actions give another result at {found} (action {number})")


async def _check_key_of_returning_states(probe: Probe) -> None:
    """A state that returns must have the key it had: a key that counts steps never does."""
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
    """Whether what the world says returns often while no key does. A world that always says the same tells nothing."""
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
            probe.error(f'admissible_actions(): {entry!r} is no {{"name", "arguments"}} of one of the tools')
            return
    expert = await world.expert_action()
    offered = [Action(entry["name"], copy.deepcopy(entry["arguments"])) for entry in admissible or ()]
    if expert is not None and expert.get("type") == "tool_call":
        offered.append(Action(expert["name"], copy.deepcopy(expert["arguments"])))
    elif expert is not None and expert.get("type") not in ("text", "tool_calls", "terminate"):
        probe.error(f"expert_action() returned {expert!r}, which is no policy action; see Action in policy_interface")
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
    if _is_deterministic(probe) and first != (await probe.look(two))[2]:
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
