"""At which level a reward runs, decided before a line of it is, and the reward made ready for that level.

Who says so, first to last: the command line, the task file, and where neither does the default for what it is: a user's
own file runs `warm`, what this package brings along runs `in_process`. The reward's own code can ask for thicker walls
than the default, and is heard; it can ask for thinner ones, and is not.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.errors import ConfigError
from reward_kit.loading import load_object, module_name_of, split_reference
from reward_kit.reward_agent.scoring import InProcessScorer, Scorer
from reward_kit.typed_interface import Origin, RewardSpec, SandboxLevel, reward_spec

if TYPE_CHECKING:
    from reward_kit.reward_agent.confined import ConfinedLevel, ConfinedReward
    from reward_kit.sandbox.limits import Limits

_LONGEST_S = 86_400.0


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """What the user says of the sandbox of a reward.

    Attributes:
        level: None where they leave it to the default.
        limits: fields of `sandbox.Limits` besides `wall_s`.
        read_paths: files and folders that it may read, absolute or relative to the folder of its reference.
        preload: installed modules to import once, before any call.
        reward_time_s: seconds that one call may take; None for a day.
    """

    level: SandboxLevel | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    read_paths: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    reward_time_s: float | None = 600.0


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward that can be scored with.

    Attributes:
        reward: loaded here, or known from behind its walls.
        notes: lines for the user, such as that it runs with thinner walls than usual.
    """

    reward: RewardSpec | ConfinedReward
    notes: tuple[str, ...] = ()


def load_reward(reference: str, folder: Path | None = None, choice: SandboxChoice | None = None) -> LoadedReward:
    """Load a reward for the level it is to run at. Unless that is `in_process`, nothing of it runs in this process.

    Args:
        reference: `file.py:function` or `package.module:function`, of a function or a class with `score`.
        folder: what a file path is relative to, by default the working directory.
        choice: what the user says of its sandbox.

    Raises:
        ConfigError: it cannot be loaded, or `isolated` is asked for and cannot be had.
    """
    choice, folder = choice or SandboxChoice(), (folder or Path.cwd()).resolve()
    location, name = split_reference(reference)
    is_own = location == "reward_kit" or location.startswith("reward_kit.")
    level: SandboxLevel = choice.level or ("in_process" if is_own else "warm")
    if level == "in_process":
        return LoadedReward(reward_spec(load_object(reference, folder)))
    if reason := _in_a_loop(_why_not_confined()):
        if level == "isolated":
            raise ConfigError(f"reward {reference!r} is to run isolated, and {reason}; `reward-kit doctor` tells more")
        return _weakened(reference, folder, level, reason)
    file = _file_of(location, folder)
    return _described(reference, folder, choice, level, Origin(file, name))


def scorer_of(reward: RewardSpec | ConfinedReward, deadline_s: float | None = None) -> Scorer:
    """Where a loaded reward is called.

    Args:
        reward: as `load_reward` gives it.
        deadline_s: for one call in this process; a confined reward has its own.
    """
    if isinstance(reward, RewardSpec):
        return InProcessScorer(reward, deadline_s)
    from reward_kit.reward_agent.confined import ConfinedScorer

    return ConfinedScorer(reward)


async def _why_not_confined() -> str:
    """Why this machine confines nothing; "" where it does."""
    from reward_kit.sandbox.availability import best_strength

    try:
        await best_strength("auto")
    except ConfigError as error:
        return str(error)
    return ""


def _weakened(reference: str, folder: Path, level: SandboxLevel, reason: str) -> LoadedReward:
    spec = reward_spec(load_object(reference, folder))
    if spec.sandbox == "isolated":
        raise ConfigError(f"reward {spec.id!r} asks to run isolated, and {reason}; `reward-kit doctor` tells more")
    note = f"reward {spec.id!r} runs in_process, without walls: {reason}; `reward-kit doctor` tells more"
    return LoadedReward(replace(spec, weakened_from=level), (note,))


def _described(
    reference: str, folder: Path, choice: SandboxChoice, level: ConfinedLevel, origin: Origin
) -> LoadedReward:
    from reward_kit.reward_agent.confined import ConfinedReward, describe, program_of, ready_to_score
    from reward_kit.reward_agent.sources import sources_of, user_roots

    file, limits, location = origin.file, limits_of(choice), split_reference(reference)[0]
    is_file = location.endswith(".py")
    # Of a stranger's file only the folder it came in is its own.
    roots = [*([file.parent] if is_file else []), *([] if is_file and level == "isolated" else user_roots())]
    sources = sources_of(file, module_name_of(file) if is_file else location, roots)
    read_paths = tuple(str((folder / path).resolve()) for path in choice.read_paths)
    program = program_of(reference, folder, sources, read_paths=read_paths, preload=choice.preload)
    facts, output = _in_a_loop(describe(program, str(file), limits))
    notes = tuple(line for line in output.splitlines() if line.strip())
    if choice.level is None and facts.sandbox == "isolated":
        level = "isolated"
    elif choice.level is None and facts.sandbox == "in_process":
        notes += (
            f"reward {facts.id!r} asks for in_process and runs {level}: code cannot take down its own walls; allow it "
            "with --sandbox in_process, or with sandbox: {level: in_process} in the task file",
        )
    reward = ConfinedReward(ready_to_score(program, facts), origin, facts, level, limits, output)
    return LoadedReward(reward, notes)


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


def _in_a_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns; run in a thread of its own where the caller's runs a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
