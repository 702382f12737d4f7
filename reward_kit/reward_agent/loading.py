"""Functions that choose the sandbox level of a reward and load the reward for this level.

The level comes from the command line or, if it is not set there, from the task file. The default is `warm` for a user's
file and `in_process` for the rewards of this package. The code of a reward can request a stricter level than the
default. Built-in rewards that parse model output do so. A request for a weaker level is ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.blocking import run_blocking
from reward_kit.errors import ConfigError, DeadlineError, ProviderError
from reward_kit.loading import is_built_in, load_object, split_reference, user_module_name
from reward_kit.reward_agent.custom_rewards import build_spec
from reward_kit.reward_agent.custom_scorer import in_process_scorer
from reward_kit.reward_agent.in_process import warn_unconfined
from reward_kit.reward_agent.requirements import check_installed
from reward_kit.reward_agent.scoring import Reward, Scorer
from reward_kit.reward_calls import fix_options, needs_host
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import Origin, RewardSpec, reward_spec

if TYPE_CHECKING:
    from reward_kit.reward_agent.sandboxed import IsolationLevel

_LONGEST_S = 86_400.0
_ANSWER_S = 60.0
"""Additional seconds that a call over HTTP may take."""
logger = logging.getLogger("reward_kit.reward_agent")


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """The user's sandbox settings for a reward.

    Attributes:
        level: the sandbox level, or None for the default.
        limits: values that override the field defaults of `sandbox.Limits`, except for `wall_s`.
        read_paths: the files and directories that the reward can read. A relative path is resolved in the `folder` of
            `load_reward`.
        preload: the installed modules to import once, before the first call.
        reward_time_s: the time limit of a call in seconds. If None, the limit is one day.
    """

    level: SandboxLevel | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    read_paths: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    reward_time_s: float | None = 600.0


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward and notes for the user. The reward was loaded in this process, or a sandbox or a server described it."""

    reward: Reward
    notes: tuple[str, ...] = ()


def load_reward(
    reference: str,
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
) -> LoadedReward:
    """Load a reward for its sandbox level.

    Unless the level is `in_process`, this process runs none of the reward's code.

    Args:
        reference: a function or a class with `score`, as `file.py:function` or `package.module:function`.
            Alternatively, the URL of a reward that `reward-kit serve` provides.
        folder: the directory for a relative file path. If None, the working directory is used.
        choice: the sandbox settings of the reward.
        options: keyword arguments that are always passed to the reward. See `reward_calls.with_options`.

    Raises:
        ConfigError: If the reward cannot be loaded, if `isolated` is requested but not available, if a requirement is
            not met, or if an option is invalid.
    """
    choice, folder, options = choice or SandboxChoice(), (folder or Path.cwd()).resolve(), options or {}
    if reference.startswith(("http://", "https://")):
        return _served(reference, choice, options)
    location, _ = split_reference(reference)
    level = choice.level
    if level is None:
        is_ours = is_built_in(location)
        level = (reward_spec(load_object(reference, folder)).sandbox or "in_process") if is_ours else "warm"
    if level == "in_process":
        return LoadedReward(load_in_process(load_object(reference, folder), options))
    if is_built_in(location) and needs_host(spec := reward_spec(load_object(reference, folder))):
        raise ConfigError(
            f"reward {spec.id!r} calls other services and cannot run at the level {level}; remove sandbox.level"
        )
    from reward_kit.sandbox.host import best_strength

    try:
        run_blocking(best_strength("auto"))
    except ConfigError as reason:
        if level == "isolated":
            problem = f"reward {reference!r} cannot run isolated: {reason}; run `reward-kit doctor` for details"
            raise ConfigError(problem) from reason
        spec = load_in_process(load_object(reference, folder), options)
        if spec.sandbox == "isolated":
            problem = f"reward {spec.id!r} requires the level isolated: {reason}; run `reward-kit doctor` for details"
            raise ConfigError(problem) from reason
        note = f"reward {spec.id!r} runs in_process, without a sandbox: {reason}; run `reward-kit doctor` for details"
        return LoadedReward(replace(spec, weakened_from=level), (note,))
    return _described(reference, folder, choice, level, options)


