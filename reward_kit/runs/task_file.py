"""Task files as text: YAML with the line of every key, and the keys that the command line or Python lays over it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from reward_kit.errors import ConfigError, why_unreadable
from reward_kit.input_limits import YAML_BYTES, shown_size
from reward_kit.limited_yaml import LimitedLoader, YamlLimitError

KeyPath = tuple[str | int, ...]

_HINTS = {
    "mapping values are not allowed here": (
        "; a text with ': ' in it stands in quotes, and the keys of one block begin in one column"
    ),
    "found character '\\t'": "; YAML is indented with spaces, not with tabs",
    "found character '@'": "; a text that begins with @ stands in quotes",
    "found character '`'": "; a text that begins with ` stands in quotes",
    "expected ',' or": "; a bracket before it is not closed",
    "found unexpected end of stream": "; a quote before it is not closed",
    "expected <block end>": "; the keys of one block begin in one column",
}

"""What most often is behind what yaml says, for those who do not know its words."""


def siblings(path: Path) -> list[str]:
    """The names in the folder that `path` is said to be in."""
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []


class _Loader(LimitedLoader):
    """Dates stay the text they are written as: they go into prompts and JSON files."""


class LocatedYaml:
    """A YAML document: its `data`, the `source` it was read from, and the line of every key and list item.

    Raises:
        ConfigError: the file does not exist or is not YAML; the message has the line.
    """

    is_written = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.source = file.read(YAML_BYTES + 1)
            if len(self.source) > YAML_BYTES:
                problem = f"the file has more than {shown_size(YAML_BYTES)}, which is the limit"
                raise ConfigError(f"{path}: {problem}; write a dataset as JSONL")
            text = self.source.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {why_unreadable(path, error)}") from None
        self._lines: dict[KeyPath, int] = {}
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            self._locate(node, ())
            self.data: Any = loader.construct_document(node) if node is not None else None
        except yaml.YAMLError as error:
            # What yaml cannot even read has a position in the text, everything else a mark.
            mark, position = getattr(error, "problem_mark", None), getattr(error, "position", 0)
            line = mark.line if mark else text.count("\n", 0, position)
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            if isinstance(error, YamlLimitError):
                raise ConfigError(f"{path}:{line + 1}: {problem}") from None
            hint = next((told for said, told in _HINTS.items() if said in problem), "")
            raise ConfigError(f"{path}:{line + 1}: not YAML: {problem}{hint}") from None
        except RecursionError:
            raise ConfigError(f"{path}: a value is nested too deeply, or contains itself") from None

    def where(self, location: KeyPath) -> str:
        """`file:line` of the nearest key on the way to `location` that stands in the file."""
        if not self.is_written:
            return str(self.path)
        while location and location not in self._lines:
            location = location[:-1]
        return f"{self.path}:{self._lines.get(location, 1)}"

    @classmethod
    def of_values(cls, data: Mapping[str, Any], path: Path) -> LocatedYaml:
        """A document that was never written: its values come from Python, and no key of it has a line.

        Args:
            data: its keys.
            path: stands for its file in messages; what is relative is looked up beside it.

        Raises:
            ConfigError: a value contains itself, or the key of a mapping is none that a file could have.
        """
        made = object.__new__(cls)
        made.path, made.data, made._lines, made.is_written = path, dict(data), {}, False
        try:
            made.source = json.dumps(data, indent=2, default=repr).encode("utf-8", "backslashreplace") + b"\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from None
        except RecursionError:
            raise ConfigError(f"{path}: a value is nested too deeply") from None
        return made

    def part(self, key: str) -> LocatedYaml:
        """What stands under a key as a document of its own, with the file and the lines that it has here."""
        inner = object.__new__(LocatedYaml)
        inner.path, inner.source, inner.data = self.path, self.source, self.data[key]
        inner._lines = {place[1:]: line for place, line in self._lines.items() if place[:1] == (key,)}
        return inner

    def _locate(self, node: yaml.Node | None, path: KeyPath) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in seen:
                    raise ConfigError(f"{self.path}:{key.start_mark.line + 1}: {name!r} is given twice")
                seen.add(name)
                self._lines[(*path, name)] = key.start_mark.line + 1
                self._locate(value, (*path, name))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._lines[(*path, index)] = value.start_mark.line + 1
                self._locate(value, (*path, index))


@contextmanager
def about(located: LocatedYaml, *location: str | int) -> Iterator[None]:
    """Name the line and the key in what goes wrong with what the key names."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{located.where(location)}: {'.'.join(map(str, location))}: {error}") from error


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
