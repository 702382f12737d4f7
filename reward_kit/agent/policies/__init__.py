"""The built-in policies and a function that creates a policy from its options."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.errors import ConfigError, PolicyError, boundary, did_you_mean, install_hint
from reward_kit.loading import load_object
from reward_kit.providers.keys import PRESETS, complete_model

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession

BUILT_IN: dict[str, str] = {
    "expert": "reward_kit.agent.policies.simple_policies:ExpertPolicy",
    "hf": "reward_kit.agent.policies.hf_policy:HFAgentPolicy",
    "human": "reward_kit.agent.policies.simple_policies:HumanPolicy",
    **dict.fromkeys(PRESETS, "reward_kit.agent.policies.openai_policy:OpenAIAgentPolicy"),
    "own_agent": "reward_kit.agent.policies.own_agent_policy:OwnAgentPolicy",
    "random": "reward_kit.agent.policies.simple_policies:RandomPolicy",
    "replay": "reward_kit.agent.policies.replay_policy:ReplayPolicy",
    "scripted": "reward_kit.agent.policies.simple_policies:ScriptedPolicy",
}
# Parameters supplied by the program are not options of a task file.
_NOT_OPTIONS = {
    "expert": {"resource"},
    "human": {"reader", "writer"},
    **{name: {"client", "http_client"} for name in PRESETS},
}
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
    """Create a policy, given its options and either the name of a built-in policy or `module:Class`.

    Args:
        name: the name, in the same form as `policy.type` in a task file.
        options: the arguments for the policy's constructor, keyed by parameter name. In a task file, these are the
            other keys of the same section.
        folder: the directory that the path in `file.py:Class` is relative to.
        traffic: the session that all requests of a run share. It is passed to the policy if its constructor has this
            parameter.
        section: the policy's key in the task file, which is used in messages.
        of_user: the names of the options that were set on the command line or in Python. All other options are assumed
            to come from the task file, which may send a key only to the origins configured for that key
            (`providers/keys.py`).

    Raises:
        ConfigError: If the policy or an option is unknown, a required option is missing, or a key is not configured for
            its endpoint.
    """
    kind = policy_class(name, options, folder, section=section)
    names_key = bool(options.get("api_key") or options.get("api_key_env") is not None)
    if (preset := PRESETS.get(name)) is not None:
        options = preset.complete(options)
    elif name == "own_agent" and isinstance(model := options.get("model"), str):
        model, options = complete_model(model, options)
        options = {**options, "model": model}
    known = _option_names(name, kind)
    if {"base_url", "api_key_env"} & options.keys() and (known is None or "api_key_env" in known):
        from reward_kit.providers.session import key_variable_for

        try:
            variable = key_variable_for(traffic, options, of_user, is_default=not names_key)
        except ConfigError as error:
            raise ConfigError(f"{section}.api_key_env: {error}") from error
        if variable != options.get("api_key_env"):
            options = {**options, "api_key_env": variable}
    arguments = dict(options)
    for key in kind.path_options:
        if options.get(key):
            arguments[key] = (folder or Path()) / options[key]
    for key in kind.maybe_path_options:
        value = options.get(key)
        if isinstance(value, str) and value and "{" not in value:
            path = (folder or Path()) / Path(value).expanduser()
            if value.startswith((".", "/", "~")) or path.exists():
                arguments[key] = path
    for key in kind.object_options:
        if isinstance(options.get(key), str):
            arguments[key] = load_object(options[key], folder)
    if traffic is not None and _SHARED in inspect.signature(kind).parameters:
        arguments[_SHARED] = traffic
    try:
        with boundary(ConfigError, f"policy {name!r}"):
            return kind(**arguments)
    except PolicyError as error:
        raise ConfigError(f"policy {name!r}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{error}{_path_hint(kind, options, folder or Path(), str(error))}") from error


def _path_hint(kind: type[AgentPolicy], options: Mapping[str, Any], folder: Path, message: str) -> str:
    """Return a hint with the directory in which a path was looked up, and a similar name in that directory.

    If the message is not about a missing path, return "".
    """
    for key in kind.maybe_path_options:
        value = options.get(key)
        if not isinstance(value, str) or not (
            repr(value) in message or message.endswith(f"directory {value} does not exist")
        ):
            continue
        if not (folder / value).exists() and folder.is_dir():
            near = did_you_mean(value, (entry.name for entry in folder.iterdir()))
            return f". It was looked up in {folder}{near if near.endswith('?') else ''}"
    return ""


def policy_class(
    name: str, options: Mapping[str, Any], folder: Path | None = None, *, section: str = "policy"
) -> type[AgentPolicy]:
    """Return the class of a policy after checking the names of its options.

    The arguments and errors are the same as for `make_policy`.
    """
    kind = _find_class(name, folder)
    known = _option_names(name, kind)
    if known is None:
        return kind
    for key in options:
        if key not in known:
            raise ConfigError(f"{section}.{key}: unknown key for policy {name!r}{did_you_mean(key, known)}")
    parameters = inspect.signature(kind).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(f"policy {name!r} needs {', '.join(f'{section}.{key}' for key in missing)}")
    return kind


def option_names(name: str, folder: Path | None = None) -> set[str] | None:
    """Return the options that a policy accepts, or None if it accepts any option.

    Raises:
        ConfigError: If the policy is unknown.
    """
    return _option_names(name, _find_class(name, folder))


def _option_names(name: str, kind: type[AgentPolicy]) -> set[str] | None:
    parameters = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters) - _NOT_OPTIONS.get(name, set()) - {_SHARED}


def _find_class(name: str, folder: Path | None) -> type[AgentPolicy]:
    if name.endswith(".py"):
        raise ConfigError(f"policy {name!r}: append the name of the class, as in {name}:Agent")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        try:
            kind = getattr(import_module(module), attribute)
        except ImportError as error:
            raise ConfigError(f"policy {name!r}: {error}; {install_hint('train')}") from error
    elif ":" not in name:
        raise ConfigError(
            f"unknown policy {name!r}{did_you_mean(name, BUILT_IN)} (to use your own policy, write file.py:Class)"
        )
    else:
        try:
            kind = load_object(name, folder)
        except ConfigError as error:
            message = str(error)
            prefix = "" if message.startswith(repr(name)) else f"{name!r}: "
            raise ConfigError(f"policy {prefix}{message}") from error
    if not (isinstance(kind, type) and issubclass(kind, AgentPolicy)):
        raise ConfigError(f"policy {name!r} is not a subclass of AgentPolicy")
    return kind
