"""`-T key=value`: one key of a task file, given on the command line and laid over the file's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from reward_kit.errors import ConfigError


def parse_override(text: str, option: str = "-T") -> tuple[str, Any]:
    """`key=value` from the command line; the value is YAML.

    Args:
        text: as typed.
        option: the option it was typed after, for messages.

    Raises:
        ConfigError: there is no `=`, or the value is not YAML.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"{option} {text!r}: write key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "unreadable"
        raise ConfigError(f"{option} {text!r}: the value is not YAML: {problem}") from None


def overlaid(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with dotted `overrides` on it; neither is changed.

    Raises:
        ConfigError: an override leads through something that is no mapping, or past the end of a list.
    """
    result: dict[str, Any] = json.loads(json.dumps(data, default=str)) if overrides else dict(data)
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        inner: Any = result
        for key in parents:
            inner = inner[_index(inner, key, dotted)] if isinstance(inner, list) else inner.setdefault(key, {})
            if not isinstance(inner, dict | list):
                raise ConfigError(f"-T {dotted}=…: {key!r} is no mapping")
        inner[_index(inner, last, dotted) if isinstance(inner, list) else last] = value
    return result


def _index(items: list[Any], key: str, dotted: str) -> int:
    if not (key.isascii() and key.isdigit() and int(key) < len(items)):
        raise ConfigError(f"-T {dotted}=…: {key!r} is no position in a list of {len(items)}, counted from 0")
    return int(key)
