"""One key of a task file laid over the file's: `-T key=value` on the command line, `overrides` in Python."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import yaml

from reward_kit.errors import ConfigError

_IS_PYTHON: ContextVar[bool] = ContextVar("_IS_PYTHON", default=False)


@contextmanager
def given_in_python() -> Iterator[None]:
    """Overrides are a parameter for as long as the block lasts: messages do not tell of an option that nobody typed."""
    token = _IS_PYTHON.set(True)
    try:
        yield
    finally:
        _IS_PYTHON.reset(token)


def given_by() -> str:
    """By what the user gave an override, for messages."""
    return "overrides" if _IS_PYTHON.get() else "-T"


def as_given(key: str, value: str = "") -> str:
    """An override as the user wrote it, or would write it, for messages; a value that is left out is not said."""
    if _IS_PYTHON.get():
        return f"overrides={{{key!r}: {repr(value) if value else '…'}}}"
    return f"-T {key}={value or '…'}"


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
                raise ConfigError(f"{as_given(dotted)}: {key!r} is no mapping")
        inner[_index(inner, last, dotted) if isinstance(inner, list) else last] = value
    return result


def keys_of_user(section: str, names: Iterable[str], overrides: Collection[str]) -> set[str]:
    """Return those keys of a block that an override gave, itself or with a block around them.

    Args:
        section: where the block stands, such as "policy"; "" for the file's top.
        names: the keys in it.
        overrides: the dotted keys that the user gave; "" stands for all.
    """
    prefix = f"{section}." if section else ""
    return {name for name in names if any(not key or f"{prefix}{name}.".startswith(f"{key}.") for key in overrides)}


def _index(items: list[Any], key: str, dotted: str) -> int:
    if not (key.isascii() and key.isdigit() and int(key) < len(items)):
        raise ConfigError(f"{as_given(dotted)}: {key!r} is no position in a list of {len(items)}, counted from 0")
    return int(key)
