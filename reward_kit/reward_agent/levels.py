"""At which level a reward runs, decided before a line of it is, and the reward made ready for that level.

Who says so, first to last: the command line, the task file, and where neither does the default for what it is: a user's
own file runs `warm`, what this package brings along runs `in_process`. The reward's own code can ask for thicker walls
than the default, and is heard, as for built-in rewards that parse what a model wrote; it can ask for thinner ones, and
is not.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.errors import ConfigError, DeadlineError, ProviderError
from reward_kit.loading import is_built_in, load_object, module_name_of, split_reference
from reward_kit.reward_agent.custom_rewards import spec_of
from reward_kit.reward_agent.custom_scorer import custom_scorer
from reward_kit.reward_agent.in_process import InProcessScorer, warn_unconfined
from reward_kit.reward_agent.requirements import check_installed, declared_in
from reward_kit.reward_agent.scoring import Reward, Scorer
from reward_kit.reward_agent.sources import refuse_network
from reward_kit.reward_calls import calls_out, fixed
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import Origin, RewardSpec, reward_spec

if TYPE_CHECKING:
    from reward_kit.reward_agent.confined import ConfinedLevel
    from reward_kit.reward_agent.package_environment import PackageEnvironment
    from reward_kit.reward_agent.sources import Sources
    from reward_kit.sandbox.limits import Limits

_LONGEST_S = 86_400.0

_ANSWER_S = 60.0

"""What a call over HTTP may take besides the time of the reward."""
_OF_WALLS = ("level", "install_requirements", "read_paths", "preload", "limits")
_UNREADABLE = (
    "reward {0!r}: what it requires cannot be read from {1} without running it, and is to be installed before it runs; "
    "write requirements=[…] with plain texts in the decorator of its `def` or `class`, or install them yourself"
)

_NOTHING_INSTALLED = (
    "sandbox.install_requirements has no effect for {0}: it runs in_process, with the packages that are installed "
    "here; leave it out, and install with pip what is missing"
)

_CALLS_OUT = (
    "reward {0!r} asks a model, or has a sandbox of its own, and can do neither at the level {1}: run it with "
    "--sandbox in_process"
)

_ALONE = "it sees the packages that it requires, and no others: name what it imports in requirements=[…] too"


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """What the user says of the sandbox of a reward.

    Attributes:
        level: None where they leave it to the default.
        limits: fields of `sandbox.Limits` besides `wall_s`.
        read_paths: files and folders that it may read, absolute or relative to the folder of its reference.
        preload: installed modules to import once, before any call.
        reward_time_s: seconds that one call may take; None for a day.
        install_requirements: its requirements are installed in an environment of their own, from the user's package
            index; else they are only checked.
    """

    level: SandboxLevel | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    read_paths: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    reward_time_s: float | None = 600.0
    install_requirements: bool = False


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward that can be scored with.

    Attributes:
        reward: loaded here, or known from behind its walls.
        notes: lines for the user, such as that it runs with thinner walls than usual.
    """

    reward: Reward
    notes: tuple[str, ...] = ()


def load_reward(
    reference: str,
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
) -> LoadedReward:
    """Load a reward for the level it is to run at. Unless that is `in_process`, nothing of it runs in this process.

    Args:
        reference: `file.py:function` or `package.module:function`, of a function or a class with `score`; or the URL of
            a reward that `reward-kit serve` serves.
        folder: what a file path is relative to, by default the working directory.
        choice: what the user says of its sandbox.
        options: keyword parameters to fix, as `reward_options.with_options` does.

    Raises:
        ConfigError: it cannot be loaded, `isolated` is asked for and cannot be had, its requirements are not met, or an
            option does not fit.
    """
    choice, folder, options = choice or SandboxChoice(), (folder or Path.cwd()).resolve(), options or {}
    if reference.startswith(("http://", "https://")):
        return _served(reference, choice, options)
    location, name = split_reference(reference)
    level = choice.level or _usual_level(reference, folder, choice)
    if level == "in_process":
        loaded = LoadedReward(_loaded_here(reference, folder, options))  # what is missing is told first
        if choice.install_requirements:
            raise ConfigError(_NOTHING_INSTALLED.format(reference))
        return loaded
    if is_built_in(location):
        _refuse_what_calls_out(reference, folder, level)
    if reason := run_to_end(_why_not_confined()):
        if level == "isolated":
            raise ConfigError(f"reward {reference!r} is to run isolated, and {reason}; `reward-kit doctor` tells more")
        return _weakened(reference, folder, level, reason, options)
    file = _file_of(location, folder)
    return _described(reference, folder, choice, level, Origin(file, name), options)


