"""Reads every resource's configuration in one way: what is unknown, wrong or outside the task's folder is one error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel

from reward_kit.errors import ConfigError
from reward_kit.validation import describe_validation_error

_Config = TypeVar("_Config", bound=BaseModel)


def read_config(model: type[_Config], config: Mapping[str, Any], resource: str) -> _Config:
    """`config` as `model`.

    Raises:
        ConfigError: one line that names every wrong key, its value and the nearest key.
    """
    try:
        return model.model_validate(dict(config))
    except pydantic.ValidationError as error:
        problems = "; ".join(describe_validation_error(error, model))
        raise ConfigError(f"{resource} resource: {problems}") from None


def task_path(path: str, task_folder: str | None, key: str) -> Path:
    """The file or directory that a task names.

    Args:
        path: as written; relative to the task's folder, or to the working directory where there is no task.
        task_folder: the folder of the task file, None where the resource is used from Python.
        key: the configuration key, for the message.

    Raises:
        ConfigError: with a task folder, the path leaves it (through `..`, as an absolute path or by a symlink).
    """
    if task_folder is None:
        return Path(path).resolve()
    folder = Path(task_folder).resolve()
    found = (folder / path).resolve()
    if not found.is_relative_to(folder):
        raise ConfigError(f"{key}: {path!r} lies outside the task's folder {folder}")
    return found


def merged_config(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, key by key, at every depth; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = merged_config(inner, value) if both else value  # type: ignore[arg-type]
    return merged