def load_in_process(reward: Any, options: Mapping[str, Any]) -> RewardSpec:
    """Return the spec of a reward function or class that is ready to be called in this process."""
    spec = fix_options(build_spec(reward), options)
    check_installed(spec.requirements, f"reward {spec.id!r}")
    for resource in spec.resources.values():
        if (check := getattr(resource, "check_options", None)) is not None:
            run_blocking(check(spec.options))
    return spec


def resolve_reward(
    given: Any,
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    choice_is: str = "choice",
) -> Reward:
    """Return the reward that a user passed to a trainer as a reference or as an object, and log its notes."""
    choice = choice or SandboxChoice()
    if isinstance(given, str):
        loaded = load_reward(given, folder, choice, options)
        for note in loaded.notes:
            logger.warning("%s", note)
        return loaded.reward
    is_chosen = choice != SandboxChoice(reward_time_s=choice.reward_time_s)
    for name, has_no_effect in ((choice_is, is_chosen), ("folder", folder is not None)):
        if has_no_effect:
            raise ConfigError(f"{name} has no effect on a loaded reward; pass a reference such as 'file.py:function'")
    spec = fix_options(given if isinstance(given, RewardSpec) else build_spec(given), options or {})
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
    """Load the reward that verl's settings `custom_reward_function.path` and `.name` specify.

    It can be a `compute_score`, a class with this method, or any other reward. Pass it to `make_scorer` to call it.

    Args:
        path: the file, or the dotted name of a module.
        name: the name of the function or class in the file or module.
        folder: the directory for a relative path. If None, the working directory is used.
        choice: the sandbox settings of the reward. A reward that calls an endpoint must run at the level `in_process`.
        reward_kwargs: additional keyword arguments that are always passed to the reward.

    Raises:
        ConfigError: If the reward cannot be loaded or cannot run at this level.

    Example:
        ```python
        loaded = load_custom_reward("reward.py", "RewardAgent", choice=SandboxChoice(level="in_process"))
        agent = AsyncRewardAgent(make_scorer(loaded.reward), max_concurrency=256)
        ```
    """
    for key, value, names in (("path", str(path), "file"), ("name", name, "function or class")):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"custom_reward_function.{key} must be the {names} of the reward, got {value!r}")
    return load_reward(f"{path}:{name}", folder, choice, reward_kwargs)


def make_scorer(reward: Reward, deadline_s: float | None = None) -> Scorer:
    """Create a scorer for a loaded reward.

    Args:
        reward: the reward that `load_reward` returned.
        deadline_s: the time limit of a call in seconds. It does not apply to a sandboxed reward, which has its own
            limits.
    """
    if isinstance(reward, RewardSpec):
        return in_process_scorer(reward, deadline_s)
    from reward_kit.reward_agent.named_rewards import NamedRewards, NamedScorer
    from reward_kit.reward_agent.sandboxed import SandboxedReward, SandboxedScorer

    if isinstance(reward, NamedRewards):
        parts = reward.parts.items()
        return NamedScorer({name: (make_scorer(part.reward, deadline_s), part.weight) for name, part in parts})
    if isinstance(reward, SandboxedReward):
        return SandboxedScorer(reward)
    from reward_kit.reward_agent.remote import RemoteReward

    assert isinstance(reward, RemoteReward), "all kinds of rewards are handled"
    return reward.scorer(deadline_s)


