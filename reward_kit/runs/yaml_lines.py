"""YAML with line numbers, so that an error about a key can say where the key stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from reward_kit.errors import ConfigError, why_unreadable
from reward_kit.limited_yaml import LimitedLoader, YamlLimitError
from reward_kit.safe_input import YAML_BYTES, shown_size

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


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in LimitedLoader.yaml_implicit_resolvers.items()
}


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
