"""Policies that ship with the package, by the name a task file uses."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.errors import ConfigError, PolicyError, boundary, did_you_mean, how_to_install
from reward_kit.loading import load_object
from reward_kit.providers.session import key_variable_for

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession

BUILT_IN: dict[str, str] = {
    "expert": "reward_kit.agent.policies.expert_policy:ExpertPolicy",
    "hf": "reward_kit.agent.policies.hf_policy:HFAgentPolicy",
    "human": "reward_kit.agent.policies.human_policy:HumanPolicy",
    "openai": "reward_kit.agent.policies.openai_policy:OpenAIAgentPolicy",
    "own_agent": "reward_kit.agent.policies.own_agent_policy:OwnAgentPolicy",
    "random": "reward_kit.agent.policies.random_policy:RandomPolicy",
    "replay": "reward_kit.agent.policies.replay_policy:ReplayPolicy",
    "scripted": "reward_kit.agent.policies.scripted_policy:ScriptedPolicy",
}
# What the program itself fills in is no option of a task file.
_NOT_OPTIONS = {"expert": {"resource"}, "human": {"reader", "writer"}}
_SHARED = "traffic"


def make_policy(
    name: str,
    options: Mapping[str, Any],
    folder: Path | None = None,
    traffic: ProviderSession | None = None,
    *,
    section: str = "policy",
    of_user: Collection[str] = (),
) -> AgentPolicy:
    """The policy of a built-in name or `module:Class`, with its options.

    Args:
        name: as in a task file's `policy.type`.
        options: its other keys; each is a parameter of the policy's constructor.
        folder: what `file.py:Class` is relative to.
        traffic: what all requests of a run share; handed to a policy whose constructor has such a parameter.
        section: the key of the task file whose block this is, for messages.
        of_user: those of the options that the user gave, on the command line or in Python. The others count as a
            file's, which sends a key only where it is configured to go (`providers/keys.py`).

    Raises:
        ConfigError: there is no such policy, or it has no such option, or lacks a required one, or names a key that is
            not configured for its endpoint.
    """
    kind = _class_of(name, folder)
    _check_options(name, kind, options, section)
    options = _with_allowed_key(name, kind, options, traffic, section, of_user)
    paths = {key: (folder or Path()) / options[key] for key in kind.path_options if options.get(key)}
    paths |= {key: path for key in kind.maybe_path_options if (path := _path_in(folder, options.get(key))) is not None}
    named = {key: options[key] for key in kind.object_options if isinstance(options.get(key), str)}
    loaded = {key: load_object(reference, folder) for key, reference in named.items()}
    try:
        with boundary(ConfigError, f"policy {name!r}"):
            return kind(**{**options, **paths, **loaded, **_shared(kind, traffic)})
    except PolicyError as error:
        raise ConfigError(f"policy {name!r}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{error}{_not_there(kind, options, folder, str(error))}") from error


def _with_allowed_key(
    name: str,
    kind: type[AgentPolicy],
    options: Mapping[str, Any],
    traffic: ProviderSession | None,
    section: str,
    of_user: Collection[str],
) -> Mapping[str, Any]:
    """The options with the variable of the key as far as a file may say it; most policies have none."""
    known = _option_names(name, kind)
    if not {"base_url", "api_key_env"} & options.keys() or (known is not None and "api_key_env" not in known):
        return options
    try:
        variable = key_variable_for(traffic, options, of_user)
    except ConfigError as error:
        raise ConfigError(f"{section}.api_key_env: {error}") from error
    return options if variable == options.get("api_key_env") else {**options, "api_key_env": variable}


def _not_there(kind: type[AgentPolicy], options: Mapping[str, Any], folder: Path | None, told: str) -> str:
    """Where a name that the message is about was looked for as a path, and what is there instead."""
    folder = folder or Path()
    for key in kind.maybe_path_options:
        value = options.get(key)
        if not isinstance(value, str) or not (repr(value) in told or told.endswith(f"no folder {value}")):
            continue
        if not (folder / value).exists() and folder.is_dir():
            near = did_you_mean(value, (entry.name for entry in folder.iterdir()))
            return f". Looked for in {folder}{near if near.endswith('?') else ''}"
    return ""


def policy_class(name: str, options: Mapping[str, Any], folder: Path | None = None) -> type[AgentPolicy]:
    """The class of a policy that could be made of these options as far as their names say; none is made.

    Args:
        name: as in a task file's `policy.type`.
        options: its other keys.
        folder: what `file.py:Class` is relative to.

    Raises:
        ConfigError: there is no such policy, or it has no such option, or lacks a required one.
    """
    kind = _class_of(name, folder)
    _check_options(name, kind, options, "policy")
    return kind


def option_names(name: str, folder: Path | None = None) -> set[str] | None:
    """The keys that a policy takes, None where it takes any.

    Args:
        name: as in a task file's `policy.type`.
        folder: what `file.py:Class` is relative to.

    Raises:
        ConfigError: there is no such policy.
    """
    return _option_names(name, _class_of(name, folder))


def _option_names(name: str, kind: type[AgentPolicy]) -> set[str] | None:
    parameters = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters) - _NOT_OPTIONS.get(name, set()) - {_SHARED}


def _class_of(name: str, folder: Path | None) -> type[AgentPolicy]:
    if name.endswith(".py"):
        raise ConfigError(f"policy {name!r}: name the class in it, as in {name}:Agent")
    if name not in BUILT_IN and ":" not in name:
        raise ConfigError(f"unknown policy {name!r}{did_you_mean(name, BUILT_IN)} (your own is file.py:Class)")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        try:
            kind = getattr(import_module(module), attribute)
        except ImportError as error:
            raise ConfigError(f"policy {name!r}: {error}; {how_to_install('train')}") from error
    else:
        try:
            kind = load_object(name, folder)
        except ConfigError as error:
            told = str(error)
            raise ConfigError(f"policy {told if told.startswith(repr(name)) else f'{name!r}: {told}'}") from error
    if not (isinstance(kind, type) and issubclass(kind, AgentPolicy)):
        raise ConfigError(f"policy {name!r} is not a subclass of AgentPolicy")
    return kind


def _path_in(folder: Path | None, value: Any) -> Path | None:
    """The path that an option means, None where it is a name, or a text."""
    if not isinstance(value, str) or not value or "{" in value:
        return None
    path = (folder or Path()) / Path(value).expanduser()
    return path if value.startswith((".", "/", "~")) or path.exists() else None


def _shared(kind: type[AgentPolicy], traffic: ProviderSession | None) -> dict[str, Any]:
    return {"traffic": traffic} if traffic is not None and "traffic" in inspect.signature(kind).parameters else {}


def _check_options(name: str, kind: type[AgentPolicy], options: Mapping[str, Any], section: str) -> None:
    known = _option_names(name, kind)
    if known is None:
        return
    for key in options:
        if key not in known:
            raise ConfigError(f"{section}.{key}: unknown key for policy {name!r}{did_you_mean(key, known)}")
    parameters = inspect.signature(kind).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(f"policy {name!r} needs {', '.join(f'{section}.{key}' for key in missing)}")