def _usual_level(reference: str, folder: Path, choice: SandboxChoice) -> SandboxLevel:
    """The level where the user leaves it open."""
    if not is_built_in(split_reference(reference)[0]):
        return "warm"
    return reward_spec(load_object(reference, folder)).sandbox or "in_process"


def scorer_of(reward: Reward, deadline_s: float | None = None) -> Scorer:
    """Where a loaded reward is called.

    Args:
        reward: as `load_reward` gives it.
        deadline_s: for one call in this process; a confined reward has its own.
    """
    if isinstance(reward, RewardSpec):
        return custom_scorer(reward, deadline_s) or InProcessScorer(reward, deadline_s)
    from reward_kit.reward_agent.confined import ConfinedReward, ConfinedScorer

    if isinstance(reward, ConfinedReward):
        return ConfinedScorer(reward)
    from reward_kit.reward_agent.remote import RemoteReward

    assert isinstance(reward, RemoteReward), "there are these three kinds"
    return reward.scorer(deadline_s)


def _served(url: str, choice: SandboxChoice, options: Mapping[str, Any]) -> LoadedReward:
    """A reward that runs elsewhere, behind HTTP, with the walls and the options that it has there."""
    from reward_kit.reward_agent.remote import Patience, RemoteReward, checked_address, notes_on

    url = checked_address(url)
    decided_there = {f"sandbox.{name}": getattr(choice, name) for name in _OF_WALLS} | {"reward_options": options}
    if given := next((name for name, value in decided_there.items() if value), None):
        raise ConfigError(f"{given} has no effect for {url}, which runs where `reward-kit serve` does: set it there")
    patience = Patience(timeout_s=min(choice.reward_time_s or _LONGEST_S, _LONGEST_S) + _ANSWER_S)
    try:
        reward = run_to_end(RemoteReward.at(url, patience=patience))
    except (ProviderError, DeadlineError) as error:
        raise ConfigError(f"reward {url} cannot be used: {error}") from error
    return LoadedReward(reward, notes_on(reward))


async def _why_not_confined() -> str:
    """Why this machine confines nothing; "" where it does."""
    from reward_kit.sandbox.availability import best_strength

    try:
        await best_strength("auto")
    except ConfigError as error:
        return str(error)
    return ""


def _loaded_here(reference: str, folder: Path, options: Mapping[str, Any]) -> RewardSpec:
    return reward_here(load_object(reference, folder), options)


def reward_here(reward: Any, options: Mapping[str, Any]) -> RewardSpec:
    """A reward function or class, ready to be called in this process.

    Raises:
        ConfigError: it is none, its requirements are not met, or an option does not fit.
    """
    spec = fixed(spec_of(reward), options)
    check_installed(spec.requirements, f"reward {spec.id!r}")
    for resource in spec.resources.values():
        if (check := getattr(resource, "check_options", None)) is not None:
            run_to_end(check(spec.options))
    return spec


def _refuse_what_calls_out(reference: str, folder: Path, level: SandboxLevel) -> None:
    """A built-in reward that asks a model, or has a sandbox of its own, can do neither behind walls."""
    spec = reward_spec(load_object(reference, folder))
    if calls_out(spec):
        raise ConfigError(f"reward {spec.id!r} calls out and cannot run {level}: leave out sandbox.level")