def _served(url: str, choice: SandboxChoice, options: Mapping[str, Any]) -> LoadedReward:
    from reward_kit.reward_agent.remote import RemoteReward, RequestOptions, checked_address, reward_notes

    url = checked_address(url)
    decided_there = {f"sandbox.{name}": getattr(choice, name) for name in ("level", "read_paths", "preload", "limits")}
    if given := next((name for name, value in {**decided_there, "reward_options": options}.items() if value), None):
        raise ConfigError(f"{given} has no effect on {url}; pass it to `reward-kit serve` instead")
    request_options = RequestOptions(timeout_s=min(choice.reward_time_s or _LONGEST_S, _LONGEST_S) + _ANSWER_S)
    try:
        reward = run_blocking(RemoteReward.connect(url, request_options=request_options))
    except (ProviderError, DeadlineError) as error:
        raise ConfigError(f"reward {url} cannot be used: {error}") from error
    return LoadedReward(reward, reward_notes(reward))


def _described(
    reference: str, folder: Path, choice: SandboxChoice, level: IsolationLevel, options: Mapping[str, Any]
) -> LoadedReward:
    from reward_kit.reward_agent.sandboxed import SandboxedReward, describe, ready_to_score, worker_program
    from reward_kit.reward_agent.sources import (
        built_in_imports,
        collect_sources,
        declared_requirements,
        find_module,
        read_source,
        refuse_network,
        user_roots,
    )
    from reward_kit.sandbox.program import Limits

    location, name = split_reference(reference)
    is_file = location.endswith(".py")
    file = (folder / location).resolve() if is_file else find_module(location)
    if file is None:
        raise ConfigError(f"module {location!r} not found; install the module, or pass a file, as in file.py:function")
    if not file.is_file():
        raise ConfigError(f"no such file: {file}")
    text = read_source(file)
    refuse_network(text, name, str(file), level)
    check_installed(declared_requirements(text, name), f"reward {name!r}")
    read_paths = [(folder / path).resolve() for path in choice.read_paths]
    if missing := next((path for path in read_paths if not path.exists()), None):
        raise ConfigError(f"sandbox.read_paths: {missing} does not exist")
    # An untrusted file may import only from its own directory.
    roots = [*([file.parent] if is_file else []), *([] if is_file and level == "isolated" else user_roots())]
    sources = collect_sources(file, user_module_name(file) if is_file else location, roots)
    preload = (*choice.preload, *sorted(built_in_imports(f"{location}.{name}")))
    readable = tuple(map(str, read_paths))
    program = worker_program(reference, folder, sources, read_paths=readable, preload=preload, options=options)
    wall_s = min(choice.reward_time_s or _LONGEST_S, _LONGEST_S)
    # The CPU limit equals the wall time limit unless the user sets it.
    limits = Limits(**{"wall_s": wall_s, "cpu_s": float(math.ceil(wall_s)), **choice.limits})
    try:
        facts, output = run_blocking(describe(program, str(file), limits))
    except ConfigError as error:
        if any(f"import {module}, which" in str(error) for module in choice.preload):
            raise ConfigError(f"sandbox.preload: {error}") from None
        raise
    if facts.calls_out:
        raise ConfigError(
            f"reward {facts.id!r} calls a model or has its own sandbox, which sandbox level {level} "
            f"does not allow; run it with --sandbox in_process"
        )
    notes = tuple(line for line in output.splitlines() if line.strip())
    if choice.level is None and facts.sandbox == "isolated":
        level = "isolated"
    elif choice.level is None and facts.sandbox == "in_process":
        notes += (
            f"reward {facts.id!r} requests in_process but runs {level}, because code cannot lower its own "
            "sandbox level; allow it with --sandbox in_process",
        )
    own = [Path(module.filename) for module in sources.modules.values() if module.text is not None]
    reward = SandboxedReward(
        id=facts.id,
        mode=facts.mode,
        requirements=tuple(facts.requirements),
        parameters=None if facts.parameters is None else frozenset(facts.parameters),
        required=frozenset(facts.required),
        resources=dict.fromkeys(facts.resources),
        program=ready_to_score(program, facts),
        origin=Origin(file, name),
        level=level,
        limits=limits,
        output=output,
        files=tuple(sorted({*own, *read_paths})),
        options=dict(options),
    )
    return LoadedReward(reward, notes)
