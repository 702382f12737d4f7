"""Policies that ship with the package, by the name a task file uses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.errors import ConfigError, PolicyError, boundary, did_you_mean
from reward_kit.loading import load_object

BUILT_IN: dict[str, str] = {
    "expert": "reward_kit.agent.policies.expert_policy:ExpertPolicy",
    "human": "reward_kit.agent.policies.human_policy:HumanPolicy",
    "openai": "reward_kit.agent.policies.openai_policy:OpenAIAgentPolicy",
    "random": "reward_kit.agent.policies.random_policy:RandomPolicy",
    "scripted": "reward_kit.agent.policies.scripted_policy:ScriptedPolicy",
}
# What the program itself fills in is no option of a task file.
_NOT_OPTIONS = {"expert": {"resource"}, "human": {"reader", "writer"}}


def make_policy(name: str, options: Mapping[str, Any], folder: Path | None = None) -> AgentPolicy:
    """The policy of a built-in name or `module:Class`, with its options.

    Args:
        name: as in a task file's `policy.type`.
        options: its other keys; each is a parameter of the policy's constructor.
        folder: what `file.py:Class` is relative to.

    Raises:
        ConfigError: there is no such policy, or it has no such option, or lacks a required one.
    """
    if name not in BUILT_IN and ":" not in name:
        raise ConfigError(f"unknown policy {name!r}{did_you_mean(name, BUILT_IN)} Your own: file.py:Class")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        kind = getattr(import_module(module), attribute)
    else:
        kind = load_object(name, folder)
    if not (isinstance(kind, type) and issubclass(kind, AgentPolicy)):
        raise ConfigError(f"{name!r} is not a subclass of AgentPolicy")
    _check_options(name, kind, options)
    paths = {key: (folder or Path()) / options[key] for key in kind.path_options if options.get(key)}
    try:
        with boundary(ConfigError, f"policy {name!r}"):
            return kind(**{**options, **paths})
    except PolicyError as error:
        raise ConfigError(f"policy {name!r}: {error}") from error


def _check_options(name: str, kind: type[AgentPolicy], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = set(parameters) - _NOT_OPTIONS.get(name, set())
    for key in options:
        if key not in known:
            raise ConfigError(f"policy.{key}: unknown key for policy {name!r}{did_you_mean(key, known)}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(f"policy {name!r} needs {', '.join(f'policy.{key}' for key in missing)}")