def _weakened(
    reference: str, folder: Path, level: SandboxLevel, reason: str, options: Mapping[str, Any]
) -> LoadedReward:
    spec = _loaded_here(reference, folder, options)
    if spec.sandbox == "isolated":
        raise ConfigError(f"reward {spec.id!r} asks to run isolated, and {reason}; `reward-kit doctor` tells more")
    note = f"reward {spec.id!r} runs in_process, without walls: {reason}; `reward-kit doctor` tells more"
    return LoadedReward(replace(spec, weakened_from=level), (note,))


def _described(
    reference: str,
    folder: Path,
    choice: SandboxChoice,
    level: ConfinedLevel,
    origin: Origin,
    options: Mapping[str, Any],
) -> LoadedReward:
    from reward_kit.reward_agent.confined import ConfinedReward, describe, program_of, ready_to_score
    from reward_kit.reward_agent.sources import built_in_imports, read_source, sources_of, user_roots

    file, limits, location = origin.file, limits_of(choice), split_reference(reference)[0]
    is_file = location.endswith(".py")
    refuse_network(read_source(file), origin.qualname, str(file), level)
    # Of a stranger's file only the folder it came in is its own.
    roots = [*([file.parent] if is_file else []), *([] if is_file and level == "isolated" else user_roots())]
    environment = _own_environment(origin, choice)
    library = environment.library_path if environment is not None else ()
    sources = sources_of(file, module_name_of(file) if is_file else location, roots, library)
    read_paths = _read_paths(choice, folder)
    preload = (*choice.preload, *sorted(built_in_imports(f"{location}.{origin.qualname}")))
    program = program_of(
        reference, folder, sources, read_paths=read_paths, preload=preload, library_path=library, options=options
    )
    try:
        facts, output = run_to_end(describe(program, str(file), limits))
    except ConfigError as error:
        if environment is not None and "No module named" in str(error):
            raise ConfigError(f"{error}\n{_ALONE}") from None
        if any(f"import {name}, which" in str(error) for name in choice.preload):
            raise ConfigError(f"sandbox.preload: {error}") from None
        raise
    if choice.install_requirements and environment is None and facts.requirements:
        raise ConfigError(_UNREADABLE.format(facts.id, file))
    if facts.calls_out:
        raise ConfigError(_CALLS_OUT.format(facts.id, level))
    notes = tuple(line for line in output.splitlines() if line.strip())
    if choice.level is None and facts.sandbox == "isolated":
        level = "isolated"
    elif choice.level is None and facts.sandbox == "in_process":
        notes += (
            f"reward {facts.id!r} asks for in_process and runs {level}: code cannot take down its own walls; allow it "
            "with --sandbox in_process",
        )
    place = (environment, _files_here(sources, read_paths), dict(options))
    reward = ConfinedReward(ready_to_score(program, facts), origin, facts, level, limits, output, *place)
    return LoadedReward(reward, notes)


def _files_here(sources: Sources, read_paths: tuple[str, ...]) -> tuple[Path, ...]:
    """The reward's own files, and what it may read."""
    own = [Path(module.filename) for module in sources.modules.values() if module.text is not None]
    return tuple(sorted({*own, *(Path(path) for path in read_paths if Path(path).exists())}))


def _own_environment(origin: Origin, choice: SandboxChoice) -> PackageEnvironment | None:
    """The packages that a reward asks for and the user lets it have; None where it has those of the interpreter."""
    from reward_kit.reward_agent.sources import read_source

    what = f"reward {origin.qualname!r}"
    declared = declared_in(read_source(origin.file), origin.qualname)
    if declared is None:  # what it says when it is described will do
        return None
    if not choice.install_requirements:
        check_installed(declared.requirements or (), what)
        return None
    if declared.requirements is None:
        raise ConfigError(_UNREADABLE.format(origin.qualname, origin.file))
    if not declared.requirements:
        return None
    from reward_kit.reward_agent.package_environment import environment_for

    return environment_for(declared.requirements, what, with_steps=declared.may_take_steps)


def _read_paths(choice: SandboxChoice, folder: Path) -> tuple[str, ...]:
    """The paths that a reward may read."""
    found = tuple((folder / path).resolve() for path in choice.read_paths)
    if missing := next((path for path in found if not path.exists()), None):
        raise ConfigError(f"sandbox.read_paths: {missing} does not exist")
    return tuple(map(str, found))


