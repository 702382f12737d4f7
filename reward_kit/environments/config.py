"""The built-in resources, and functions that validate and merge resource configurations.

A task file may set every key. A row of a dataset is untrusted, so `merged_config` accepts only the keys in the
resource's `per_sample_keys`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pydantic
from pydantic import BaseModel, ConfigDict

from reward_kit.environments.base import ForkableResource, describe_missing_methods
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.loading import load_object
from reward_kit.providers.keys import check_allowed, url_origin
from reward_kit.validation import describe_validation_error

BUILT_IN: dict[str, str] = {
    "alfworld": "alfworld:AlfworldResource",
    "alfworld_real": "alfworld:RealAlfworldResource",
    "composite": "composite:CompositeResource",
    "filesystem": "filesystem:FilesystemResource",
    "gymnasium": "gymnasium:GymnasiumResource",
    "harbor": "harbor:HarborResource",
    "http": "http:HttpResource",
    "mcp": "mcp:McpResource",
    "openenv": "openenv:OpenEnvResource",
    "python_state": "python_state:PythonStateResource",
    "sokoban": "sokoban:SokobanResource",
    "sqlite": "sqlite:SqliteResource",
    "textworld": "textworld:TextworldResource",
    "webshop": "webshop:WebshopResource",
}
"""Maps the name of a built-in resource to its module in `reward_kit.environments` and its class. They are
imported on first use.
"""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_Config = TypeVar("_Config", bound=BaseModel)


class ResourceConfig(BaseModel):
    """The base class for resource configurations. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid")


def resource_class(name: str) -> type[ForkableResource]:
    """Return the resource class for a built-in name, `module:Class` or `file.py:Class`.

    Raises:
        ConfigError: the class does not exist, is not a `ForkableResource`, or needs a package that is not installed.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        kind = getattr(import_module(f"reward_kit.environments.{module}"), attribute)
    elif ":" in name:
        kind = load_object(name)
    else:
        raise ConfigError(
            f"unknown resource {name!r}{did_you_mean(name, BUILT_IN)} (to use your own resource, write file.py:Class)"
        )
    if not (isinstance(kind, type) and issubclass(kind, ForkableResource)):
        raise ConfigError(f"{name!r} is not a subclass of ForkableResource")
    if kind.__abstractmethods__:
        raise ConfigError(f"{name!r} {describe_missing_methods(kind)}")
    return kind


def read_config(model: type[_Config], config: Mapping[str, Any], resource: str, part: str = "") -> _Config:
    """Validate `config` as `model`. If `config` is only a part of a configuration, messages refer to it as `part`.

    Raises:
        ConfigError: a key or value is invalid. The message lists all invalid keys and, for each, the nearest valid
            name.
    """
    try:
        return model.model_validate(dict(config))
    except pydantic.ValidationError as error:
        problems = "; ".join(describe_validation_error(error, model))
        raise ConfigError(f"{resource} resource: {part}{problems}") from None


def headers_from_environment(names: Mapping[str, str], url: str, resource: str, started: str = "") -> dict[str, str]:
    """Return the headers that `headers_env` defines for requests to `url`.

    `headers_env` maps header names to the environment variables that contain their values. `started` is the address of
    the server that the task starts, or "" if it starts none. A server that the task starts on this machine may receive
    any variable, because the task could also pass the variable through `pass_env`.

    Raises:
        ConfigError: a variable is not set, or may not be sent to that origin (`providers/keys.py`).
    """
    for header, name in names.items():
        where = f"{resource} resource: headers_env: {header}"
        if not os.environ.get(name):
            raise ConfigError(f"{where}: the environment variable {name} is not set")
        try:
            is_started = bool(started) and url_origin(url) == url_origin(started)
            if not (is_started and urlsplit(started).hostname in _LOOPBACK):
                check_allowed(name, url, os.environ)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error
    return {header: os.environ[name] for header, name in names.items()}


def task_path(path: str, task_folder: str | None, key: str) -> Path:
    """Return the path that a task sets in `key`. It may be relative to the task's directory or the working directory.

    Raises:
        ConfigError: `task_folder` is set, and the path is outside that directory (through `..`, an absolute path or a
            symlink).
    """
    if task_folder is None:
        return Path(path).resolve()
    folder = Path(task_folder).resolve()
    target = (folder / path).resolve()
    if not target.is_relative_to(folder):
        raise ConfigError(f"{key}: {path!r} is outside the task's directory {folder}")
    return target


def merged_config(
    kind: type[ForkableResource], base: Mapping[str, Any], row: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the configuration of a sample.

    This is the task's `base_resource_config`, updated with the row's `resource_config`.

    Args:
        kind: the class of the resource.
        base: the task's configuration.
        row: the row's configuration, which is untrusted.
        where: the name of the row, or its file and line, for error messages.

    Raises:
        ConfigError: the row sets a key that is not per-sample data for this resource.
    """
    check_row_config(kind, base, row, where)
    return deep_merge(base, row)


def check_row_config(kind: type[ForkableResource], base: Mapping[str, Any], row: Mapping[str, Any], where: str) -> None:
    """Reject a row's `resource_config` if it sets anything other than per-sample data.

    The arguments are the same as for `merged_config`.
    """
    for key, owner in kind.keys_refused_to_rows(base, row) if row else ():
        allowed = sorted(kind.per_sample_keys_for(base))
        keys = f"rows may set {', '.join(allowed)}" if allowed else "rows may not set any of its keys"
        remedy = "; set it in the task file, or remove it"
        if not owner.__module__.startswith("reward_kit."):
            remedy += f"; if its values are plain data, add it to {owner.__name__}.per_sample_keys"
        raise ConfigError(f"{where}: resource_config.{key}: a row cannot set this key ({keys}){remedy}")


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated recursively with `over`. The author of the task wrote both."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(inner, value) if both else value  # type: ignore[arg-type] # both are mappings
    return merged