def limits_of(choice: SandboxChoice) -> Limits:
    """The limits of one call. CPU time is as long as the wall limit, unless the user says otherwise."""
    from reward_kit.sandbox.limits import Limits

    wall_s = min(choice.reward_time_s or _LONGEST_S, _LONGEST_S)
    return Limits(**{"wall_s": wall_s, "cpu_s": float(math.ceil(wall_s)), **choice.limits})


def _file_of(location: str, folder: Path) -> Path:
    """The file of a reward, found without importing anything."""
    if location.endswith(".py"):
        path = (folder / location).resolve()
        if not path.is_file():
            raise ConfigError(f"no such file: {path}")
        return path
    from reward_kit.reward_agent.sources import find_module

    found = find_module(location)
    if found is None:
        raise ConfigError(f"no module {location!r} is found; install it, or name a file: file.py:function")
    return found


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns; run in a thread of its own where the caller's runs a loop already."""
    if not _has_loop():  # asked outside of an `except`, which would stand in every later traceback
        return asyncio.run(coroutine)
    place: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def told() -> Any:
        place.set_result((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
        return await coroutine

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(contextvars.copy_context().run, asyncio.run, told())
        try:
            return running.result()
        except BaseException:  # where the caller is interrupted, what runs for it is cancelled, and waited for
            if not running.done():
                loop, task = place.result()
                loop.call_soon_threadsafe(task.cancel)
            raise


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


logger = logging.getLogger("reward_kit.reward_agent")


def reward_given(
    given: Any,
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    choice_is: str = "choice",
) -> Reward:
    """The reward that a user gave. What there is to say of its walls is logged.

    Args:
        given: `file.py:function` or what else `load_reward` takes, which runs at the level that the command line would
            choose; or a reward function, class, `compute_score` or spec, which runs in this process.
        folder: what a file is relative to, by default the working directory.
        choice: what the user says of the sandbox of a reward that is named. Its time is for the
            caller to keep where the reward is none.
        options: keyword parameters to fix.
        choice_is: what the user knows the choice as, for the message.

    Raises:
        ConfigError: it cannot be loaded, its requirements are not met, an option does not fit, or what is said of a
            folder or sandbox has no effect.
    """
    choice = choice or SandboxChoice()
    if isinstance(given, str):
        loaded = load_reward(given, folder, choice, options)
        for note in loaded.notes:
            logger.warning("%s", note)
        return loaded.reward
    is_walled = choice != SandboxChoice(reward_time_s=choice.reward_time_s)
    for name, has_no_effect in ((choice_is, is_walled), ("folder", folder is not None)):
        if has_no_effect:
            raise ConfigError(f"{name} has no effect on a reward that is loaded already; name it: 'file.py:function'")
    spec = fixed(given if isinstance(given, RewardSpec) else spec_of(given), options or {})
    check_installed(spec.requirements, f"reward {spec.id!r}")
    warn_unconfined(spec)
    return spec


def load_custom_reward(
    path: str | Path,
    name: str = "compute_score",
    *,
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
) -> LoadedReward:
    """Load a `compute_score`, a class that has one, or any other reward. `scorer_of(loaded.reward)` calls it.

    Args:
        path: the file, or a module's dotted name.
        name: of the function or class in it.
        folder: what a relative path is relative to, by default the working directory.
        choice: what the user says of its sandbox; one that asks an endpoint runs at the level `in_process` alone.
        reward_kwargs: its further keyword parameters.

    Raises:
        ConfigError: it cannot be loaded, or not at that level.

    Example:
        ```python
        loaded = load_custom_reward("reward.py", "RewardAgent", choice=SandboxChoice(level="in_process"))
        agent = AsyncRewardAgent(scorer_of(loaded.reward), max_concurrency=256)
        ```
    """
    for key, value in (("path", str(path)), ("name", name)):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"custom_reward_function.{key} is {value!r}; it names the reward's {_NAMED[key]}")
    return load_reward(f"{path}:{name}", folder, choice, reward_kwargs)


_NAMED = {"path": "file", "name": "function or class"}
